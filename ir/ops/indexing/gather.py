"""Elements gathered by index: `gather`, `gather_elements`, `gather_nd`, and their gradients.

Indices are int32 or int64; negative ones count from the end; one outside its axis is an error that
names the operator. Dims: d0, d1, … by the axes of x that stay; i0, i1, … by the axes of the
indices; v, the axis that is indexed. Split over v, a tile holds some of the elements and gives
zeros for the others, so that the tiles' sum is the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_axis, need_float, need_integer
from soapstone.ir.ops.signatures import DimTable, along, finish, named
from soapstone.ir.spec import Case, GradientContext, Tile, box_shape, define
from soapstone.ir.tensor import Array, TensorSpec


def positions(operator: str, ids: Array, extent: int, axis: int) -> Array:
    """Return indices as int64 counted from 0, of an axis of `extent` elements.

    Raises:
        GraphError: an index is outside the axis; names the operator, operand, index and extent.
    """
    place = ids.astype(np.int64)
    bad = (place < -extent) | (place >= extent)
    if bad.any():
        needed = f"{-extent} to {extent - 1} needed for the {extent} elements of axis {axis}"
        found = f"{operator}: operand 'ids': index {place[bad].flat[0]} found"
        raise GraphError(f"{found}, {needed if extent else f'but axis {axis} is empty'}")
    return np.where(place < 0, place + extent, place)


def held_positions(
    operator: str, attributes: Attributes, ids: Array, extent: int
) -> tuple[Array, Array]:
    """Return where indices point to in a tile of the axis, and which of them point into it.

    Indices that do not are given as 0. `extent` is the tile's; attributes `base` and `total` are
    where it begins and how long the whole axis is, in a tile's attributes.
    """
    total, axis = attributes.get("total", extent), attributes["axis"]
    place = positions(operator, ids, total, axis) - attributes.get("base", 0)
    held = (place >= 0) & (place < extent)
    return np.where(held, place, 0), held


def split_axis(dtype: str) -> dict[str, Kind]:
    """Return the kinds of a gather's dims: booleans have no sum, so their axis stays whole."""
    return {"v": Kind.WHOLE} if dtype == "bool" else {}


def along_axis(inputs: Sequence[TensorSpec], attributes: Attributes) -> dict[int, range]:
    """Return which numbers the indices of an axis of operand 0 may be (`OpSpec.indices`)."""
    extent = inputs[0].shape[attributes["axis"]]
    return {1: range(-extent, extent)}


def _indices(table: DimTable, spec: TensorSpec, where: str) -> Operand:
    return named(table, (f"i{axis}" for axis in range(spec.rank)), spec.shape, where)


# gather


def _gather_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    (x, ids), axis = inputs, attributes["axis"]
    need_integer(inputs, 1)
    need_axis(x, axis)
    table = DimTable()
    names = ["v" if place == axis else f"d{place}" for place in range(x.rank)]
    whole = named(table, names, x.shape, "input 0")
    indices = _indices(table, ids, "input 1")
    output = Operand((*whole.axes[:axis], *indices.axes, *whole.axes[axis + 1 :]))
    return finish(table, [whole, indices], [output], [x.dtype], split_axis(x.dtype))


def _gather(attributes: Attributes, x: Array, ids: Array) -> Array:
    axis = attributes["axis"]
    place, held = held_positions("gather", attributes, ids, x.shape[axis])
    shape = (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])
    if x.shape[axis] == 0:
        return np.zeros(shape, x.dtype)
    y = np.take(x, place, axis)
    y[(slice(None),) * axis + (~held,)] = 0
    return np.asarray(y)


def localize_axis(attributes: Attributes, tile: Tile) -> Attributes:
    """Return the attributes of a tile, which knows where its part of the indexed axis begins."""
    total = tile.input_shapes[0][attributes["axis"]]
    return {**attributes, "base": tile.intervals["v"][0], "total": total}


def _gather_gradient(g: GradientContext) -> Sequence[str | None]:
    x, ids = g.inputs
    axis = g.attributes["axis"]
    extent = g.spec(x).shape[axis]
    return [g.emit("gather_grad", g.grad(), ids, axis=axis, extent=extent), None]


