"""Rows of a table gathered by index, and their gradients added up by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.indexing.embedding import held_rows
from soapstone.kernels.cpu.elementwise.lane_loops import (
    add_floats,
    copy_floats,
    fill_floats,
)
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import helper, native, noop, parallel_for, useful_threads
from soapstone.native.intrinsics import i32p, i64p, words
from soapstone.native.memory import pack
from soapstone.native.moves import row_offset
from soapstone.native.walks import merge

# Words of the blocks: 0 ids, 1 whether they are int64, 2 y or dy, 3 table, 4 its row's bytes,
# 5 its rows, 6 floats a row, 7 number of its first row, 8 whether other rows lie elsewhere, 9 ids,
# 10 their rank, 11 rows of all tiles, 12.. extents, strides of ids, strides of y.
_TABLE = 12


@helper
def _row_of(w: Any, place: int) -> Any:
    at = w[0] + row_offset(w, _TABLE, _TABLE + w[10], w[10], place)
    return (i64p(at)[0] if w[1] != 0 else np.int64(i32p(at)[0])) - w[7]


@native("body")
def _embedding(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n, rank = w[5], w[6], w[10]
    for place in range(begin, end):
        row = _row_of(w, place)
        to = w[2] + row_offset(w, _TABLE, _TABLE + 2 * rank, rank, place)
        if row >= 0 and row < rows:
            copy_floats(to, w[3] + row * w[4], n)
        elif w[8] != 0 and row + w[7] >= 0 and row + w[7] < w[11]:
            fill_floats(to, np.float32(0.0), n)
        else:
            return 1
    return 0


@native("body")
def _embedding_grad(block: Any, begin: int, end: int) -> int:
    # Each part owns a stretch of the table and looks at all ids, in order: the sums have the same
    # bits however it is cut.
    w = words(block)
    n, rank = w[6], w[10]
    for row in range(begin, end):
        fill_floats(w[3] + row * w[4], np.float32(0.0), n)
    for place in range(w[9]):
        row = _row_of(w, place)
        if begin <= row and row < end:
            dy = w[2] + row_offset(w, _TABLE, _TABLE + 2 * rank, rank, place)
            add_floats(w[3] + row * w[4], dy, n)
    return 0


def _rows_contiguous(array: Array) -> bool:
    held = array.size > 0 and array.shape[-1] > 1
    return is_float32(array) and (not held or array.strides[-1] == 4)


def _words(call: Call, ids: Array, y: Array, table: Array) -> tuple[Any, ...] | None:
    if ids.dtype not in (np.int32, np.int64) or not ids.flags.aligned:
        return None
    if not (_rows_contiguous(y) and _rows_contiguous(table)):
        return None
    a = call.attributes
    extents, strides = merge(ids.shape, [ids.strides, y.strides[:-1]])
    head = ids, ids.dtype == np.int64, y, table, table.strides[0], *table.shape
    return (
        *head,
        a.get("base", 0),
        a.get("partial", False),
        ids.size,
        len(extents),
        a.get("total", 1 << 62),
        extents,
        strides,
    )


@variant("embedding", "numba")
def embedding(call: Call) -> Entry | None:
    """The rows that the ids name; zeros for rows of other tiles of the table."""
    (ids, table), (y,) = call.inputs, call.outputs
    values = _words(call, ids, y, table)
    if values is None:
        return None
    if ids.size == 0:
        return noop()
    threads = useful_threads(call.threads, 2 * y.nbytes)
    status = outside(call.operator, held_rows, call.attributes, ids, len(table))
    return parallel_for(_embedding, pack(*values), ids.size, threads, status)


@variant("embedding_grad", "numba")
def embedding_grad(call: Call) -> Entry | None:
    """The rows of dy added up by the row of the table they came from."""
    (dy, ids), (dtable,) = call.inputs, call.outputs
    values = _words(call, ids, dy, dtable)
    if values is None:
        return None
    if dtable.size == 0:
        return noop()
    threads = useful_threads(call.threads, 2 * dy.nbytes + dtable.nbytes)
    return parallel_for(_embedding_grad, pack(*values), dtable.shape[0], threads)
