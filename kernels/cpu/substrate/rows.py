"""Calls that normalise several trailing axes, seen as calls that normalise one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from soapstone.kernels.entry import Array, Call, Entry

Bind = Callable[[Call], Entry | None]


def _merged(array: Array, lead: int) -> Array:
    """A view whose axes from `lead` on are one.

    Raises:
        ValueError: strides forbid it.
    """
    return np.reshape(array, (*array.shape[:lead], -1), copy=False)


def over_last_axis(inputs: str, outputs: str) -> Callable[[Bind], Bind]:
    """Return a decorator that makes a kernel of the last axis one of any attribute `axis`.

    Operands are written by a letter each: x has all axes, c the normalised ones, s the others.
    """

    def wrap(bind: Bind) -> Bind:
        @functools.wraps(bind)
        def bind_merged(call: Call) -> Entry | None:
            rank = call.inputs[0].ndim
            axis = int(call.attributes.get("axis", -1))
            lead = axis if axis >= 0 else rank + axis
            if lead == rank - 1 or rank == 0:
                return bind(call)
            if call.inputs[0].size == 0:
                return None
            starts = {"x": lead, "c": 0}

            def view(array: Array, letter: str) -> Array:
                return array if letter == "s" else _merged(array, starts[letter])

            try:
                return bind(
                    replace(
                        call,
                        inputs=tuple(map(view, call.inputs, inputs)),
                        outputs=tuple(map(view, call.outputs, outputs)),
                    )
                )
            except ValueError:
                return None

        return bind_merged

    return wrap
