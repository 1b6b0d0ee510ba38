"""Bags of rows of a table: each sample's rows summed, averaged, or their maximum taken.

Dims: n, the bags; l, the rows of a bag; v, the table's rows; d, a row's elements. Split over v, a
tile holds some of the rows and leaves the others out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.ops.checks import need_count, need_float, need_integer
from soapstone.ir.ops.indexing.embedding import added_rows, held_rows, localize_table
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, GradientContext, Tile, define, of_extents
from soapstone.ir.tensor import Array, TensorSpec

_REDUCTION = {"reduction": Attribute("str", "mean", choices=("sum", "mean", "max"))}


def _work(extents: Mapping[str, int]) -> float:
    return float(extents["n"]) * extents["l"] * extents["d"]


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 2)
    need_integer(inputs, 0)
    need_float(inputs, 1)
    monoid = "max" if attributes["reduction"] == "max" else "sum"
    return einsum("n l, v d -> n d", inputs, dtypes=[inputs[1].dtype], monoid=monoid)


def _embedding_bag(attributes: Attributes, ids: Array, table: Array) -> Array:
    place, held = held_rows("embedding_bag", attributes, ids, table.shape[0])
    maximum = attributes["reduction"] == "max"
    empty = maximum and (ids.shape[1] > 0 or "length" in attributes)
    absent = table.dtype.type(-np.inf if empty else 0)
    chosen = np.full((*ids.shape, table.shape[1]), absent, table.dtype)
    chosen[held] = table[place[held]]
    if maximum:
        return np.asarray(chosen.max(axis=1, initial=absent))
    total = chosen.sum(axis=1)
    if attributes["reduction"] == "mean":
        total = total / table.dtype.type(max(attributes.get("length", ids.shape[1]), 1))
    return np.asarray(total)


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    made = {"base": tile.intervals["v"][0], "total": tile.input_shapes[1][0]}
    length = tile.input_shapes[0][1]
    return {**attributes, **made} | ({"length": length} if length else {})


def _gradient(g: GradientContext) -> Sequence[str | None]:
    ids, table = g.inputs
    if g.attributes["reduction"] == "max":
        return [None, g.emit("embedding_bag_max_grad", g.grad(), ids, table, g.outputs[0])]
    mean = g.attributes["reduction"] == "mean"
    scale = 1 / max(g.spec(ids).shape[1], 1) if mean else 1.0
    rows = g.spec(table).shape[0]
    return [None, g.emit("embedding_bag_grad", g.grad(), ids, vocabulary=rows, scale=scale)]


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 2)
    need_float(inputs, 0)
    need_integer(inputs, 1)
    table = TensorSpec((attributes["vocabulary"],), inputs[0].dtype)
    bound = einsum("n d, n l, v -> v d", (*inputs, table), dtypes=[inputs[0].dtype])
    return Signature(bound.dims, bound.inputs[:2], bound.outputs, bound.dtypes)


def _embedding_bag_grad(attributes: Attributes, dy: Array, ids: Array) -> Array:
    each = np.broadcast_to(dy[:, None], (*ids.shape, dy.shape[1]))
    return added_rows(attributes, each * dy.dtype.type(attributes["scale"]), ids)


def _max_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 4)
    need_float(inputs, 0, 2, 3)
    need_integer(inputs, 1)
    kinds = {"l": Kind.WHOLE, "v": Kind.WHOLE}
    return einsum("n d, n l, v d, n d -> v d", inputs, dtypes=[inputs[0].dtype], kinds=kinds)


def _max_grad(attributes: Attributes, dy: Array, ids: Array, table: Array, y: Array) -> Array:
    dtable = np.zeros_like(table)
    if not ids.shape[1]:
        return dtable
    place, _ = held_rows("embedding_bag", attributes, ids, table.shape[0])
    chosen = table[place] == y[:, None]  # the first of several equal ones has it all
    row = np.take_along_axis(place, np.argmax(chosen, axis=1), axis=1)
    np.add.at(dtable, (row, np.arange(dy.shape[1])[None, :]), dy)
    return dtable


define(
    name="embedding_bag",
    inputs=("ids", "table"),
    signature=_signature,
    reference=_embedding_bag,
    attributes=_REDUCTION,
    gradient=_gradient,
    localize=_localize,
    indices=lambda inputs, _: {0: range(inputs[1].shape[0])},
    operations=of_extents(_work),
    cases=(
        Case(("int32 4 3 <5", "5 3")),
        Case(("int64 4 3 <5", "5 3"), {"reduction": "sum"}),
        Case(("int32 4 3 <5", "5 3"), {"reduction": "max"}),
        Case(("int32 1 1 <1", "1 1"), {"reduction": "max"}),
        Case(("int64 0 2 <3", "3 2")),
        Case(("int32 2 0 <3", "3 2"), {"reduction": "max"}),
        Case(("int32 2 0 <3", "3 2")),
        Case(("int64 6 4 <9", "9 70"), {"reduction": "sum"}, ()),
    ),
    doc="of the rows of the table (v, d) that each bag of ids (n, l) names: (n, d); of none, 0",
)
define(
    name="embedding_bag_grad",
    inputs=("dy", "ids"),
    outputs=("dtable",),
    signature=_grad_signature,
    reference=_embedding_bag_grad,
    attributes={
        "vocabulary": Attribute("int", minimum=0),
        "scale": Attribute("float", 1.0),
    },
    localize=localize_table,
    operations=of_extents(_work),
    cases=(
        Case(("4 3", "int32 4 3 <5"), {"vocabulary": 5}, ()),
        Case(("4 3", "int64 4 3 <5"), {"vocabulary": 5, "scale": 0.25}, ()),
        Case(("1 1", "int32 1 1 <1"), {"vocabulary": 1}, ()),
        Case(("0 2", "int64 0 2 <3"), {"vocabulary": 3}, ()),
        Case(("6 70", "int64 6 4 <9"), {"vocabulary": 9}, ()),
    ),
    doc="dy times scale, added to each of the rows of its bag: (vocabulary, d)",
)
define(
    name="embedding_bag_max_grad",
    inputs=("dy", "ids", "table", "y"),
    outputs=("dtable",),
    signature=_max_signature,
    reference=_max_grad,
    operations=of_extents(_work),
    cases=(
        Case(("2 3", "int32 2 2 <4", "4 3", "2 3"), {}, ()),
        Case(("1 1", "int64 1 1 <1", "1 1", "1 1"), {}, ()),
        Case(("2 3", "int32 2 0 <4", "4 3", "2 3"), {}, ()),
    ),
    doc="dy added to the first row of its bag that holds the maximum",
)
