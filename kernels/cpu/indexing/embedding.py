"""Rows of a table gathered by index; embedding_grad.py has their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.indexing.embedding import held_rows
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, fill_floats
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import float_rows
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.memory import Block
from soapstone.native.moves import row_at
from soapstone.native.promises import held, lying
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import merge

# wide: ids are int64; y: or dy; step: bytes of a row of the table, which has `rows` of n floats,
# the first of them number `base` of `total`; partial: the others lie elsewhere. Then the walk of
# the ids, of `rank` dims, in ids and y.
ROWS = Fields("ids wide count y table step rows n base partial rank total", reals="factor")
_rows_of, _table_of = ROWS.at, ROWS.table


@helper
def row_of(w: Any, table: Any, place: int) -> Any:
    """The row of the table that the id at a place names, counted from the tile's first."""
    return integer_at(w.ids + row_at(table, w.rank, 0, place), w.wide) - w.base


@native("body")
def _embedding(block: Any, begin: int, end: int) -> int:
    w, table = _rows_of(block), _table_of(block)
    rows, n, rank = w.rows, w.n, w.rank
    for place in range(begin, end):
        row = row_of(w, table, place)
        to = w.y + row_at(table, rank, 1, place)
        if row >= 0 and row < rows:
            copy_floats(to, w.table + row * w.step, n)
        elif w.partial != 0 and row + w.base >= 0 and row + w.base < w.total:
            fill_floats(to, np.float32(0.0), n)
        else:
            return 1
    return 0


def rows_block(call: Call, ids: Array, y: Array, table: Array, factor: float = 1.0) -> Block | None:
    """Return the block of ids and what they name rows of; None where kernels do not serve them."""
    if not is_integer(ids) or not float_rows(y, table):
        return None
    a = call.attributes
    extents, strides = merge(ids.shape, [ids.strides, y.strides[:-1]])
    return ROWS.pack(
        *(extents, strides),
        ids=ids,
        wide=ids.dtype == np.int64,
        count=ids.size,
        y=y,
        table=lying(table),
        step=table.strides[0],
        rows=table.shape[0],
        n=table.shape[1],
        base=a.get("base", 0),
        partial=a.get("partial", False),
        rank=len(extents),
        total=a.get("total", 1 << 62),
        factor=factor,
    )


@variant("embedding", "numba", promises=True)
def embedding(call: Call) -> Entry | None:
    """The rows that the ids name; zeros for rows of other tiles of the table."""
    (ids, table), (y,) = call.inputs, call.outputs
    ids = held(ids)
    block = rows_block(call, ids, y, table)
    if block is None:
        return None
    if ids.size == 0:
        return noop()
    threads = useful_threads(call.threads, 2 * y.nbytes)
    status = outside(call.operator, held_rows, call.attributes, ids, len(table))
    return parallel_for(_embedding, block, ids.size, threads, status)
