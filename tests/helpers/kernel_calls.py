"""Calls of kernels: every variant that serves a call, in any layout, against the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, spec_of
from soapstone.kernels.cpu import onednn
from soapstone.kernels.cpu.onednn.library import instructions
from soapstone.kernels.cpu.products.forms import default_form
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variants
from soapstone.native import memory

LIBRARY = (default_form() or ("reference", None))[0]  # whose products there are
BOTH = {"numba", "onednn"} if onednn.available() else {"numba"}
# Where vectors are shorter than 512 bits, oneDNN's classic product is its first choice.
WIDE = onednn.available() and bool(instructions() & 0x20)
LAYOUTS = ("plain", "last", "tile", "last tile")
FILL = 77  # of what no kernel writes


def random(*shape: int, seed: int = 0, shift: float = 0.0) -> Array:
    """Return float32 standard normal numbers around `shift`."""
    made = np.random.default_rng([seed, *shape]).standard_normal(shape) + shift
    return np.asarray(made, np.float32)


def place(array: Array, layout: str) -> Array:
    """Return a copy in a layout.

    `last`: axis 1 is innermost; `tile`: part of a larger array; both; `reversed`: the first axis is
    innermost; plain.
    """
    order = tuple(range(array.ndim))
    if "last" in layout and array.ndim > 2:
        order = (0, *order[2:], 1)
    if "reversed" in layout:
        order = order[::-1]
    margin = 3 if "tile" in layout else 0
    store = np.full([array.shape[axis] + margin for axis in order], FILL, array.dtype)
    box: tuple[Any, ...] = (..., *(slice(1, 1 + array.shape[axis]) for axis in order))
    view = (store[box] if margin else store).transpose(np.argsort(order))
    view[...] = array
    return view


def around(view: Array) -> bool:
    """Return whether what lies around a tile is as it was; the tile itself is filled for that."""
    view[...] = FILL
    while isinstance(view.base, np.ndarray):
        view = view.base
    return bool((view == np.full((), FILL, view.dtype)).all())


def bound(call: Call, name: str = "onednn") -> Entry | None:
    """Return what the named variant makes of a call."""
    (variant,) = (v for v in variants(call.operator) if v.name == name)
    return variant.bind(call)


def followed(call: Call, program: Sequence[Any], *operands: Array) -> Call:
    """Return a call with the steps of a program on its result; operands: what they read beside."""
    attributes = {
        "operator": call.operator,
        "items": tuple(call.attributes.items()),
        "arity": len(call.inputs),
        "program": program,
        "wide": False,
    }
    inputs = (*call.inputs, *operands)
    return replace(call, operator="with_epilogue", attributes=attributes, inputs=inputs)


def run(entry: Entry | None) -> None:
    """Run an entry, of a variant that serves its call."""
    assert entry is not None, "the variant refused the call"
    assert memory.run(entry) == 0


def near(found: Array, wanted: Array, tolerance: float = 2e-5) -> None:
    """Assert equality up to rounding of single precision, relative to the largest value."""
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale)


def reference(name: str, arrays: Sequence[Array], attributes: Mapping[str, Any]) -> Sequence[Array]:
    """Return the outputs by the operator's declared meaning, in double precision."""
    spec = operator(name)
    own = {key: value for key, value in attributes.items() if key in spec.attributes}
    wide = (x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays)
    with np.errstate(all="ignore"):
        return spec.run({**attributes, **spec.normalise(own)}, *wide)


def served(
    name: str,
    arrays: Sequence[Array],
    attributes: Mapping[str, Any] = {},
    *,
    layout: str = "plain",
    outputs: Sequence[Array] | None = None,
    threads: int | tuple[int, ...] = (1, 2),
    constants: frozenset[int] = frozenset(),
    only: str = "",
    every: bool = False,
    tolerance: float = 1e-4,
) -> set[str]:
    """Run every variant of a call twice, against the reference; return which of them serve it.

    Arrays of the most axes, or `every` one, are in the layout, others plain. Nothing but outputs
    may be written.
    """
    spec = operator(name)
    own = {key: value for key, value in attributes.items() if key in spec.attributes}
    given = {**attributes, **spec.normalise(own)}
    expected = reference(name, arrays, attributes)
    rank = max(array.ndim for array in (*arrays, *expected))
    types = spec.bind([spec_of(array) for array in arrays], given).dtypes
    if layout != "plain":
        arrays = [place(x, layout) if every or x.ndim == rank else x for x in arrays]
    names = set()
    for variant in (v for v in variants(name) if only in ("", v.name)):
        if (LIBRARY, variant.name) == ("onednn", "openblas"):
            continue  # who compiles all kernels imports it too
        for count in (threads,) if isinstance(threads, int) else threads:
            made = outputs
            if made is None:
                blank = [np.full(x.shape, FILL, kind) for x, kind in zip(expected, types)]
                made = [place(x, layout) if every or x.ndim == rank else x for x in blank]
            entry = variant.bind(Call(name, given, tuple(arrays), tuple(made), count, constants))
            if entry is None:
                continue
            names.add(variant.name)
            assert memory.run(entry) == memory.run(entry) == 0
            for output, value in zip(made, expected, strict=True):
                where = f"{variant.name} {layout} {count}"
                if value.dtype.kind != "f":
                    np.testing.assert_array_equal(output, value, err_msg=where)
                    continue
                np.testing.assert_allclose(
                    output, value, rtol=tolerance, atol=tolerance, err_msg=where
                )
            assert outputs is not None or all(map(around, made)), "wrote outside a tile"
    return names


CONVOLUTIONS = {
    "plain": {"x": (2, 5, 9, 8), "w": (7, 5, 3, 3), "padding": (1, 1, 1, 1)},
    "one_channel": {"x": (3, 1, 12, 12), "w": (6, 1, 5, 5), "padding": (2, 2, 2, 2)},
    "wide": {"x": (2, 32, 7, 7), "w": (48, 32, 3, 3), "padding": (1, 1, 1, 1)},
    "pointwise": {"x": (2, 24, 6, 5), "w": (40, 24, 1, 1)},
    "batch_1": {"x": (1, 16, 9, 9), "w": (16, 16, 3, 3), "padding": (1, 1, 1, 1)},
    "one_pixel": {"x": (4, 16, 3, 3), "w": (8, 16, 3, 3)},
    "strided": {"x": (2, 3, 15, 15), "w": (16, 3, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3)},
    "uneven": {"x": (2, 6, 9, 10), "w": (5, 6, 3, 2), "stride": (2, 1), "padding": (0, 1, 2, 0)},
    "dilated": {
        "x": (2, 8, 11, 11),
        "w": (8, 8, 3, 3),
        "dilation": (2, 3),
        "padding": (2, 3, 2, 3),
    },
    "groups": {"x": (2, 12, 8, 8), "w": (18, 4, 3, 3), "groups": 3, "padding": (1, 1, 1, 1)},
    "depthwise": {"x": (2, 16, 8, 8), "w": (16, 1, 3, 3), "groups": 16, "padding": (1, 1, 1, 1)},
    "multiplier": {"x": (2, 4, 8, 8), "w": (12, 1, 3, 3), "groups": 4, "padding": (1, 0, 0, 1)},
}


def problem(name: str) -> tuple[Array, Array, dict[str, Any]]:
    """Return x, w and the attributes of a convolution case."""
    case = CONVOLUTIONS[name]
    at = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    at.update({k: v for k, v in case.items() if k in at})
    return random(*case["x"]), random(*case["w"], seed=1), at
