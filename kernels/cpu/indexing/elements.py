"""Single elements gathered or put by index, line by line along an axis.

Lines are independent of each other and shared out over threads; along a line elements go in order,
so that of several updates of one element the last counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.ops.indexing.gather import positions
from soapstone.kernels.cpu.indexing.slices import (
    COMBINATIONS,
    PUT,
    combine,
    elements_served,
    index_at,
    indices_served,
    outside,
)
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.copies import copy
from soapstone.native.entries import native, noop, parallel_for, sequence, useful_threads
from soapstone.native.intrinsics import words
from soapstone.native.memory import Block, Statuses, pack
from soapstone.native.moves import move, row_offset
from soapstone.native.walks import merge


# Words: 0 array that is indexed, 1 the other, 2 ids, 3 whether they are int64, 4 bytes an element,
# 5 how elements are combined, 6 length of a line, 7, 8 and 9 steps of the arrays along it, 10 first
# element of the tile, 11 how many it has, 12 how many the axis has, 13 address of a zero, 14 rank,
# 15.. extents of the lines, strides of the three arrays.
@native("body")
def _gather_lines(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank, size = w[14], w[4]
    for line in range(begin, end):
        x = w[0] + row_offset(w, 15, 15 + rank, rank, line)
        y = w[1] + row_offset(w, 15, 15 + 2 * rank, rank, line)
        ids = w[2] + row_offset(w, 15, 15 + 3 * rank, rank, line)
        for i in range(w[6]):
            index = index_at(ids + i * w[9], w[3], w[12])
            if index < 0:
                return 1
            index -= w[10]
            if index >= 0 and index < w[11]:
                move(size, y + i * w[8], x + index * w[7])
            else:
                move(size, y + i * w[8], w[13])
    return 0


@native("body")
def _scatter_lines(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank, size, how = w[14], w[4], w[5]
    for line in range(begin, end):
        y = w[0] + row_offset(w, 15, 15 + rank, rank, line)
        updates = w[1] + row_offset(w, 15, 15 + 2 * rank, rank, line)
        ids = w[2] + row_offset(w, 15, 15 + 3 * rank, rank, line)
        for i in range(w[6]):
            index = index_at(ids + i * w[9], w[3], w[12])
            if index < 0:
                return 1
            index -= w[10]
            if index >= 0 and index < w[11]:
                if how == PUT:
                    move(size, y + index * w[7], updates + i * w[8])
                else:
                    combine(how, y + index * w[7], updates + i * w[8])
    return 0


def _lines(
    call: Call, indexed: Array, other: Array, ids: Array, how: int
) -> tuple[Block, int, Statuses]:
    """Return the block, the number of lines and what a status means."""
    axis = call.attributes["axis"]
    total = call.attributes.get("total", indexed.shape[axis])

    def but(values: Sequence[int]) -> list[int]:
        return [value for d, value in enumerate(values) if d != axis]

    arrays = (indexed, other, ids)
    extents, strides = merge(but(ids.shape), [but(array.strides) for array in arrays])
    block = pack(
        (indexed, other, ids, ids.dtype == np.int64, indexed.itemsize, how, ids.shape[axis]),
        [array.strides[axis] for array in arrays],
        (call.attributes.get("base", 0), indexed.shape[axis], total),
        (np.zeros(1, np.int64), len(extents), extents, strides),
    )
    return block, math.prod(extents), outside(call.operator, positions, ids, total, axis)


@variant("gather_elements", "numba")
def gather_elements(call: Call) -> Entry | None:
    """Of each line, the elements that the same line of ids names."""
    (x, ids), (y,) = call.inputs, call.outputs
    if not (indices_served(ids) and elements_served(x, y)):
        return None
    if ids.size == 0:
        return noop()
    block, lines, status = _lines(call, x, y, ids, PUT)
    threads = useful_threads(call.threads, ids.nbytes + 2 * y.nbytes)
    return parallel_for(_gather_lines, block, lines, threads, status)


@variant("scatter_elements", "numba")
def scatter_elements(call: Call) -> Entry | None:
    """x with updates put at the places that ids name, or combined with what is there."""
    (x, ids, updates), (y,) = call.inputs, call.outputs
    how = COMBINATIONS[call.attributes["reduction"]]
    if not (indices_served(ids) and elements_served(x, updates, y)):
        return None
    if how != PUT and not is_float32(x, updates, y):
        return None
    copied = copy(y, x, call.threads)
    if ids.size == 0:
        return copied
    block, lines, status = _lines(call, y, updates, ids, how)
    threads = useful_threads(call.threads, ids.nbytes + 2 * updates.nbytes)
    put = parallel_for(_scatter_lines, block, lines, threads, status)
    return None if copied is None else sequence([copied, put])