def _gather_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    (dy, ids), axis = inputs, attributes["axis"]
    need_float(inputs, 0)
    need_integer(inputs, 1)
    rank = dy.rank - ids.rank + 1
    if rank <= axis:
        raise ShapeError(
            f"input 0 has rank {dy.rank} (shape {dy.shape}); {ids.rank + axis} or more needed"
        )
    table = DimTable()
    names = [f"d{place}" for place in range(axis)]
    names += [f"i{place}" for place in range(ids.rank)]
    names += [f"d{place}" for place in range(axis + 1, rank)]
    given = named(table, names, dy.shape, "input 0")
    indices = _indices(table, ids, "input 1")
    v = along(table, "v", attributes["extent"], "attribute extent")
    output = Operand((*given.axes[:axis], v, *given.axes[axis + ids.rank :]))
    return finish(table, [given, indices], [output], [dy.dtype])


def _gather_grad(attributes: Attributes, dy: Array, ids: Array) -> Array:
    axis, extent = attributes["axis"], attributes["extent"]
    place, held = held_positions("gather_grad", attributes, ids, extent)
    shape = (*dy.shape[:axis], extent, *dy.shape[axis + ids.ndim :])
    dx = np.zeros(shape, dy.dtype)
    lead = np.moveaxis(dy, range(axis, axis + ids.ndim), range(ids.ndim))
    np.add.at(np.moveaxis(dx, axis, 0), place[held], lead[held])
    return dx


def _gather_grad_localize(attributes: Attributes, tile: Tile) -> Attributes:
    lo, hi = tile.intervals["v"]
    return {**attributes, "base": lo, "extent": hi - lo, "total": attributes["extent"]}


_AXIS = {"axis": Attribute("axis", 0, minimum=0)}
define(
    name="gather",
    inputs=("x", "ids"),
    signature=_gather_signature,
    reference=_gather,
    attributes=_AXIS,
    gradient=_gather_gradient,
    localize=localize_axis,
    indices=along_axis,
    flops_per_point=0,
    onnx=Onnx("Gather", casts={1: "int64"}),
    cases=(
        Case(("5 3", "int64 4 <5")),
        Case(("5 3", "int32 2 2 >=-3 <3"), {"axis": 1}),
        Case(("3 4 2", "int64 <4"), {"axis": 1}),
        Case(("2 3 4", "int64 2 1 3 >=-4 <4"), {"axis": 2}),
        Case(("4", "int64 0 <3")),
        Case(("1 2", "int32 3 >=-1 <1")),
        Case(("0 3", "int64 2 <3"), {"axis": 1}),
        Case(("int64 6 <99", "int64 3 <6"), {}, ()),
        Case(("bool 3 4", "int64 3 <4"), {"axis": 1}, ()),
    ),
    doc="the elements of an axis that ids name, negative ones from its end, in its place\n"
    "x: any shape; ids: int32 or int64 of any shape, which stands in the place of the axis",
)
define(
    name="gather_grad",
    inputs=("dy", "ids"),
    outputs=("dx",),
    signature=_gather_grad_signature,
    reference=_gather_grad,
    attributes={**_AXIS, "extent": Attribute("int", minimum=0)},
    localize=_gather_grad_localize,
    cases=(
        Case(("4 3", "int64 4 <5"), {"extent": 5}, ()),
        Case(("5 2 2", "int32 2 2 >=-3 <3"), {"axis": 1, "extent": 3}, ()),
        Case(("3 2", "int64 <4"), {"axis": 1, "extent": 4}, ()),
        Case(("0", "int64 0 <3"), {"extent": 4}, ()),
        Case(("0 2", "int64 2 <3"), {"axis": 1, "extent": 3}, ()),
    ),
    doc="dy added up by the element of the axis it came from",
)

# gather_elements


def element_axes(
    table: DimTable, x: TensorSpec, ids: TensorSpec, axis: int, where: str
) -> tuple[list[Axis], list[Axis]]:
    """Return the axes of x and of the indices of an operator on single elements.

    Both have one rank, and along other axes than `axis` indices are at most as many as elements.

    Raises:
        ShapeError: they do not fit; names the dim.
    """
    need_axis(x, axis)
    if ids.rank != x.rank:
        raise ShapeError(f"{where} has rank {ids.rank} (shape {ids.shape}); {x.rank} needed")
    whole: list[Axis] = []
    some: list[Axis] = []
    for place, (extent, count) in enumerate(zip(x.shape, ids.shape)):
        if place == axis:
            whole.append(along(table, "v", extent, "input 0"))
            some.append(along(table, "i0", count, where))
            continue
        if count > extent:
            raise ShapeError(
                f"dim d{place} is {extent} in input 0 but {count} in {where};"
                f" at most {extent} needed"
            )
        some.append(along(table, f"d{place}", count, where))
        whole.append(Affine(f"d{place}", extent))
    return whole, some


