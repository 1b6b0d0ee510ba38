"""Operators that move elements and compute nothing: reshape, transpose, concat, split.

`full` stands here too; `slice` and `pad` are in slicing.py. Dims: d0, d1, … by the axes
of the output (of `split`: of the input); `reshape` names its common factors f0, f1, …
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from soapstone.dtypes import DTYPES, learn
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Operand, Product, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_axis, need_numbers
from soapstone.ir.ops.movement import laws_movement
from soapstone.ir.ops.normalization import laws_sequence
from soapstone.ir.ops.signatures import DimTable, along, finish, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, box_shape, define
from soapstone.ir.tensor import Array, TensorSpec

_COLUMNS = 64  # of a large transposed array that are copied together
_LARGE = 1 << 16  # elements
_NONE = ""  # renames a dim that follows no dim of the forward operator


# full


def _full_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table = DimTable()
    output = numbered(table, attributes["shape"], "attribute shape")
    return finish(table, [], [output], [attributes["dtype"]])


define(
    name="full",
    inputs=(),
    signature=_full_signature,
    reference=lambda a: np.full(a["shape"], a["value"], learn(a["dtype"])),
    attributes={
        "shape": Attribute("ints", minimum=0, extents=True),
        "value": Attribute("float", 0.0),
        "dtype": Attribute("str", "float32", choices=DTYPES),
    },
    gradient=lambda g: [],
    localize=lambda a, tile: {**a, "shape": box_shape(tile.outputs[0])},
    flops_per_point=0,
    onnx="ConstantOfShape",
    layer=None,
    cases=(
        Case((), {"shape": (3, 4), "value": 1.5}),
        Case((), {"shape": (), "value": 1.0, "dtype": "float64"}),
        Case((), {"shape": (5,), "value": 3.0, "dtype": "int64"}),
        Case((), {"shape": (0, 2)}),
        Case((), {"shape": (1, 2), "value": 1.0, "dtype": "bool"}),
    ),
    doc="a constant; every element is value",
)
# reshape


def axis_groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the shortest runs of axes of both shapes with equal numbers of elements.

    Axes of extent 1 belong to no run; the shapes hold as many elements, and not zero.
    """
    left = [axis for axis, extent in enumerate(before) if extent != 1]
    right = [axis for axis, extent in enumerate(after) if extent != 1]
    while left:
        group: tuple[list[int], list[int]] = ([left.pop(0)], [right.pop(0)])
        a, b = before[group[0][0]], after[group[1][0]]
        while a != b:
            if a < b:
                group[0].append(left.pop(0))
                a *= before[group[0][-1]]
            else:
                group[1].append(right.pop(0))
                b *= after[group[1][-1]]
        yield group


