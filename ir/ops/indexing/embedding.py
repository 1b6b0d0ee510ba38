"""Rows of a table gathered by index, and the gradient of the table.

Dims: d0, d1, … of the indices; v, the table's rows; d, a row's elements. Split over v, a tile holds
some of the rows and gives zeros for the others, so that the tiles' sum is the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Operand, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_float, need_integer, need_rank
from soapstone.ir.ops.signatures import DimTable, along, finish, named, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec


def held_rows(operator: str, attributes: Attributes, ids: Array, rows: int) -> tuple[Array, Array]:
    """Return the place of each id in a tile's rows, and which of them the tile holds.

    Raises:
        GraphError: an index outside the whole table; names the operator, operand, index and rows.
    """
    total = attributes.get("total", rows)
    inside = (ids >= 0) & (ids < total)
    if not inside.all():
        found = ids[~inside].flat[0]
        needed = f"0 to {total - 1} needed for the {total} rows of operand 'table'"
        raise GraphError(
            f"{operator}: operand 'ids': index {found} found, "
            f"{needed if total else 'but the table is empty'}"
        )
    place = ids.astype(np.int64) - attributes.get("base", 0)
    return place, (place >= 0) & (place < rows)


def added_rows(attributes: Attributes, dy: Array, ids: Array) -> Array:
    """Return dy (*ids.shape, d) added up by the row of the (tile of the) table it came from."""
    rows = attributes["vocabulary"]
    place = ids.astype(np.int64) - attributes.get("base", 0)
    held = (place >= 0) & (place < rows)
    dtable = np.zeros((rows, dy.shape[-1]), dy.dtype)
    np.add.at(dtable, place[held], dy[held])
    return dtable


def localize_table(attributes: Attributes, tile: Tile) -> Attributes:
    """Return the attributes of a tile of a table's gradient."""
    return {**attributes, "base": tile.intervals["v"][0], "vocabulary": tile.size("v")}


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_integer(inputs, 0)
    need_rank(inputs, 1, "v d")
    need_float(inputs, 1)
    table = DimTable()
    ids = numbered(table, inputs[0].shape, "input 0")
    rows = named(table, "vd", inputs[1].shape, "input 1")
    y = Operand((*ids.axes, rows.axes[1]))
    return finish(table, [ids, rows], [y], [inputs[1].dtype])


def _embedding(attributes: Attributes, ids: Array, rows: Array) -> Array:
    place, held = held_rows("embedding", attributes, ids, rows.shape[0])
    y = np.zeros((*ids.shape, rows.shape[1]), rows.dtype)
    y[held] = rows[place[held]]
    return y


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    (lo, hi), total = tile.intervals["v"], tile.input_shapes[1][0]
    return {**attributes, "base": lo, "partial": hi - lo < total, "total": total}


def _gradient(g: GradientContext) -> Sequence[str | None]:
    ids, table = g.inputs
    return [None, g.emit("embedding_grad", g.grad(), ids, vocabulary=g.spec(table).shape[0])]


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_integer(inputs, 1)
    need_float(inputs, 0)
    if inputs[0].rank != inputs[1].rank + 1:
        raise ShapeError(
            f"input 0 has rank {inputs[0].rank} (shape {inputs[0].shape}); {inputs[1].rank + 1}"
            " needed (the axes of input 1, then d)"
        )
    table = DimTable()
    ids = numbered(table, inputs[1].shape, "input 1")
    lead = numbered(table, inputs[0].shape[:-1], "input 0")
    v = along(table, "v", attributes["vocabulary"], "attribute vocabulary")
    d = along(table, "d", inputs[0].shape[-1], "input 0")
    operands = [Operand((*lead.axes, d)), ids]
    return finish(table, operands, [Operand((v, d))], [inputs[0].dtype])


define(
    name="embedding",
    inputs=("ids", "table"),
    signature=_signature,
    reference=_embedding,
    gradient=_gradient,
    localize=_localize,
    indices=lambda inputs, _: {0: range(inputs[1].shape[0])},
    onnx=Onnx("Gather", inputs=(1, 0), casts={0: "int64"}),
    cases=(
        Case(("int32 4 <5", "5 3")),
        Case(("int64 2 3 <7", "7 2")),
        Case(("int32 <4", "4 3")),
        Case(("int32 1 <1", "1 1")),
        Case(("int64 0 <3", "3 2")),
        Case(("int32 3 2 <6", "6 0")),
    ),
    doc="the rows of the table (v, d) that ids (any shape) name: (…, d)",
)
define(
    name="embedding_grad",
    inputs=("dy", "ids"),
    outputs=("dtable",),
    signature=_grad_signature,
    reference=added_rows,
    attributes={"vocabulary": Attribute("int", minimum=0)},
    localize=localize_table,
    cases=(
        Case(("4 3", "int32 4 <5"), {"vocabulary": 5}, ()),
        Case(("2 3 2", "int64 2 3 <7"), {"vocabulary": 7}, ()),
        Case(("3", "int32 <4"), {"vocabulary": 4}, ()),
        Case(("1 1", "int32 1 <1"), {"vocabulary": 1}, ()),
        Case(("0 2", "int64 0 <3"), {"vocabulary": 3}, ()),
    ),
    doc="dy added up by the row it came from: (vocabulary, d)",
)