def element_places(place: Array, axis: int) -> tuple[Array, ...]:
    """Return the index tuple of x[i, …, place[i, …, j, …], …]: `place` along axis, else itself."""
    grid = np.ogrid[tuple(slice(extent) for extent in place.shape)]
    return tuple(place if d == axis else grid[d] for d in range(place.ndim))


def _elements_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, ids = inputs
    need_integer(inputs, 1)
    table = DimTable()
    whole, some = element_axes(table, x, ids, attributes["axis"], "input 1")
    operands = [Operand(tuple(whole)), Operand(tuple(some))]
    return finish(table, operands, [Operand(tuple(some))], [x.dtype], split_axis(x.dtype))


def _gather_elements(attributes: Attributes, x: Array, ids: Array) -> Array:
    axis = attributes["axis"]
    place, held = held_positions("gather_elements", attributes, ids, x.shape[axis])
    if x.size == 0:
        return np.zeros(ids.shape, x.dtype)
    return np.where(held, x[element_places(place, axis)], x.dtype.type(0))


def _elements_gradient(g: GradientContext) -> Sequence[str | None]:
    x, ids = g.inputs
    shape, axis = g.spec(x).shape, g.attributes["axis"]
    names = {f"d{d}": "v" if d == axis else f"d{d}" for d in range(len(shape))}
    unlike = {  # axes of which the indices name only some elements follow nothing
        d: d != axis and a != b for d, (a, b) in enumerate(zip(shape, g.spec(ids).shape))
    }
    rename = {name: "" if unlike[d] else names[name] for d, name in enumerate(names)}
    zeros = g.emit("full", shape=shape, dtype=g.spec(x).dtype, rename=rename)
    dims = {f"d{d}": "" for d, differs in unlike.items() if differs}
    made = g.emit("scatter_elements", zeros, ids, g.grad(), axis=axis, reduction="add", rename=dims)
    return [made, None]


define(
    name="gather_elements",
    inputs=("x", "ids"),
    signature=_elements_signature,
    reference=_gather_elements,
    attributes=_AXIS,
    gradient=_elements_gradient,
    localize=localize_axis,
    indices=along_axis,
    flops_per_point=0,
    onnx=Onnx("GatherElements", casts={1: "int64"}),
    layer={"axis": -1},
    cases=(
        Case(("4 3", "int64 2 3 >=-4 <4")),
        Case(("3 4", "int32 3 2 <4"), {"axis": 1}),
        Case(("3 4 2", "int64 2 5 2 >=-4 <4"), {"axis": 1}),
        Case(("5", "int64 7 <5")),
        Case(("2 3", "int64 2 0 <3"), {"axis": 1}),
        Case(("0 3", "int64 0 2 <3"), {"axis": 1}),
        Case(("int64 4 2 <9", "int64 2 2 <4"), {}, ()),
        Case(("bool 4 2", "int64 2 2 <4"), {}, ()),
    ),
    doc="the elements that each line of ids along axis names in the same line of x\n"
    "x: any shape; ids: int32 or int64 of as many axes, no longer than x's but along axis,\n"
    "negative ones from the end; result: of the shape of ids",
)

# gather_nd


def nd_positions(
    operator: str, ids: Array, shape: Sequence[int], batch_dims: int
) -> tuple[Array, ...]:
    """Return the index tuple of x[batch…, ids[…, 0], ids[…, 1], …] for x of a shape."""
    axes = range(batch_dims, batch_dims + ids.shape[-1])
    places = [positions(operator, ids[..., k], shape[axis], axis) for k, axis in enumerate(axes)]
    lead = ids.shape[:-1]
    batch = [
        np.arange(lead[d]).reshape([-1 if axis == d else 1 for axis in range(len(lead))])
        for d in range(batch_dims)
    ]
    return (*batch, *places)


