"""Elements put where indices say: `scatter_elements`, `scatter_nd`, and their gradients.

With `reduction` none, of several updates of one element the last counts; the others combine them
with what is there. Dims as in gather.py; v, the axis that is indexed, splits freely: a tile takes
the updates that fall into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_axis, need_count, need_float, need_integer
from soapstone.ir.ops.indexing.gather import (
    along_axis,
    element_places,
    held_positions,
    localize_axis,
    nd_positions,
)
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

REDUCTIONS = ("none", "add", "mul", "max", "min")
_COMBINE: dict[str, Any] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _put(y: Array, places: Any, updates: Array, reduction: str) -> Array:
    if reduction == "none":
        y[places] = updates  # of repeated places NumPy keeps the last
    else:
        _COMBINE[reduction].at(y, places, updates)
    return y


def _need_update(
    inputs: Sequence[TensorSpec], shape: Sequence[int], attributes: Attributes
) -> None:
    x, _, updates = inputs
    if updates.dtype != x.dtype:
        raise ShapeError(f"input 2 is {updates}; {x.dtype} of input 0 needed (shape {shape})")
    if updates.shape != tuple(shape):
        raise ShapeError(f"input 2 has shape {updates.shape}; {tuple(shape)} needed")
    if x.dtype == "bool" and attributes["reduction"] != "none":
        raise ShapeError(
            f"input 0 is {x}; a number type needed for reduction {attributes['reduction']}"
        )


# scatter_elements


def _element_sides(
    table: DimTable, x: TensorSpec, ids: TensorSpec, axis: int
) -> tuple[Operand, Operand, dict[str, Kind]]:
    """Return the axes of x and of the indices, and the kinds of the dims."""
    need_axis(x, axis)
    if ids.rank != x.rank:
        raise ShapeError(f"the indices have rank {ids.rank} (shape {ids.shape}); {x.rank} needed")
    whole: list[Axis] = []
    some: list[Axis] = []
    kinds = {}
    for place, (extent, count) in enumerate(zip(x.shape, ids.shape)):
        name = "v" if place == axis else f"d{place}"
        whole.append(along(table, name, extent, "x"))
        if place != axis and count > extent:
            raise ShapeError(
                f"dim {name} is {extent} in x but {count} in the indices; at most {extent} needed"
            )
        if place != axis and count == extent:
            some.append(whole[-1])
        else:
            some.append(Whole(count))
            if place != axis:  # the elements past the indices stay as they are
                kinds[name] = Kind.WHOLE
    return Operand(tuple(whole)), Operand(tuple(some)), kinds


def _elements_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, ids, _ = inputs
    need_integer(inputs, 1)
    _need_update(inputs, ids.shape, attributes)
    table = DimTable()
    whole, some, kinds = _element_sides(table, x, ids, attributes["axis"])
    return finish(table, [whole, some, some], [whole], [x.dtype], kinds)


def _scatter_elements(attributes: Attributes, x: Array, ids: Array, updates: Array) -> Array:
    axis = attributes["axis"]
    place, held = held_positions("scatter_elements", attributes, ids, x.shape[axis])
    places = tuple(np.broadcast_to(p, ids.shape)[held] for p in element_places(place, axis))
    return _put(x.copy(), places, updates[held], attributes["reduction"])


def _elements_gradient(g: GradientContext) -> Sequence[str | None]:
    _, ids, _ = g.inputs
    axis, reduction = g.attributes["axis"], g.attributes["reduction"]
    if reduction == "add":
        rename = {"i0": ""} | {  # where the indices are fewer, the forward dims stay whole
            f"d{d}": ""
            for d, (a, b) in enumerate(zip(g.spec(g.inputs[0]).shape, g.spec(ids).shape))
            if a != b
        }
        return [g.grad(), None, g.emit("gather_elements", g.grad(), ids, axis=axis, rename=rename)]
    rest = () if reduction == "none" else (g.inputs[0], g.inputs[2], g.outputs[0])
    made = g.emit.all("scatter_elements_grad", g.grad(), ids, *rest, axis=axis, reduction=reduction)
    return [made[0], None, made[1]]


def _grad_inputs(inputs: tuple[TensorSpec, ...], attributes: Attributes, updates: Operand) -> None:
    need_float(inputs, 0)
    need_integer(inputs, 1)
    need_count(inputs, 2 if attributes["reduction"] == "none" else 5)
    for position, shape in ((2, inputs[0].shape), (3, updates.shape), (4, inputs[0].shape)):
        if position < len(inputs) and inputs[position].shape != shape:
            raise ShapeError(f"input {position} has shape {inputs[position].shape}; {shape} needed")


def _elements_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table = DimTable()
    whole, some, kinds = _element_sides(table, inputs[0], inputs[1], attributes["axis"])
    _grad_inputs(inputs, attributes, some)
    operands = [whole, some, whole, some, whole][: len(inputs)]
    kinds["v"] = Kind.WHOLE
    return finish(table, operands, [whole, some], [inputs[0].dtype] * 2, kinds)


def _elements_grad(attributes: Attributes, dy: Array, ids: Array, *rest: Array) -> Any:
    axis = attributes["axis"]
    place, _ = held_positions("scatter_elements_grad", attributes, ids, dy.shape[axis])
    return _combined_grad(attributes, dy, element_places(place, axis), ids.shape, *rest)


def _combined_grad(
    attributes: Attributes, dy: Array, places: Any, shape: tuple[int, ...], *rest: Array
) -> tuple[Array, Array]:
    """Return dx and the gradient of updates of a shape, which went to `places` of x."""
    reduction = attributes["reduction"]
    if reduction == "none":
        dx = dy.copy()
        dx[places] = 0
        order = np.zeros(dy.shape, np.int64)
        number = np.arange(int(np.prod(shape))).reshape(shape)
        order[places] = number
        return dx, np.where(order[places] == number, dy[places], dy.dtype.type(0))
    x, updates, y = rest
    if reduction in ("max", "min"):  # ties share the gradient
        hit, mine = (updates == y[places]).astype(dy.dtype), (x == y).astype(dy.dtype)
        ties = mine.copy()
        np.add.at(ties, places, hit)
        share = dy / np.maximum(ties, 1)
        return share * mine, np.asarray(share[places] * hit)
    # A product: of the factors that are not zero, and how many are.
    zero, none = (x == 0).astype(np.int64), np.where(x == 0, 1, x)
    np.add.at(zero, places, (updates == 0).astype(np.int64))
    np.multiply.at(none, places, np.where(updates == 0, 1, updates))

    def others(factor: Array, zeros: Array, product: Array) -> Array:
        rest = np.where(factor == 0, product, product / np.where(factor == 0, 1, factor))
        return np.where(zeros - (factor == 0) > 0, 0, rest).astype(dy.dtype)

    dx = dy * others(x, zero, none)
    return dx, np.asarray(dy[places] * others(updates, zero[places], none[places]))


_REDUCTION = {"reduction": Attribute("str", "none", choices=REDUCTIONS)}
_ELEMENTS = {"axis": Attribute("axis", 0, minimum=0), **_REDUCTION}
_Sides = tuple[tuple[str, str, str], int]
_ELEMENT_CASES: tuple[_Sides, ...] = (
    (("4 3", "int64 2 3 >=-4 <4", "2 3"), 0),
    (("3 4", "int32 3 5 <4", "3 5"), 1),
    (("3 4 2", "int64 2 2 2 <4", "2 2 2"), 1),
)


def _each(make: Callable[[str, _Sides], Case], sides: Sequence[_Sides]) -> tuple[Case, ...]:
    return tuple(make(reduction, side) for reduction in REDUCTIONS for side in sides)


define(
    name="scatter_elements",
    inputs=("x", "ids", "updates"),
    signature=_elements_signature,
    reference=_scatter_elements,
    attributes=_ELEMENTS,
    gradient=_elements_gradient,
    localize=localize_axis,
    indices=along_axis,
    onnx=Onnx("ScatterElements", casts={1: "int64"}),
    layer={"axis": -1},
    cases=(
        *_each(
            lambda reduction, side: Case(side[0], {"axis": side[1], "reduction": reduction}),
            _ELEMENT_CASES,
        ),
        Case(("5", "int64 0 <5", "0")),
        Case(("0 3", "int64 0 2 <3", "0 2"), {"axis": 1}),
        Case(("int64 4 2 <9", "int64 2 2 <4", "int64 2 2"), {"reduction": "add"}, ()),
        Case(("bool 4 2", "int64 2 2 <4", "bool 2 2"), {}, ()),
    ),
    doc="x, with updates at the places of each line along axis that ids name\n"
    "x: any shape, which is also the result's; ids: int32 or int64 of as many axes, no longer\n"
    "than x's but along axis, negative ones from the end; updates: of the shape of ids",
)


def _grad_case(reduction: str, dy: str, updates: str, ids: str, **attributes: int) -> Case:
    inputs = (dy, ids) if reduction == "none" else (dy, ids, dy, updates, dy)
    return Case(inputs, {**attributes, "reduction": reduction}, ())


define(
    name="scatter_elements_grad",
    inputs=("dy", "ids", "x?", "updates?", "y?"),
    outputs=("dx", "dupdates"),
    signature=_elements_grad_signature,
    reference=_elements_grad,
    attributes=_ELEMENTS,
    cases=tuple(
        _grad_case(reduction, side[0][0], side[0][2], side[0][1], axis=side[1])
        for reduction in ("none", "mul", "max")
        for side in _ELEMENT_CASES
    ),
    doc="dy of the elements of x that stayed, and of the updates that counted",
)

# scatter_nd


def _nd_sides(table: DimTable, x: TensorSpec, ids: TensorSpec) -> tuple[Operand, Operand, Operand]:
    """Return the axes of x, of the indices and of the updates."""
    if ids.rank == 0 or not 1 <= ids.shape[-1] <= x.rank:
        raise ShapeError(
            f"the indices have shape {ids.shape}: 1 to {x.rank} of them an element needed, the"
            f" rank of x"
        )
    count = ids.shape[-1]
    lead = [Whole(extent) for extent in ids.shape[:-1]]
    rest = [along(table, f"d{count + d}", e, "x") for d, e in enumerate(x.shape[count:])]
    indexed = [Whole(extent, gathered=True) for extent in x.shape[:count]]
    return Operand((*indexed, *rest)), Operand((*lead, Whole(count))), Operand((*lead, *rest))


def _nd_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, ids, _ = inputs
    need_integer(inputs, 1)
    table = DimTable()
    whole, indices, updates = _nd_sides(table, x, ids)
    _need_update(inputs, updates.shape, attributes)
    return finish(table, [whole, indices, updates], [whole], [x.dtype])


def _scatter_nd(attributes: Attributes, x: Array, ids: Array, updates: Array) -> Array:
    places = nd_positions("scatter_nd", ids, x.shape, 0)
    return _put(x.copy(), places, updates, attributes["reduction"])


def _nd_gradient(g: GradientContext) -> Sequence[str | None]:
    ids, reduction = g.inputs[1], g.attributes["reduction"]
    if reduction == "add":
        return [g.grad(), None, g.emit("gather_nd", g.grad(), ids)]
    rest = () if reduction == "none" else (g.inputs[0], g.inputs[2], g.outputs[0])
    made = g.emit.all("scatter_nd_grad", g.grad(), ids, *rest, reduction=reduction)
    return [made[0], None, made[1]]


def _nd_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table = DimTable()
    whole, indices, updates = _nd_sides(table, inputs[0], inputs[1])
    _grad_inputs(inputs, attributes, updates)
    operands = [whole, indices, whole, updates, whole][: len(inputs)]
    return finish(table, operands, [whole, updates], [inputs[0].dtype] * 2)


def _nd_grad(attributes: Attributes, dy: Array, ids: Array, *rest: Array) -> Any:
    places = nd_positions("scatter_nd_grad", ids, dy.shape, 0)
    shape = (*ids.shape[:-1], *dy.shape[ids.shape[-1] :])
    return _combined_grad(attributes, dy, places, shape, *rest)


_ND_CASES: tuple[_Sides, ...] = (
    (("4 3 2", "int64 5 1 >=-4 <4", "5 3 2"), 0),
    (("3 4 2", "int32 2 2 2 <3", "2 2 2"), 0),
    (("5", "int64 3 1 <5", "3"), 0),
)
define(
    name="scatter_nd",
    inputs=("x", "ids", "updates"),
    signature=_nd_signature,
    reference=_scatter_nd,
    attributes=_REDUCTION,
    gradient=_nd_gradient,
    onnx=Onnx("ScatterND", casts={1: "int64"}),
    cases=(
        *_each(lambda reduction, side: Case(side[0], {"reduction": reduction}), _ND_CASES),
        Case(("5 2", "int64 0 1 <5", "0 2")),
        Case(("int64 4 2 <9", "int64 2 1 <4", "int64 2 2"), {"reduction": "add"}, ()),
        Case(("bool 4 2", "int64 2 1 <4", "bool 2 2"), {}, ()),
    ),
    doc="x, with updates as the slices that the last axis of ids names\n"
    "x: any shape, which is also the result's; ids: (…, k) int32 or int64, negative ones from\n"
    "the end; updates: (…, *the axes of x after the first k)",
)
define(
    name="scatter_nd_grad",
    inputs=("dy", "ids", "x?", "updates?", "y?"),
    outputs=("dx", "dupdates"),
    signature=_nd_grad_signature,
    reference=_nd_grad,
    attributes=_REDUCTION,
    cases=tuple(
        _grad_case(reduction, side[0][0], side[0][2], side[0][1])
        for reduction in ("none", "mul", "max")
        for side in _ND_CASES
    ),
    doc="dy of the elements of x that stayed, and of the updates that counted",
)
