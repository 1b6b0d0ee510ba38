"""`slice` and `pad`, each the gradient of the other. Dims: d0, d1, … by the output's axes.

A slice that goes backwards, and a border made of the elements themselves, split like any other; but
their tiles need all of the input along that axis, and hold what they make of it in `part`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float, need_numbers
from soapstone.ir.ops.movement import laws_movement
from soapstone.ir.ops.signatures import DimTable, finish, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, box_shape, define
from soapstone.ir.tensor import Array, TensorSpec


def slice_bounds(
    extent: int, start: int | None, stop: int | None, step: int = 1
) -> tuple[int, int, int]:
    """Return `start:stop:step` of an axis as operator `slice` wants it: counted from 0, clipped.

    Bounds are Python's, and ONNX's: negative ones count from the end, those past an end are
    clipped, None is as far as it goes. The stop of a slice backwards may be -1.

    Raises:
        ShapeError: the step is 0.
    """
    if step == 0:
        raise ShapeError("slice: step 0 found, another number needed")
    start, stop, step = slice(start, stop, step).indices(extent)
    if step > 0:
        return start, max(start, stop), step
    return start, min(start, stop), step


def _follow_equal(own: Sequence[int], forward: Sequence[int]) -> dict[str, str]:
    """Return the renaming that lets only the axes of equal extent follow the forward operator."""
    return {
        f"d{axis}": f"d{axis}" if a == b else "" for axis, (a, b) in enumerate(zip(own, forward))
    }


def _slice_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x = inputs[0]
    table = DimTable()
    axes: list[Axis] = []
    for name in ("starts", "stops", "steps"):
        need_numbers(x, name, attributes[name])
    for axis, extent in enumerate(x.shape):
        start, stop, step = (attributes[name][axis] for name in ("starts", "stops", "steps"))
        if step == 0:
            raise GraphError(f"attribute steps: 0 found for dim d{axis}, another number needed")
        if step > 0 and not 0 <= start <= stop <= extent:
            raise ShapeError(
                f"dim d{axis}: slice {start} to {stop} found, 0 <= start <= stop <= {extent} needed"
            )
        if step < 0 and not extent > start >= stop >= -1:
            raise ShapeError(
                f"dim d{axis}: slice {start} back to {stop} found,"
                f" {extent} > start >= stop >= -1 needed"
            )
        table.add(f"d{axis}", len(range(start, stop, step)), "the slice")
        if step > 0:
            axes.append(Affine(f"d{axis}", extent, stride=step, offset=start))
        else:
            axes.append(Whole(extent))
    shape = [table.extent(f"d{axis}") for axis in range(x.rank)]
    return finish(table, [Operand(tuple(axes))], [numbered(table, shape, "output")], [x.dtype])


def slices(attributes: Attributes) -> tuple[slice, ...]:
    """Return the slices, as NumPy indexes with them, of the attributes of a `slice`."""
    made = []
    for bounds in zip(attributes["starts"], attributes["stops"], attributes["steps"]):
        start, stop, step = bounds
        if start == stop:
            made.append(slice(0, 0))
        else:
            made.append(slice(start, None if stop < 0 else stop, step))
    return tuple(made)


def _slice(attributes: Attributes, x: Array) -> Array:
    return np.asarray(x[slices(attributes)]).copy()


def _slice_localize(attributes: Attributes, tile: Tile) -> Attributes:
    starts, stops, steps = [], [], attributes["steps"]
    for axis, extent in enumerate(box_shape(tile.inputs[0])):
        start, stop, step = 0, extent, steps[axis]
        if step < 0:
            lo, hi = tile.intervals[f"d{axis}"]
            first = attributes["starts"][axis]
            start, stop = max(first + lo * step, -1), max(first + hi * step, -1)
        starts.append(start)
        stops.append(stop)
    return {"starts": tuple(starts), "stops": tuple(stops), "steps": steps}


def _slice_grad(g: GradientContext) -> list[str | None]:
    dy, x = g.spec(g.grad()), g.spec(g.inputs[0])
    steps = g.attributes["steps"]
    turned = tuple(axis for axis, step in enumerate(steps) if step < 0)
    grad = g.emit("reverse", g.grad(), axes=turned) if turned else g.grad()
    low, high, interior = [], [], []
    for axis, (start, step) in enumerate(zip(g.attributes["starts"], steps)):
        count = dy.shape[axis]
        if step < 0:  # the same elements, from the other end
            start, step = (start + (count - 1) * step if count else 0), -step
        step = step if count > 1 else 1
        span = max(count + (count - 1) * (step - 1), 0)
        low.append(start)
        high.append(x.shape[axis] - start - span)
        interior.append(step - 1)
    rename = _follow_equal(x.shape, dy.shape)
    return [g.emit("pad", grad, low=low, high=high, interior=interior, rename=rename)]


define(
    name="slice",
    view="slice",
    inputs=("x",),
    signature=_slice_signature,
    reference=_slice,
    attributes={
        "starts": Attribute("ints", minimum=-1, extents=True),
        "stops": Attribute("ints", minimum=-1, extents=True),
        "steps": Attribute("ints"),
    },
    gradient=_slice_grad,
    localize=_slice_localize,
    flops_per_point=0,
    onnx="Slice",
    cases=(
        Case(("5 4",), {"starts": (1, 0), "stops": (4, 4), "steps": (1, 1)}),
        Case(("7 3",), {"starts": (1, 0), "stops": (7, 3), "steps": (2, 2)}),
        Case(("6",), {"starts": (0,), "stops": (5,), "steps": (3,)}),
        Case(("4 3",), {"starts": (2, 1), "stops": (2, 3), "steps": (1, 1)}),
        Case(("4",), {"starts": (1,), "stops": (2,), "steps": (5,)}),
        Case(("5 4",), {"starts": (4, 0), "stops": (-1, 4), "steps": (-1, 1)}),
        Case(("8 6",), {"starts": (6, 4), "stops": (0, -1), "steps": (-2, -3)}),
        Case(("3",), {"starts": (1,), "stops": (1,), "steps": (-2,)}),
        Case(("0",), {"starts": (-1,), "stops": (-1,), "steps": (-1,)}),
        Case(("int64 5 <9",), {"starts": (1,), "stops": (4,), "steps": (2,)}, ()),
    ),
    doc="each axis from start until stop by step; backwards, a stop of -1 is the beginning",
)


def _spread(extent: int, interior: int) -> int:
    """Return the extent of an axis once `interior` elements stand between neighbours."""
    return extent + max(extent - 1, 0) * interior


def border_indices(mode: str, extent: int, low: int, high: int) -> Array:
    """Return which element of an axis each place of the padded axis holds: int64."""
    made = np.pad(np.arange(extent), (low, high), mode)  # type: ignore[call-overload]
    return np.asarray(made, np.int64)


def _pad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x = inputs[0]
    table = DimTable()
    axes: list[Axis] = []
    kinds = {}
    for name in ("low", "high", "interior"):
        need_numbers(x, name, attributes[name])
    if attributes["mode"] != "constant" and any(attributes["interior"]):
        raise GraphError(
            f"attribute interior: {attributes['interior']} found, zeros needed for mode"
            f" {attributes['mode']}"
        )
    for axis, extent in enumerate(x.shape):
        low, high, interior = (attributes[name][axis] for name in ("low", "high", "interior"))
        table.add(f"d{axis}", low + _spread(extent, interior) + high, "the padded input 0")
        if interior:  # an output interval is no interval of the input
            kinds[f"d{axis}"] = Kind.WHOLE
            axes.append(Whole(extent))
        elif attributes["mode"] != "constant" and (low or high):
            if extent == 0:
                raise ShapeError(
                    f"dim d{axis} is 0 in input 0; 1 or more needed for mode {attributes['mode']}"
                )
            axes.append(Whole(extent))
        else:
            axes.append(Affine(f"d{axis}", extent, offset=-low))
    shape = [table.extent(f"d{axis}") for axis in range(x.rank)]
    output = numbered(table, shape, "output")
    return finish(table, [Operand(tuple(axes))], [output], [x.dtype], kinds)


def _pad(attributes: Attributes, x: Array) -> Array:
    low, high, interior = attributes["low"], attributes["high"], attributes["interior"]
    if attributes["mode"] != "constant":
        return x[np.ix_(*border_maps(attributes, x.shape))] if x.ndim else x.copy()
    spread = [_spread(extent, between) for extent, between in zip(x.shape, interior)]
    shape = [a + extent + b for a, extent, b in zip(low, spread, high)]
    result = np.full(shape, attributes["value"], x.dtype)
    steps = zip(low, spread, interior)
    result[tuple(slice(a, a + extent, between + 1) for a, extent, between in steps)] = x
    return result


def border_maps(attributes: Attributes, shape: Sequence[int]) -> list[Array]:
    """Return, for each axis, which element of x each place of the (tile of the) output holds."""
    maps = []
    mode = attributes["mode"]
    part = attributes.get("part", (None,) * len(shape))
    for extent, low, high, held in zip(shape, attributes["low"], attributes["high"], part):
        whole = border_indices(mode, extent, low, high) if low or high else np.arange(extent)
        maps.append(whole if held is None else whole[held[0] : held[1]])
    return maps


def _pad_localize(attributes: Attributes, tile: Tile) -> Attributes:
    if attributes["mode"] != "constant":
        part = [
            tile.intervals[f"d{axis}"] if low or high else None
            for axis, (low, high) in enumerate(zip(attributes["low"], attributes["high"]))
        ]
        return {**attributes, "part": tuple(part)}
    low, high = [], []
    sizes, held = box_shape(tile.outputs[0]), box_shape(tile.inputs[0])
    for axis, (size, extent) in enumerate(zip(sizes, held)):
        first = int(tile.inputs[0][0][axis]) + attributes["low"][axis]
        before = min(max(first - int(tile.outputs[0][0][axis]), 0), size)
        low.append(before)
        high.append(size - before - _spread(extent, attributes["interior"][axis]))
    return {**attributes, "low": tuple(low), "high": tuple(high)}


def _pad_grad(g: GradientContext) -> list[str | None]:
    dy, x, low = g.spec(g.grad()), g.spec(g.inputs[0]), g.attributes["low"]
    interior = g.attributes["interior"]
    rename = _follow_equal(x.shape, dy.shape)
    if g.attributes["mode"] != "constant":
        kept = {name: g.attributes[name] for name in ("low", "high", "mode")}
        return [g.emit("pad_grad", g.grad(), **kept, rename=rename)]
    stops = [a + _spread(e, between) for a, e, between in zip(low, x.shape, interior)]
    steps = [between + 1 for between in interior]
    return [g.emit("slice", g.grad(), starts=low, stops=stops, steps=steps, rename=rename)]


def _border_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    dy = inputs[0]
    table = DimTable()
    axes: list[Axis] = []
    shape, kinds = [], {}
    for name in ("low", "high"):
        need_numbers(dy, name, attributes[name])
    for axis, extent in enumerate(dy.shape):
        low, high = attributes["low"][axis], attributes["high"][axis]
        inside = extent - low - high
        if inside < (1 if low or high else 0):
            raise ShapeError(f"dim d{axis} is {extent} in input 0; more than {low + high} needed")
        shape.append(inside)
        table.add(f"d{axis}", inside, "the output")
        if low or high:  # where an element went is scattered over the border
            kinds[f"d{axis}"] = Kind.WHOLE
            axes.append(Whole(extent))
        else:
            axes.append(Affine(f"d{axis}", extent))
    return finish(
        table, [Operand(tuple(axes))], [numbered(table, shape, "output")], [dy.dtype], kinds
    )


def _border_grad(attributes: Attributes, dy: Array) -> Array:
    low, high = attributes["low"], attributes["high"]
    for axis, (a, b) in enumerate(zip(low, high)):
        if not (a or b):
            continue
        shape = list(dy.shape)
        shape[axis] -= a + b
        places = border_indices(attributes["mode"], shape[axis], a, b)
        made = np.zeros(shape, dy.dtype)
        np.add.at(np.moveaxis(made, axis, 0), places, np.moveaxis(dy, axis, 0))
        dy = made
    return dy.copy()


_BORDER = {
    "low": Attribute("ints", minimum=0),
    "high": Attribute("ints", minimum=0),
    "mode": Attribute("str", "constant", choices=("constant", "edge", "reflect", "wrap")),
}
_NONE = {"interior": (0, 0)}
define(
    name="pad",
    inputs=("x",),
    signature=_pad_signature,
    reference=_pad,
    attributes={
        **_BORDER,
        "interior": Attribute("ints", minimum=0),
        "value": Attribute("float", 0.0),
    },
    gradient=_pad_grad,
    localize=_pad_localize,
    flops_per_point=0,
    forms=laws_movement.ENLARGE_FORMS,
    laws=laws_movement.ENLARGE_LAWS,
    onnx="Pad",
    cases=(
        Case(("3 4",), {"low": (1, 0), "high": (0, 2), "interior": (0, 0)}),
        Case(("3",), {"low": (2,), "high": (3,), "interior": (0,), "value": 1.5}),
        Case(("3 2",), {"low": (1, 1), "high": (0, 1), "interior": (2, 0), "value": -1.0}),
        Case(("0 2",), {"low": (2, 0), "high": (1, 0), "interior": (3, 1)}),
        Case(("1",), {"low": (0,), "high": (0,), "interior": (2,)}),
        Case(("int32 3 <9",), {"low": (1,), "high": (1,), "interior": (0,), "value": 7.0}, ()),
        Case(("3 4",), {"low": (2, 0), "high": (1, 0), "mode": "edge", **_NONE}),
        Case(("3 4",), {"low": (2, 1), "high": (1, 3), "mode": "reflect", **_NONE}),
        Case(("3 2",), {"low": (0, 3), "high": (2, 4), "mode": "wrap", **_NONE}),
        Case(("0 2",), {"low": (0, 1), "high": (0, 1), "mode": "edge", **_NONE}),
        Case(("1 3",), {"low": (2, 5), "high": (1, 4), "mode": "reflect", **_NONE}),
    ),
    doc="value (or, by mode, x itself) around x, low before and high after, and `interior`"
    " values between neighbours",
)
define(
    name="pad_grad",
    inputs=("dy",),
    outputs=("dx",),
    signature=_border_grad_signature,
    reference=_border_grad,
    attributes=_BORDER,
    cases=(
        Case(("6 4",), {"low": (2, 0), "high": (1, 0), "mode": "edge"}, ()),
        Case(("6 8",), {"low": (2, 1), "high": (1, 3), "mode": "reflect"}, ()),
        Case(("3 9",), {"low": (0, 3), "high": (0, 4), "mode": "wrap"}, ()),
        Case(("3 0",), {"low": (1, 0), "high": (1, 0), "mode": "edge"}, ()),
    ),
    doc="dy with each element of a border (mode edge, reflect, wrap) added to where it is from",
)
