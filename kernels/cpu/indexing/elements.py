"""Single elements gathered or put by index, line by line along an axis.

Lines are independent of each other and shared out over threads; along a line elements go in order,
so that of several updates of one element the last counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.ir.ops.indexing.gather import positions
from soapstone.kernels.cpu.indexing.slices import (
    COMBINATIONS,
    PUT,
    combine,
    elements_served,
    index_at,
    outside,
)
from soapstone.kernels.cpu.substrate.integers import is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import native, noop, sequence
from soapstone.native.moves import move, row_at
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import merge

# x: the array that is indexed, y the other, which `gathers` says is the one that is written; wide:
# ids are int64; size: bytes an element; how: they are combined; length: of a line, step: along it;
# base, held: the tile's first element and how many it has, of `total`; zero: an address. Then the
# walk of the lines, of `rank` dims, in x, y and ids.
_LINES = Fields("x y ids gathers wide size how length step(x y ids) base held total zero rank")
_lines_of, _table_of = _LINES.at, _LINES.table


@native("body")
def _each_line(block: Any, begin: int, end: int) -> int:
    w, table = _lines_of(block), _table_of(block)
    rank, size, how, gathers = w.rank, w.size, w.how, w.gathers != 0
    for line in range(begin, end):
        x = w.x + row_at(table, rank, 0, line)
        y = w.y + row_at(table, rank, 1, line)
        ids = w.ids + row_at(table, rank, 2, line)
        for i in range(w.length):
            index = index_at(ids + i * w.step_ids, w.wide, w.total)
            if index < 0:
                return 1
            index -= w.base
            inside = index >= 0 and index < w.held
            named, other = x + index * w.step_x, y + i * w.step_y
            if gathers:
                move(size, other, named if inside else w.zero)
            elif inside and how == PUT:
                move(size, named, other)
            elif inside:
                combine(how, named, other)
    return 0


def _lines(call: Call, indexed: Array, other: Array, ids: Array, how: int | None) -> Entry:
    """Return the entry that gathers lines, or puts what comes to them as `how` says."""
    axis = call.attributes["axis"]
    total = call.attributes.get("total", indexed.shape[axis])
    arrays = (indexed, other, ids)
    others = [d for d in range(ids.ndim) if d != axis]
    extents, strides = merge(ids.shape, [array.strides for array in arrays], others)
    block = _LINES.pack(
        *(extents, strides),
        x=indexed,
        y=other,
        ids=ids,
        wide=ids.dtype == np.int64,
        gathers=how is None,
        size=indexed.itemsize,
        how=PUT if how is None else how,
        length=ids.shape[axis],
        step=[array.strides[axis] for array in arrays],
        base=call.attributes.get("base", 0),
        held=indexed.shape[axis],
        total=total,
        zero=np.zeros(1, np.int64),
        rank=len(extents),
    )
    statuses = outside(call.operator, positions, ids, total, axis)
    threads = useful_threads(call.threads, ids.nbytes + 2 * other.nbytes)
    return parallel_for(_each_line, block, math.prod(extents), threads, statuses)


@variant("gather_elements", "numba")
def gather_elements(call: Call) -> Entry | None:
    """Of each line, the elements that the same line of ids names."""
    (x, ids), (y,) = call.inputs, call.outputs
    if not (is_integer(ids) and elements_served(x, y)):
        return None
    if ids.size == 0:
        return noop()
    return _lines(call, x, y, ids, None)


@variant("scatter_elements", "numba")
def scatter_elements(call: Call) -> Entry | None:
    """x with updates put at the places that ids name, or combined with what is there."""
    (x, ids, updates), (y,) = call.inputs, call.outputs
    how = COMBINATIONS[call.attributes["reduction"]]
    if not (is_integer(ids) and elements_served(x, updates, y)):
        return None
    if how != PUT and not is_float32(x, updates, y):
        return None
    copied = copy(y, x, call.threads)
    if ids.size == 0:
        return copied
    return sequence([copied, _lines(call, y, updates, ids, how)])
