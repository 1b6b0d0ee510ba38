"""Bags of rows of a table: their sum, mean or maximum; see embedding.py for the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.indexing.embedding import held_rows
from soapstone.kernels.cpu.elementwise.lane_loops import (
    add_floats,
    copy_floats,
    fill_floats,
    get,
    loop,
    put,
)
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.recurrent.gates import rows_contiguous
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.rowmath import scale_row
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native, noop, parallel_for, useful_threads
from soapstone.native.intrinsics import as_float, i32p, i64p, words
from soapstone.native.lanes import Lanes, maximum
from soapstone.native.memory import pack
from soapstone.native.simd import vectorised


@vectorised
def _raise(to: Lanes, x: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, maximum(get(to, i, width, mask), get(x, i, width, mask)), mask)

    loop(n.builder, n, body)


# Words: 0 ids, 1 whether they are int64, 2 bytes a bag, 3 bytes an id, 4 ids a bag, 5 y, 6 its
# row's bytes, 7 table, 8 its row's bytes, 9 its rows, 10 floats a row, 11 number of its first row,
# 12 rows of all tiles, 13 whether the maximum, 14 factor, 15 what no row gives.


@native("body")
def _bags(block: Any, begin: int, end: int) -> int:
    w = words(block)
    n = w[10]
    factor, nothing = np.float32(as_float(w[14])), np.float32(as_float(w[15]))
    for bag in range(begin, end):
        to = w[5] + bag * w[6]
        held = 0
        for i in range(w[4]):
            at = w[0] + bag * w[2] + i * w[3]
            row = (i64p(at)[0] if w[1] != 0 else np.int64(i32p(at)[0])) - w[11]
            if row < 0 or row >= w[9]:
                if row + w[11] < 0 or row + w[11] >= w[12]:
                    return 1
                continue
            source = w[7] + row * w[8]
            if held == 0:
                copy_floats(to, source, n)
            elif w[13] != 0:
                _raise(to, source, n)
            else:
                add_floats(to, source, n)
            held += 1
        if held == 0:
            fill_floats(to, nothing, n)
        elif factor != 1.0:
            scale_row(to, to, n, factor)
    return 0


@variant("embedding_bag", "numba")
def embedding_bag(call: Call) -> Entry | None:
    """The sum, mean or maximum of the rows that each bag names."""
    (ids, table), (y,) = call.inputs, call.outputs
    if ids.dtype not in (np.int32, np.int64) or not ids.flags.aligned:
        return None
    if not is_float32(table, y) or not rows_contiguous(table, y):
        return None
    if y.size == 0:
        return noop()
    a = call.attributes
    kind, length = a["reduction"], a.get("length", ids.shape[1])
    factor = 1 / max(length, 1) if kind == "mean" else 1.0
    nothing = float("-inf") if kind == "max" and "length" in a else 0.0
    block = pack(
        (ids, ids.dtype == np.int64, *ids.strides, ids.shape[1], y, y.strides[0]),
        (table, table.strides[0], *table.shape, a.get("base", 0), a.get("total", len(table))),
        (kind == "max", factor, nothing),
    )
    threads = useful_threads(call.threads, 4 * ids.size * table.shape[1] + y.nbytes)
    status = outside(call.operator, held_rows, call.attributes, ids, len(table))
    return parallel_for(_bags, block, ids.shape[0], threads, status)
