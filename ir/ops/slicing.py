"""`slice` and `pad`, each the gradient of the other. Dims: d0, d1, … by the output's axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.dims import Affine, Axis, DimTable, Kind, Operand, Signature, Whole, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.movement import need_numbers, plain
from soapstone.ir.ops.reduction import box_shape
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, Tile, register
from soapstone.ir.tensor import Array, TensorSpec


def _follow_equal(own: Sequence[int], forward: Sequence[int]) -> dict[str, str]:
    """Return the renaming that lets only the axes of equal extent follow the forward operator."""
    return {
        f"d{axis}": f"d{axis}" if a == b else "" for axis, (a, b) in enumerate(zip(own, forward))
    }


def _slice_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x = inputs[0]
    table = DimTable()
    axes = []
    for name in ("starts", "stops", "steps"):
        need_numbers(x, name, attributes[name])
    for axis, extent in enumerate(x.shape):
        start, stop, step = (attributes[name][axis] for name in ("starts", "stops", "steps"))
        if not start <= stop <= extent:
            raise ShapeError(
                f"dim d{axis}: slice {start} to {stop} found, start <= stop <= {extent} needed"
            )
        table.add(f"d{axis}", -(-(stop - start) // step), "the slice")
        axes.append(Affine(f"d{axis}", extent, stride=step, offset=start))
    shape = [table.extent(f"d{axis}") for axis in range(x.rank)]
    return finish(table, [Operand(tuple(axes))], [plain(table, shape, "output")], [x.dtype])


def _slice(attributes: Attributes, x: Array) -> Array:
    bounds = zip(attributes["starts"], attributes["stops"], attributes["steps"])
    return np.asarray(x[tuple(slice(*bound) for bound in bounds)]).copy()


def _slice_localize(attributes: Attributes, tile: Tile) -> Attributes:
    shape = box_shape(tile.inputs[0])
    return {"starts": (0,) * len(shape), "stops": shape, "steps": attributes["steps"]}


def _slice_grad(g: GradientContext) -> list[str | None]:
    dy, x = g.spec(g.grad()), g.spec(g.inputs[0])
    low, high, interior = [], [], []
    for axis, (start, step) in enumerate(zip(g.attributes["starts"], g.attributes["steps"])):
        step = step if dy.shape[axis] > 1 else 1
        span = max(dy.shape[axis] + (dy.shape[axis] - 1) * (step - 1), 0)
        low.append(start)
        high.append(x.shape[axis] - start - span)
        interior.append(step - 1)
    rename = _follow_equal(x.shape, dy.shape)
    return [g.emit("pad", g.grad(), low=low, high=high, interior=interior, rename=rename)]


register(
    OpSpec(
        name="slice",
        inputs=("x",),
        signature=_slice_signature,
        reference=_slice,
        attributes={
            "starts": Attribute("ints", minimum=0),
            "stops": Attribute("ints", minimum=0),
            "steps": Attribute("ints", minimum=1),
        },
        gradient=_slice_grad,
        localize=_slice_localize,
        flops_per_point=0,
        laws=("linear",),
        onnx="Slice",
        cases=(
            Case(("5 4",), {"starts": (1, 0), "stops": (4, 4), "steps": (1, 1)}),
            Case(("7 3",), {"starts": (1, 0), "stops": (7, 3), "steps": (2, 2)}),
            Case(("6",), {"starts": (0,), "stops": (5,), "steps": (3,)}),
            Case(("4 3",), {"starts": (2, 1), "stops": (2, 3), "steps": (1, 1)}),
            Case(("4",), {"starts": (1,), "stops": (2,), "steps": (5,)}),
            Case(("int64 5 <9",), {"starts": (1,), "stops": (4,), "steps": (2,)}, ()),
        ),
    )
)


def _spread(extent: int, interior: int) -> int:
    """Return the extent of an axis once `interior` elements stand between neighbours."""
    return extent + max(extent - 1, 0) * interior


def _pad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x = inputs[0]
    table = DimTable()
    axes: list[Axis] = []
    kinds = {}
    for name in ("low", "high", "interior"):
        need_numbers(x, name, attributes[name])
    for axis, extent in enumerate(x.shape):
        low, high, interior = (attributes[name][axis] for name in ("low", "high", "interior"))
        table.add(f"d{axis}", low + _spread(extent, interior) + high, "the padded input 0")
        if interior:  # an output interval is no interval of the input
            kinds[f"d{axis}"] = Kind.WHOLE
            axes.append(Whole(extent))
        else:
            axes.append(Affine(f"d{axis}", extent, offset=-low))
    shape = [table.extent(f"d{axis}") for axis in range(x.rank)]
    output = plain(table, shape, "output")
    return finish(table, [Operand(tuple(axes))], [output], [x.dtype], kinds)


def _pad(attributes: Attributes, x: Array) -> Array:
    low, high, interior = attributes["low"], attributes["high"], attributes["interior"]
    spread = [_spread(extent, between) for extent, between in zip(x.shape, interior)]
    shape = [a + extent + b for a, extent, b in zip(low, spread, high)]
    result = np.full(shape, attributes["value"], x.dtype)
    steps = zip(low, spread, interior)
    result[tuple(slice(a, a + extent, between + 1) for a, extent, between in steps)] = x
    return result


def _pad_localize(attributes: Attributes, tile: Tile) -> Attributes:
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
    stops = [a + _spread(e, between) for a, e, between in zip(low, x.shape, interior)]
    steps = [between + 1 for between in interior]
    rename = _follow_equal(x.shape, dy.shape)
    return [g.emit("slice", g.grad(), starts=low, stops=stops, steps=steps, rename=rename)]


register(
    OpSpec(
        name="pad",
        inputs=("x",),
        signature=_pad_signature,
        reference=_pad,
        attributes={
            "low": Attribute("ints", minimum=0),
            "high": Attribute("ints", minimum=0),
            "interior": Attribute("ints", minimum=0),
            "value": Attribute("float", 0.0),
        },
        gradient=_pad_grad,
        localize=_pad_localize,
        flops_per_point=0,
        onnx="Pad",
        cases=(
            Case(("3 4",), {"low": (1, 0), "high": (0, 2), "interior": (0, 0)}),
            Case(("3",), {"low": (2,), "high": (3,), "interior": (0,), "value": 1.5}),
            Case(("3 2",), {"low": (1, 1), "high": (0, 1), "interior": (2, 0), "value": -1.0}),
            Case(("0 2",), {"low": (2, 0), "high": (1, 0), "interior": (3, 1)}),
            Case(("1",), {"low": (0,), "high": (0,), "interior": (2,)}),
            Case(("int32 3 <9",), {"low": (1,), "high": (1,), "interior": (0,), "value": 7.0}, ()),
        ),
        doc="value around x, low before and high after, and `interior` of it between neighbours",
    )
)