def _nd_axes(
    table: DimTable, shape: Sequence[int], ids: TensorSpec, batch: int
) -> tuple[list[Axis], list[Axis], list[Axis]]:
    """Return the axes of x, of the indices, and of the output."""
    where = "input 1"
    if ids.rank <= batch:
        raise ShapeError(f"{where} has rank {ids.rank} (shape {ids.shape}); {batch + 1} needed")
    count = ids.shape[-1]
    if not batch + count <= len(shape) or count == 0:
        raise ShapeError(
            f"{where} has shape {ids.shape}: {count} indices an element, 1 to"
            f" {len(shape) - batch} needed (the rank {len(shape)} of x less {batch} batch dims)"
        )
    lead = [along(table, f"d{d}", e, "x") for d, e in enumerate(shape[:batch])]
    indexed = [Whole(extent, gathered=True) for extent in shape[batch : batch + count]]
    rest = [
        along(table, f"d{batch + count + d}", e, "x") for d, e in enumerate(shape[batch + count :])
    ]
    indices = [along(table, f"d{d}", e, where) for d, e in enumerate(ids.shape[:batch])]
    indices += [along(table, f"i{d}", e, where) for d, e in enumerate(ids.shape[batch:-1])]
    return [*lead, *indexed, *rest], [*indices, Whole(count)], [*indices, *rest]


def _nd_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, ids = inputs
    need_integer(inputs, 1)
    table = DimTable()
    axes = _nd_axes(table, x.shape, ids, attributes["batch_dims"])
    whole, indices, output = (Operand(tuple(side)) for side in axes)
    return finish(table, [whole, indices], [output], [x.dtype])


def _gather_nd(attributes: Attributes, x: Array, ids: Array) -> Array:
    places = nd_positions("gather_nd", ids, x.shape, attributes["batch_dims"])
    return np.asarray(x[places]).copy()


def _nd_gradient(g: GradientContext) -> Sequence[str | None]:
    x, ids = g.inputs
    batch, shape = g.attributes["batch_dims"], g.spec(x).shape
    return [g.emit("gather_nd_grad", g.grad(), ids, batch_dims=batch, shape=shape), None]


def _nd_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    dy, ids = inputs
    need_float(inputs, 0)
    need_integer(inputs, 1)
    table = DimTable()
    axes = _nd_axes(table, attributes["shape"], ids, attributes["batch_dims"])
    whole, indices, output = (Operand(tuple(side)) for side in axes)
    if dy.shape != output.shape:
        raise ShapeError(f"input 0 has shape {dy.shape}; {output.shape} needed")
    return finish(table, [output, indices], [whole], [dy.dtype])


def _gather_nd_grad(attributes: Attributes, dy: Array, ids: Array) -> Array:
    dx = np.zeros(attributes["shape"], dy.dtype)
    np.add.at(dx, nd_positions("gather_nd_grad", ids, dx.shape, attributes["batch_dims"]), dy)
    return dx


_BATCH = {"batch_dims": Attribute("int", 0, minimum=0)}
_ND_CASES = (
    (("4 3 2", "int64 5 1 >=-4 <4"), 0, (5, 3, 2)),
    (("3 4 2", "int32 2 2 2 <3"), 0, (2, 2, 2)),
    (("2 3 4", "int64 2 3 1 <3"), 1, (2, 3, 4)),
    (("2 2 3", "int64 2 2 1 >=-3 <3"), 2, (2, 2)),
    (("3", "int64 1 <3"), 0, ()),
    (("2 3", "int64 0 1 <2"), 0, (0, 3)),
)
define(
    name="gather_nd",
    inputs=("x", "ids"),
    signature=_nd_signature,
    reference=_gather_nd,
    attributes=_BATCH,
    gradient=_nd_gradient,
    flops_per_point=0,
    onnx=Onnx("GatherND", casts={1: "int64"}),
    cases=(
        *(Case(inputs, {"batch_dims": batch}) for inputs, batch, _ in _ND_CASES),
        Case(("bool 4 3", "int64 2 2 <3"), {}, ()),
    ),
    doc="the slices of x that the last axis of ids names by their first indices\n"
    "x: any shape; ids: (…, k) int32 or int64, negative ones from the end, whose first\n"
    "batch_dims axes are those of x; result: (…, *the axes of x after batch_dims + k)",
)
define(
    name="gather_nd_grad",
    inputs=("dy", "ids"),
    outputs=("dx",),
    signature=_nd_grad_signature,
    reference=_gather_nd_grad,
    attributes={**_BATCH, "shape": Attribute("ints", minimum=0)},
    localize=lambda a, tile: {**a, "shape": box_shape(tile.outputs[0])},
    cases=tuple(
        Case(
            (" ".join(map(str, shape)), inputs[1]),
            {"batch_dims": batch, "shape": tuple(map(int, inputs[0].split()))},
            (),
        )
        for inputs, batch, shape in _ND_CASES
    ),
    doc="dy added up by the slice it came from, in an array of a shape",
)
