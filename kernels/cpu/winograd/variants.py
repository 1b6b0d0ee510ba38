"""3x3 convolutions of stride 1 by Winograd's minimal filtering, and their gradient by the input.

F(2x2, 3x3) multiplies 2.25 times less than the direct form, F(4x4, 3x3) 4 times; each is a variant,
and measured cost decides. Constant weights are transformed when the entry is made; others on each
run, and only for F(2x2), whose rounding errors training does not notice. Infinity or NaN in x makes
NaN of the results of its whole tile, not only of those whose window holds it.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from soapstone.kernels.cpu.elementwise.epilogue import inner
from soapstone.kernels.cpu.winograd.entries import Finish, Plan, Problem, entry
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant


def bind(call: Call, size: int, finish: Finish, plan: Plan | None = None) -> Entry | None:
    """Return the entry of finish(conv2d(x, w) + b) by tiles of `size`, or None where unserved."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    constant = 1 in call.constants
    if not (constant or size == 2) or len(rest) != bool(call.attributes.get("bias", False)):
        return None
    bias = rest[0] if rest else None
    padding = _padding(call, x, w, y, tuple(map(int, call.attributes["padding"])))
    if padding is None:
        return None
    problem = Problem(x, w, y, bias, padding, finish, call.threads, constant)
    return entry(problem, size, plan) if problem.served() else None


def _padding(
    call: Call, x: Array, w: Array, y: Array, padding: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the padding (top, left) of a 3x3 convolution of stride 1, or None of any other."""
    at = call.attributes
    if x.ndim != 4 or w.shape[2:] != (3, 3) or int(at["groups"]) != 1:
        return None
    top, left, bottom, right = padding
    if (*at["stride"], *at["dilation"]) != (1, 1, 1, 1) or min(bottom, right) < 0:
        return None
    made = (x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2)
    return (top, left) if y.shape[2:] == made else None


@variant("conv2d_grad_input", "winograd2")
def grad_input(call: Call, plan: Plan | None = None) -> Entry | None:
    """Return the entry of dx: the convolution of dy with the weights turned by half a turn."""
    (dy, w), (dx,) = call.inputs, call.outputs
    padding = _padding(call, dy, w, dx, tuple(2 - int(pad) for pad in call.attributes["padding"]))
    if padding is None:
        return None
    problem = Problem(dy, w, dx, None, padding, Finish(), call.threads, turned=True)
    return entry(problem, 2, plan) if problem.served() else None


_OWN = {None: Finish(), "relu": Finish(low=0.0)}


def _plain(call: Call, size: int) -> Entry | None:
    """Return the entry of a convolution by F(size x size, 3x3)."""
    finish = _OWN.get(call.attributes.get("activation"))
    return None if finish is None else bind(call, size, finish)


def _fused(call: Call, size: int) -> Entry | None:
    """Return the entry of such a convolution with the steps on its results."""
    if call.attributes["operator"] != "conv2d":
        return None
    conv2d = inner(call)
    finish = _OWN.get(conv2d.attributes.get("activation"))
    for step in _chain(call):
        finish = None if finish is None or step is None else _after(finish, step)
    return None if finish is None else bind(conv2d, size, finish)


_Step: TypeAlias = Array | tuple[float, float]  # what is added to the result, or its bounds


def _chain(call: Call) -> Iterator[_Step | None]:
    """Yield the steps on the result; None is one that no `Finish` can hold."""
    y, operands = call.outputs[0], call.inputs[call.attributes["arity"] :]
    result = 0
    for index, (name, numbers, items) in enumerate(call.attributes["program"]):
        settings = dict(items)
        others = [number for number in numbers if number != result]
        if numbers == (result,) and name == "relu":
            yield 0.0, math.inf
        elif numbers == (result,) and name == "clip":
            low, high = settings.get("low"), settings.get("high")
            yield -math.inf if low is None else low, math.inf if high is None else high
        elif name == "add" and len(others) == 1 and len(numbers) == 2:
            known = 1 <= others[0] <= len(operands)
            operand = operands[others[0] - 1] if known else None
            yield operand if operand is not None and operand.shape == y.shape else None
        else:
            yield None
        result = len(operands) + index + 1


def _after(finish: Finish, step: _Step) -> Finish | None:
    """Return the finish with one more step, or None where it has no place for that."""
    if isinstance(step, np.ndarray):
        if finish.added is not None or finish.high != math.inf:
            return None
        return Finish(before=finish.low, added=step)
    low, high = (min(max(bound, step[0]), step[1]) for bound in (finish.low, finish.high))
    return replace(finish, low=low, high=high)


# What they usually take of the direct form's time, where they serve a convolution at all.
for _size, _expected in ((2, 0.6), (4, 0.4)):
    _registered = partial(variant, name=f"winograd{_size}", expected=_expected, promises=True)
    _registered("conv2d")(partial(_plain, size=_size))
    _registered("with_epilogue")(partial(_fused, size=_size))
