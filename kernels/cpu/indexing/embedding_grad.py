"""Gradients of tables: zeros everywhere, and the few rows that were read added up.

Each part of the work owns a stretch of the table and looks at all ids, in order, so that the sums
have the same bits however it is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.kernels.cpu.elementwise.lane_loops import fill_floats, get, loop, put
from soapstone.kernels.cpu.recurrent.gates import rows_contiguous
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import helper, native, noop, parallel_for, useful_threads
from soapstone.native.intrinsics import as_float, i32p, i64p, words
from soapstone.native.lanes import F32, Lanes
from soapstone.native.memory import pack
from soapstone.native.moves import row_offset
from soapstone.native.simd import vectorised
from soapstone.native.walks import merge

# Words: 0 ids, 1 whether they are int64, 2 how many, 3 dy, 4 table, 5 its row's bytes, 6 floats a
# row, 7 number of its first row, 8 factor on dy, 9 rank of the ids, 10.. extents, strides of the
# ids and of dy.
_TABLE = 10


@vectorised
def _add(to: Lanes, x: Lanes, n: Lanes, factor: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(to, i, width, mask) + get(x, i, width, mask) * factor, mask)

    loop(n.builder, n, body)


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
    w = words(block)
    n, rank = w[6], w[9]
    factor = np.float32(as_float(w[8]))
    if w[5] == n * 4:
        _clear(w[4] + begin * w[5], (end - begin) * w[5])
    else:
        for row in range(begin, end):
            fill_floats(w[4] + row * w[5], np.float32(0.0), n)
    for place in range(w[2]):
        at = w[0] + row_offset(w, _TABLE, _TABLE + rank, rank, place)
        row = (i64p(at)[0] if w[1] != 0 else np.int64(i32p(at)[0])) - w[7]
        if begin <= row and row < end:
            dy = w[3] + row_offset(w, _TABLE, _TABLE + 2 * rank, rank, place)
            _add(w[4] + row * w[5], dy, n, factor)
    return 0


@variant("embedding_grad", "numba_rows")
def embedding_grad(call: Call) -> Entry | None:
    """The rows of dy added up by the row of the table they came from."""
    dy, ids = call.inputs
    return _bind(call, dy, ids, 1.0)


@variant("embedding_bag_grad", "numba_rows")
def embedding_bag_grad(call: Call) -> Entry | None:
    """The rows of dy, scaled, added to the rows of the table in their bags."""
    dy, ids = call.inputs
    each = np.broadcast_to(dy[:, None], (*ids.shape, dy.shape[1]))
    return _bind(call, each, ids, float(call.attributes["scale"]))


def _bind(call: Call, dy: Array, ids: Array, factor: float) -> Entry | None:
    (table,) = call.outputs
    if ids.dtype not in (np.int32, np.int64) or not ids.flags.aligned:
        return None
    if not is_float32(dy, table) or not rows_contiguous(dy, table):
        return None
    if table.size == 0:
        return noop()
    extents, strides = merge(ids.shape, [ids.strides, dy.strides[:-1]])
    block = pack(
        (ids, ids.dtype == np.int64, ids.size, dy, table, table.strides[0], table.shape[1]),
        (call.attributes.get("base", 0), factor, len(extents)),
        (extents, strides),
    )
    threads = useful_threads(call.threads, 8 * dy.size + table.nbytes)
    return parallel_for(_rows, block, table.shape[0], threads)