def common_factors(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """Return the common factors of two equal products, outermost first, or None if there are none.

    Both lists of extents must merge from the factors: 6 4 and 2 12 do (2 3 4); 2 3 and 3 2 do not.
    """
    marks = sorted({*np.cumprod(a[::-1]).tolist(), *np.cumprod(b[::-1]).tolist(), 1})
    if any(high % low for low, high in itertools.pairwise(marks)):
        return None
    return [high // low for low, high in itertools.pairwise(marks)][::-1]


def _reshape_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, shape = inputs[0], attributes["shape"]
    if math.prod(shape) != x.size:
        raise ShapeError(
            f"input 0 has {x.size} elements (shape {x.shape}); {math.prod(shape)} needed"
            f" for shape {shape}"
        )
    table = DimTable()
    axes: tuple[list[Axis], list[Axis]] = (
        [Whole(extent) for extent in x.shape],
        [Whole(extent) for extent in shape],
    )
    count = 0
    for group in axis_groups(x.shape, shape) if x.size else ():
        extents = ([x.shape[i] for i in group[0]], [shape[i] for i in group[1]])
        factors = common_factors(*extents)
        if factors is None:  # every point needs, and makes, all of these axes
            continue
        names = [
            table.add(f"f{count + i}", factor, "the shapes") for i, factor in enumerate(factors)
        ]
        count += len(factors)
        for side, members, sizes in zip(axes, group, extents):
            position = 0
            for axis, extent in zip(members, sizes):
                first, product = position, 1
                while product < extent:
                    product *= factors[position]
                    position += 1
                if position == first + 1:
                    side[axis] = Affine(names[first], extent)
                else:
                    taken = slice(first, position)
                    side[axis] = Product(tuple(names[taken]), tuple(factors[taken]))
    return finish(table, [Operand(tuple(axes[0]))], [Operand(tuple(axes[1]))], [x.dtype])


define(
    name="reshape",
    view="reshape",
    inputs=("x",),
    signature=_reshape_signature,
    reference=lambda a, x: x.reshape(a["shape"]).copy(),
    attributes={"shape": Attribute("ints", minimum=0, extents=True)},
    gradient=lambda g: [g.emit("reshape", g.grad(), shape=g.spec(g.inputs[0]).shape)],
    localize=lambda a, tile: {"shape": box_shape(tile.outputs[0])},
    flops_per_point=0,
    forms=laws_sequence.MERGE_FORMS,
    laws=laws_sequence.MERGE_LAWS,
    onnx="Reshape",
    cases=(
        Case(("3 4",), {"shape": (12,)}),
        Case(("12",), {"shape": (2, 3, 2)}),
        Case(("2 3 4",), {"shape": (6, 4)}),
        Case(("6 4",), {"shape": (2, 12)}),
        Case(("2 2 3 2",), {"shape": (2, 3, 2, 2)}),
        Case(("3 1 2",), {"shape": (1, 3, 2, 1)}),
        Case(("",), {"shape": (1, 1)}),
        Case(("0 4",), {"shape": (2, 0)}),
        Case(("int32 4 <9",), {"shape": (2, 2)}, ()),
    ),
)

# transpose


def _transpose_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, permutation = inputs[0], attributes["permutation"]
    need_numbers(x, "permutation", permutation)
    if sorted(permutation) != list(range(x.rank)):
        raise ShapeError(
            f"attribute permutation: {permutation} found; each axis below rank {x.rank} once needed"
        )
    table = DimTable()
    output = numbered(table, [x.shape[axis] for axis in permutation], "the permuted input 0")
    operand = Operand(tuple(output.axes[i] for i in np.argsort(permutation)))
    return finish(table, [operand], [output], [x.dtype])


def _transpose_grad(g: GradientContext) -> list[str | None]:
    inverse = tuple(int(axis) for axis in np.argsort(g.attributes["permutation"]))
    rename = {f"d{axis}": f"d{source}" for axis, source in enumerate(inverse)}
    return [g.emit("transpose", g.grad(), permutation=inverse, rename=rename)]


def _transposed(x: Array, permutation: Sequence[int]) -> Array:
    """Return a copy of x with its axes permuted.

    Some columns of the result at a time: of a whole row of it every number is of another line of
    memory, of which a cache would not have the next number any more.
    """
    moved = np.transpose(x, permutation)
    if moved.size < _LARGE or moved.strides[-1] == moved.itemsize:
        return moved.copy()
    made = np.empty(moved.shape, moved.dtype)
    for first in range(0, made.shape[-1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        made[..., columns] = moved[..., columns]
    return made


define(
    name="transpose",
    view="transpose",
    inputs=("x",),
    signature=_transpose_signature,
    reference=lambda a, x: _transposed(x, a["permutation"]),
    attributes={"permutation": Attribute("ints", minimum=0)},
    gradient=_transpose_grad,
    flops_per_point=0,
    forms=laws_movement.TRANSPOSE_FORMS,
    laws=laws_movement.TRANSPOSE_LAWS,
    onnx=Onnx("Transpose", attributes={"permutation": "perm"}),
    doc="x with its axes permuted\nx: any shape; axis i of the result is axis permutation[i] of x",
    cases=(
        Case(("3 4",), {"permutation": (1, 0)}),
        Case(("2 3 4",), {"permutation": (2, 0, 1)}),
        Case(("2 1 3",), {"permutation": (1, 2, 0)}),
        Case(("0 3",), {"permutation": (1, 0)}),
        Case(("",), {"permutation": ()}),
        Case(("bool 2 3",), {"permutation": (1, 0)}, ()),
    ),
)

# concat and split, each the gradient of the other


def _joined(table: DimTable, specs: Sequence[TensorSpec], axis: int, what: str) -> list[Operand]:
    """Return the parts of an axis as intervals of its dim, one after the other."""
    offset = 0
    parts = []
    for position, spec in enumerate(specs):
        where = f"{what} {position}"
        axes = [
            Affine(f"d{i}", extent, offset=-offset)
            if i == axis
            else along(table, f"d{i}", extent, where)
            for i, extent in enumerate(spec.shape)
        ]
        offset += spec.shape[axis]
        parts.append(Operand(tuple(axes)))
    return parts


def _concat_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    first, axis = inputs[0], attributes["axis"]
    need_axis(first, axis)
    for position, spec in enumerate(inputs):
        if spec.rank != first.rank or spec.dtype != first.dtype:
            raise ShapeError(
                f"input {position} is {spec}; rank {first.rank} and {first.dtype} of input 0 needed"
            )
    total = sum(spec.shape[axis] for spec in inputs)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    table = DimTable()
    output = numbered(table, shape, "input 0")
    return finish(table, _joined(table, inputs, axis, "input"), [output], [first.dtype])


def _concat_grad(g: GradientContext) -> list[str | None]:
    axis = g.attributes["axis"]
    sizes = tuple(g.spec(name).shape[axis] for name in g.inputs)
    return list(g.emit.all("split", g.grad(), axis=axis, sizes=sizes))


def _split_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, axis, sizes = inputs[0], attributes["axis"], attributes["sizes"]
    need_axis(x, axis)
    if not sizes:
        raise GraphError("attribute sizes: 0 numbers found, 1 or more needed")
    if sum(sizes) != x.shape[axis]:
        raise ShapeError(f"dim d{axis} is {x.shape[axis]} in input 0 but {sum(sizes)} in all sizes")
    parts = [TensorSpec((*x.shape[:axis], n, *x.shape[axis + 1 :]), x.dtype) for n in sizes]
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    outputs = _joined(table, parts, axis, "output")
    return finish(table, [operand], outputs, [x.dtype] * len(parts))


def _split(attributes: Attributes, x: Array) -> tuple[Array, ...]:
    bounds = np.cumsum(attributes["sizes"])[:-1]
    return tuple(part.copy() for part in np.split(x, bounds, attributes["axis"]))


def _split_localize(attributes: Attributes, tile: Tile) -> Attributes:
    axis = attributes["axis"]
    return {"axis": axis, "sizes": tuple(box_shape(box)[axis] for box in tile.outputs)}


def _split_grad(g: GradientContext) -> list[str | None]:
    parts = []
    for name, grad in zip(g.outputs, g.grads):
        spec = g.spec(name)
        parts.append(
            grad or g.emit("full", shape=spec.shape, dtype=spec.dtype, rename=_whole(spec))
        )
    return [g.emit("concat", *parts, axis=g.attributes["axis"])]


def _whole(spec: TensorSpec) -> dict[str, str]:
    return {f"d{axis}": _NONE for axis in range(spec.rank)}


define(
    name="concat",
    view="concat",
    inputs=("x*",),
    signature=_concat_signature,
    reference=lambda a, *parts: np.concatenate(parts, a["axis"]),
    attributes={"axis": Attribute("axis", minimum=0)},
    gradient=_concat_grad,
    flops_per_point=0,
    forms=laws_movement.CONCAT_FORMS,
    laws=laws_movement.CONCAT_LAWS + laws_movement.JOINED_LAWS,
    onnx="Concat",
    cases=(
        Case(("2 3", "4 3"), {"axis": 0}),
        Case(("2 3", "2 1", "2 2"), {"axis": 1}),
        Case(("2 2 2", "2 0 2"), {"axis": 1}),
        Case(("3",), {"axis": 0}),
        Case(("int32 2 <9", "int32 3 <9"), {"axis": 0}, ()),
    ),
)
define(
    name="split",
    view="split",
    inputs=("x",),
    outputs=("y*",),
    signature=_split_signature,
    reference=_split,
    attributes={"axis": Attribute("axis", minimum=0), "sizes": Attribute("ints", minimum=0)},
    gradient=_split_grad,
    localize=_split_localize,
    flops_per_point=0,
    forms=laws_movement.SPLIT_FORMS,
    laws=laws_movement.SPLIT_LAWS,
    onnx="Split",
    cases=(
        Case(("6 3",), {"axis": 0, "sizes": (2, 4)}),
        Case(("2 6",), {"axis": 1, "sizes": (1, 2, 3)}),
        Case(("2 3 2",), {"axis": 1, "sizes": (0, 3)}),
        Case(("3",), {"axis": 0, "sizes": (3,)}),
        Case(("bool 4 2",), {"axis": 0, "sizes": (1, 3)}, ()),
    ),
)
