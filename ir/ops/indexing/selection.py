"""Operators along one axis that look at all of it: top_k, argmax, argmin, cumsum; and trilu.

Dims: d0, d1, … by the input's axes. The axis itself is never split; all others are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx, OnnxAttribute
from soapstone.ir.ops.checks import need_axis
from soapstone.ir.ops.reduction.folds import need_number
from soapstone.ir.ops.signatures import DimTable, finish, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

# argmax, argmin


def _arg_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, axis = inputs[0], attributes["axis"]
    need_number(inputs)
    need_axis(x, axis)
    if x.shape[axis] == 0:
        raise ShapeError(f"dim d{axis} is 0 in input 0; 1 or more needed to choose from")
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    kept: tuple[Axis, ...] = (Whole(1),) if attributes["keepdims"] else ()
    output = Operand((*operand.axes[:axis], *kept, *operand.axes[axis + 1 :]))
    return finish(table, [operand], [output], ["int64"], {f"d{axis}": Kind.WHOLE})


def _arg(choose: Callable[..., Array]) -> Callable[[Attributes, Array], Array]:
    def reference(attributes: Attributes, x: Array) -> Array:
        axis, keepdims = attributes["axis"], attributes["keepdims"]
        if not attributes["select_last_index"]:
            return np.asarray(choose(x, axis, keepdims=keepdims), np.int64)
        last = x.shape[axis] - 1 - choose(np.flip(x, axis), axis, keepdims=keepdims)
        return np.asarray(last, np.int64)

    return reference


for _name, _choose, _onnx, _which in (
    ("argmax", np.argmax, "ArgMax", "largest"),
    ("argmin", np.argmin, "ArgMin", "smallest"),
):
    define(
        name=_name,
        inputs=("x",),
        signature=_arg_signature,
        reference=_arg(_choose),
        attributes={
            "axis": Attribute("axis", 0, minimum=0),
            "keepdims": Attribute("bool", True),
            "select_last_index": Attribute("bool", False),
        },
        gradient=lambda g: [None],
        onnx=_onnx,
        layer={"axis": -1, "keepdims": False},
        cases=(
            Case(("3 4",)),
            Case(("3 4",), {"axis": 1, "keepdims": False}),
            Case(("2 3 4",), {"axis": 1, "select_last_index": True}),
            Case(("5",), {"keepdims": False}),
            Case(("3 1",), {"axis": 1}),
            Case(("0 3",), {"axis": 1}),
            Case(("int64 4 5 <3",), {"axis": 1}),
            Case(("int32 6 2 <3",), {"select_last_index": True}),
        ),
        doc=f"the int64 index of the {_which} element along axis, of equals the first or last\n"
        "x: any shape; the result lacks the axis, or has it of extent 1 with keepdims",
    )

# top_k


def _top_k_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, axis, k = inputs[0], attributes["axis"], attributes["k"]
    need_number(inputs)
    need_axis(x, axis)
    if k > x.shape[axis]:
        raise ShapeError(f"dim d{axis} is {x.shape[axis]} in input 0; k = {k} or more needed")
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    output = Operand((*operand.axes[:axis], Whole(k), *operand.axes[axis + 1 :]))
    kinds = {f"d{axis}": Kind.WHOLE}
    return finish(table, [operand], [output, output], [x.dtype, "int64"], kinds)


def _top_k(attributes: Attributes, x: Array) -> tuple[Array, Array]:
    axis, k = attributes["axis"], attributes["k"]
    if attributes["largest"]:
        # Stable from the far end, so that of equal elements the first comes first; NaN leads.
        order = x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis, kind="stable")
        order = np.flip(order, axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    order = np.take(order, np.arange(k), axis)
    if not attributes["sorted"]:
        order = np.sort(order, axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def _top_k_grad(g: GradientContext) -> list[str | None]:
    x, axis = g.spec(g.inputs[0]), g.attributes["axis"]
    zeros = g.emit("full", shape=x.shape, dtype=x.dtype)
    rename = {"v": f"d{axis}", "i0": ""}
    return [g.emit("scatter_elements", zeros, g.outputs[1], g.grad(), axis=axis, rename=rename)]


define(
    name="top_k",
    inputs=("x",),
    outputs=("values", "indices"),
    signature=_top_k_signature,
    reference=_top_k,
    attributes={
        "k": Attribute("int", minimum=0),
        "axis": Attribute("axis", 0, minimum=0),
        "largest": Attribute("bool", True),
        "sorted": Attribute("bool", True),
    },
    gradient=_top_k_grad,
    flops_per_point=4,
    onnx="TopK",
    layer={"axis": -1},
    cases=(
        Case(("3 5",), {"k": 2, "axis": 1}),
        Case(("6 2",), {"k": 3, "largest": False}),
        Case(("2 7 3",), {"k": 7, "axis": 1}),
        Case(("2 9",), {"k": 4, "axis": 1, "sorted": False}),
        Case(("4",), {"k": 1}),
        Case(("3 2",), {"k": 0, "axis": 1}),
        Case(("0 4",), {"k": 2, "axis": 1}),
        Case(("int64 3 9 <4",), {"k": 5, "axis": 1}, ()),
    ),
    doc="the k greatest (or least) elements along axis, and their int64 indices\n"
    "x: any shape; both results: of that shape, but of k along axis. They are in order, the\n"
    "greatest (or least) first, or in order of index unless sorted; of equal elements the\n"
    "first counts, and NaN is greater than all numbers",
)

# cumsum


def _axis_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, axis = inputs[0], attributes["axis"]
    need_number(inputs)
    need_axis(x, axis)
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    return finish(table, [operand], [operand], [x.dtype], {f"d{axis}": Kind.WHOLE})


def _cumsum(attributes: Attributes, x: Array) -> Array:
    axis = attributes["axis"]
    if attributes["reverse"]:
        x = np.flip(x, axis)
    y = np.cumsum(x, axis, dtype=x.dtype)
    if attributes["exclusive"]:
        y = np.roll(y, 1, axis)
        y[(slice(None),) * axis + (slice(0, 1),)] = 0
    return (np.flip(y, axis) if attributes["reverse"] else y).copy()


def _cumsum_grad(g: GradientContext) -> list[str | None]:
    turned = {**g.attributes, "reverse": not g.attributes["reverse"]}
    return [g.emit("cumsum", g.grad(), **turned)]


define(
    name="cumsum",
    inputs=("x",),
    signature=_axis_signature,
    reference=_cumsum,
    attributes={
        "axis": Attribute("axis", 0, minimum=0),
        "exclusive": Attribute("bool", False),
        "reverse": Attribute("bool", False),
    },
    gradient=_cumsum_grad,
    onnx=Onnx("CumSum", attributes={"axis": OnnxAttribute(input=1)}),
    layer={"axis": -1},
    cases=(
        Case(("3 4",)),
        Case(("3 4",), {"axis": 1, "exclusive": True}),
        Case(("2 3 4",), {"axis": 1, "reverse": True}),
        Case(("2 5",), {"axis": 1, "reverse": True, "exclusive": True}),
        Case(("1",), {"exclusive": True}),
        Case(("0 3",)),
        Case(("2 0",), {"axis": 1, "exclusive": True}),
        Case(("int64 3 4 <9",), {"axis": 1}, ()),
    ),
    doc="the sums of all elements up to each one along axis, itself included or not\n"
    "x: any shape, which is also the result's; with reverse, sums begin at the end",
)

# trilu


def _trilu_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x = inputs[0]
    if x.rank < 2:
        raise ShapeError(f"input 0 has rank {x.rank} (shape {x.shape}); 2 or more needed")
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    return finish(table, [operand], [operand], [x.dtype])


def _trilu(attributes: Attributes, x: Array) -> Array:
    cut = np.triu if attributes["upper"] else np.tril
    return np.asarray(cut(x, attributes["k"]), x.dtype)


def _trilu_localize(attributes: Attributes, tile: Tile) -> Attributes:
    row, column = (int(first) for first in tile.outputs[0][0][-2:])
    return {**attributes, "k": attributes["k"] + row - column}


define(
    name="trilu",
    inputs=("x",),
    signature=_trilu_signature,
    reference=_trilu,
    attributes={"k": Attribute("int", 0), "upper": Attribute("bool", True)},
    gradient=lambda g: [g.emit("trilu", g.grad(), **g.attributes)],
    localize=_trilu_localize,
    flops_per_point=0,
    onnx=Onnx("Trilu", attributes={"k": OnnxAttribute(input=1)}),
    cases=(
        Case(("3 4",)),
        Case(("4 3",), {"k": 1, "upper": False}),
        Case(("2 3 3",), {"k": -1}),
        Case(("2 2 5",), {"k": 3}),
        Case(("1 1",), {"k": 1}),
        Case(("0 3",)),
        Case(("int64 3 3 <9",), {"upper": False}, ()),
        Case(("bool 3 3",), {}, ()),
    ),
    doc="the last two axes on and above (or below) diagonal k; zeros elsewhere\n"
    "x: (…, rows, columns), which is also the result's shape",
)
