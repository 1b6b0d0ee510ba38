"""Operators that repeat, turn and regroup elements: tile, reverse, depth_to_space and its inverse.

Dims: d0, d1, … by the input's axes; of `tile`, r0, r1, … are the repeats of each axis.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Product, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx, OnnxAttribute
from soapstone.ir.ops.checks import need_axis, need_numbers, need_rank
from soapstone.ir.ops.reduction.folds import unit_rename
from soapstone.ir.ops.signatures import DimTable, along, finish, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

# tile


def _tile_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, repeats = inputs[0], attributes["repeats"]
    need_numbers(x, "repeats", repeats)
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    axes: list[Axis] = []
    for axis, (extent, count) in enumerate(zip(x.shape, repeats)):
        if count == 1:
            axes.append(Affine(f"d{axis}", extent))
        else:
            table.add(f"r{axis}", count, "attribute repeats")
            axes.append(Product((f"r{axis}", f"d{axis}"), (count, extent)))
    return finish(table, [operand], [Operand(tuple(axes))], [x.dtype])


def _tile_localize(attributes: Attributes, tile: Tile) -> Attributes:
    counts = enumerate(attributes["repeats"])
    return {"repeats": tuple(1 if count == 1 else tile.size(f"r{axis}") for axis, count in counts)}


def _tile_grad(g: GradientContext) -> list[str | None]:
    x, repeats = g.spec(g.inputs[0]), g.attributes["repeats"]
    shape: list[int] = []
    names: list[str] = []
    axes: list[int] = []
    for axis, (extent, count) in enumerate(zip(x.shape, repeats)):
        if count != 1:
            axes.append(len(shape))
            shape.append(count)
            names.append(f"r{axis}")
        shape.append(extent)
        names.append(f"d{axis}")
    if not axes:
        return [g.grad()]
    parts = g.emit("reshape", g.grad(), shape=shape, rename=unit_rename(shape, names))
    rename = {f"d{place}": name for place, name in enumerate(names)}
    return [g.emit("reduce_sum", parts, axes=axes, rename=rename)]


define(
    name="tile",
    inputs=("x",),
    signature=_tile_signature,
    reference=lambda a, x: np.tile(x, a["repeats"]),
    attributes={"repeats": Attribute("ints", minimum=0)},
    gradient=_tile_grad,
    localize=_tile_localize,
    flops_per_point=0,
    onnx=Onnx("Tile", attributes={"repeats": OnnxAttribute(input=1)}),
    cases=(
        Case(("2 3",), {"repeats": (2, 1)}),
        Case(("2 3",), {"repeats": (3, 2)}),
        Case(("1 4 1",), {"repeats": (2, 1, 3)}),
        Case(("",), {"repeats": ()}),
        Case(("3 2",), {"repeats": (1, 1)}),
        Case(("2",), {"repeats": (0,)}),
        Case(("0 2",), {"repeats": (2, 2)}),
        Case(("int64 3 <9",), {"repeats": (2,)}, ()),
    ),
    doc="x beside itself so many times along each axis\n"
    "x: any shape; repeats: a number for each of its axes, by which extents are multiplied",
)

# reverse


def _reverse_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, axes = inputs[0], attributes["axes"]
    for axis in axes:
        need_axis(x, axis)
    table = DimTable()
    output = numbered(table, x.shape, "input 0")
    operand = Operand(tuple(Whole(a.extent) if i in axes else a for i, a in enumerate(output.axes)))
    return finish(table, [operand], [output], [x.dtype])


def reverse_slices(attributes: Attributes, rank: int) -> tuple[slice, ...]:
    """Return the slices of x that are the (tile of the) output of a `reverse`."""
    made = [slice(None)] * rank
    parts = attributes.get("parts", (None,) * len(attributes["axes"]))
    for axis, part in zip(attributes["axes"], parts):
        if part is None:
            made[axis] = slice(None, None, -1)
            continue
        lo, hi, extent = part
        if lo < hi:
            made[axis] = slice(extent - 1 - lo, extent - 1 - hi if hi < extent else None, -1)
        else:
            made[axis] = slice(0, 0)
    return tuple(made)


def _reverse_localize(attributes: Attributes, tile: Tile) -> Attributes:
    shape = tile.input_shapes[0]
    parts = tuple((*tile.intervals[f"d{axis}"], shape[axis]) for axis in attributes["axes"])
    return {**attributes, "parts": parts}


define(
    name="reverse",
    inputs=("x",),
    signature=_reverse_signature,
    reference=lambda a, x: x[(..., *reverse_slices(a, x.ndim))].copy(),
    attributes={"axes": Attribute("axes", minimum=0)},
    gradient=lambda g: [g.emit("reverse", g.grad(), axes=g.attributes["axes"])],
    localize=_reverse_localize,
    flops_per_point=0,
    cases=(
        Case(("4 3",), {"axes": (0,)}),
        Case(("2 3 5",), {"axes": (2, 0)}),
        Case(("2 3 2 5",), {"axes": (1,)}),
        Case(("",), {"axes": ()}),
        Case(("0 2",), {"axes": (0, 1)}),
        Case(("1 3",), {"axes": (0,)}),
        Case(("int32 4 <9",), {"axes": (0,)}, ()),
    ),
    doc="x from the last element to the first along axes\nx: any shape, which is also the result's",
)

# depth_to_space, space_to_depth


def _regroup(
    inputs: tuple[TensorSpec, ...], attributes: Attributes, deep: bool
) -> tuple[DimTable, Operand, Operand]:
    """Return the two sides, the one with deep channels first; input 0 is that one if `deep`."""
    need_rank(inputs, 0, "n c h w")
    size = attributes["blocksize"]
    n, c, h, w = inputs[0].shape
    if deep:
        if c % (size * size):
            raise ShapeError(f"dim c: {c} in input 0; a multiple of {size * size} needed")
        c //= size * size
    else:
        for name, extent in (("h", h), ("w", w)):
            if extent % size:
                raise ShapeError(f"dim {name}: {extent} in input 0; a multiple of {size} needed")
        h, w = h // size, w // size
    table = DimTable()
    plain_axes = {name: along(table, name, e, "input 0") for name, e in zip("nchw", (n, c, h, w))}
    for name in "pq":
        table.add(name, size, "attribute blocksize")
    order = (("p", "q", "c"), (size, size, c))
    if attributes["mode"] == "CRD":
        order = (("c", "p", "q"), (c, size, size))
    channels = Product(*order)
    below = Operand((plain_axes["n"], channels, plain_axes["h"], plain_axes["w"]))
    high, wide = Product(("h", "p"), (h, size)), Product(("w", "q"), (w, size))
    return table, below, Operand((plain_axes["n"], plain_axes["c"], high, wide))


_BLOCK = {"p": Kind.WHOLE, "q": Kind.WHOLE}


def _to_space_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table, deep, wide = _regroup(inputs, attributes, True)
    return finish(table, [deep], [wide], [inputs[0].dtype], _BLOCK)


def _to_depth_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table, deep, wide = _regroup(inputs, attributes, False)
    return finish(table, [wide], [deep], [inputs[0].dtype], _BLOCK)


# The axes of a deep image, split, in the order of a wide one's.
TO_SPACE = {"DCR": (0, 3, 4, 1, 5, 2), "CRD": (0, 1, 4, 2, 5, 3)}


def _depth_to_space(attributes: Attributes, x: Array) -> Array:
    n, c, h, w = x.shape
    b, mode = attributes["blocksize"], attributes["mode"]
    c //= b * b
    split = (n, b, b, c, h, w) if mode == "DCR" else (n, c, b, b, h, w)
    return x.reshape(split).transpose(TO_SPACE[mode]).reshape(n, c, h * b, w * b).copy()


def _space_to_depth(attributes: Attributes, x: Array) -> Array:
    n, c, h, w = x.shape
    b, mode = attributes["blocksize"], attributes["mode"]
    h, w = h // b, w // b
    parts = x.reshape(n, c, h, b, w, b).transpose(np.argsort(TO_SPACE[mode]))
    return parts.reshape(n, c * b * b, h, w).copy()


_REGROUP = {
    "blocksize": Attribute("int", minimum=1),
    "mode": Attribute("str", "DCR", choices=("DCR", "CRD")),
}


define(
    name="depth_to_space",
    inputs=("x",),
    signature=_to_space_signature,
    reference=_depth_to_space,
    attributes=_REGROUP,
    gradient=lambda g: [g.emit("space_to_depth", g.grad(), **g.attributes)],
    flops_per_point=0,
    onnx="DepthToSpace",
    cases=(
        Case(("2 8 2 3",), {"blocksize": 2}),
        Case(("2 8 2 3",), {"blocksize": 2, "mode": "CRD"}),
        Case(("1 4 1 1",), {"blocksize": 2}),
        Case(("2 3 2 2",), {"blocksize": 1}),
        Case(("0 4 2 1",), {"blocksize": 2}),
    ),
    doc="blocks of b x b channels as squares of an image b times as high and wide",
)
define(
    name="space_to_depth",
    inputs=("x",),
    signature=_to_depth_signature,
    reference=_space_to_depth,
    attributes=_REGROUP,
    gradient=lambda g: [g.emit("depth_to_space", g.grad(), **g.attributes)],
    flops_per_point=0,
    onnx="SpaceToDepth",
    cases=(
        Case(("2 2 4 6",), {"blocksize": 2}),
        Case(("2 2 4 6",), {"blocksize": 2, "mode": "CRD"}),
        Case(("1 1 2 2",), {"blocksize": 2}),
        Case(("2 3 2 2",), {"blocksize": 1}),
        Case(("2 1 0 3",), {"blocksize": 3}),
    ),
    doc="squares of b x b elements of an image as channels",
)
