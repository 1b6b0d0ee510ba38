"""Gradients of tables: zeros everywhere, and the few rows that were read added up.

Each part of the work owns a stretch of the table and looks at all ids, in order, so that the sums
have the same bits however it is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.kernels.cpu.elementwise.lane_loops import add_scaled, fill_floats
from soapstone.kernels.cpu.indexing.embedding import ROWS, row_of, rows_block
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import helper, native, noop
from soapstone.native.lanes import F32, Lanes
from soapstone.native.moves import row_at
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads

_rows_of, _table_of = ROWS.at, ROWS.table


@vectorised
def _zeros(to: Lanes) -> None:
    """Write 128 bytes of zeros. By half a line each: whole lines at once are slower to memory."""
    kind = ir.VectorType(F32, 8)
    for offset in range(0, 128, 32):
        place = to.builder.inttoptr((to + offset).value, kind.as_pointer())
        to.builder.store(ir.Constant(kind, [0.0] * 8), place, align=4)


@helper
def _clear(at: int, nbytes: int) -> None:
    """Write zeros into whole floats from an address on."""
    last = at + (nbytes & -128)
    for place in range(at, last, 128):
        _zeros(place)
    fill_floats(last, np.float32(0.0), (nbytes & 127) // 4)


@native("body")
def _rows(block: Any, begin: int, end: int) -> int:
    w, table = _rows_of(block), _table_of(block)
    n, rank = w.n, w.rank
    factor = np.float32(w.factor)
    if w.step == n * 4:
        _clear(w.table + begin * w.step, (end - begin) * w.step)
    else:
        for row in range(begin, end):
            fill_floats(w.table + row * w.step, np.float32(0.0), n)
    for place in range(w.count):
        row = row_of(w, table, place)
        if begin <= row and row < end:
            dy = w.y + row_at(table, rank, 1, place)
            add_scaled(w.table + row * w.step, dy, n, factor)
    return 0


@variant("embedding_grad", "numba")
def embedding_grad(call: Call) -> Entry | None:
    """The rows of dy added up by the row of the table they came from."""
    dy, ids = call.inputs
    return _bind(call, dy, ids, 1.0)


@variant("embedding_bag_grad", "numba")
def embedding_bag_grad(call: Call) -> Entry | None:
    """The rows of dy, scaled, added to the rows of the table in their bags."""
    dy, ids = call.inputs
    each = np.broadcast_to(dy[:, None], (*ids.shape, dy.shape[1]))
    return _bind(call, each, ids, float(call.attributes["scale"]))


def _bind(call: Call, dy: Array, ids: Array, factor: float) -> Entry | None:
    (table,) = call.outputs
    block = rows_block(call, ids, dy, table, factor)
    if block is None:
        return None
    if table.size == 0:
        return noop()
    threads = useful_threads(call.threads, 8 * dy.size + table.nbytes)
    return parallel_for(_rows, block, table.shape[0], threads)
