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
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import float_rows
from soapstone.kernels.cpu.substrate.rowmath import scale_row
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop
from soapstone.native.lanes import Lanes, maximum
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads


@vectorised
def _raise(to: Lanes, x: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, maximum(get(to, i, width, mask), get(x, i, width, mask)), mask)

    loop(n.builder, n, body)


# wide: ids are int64; id_step: along bags and ids; length: ids a bag; the table has `rows` of n
# floats, the first of them number `base` of `total`; nothing: what no row gives.
_BAGS = Fields(
    "ids wide id_step(bag id) length y y_step table table_step rows n base total largest",
    reals="factor nothing",
)
_bags_of = _BAGS.at


@native("body")
def _bags(block: Any, begin: int, end: int) -> int:
    w = _bags_of(block)
    n = w.n
    factor, nothing = np.float32(w.factor), np.float32(w.nothing)
    for bag in range(begin, end):
        to = w.y + bag * w.y_step
        held = 0
        for i in range(w.length):
            at = w.ids + bag * w.id_step_bag + i * w.id_step_id
            row = integer_at(at, w.wide) - w.base
            if row < 0 or row >= w.rows:
                if row + w.base < 0 or row + w.base >= w.total:
                    return 1
                continue
            source = w.table + row * w.table_step
            if held == 0:
                copy_floats(to, source, n)
            elif w.largest != 0:
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
    if not is_integer(ids) or not float_rows(table, y):
        return None
    if y.size == 0:
        return noop()
    a = call.attributes
    kind, length = a["reduction"], a.get("length", ids.shape[1])
    factor = 1 / max(length, 1) if kind == "mean" else 1.0
    nothing = float("-inf") if kind == "max" and "length" in a else 0.0
    rows, n = table.shape
    block = _BAGS.pack(
        ids=ids,
        wide=ids.dtype == np.int64,
        id_step=ids.strides,
        length=ids.shape[1],
        y=y,
        y_step=y.strides[0],
        table=table,
        table_step=table.strides[0],
        rows=rows,
        n=n,
        base=a.get("base", 0),
        total=a.get("total", rows),
        largest=kind == "max",
        factor=factor,
        nothing=nothing,
    )
    threads = useful_threads(call.threads, 4 * ids.size * table.shape[1] + y.nbytes)
    status = outside(call.operator, held_rows, call.attributes, ids, len(table))
    return parallel_for(_bags, block, ids.shape[0], threads, status)
