"""Copies between arrays of one shape and any strides: what all operators that move elements do.

Dims are put in the order of the destination's memory. Where both sides have the same contiguous
dim, rows are copied whole; where they have different ones, square blocks are transposed in
registers, so that every cache line is read once and written once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from soapstone.kernels.cpu.substrate.lanes import (
    I8,
    I32,
    I64,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_lanes,
    store_some,
)
from soapstone.kernels.cpu.substrate.layout import merge
from soapstone.kernels.cpu.substrate.moves import copy_bytes, copy_small, fill_run, strided_run
from soapstone.kernels.cpu.substrate.native import (
    Block,
    Native,
    call_body,
    native,
    noop,
    pack,
    parallel_for,
    routine,
    useful_threads,
    words,
)
from soapstone.kernels.cpu.substrate.runs import row_offset
from soapstone.kernels.cpu.substrate.simd import vectorised
from soapstone.kernels.entry import Array, Entry
from soapstone.native.memory import address

_ITEM_BYTES = 32768  # of rows copied one element after the other, in one item
_SHORT, _LONG = 64, 256  # elements a side of the tiles whose squares are transposed in one item
_NARROW = 4  # a dim shorter than this is not worth transposing
_SMALL_BYTES = 64  # a row of this many is one masked move; a call of memcpy takes longer
_WHOLE, _FILL, _STRIDED, _SMALL = 0, 1, 2, 3


# ------------------------------------------------------------------------------------ row by row
# Words: 0 source, 1 destination, 2 bytes an element, 3 mode, 4 rows, 5 length, 6 and 7 their steps
# along the row, 8 columns an item, 9 items across, 10 rows an item, 11 rank, 12.. extents, strides.
@native("body")
def _copy_rows(block: Any, begin: int, end: int) -> int:
    w = words(block)
    size, mode, rows, length, x_step, to_step = w[2], w[3], w[4], w[5], w[6], w[7]
    columns, across, group, rank = w[8], w[9], w[10], w[11]
    for item in range(begin, end):
        column = item % across * columns
        n = min(columns, length - column)
        row = item // across * group
        stop = min(rows, row + group)
        while row < stop:  # rows along the last of the other dims lie at equal steps
            run = min(stop - row, w[11 + rank] - row % w[11 + rank])
            x = w[0] + row_offset(w, 12, 12 + rank, rank, row) + column * x_step
            to = w[1] + row_offset(w, 12, 12 + 2 * rank, rank, row) + column * to_step
            row += run
            x_row, to_row = w[11 + 2 * rank], w[11 + 3 * rank]
            if mode == _SMALL:
                for _ in range(run):
                    copy_small(to, x, n * size // 4)
                    x += x_row
                    to += to_row
                continue
            for _ in range(run):
                if mode == _WHOLE:
                    copy_bytes(to, x, n * size)
                elif mode == _FILL:
                    fill_run(size, to, x, n)
                else:
                    strided_run(size, to, to_step, x, x_step, n)
                x += x_row
                to += to_row
    return 0


# ------------------------------------------------------------------------------- square by square
def _transposed(rows: Sequence[Lanes]) -> list[Lanes]:
    """The columns of a square of lanes: swap bit after bit of the row and column numbers."""
    square, side = list(rows), len(rows)
    builder = square[0].builder
    step = side // 2
    while step:
        low = [k if not k & step else side + k - step for k in range(side)]
        high = [k + step if not k & step else side + k for k in range(side)]
        masks = [ir.Constant(ir.VectorType(I32, side), order) for order in (low, high)]
        for i in range(side):
            if not i & step:
                a, b = square[i].value, square[i + step].value
                square[i] = Lanes(builder, builder.shuffle_vector(a, b, masks[0]))
                square[i + step] = Lanes(builder, builder.shuffle_vector(a, b, masks[1]))
        step //= 2
    return square


def _least(a: Lanes, b: Lanes) -> Lanes:
    builder = a.builder
    return Lanes(builder, builder.select((a < b).value, a.value, b.value))


def _square_writers(element: Any, side: int) -> tuple[Any, Any]:
    """Copies of one square, where all of it counts and where only na columns and nb rows do."""

    def full(to: Lanes, to_step: Lanes, x: Lanes, x_step: Lanes) -> None:
        rows = [load_lanes(x + x_step * k, 0, element, side) for k in range(side)]
        for k, column in enumerate(_transposed(rows)):
            store_lanes(to + to_step * k, 0, column)

    def edge(to: Lanes, to_step: Lanes, x: Lanes, x_step: Lanes, na: Lanes, nb: Lanes) -> None:
        # Rows past the end read the last one again; columns past it are written under no lane.
        held = first(nb, side)
        rows = []
        for k in range(side):
            row = _least(na.like(k), na - 1)
            rows.append(load_some(x + x_step * row, 0, held, 0, element, side))
        builder = na.builder
        for k, column in enumerate(_transposed(rows)):
            inside = builder.icmp_signed(">", nb.value, I64(k))
            count = Lanes(builder, builder.select(inside, na.value, I64(0)))
            row = _least(nb.like(k), nb - 1)
            store_some(to + to_step * row, 0, column, first(count, side))

    return vectorised(full), vectorised(edge)


def _square_loop(element: Any, side: int, nbytes: int) -> Callable[..., Any]:
    full, edge = _square_writers(element, side)

    @routine
    def write(to: int, to_step: int, x: int, x_step: int, na: int, nb: int, a_first: bool) -> None:
        across = (na if a_first else nb) + side - 1
        across //= side
        for k in range(((na + side - 1) // side) * ((nb + side - 1) // side)):
            inner, outer = k % across * side, k // across * side
            a, b = (inner, outer) if a_first else (outer, inner)
            source = x + a * x_step + b * nbytes
            target = to + b * to_step + a * nbytes
            if a + side <= na and b + side <= nb:
                full(target, to_step, source, x_step)
            else:
                edge(target, to_step, source, x_step, min(side, na - a), min(side, nb - b))

    return write


_square_1 = _square_loop(I8, 16, 1)
_square_4 = _square_loop(I32, 16, 4)
_square_8 = _square_loop(I64, 8, 8)


# The destination is contiguous along dim a, the source along dim b. Words: 0 source, 1 destination,
# 2 bytes an element, 3 and 4 extents of a and b, 5 the source's step along a, 6 the destination's
# along b, 7 and 8 tiles of a and b, 9 and 10 their extents, 11 whether squares go along a first,
# 12 rank of the other dims, 13.. their extents and strides.
@native("body")
def _copy_squares(block: Any, begin: int, end: int) -> int:
    w = words(block)
    size, extent_a, extent_b, x_step, to_step = w[2], w[3], w[4], w[5], w[6]
    tiles_a, tiles_b, side_a, side_b = w[7], w[8], w[9], w[10]
    a_first, rank = w[11] != 0, w[12]
    for item in range(begin, end):
        a = item % tiles_a * side_a
        b = item // tiles_a % tiles_b * side_b
        row = item // tiles_a // tiles_b
        na, nb = min(side_a, extent_a - a), min(side_b, extent_b - b)
        x = w[0] + row_offset(w, 13, 13 + rank, rank, row) + a * x_step + b * size
        to = w[1] + row_offset(w, 13, 13 + 2 * rank, rank, row) + b * to_step + a * size
        if size == 4:
            _square_4(to, to_step, x, x_step, na, nb, a_first)
        elif size == 8:
            _square_8(to, to_step, x, x_step, na, nb, a_first)
        else:
            _square_1(to, to_step, x, x_step, na, nb, a_first)
    return 0


# ------------------------------------------------------------------------------- several in one
# Words: 0 how many; of each: the body, its block, its first item among all.
@native("body")
def _copy_several(block: Any, begin: int, end: int) -> int:
    w = words(block)
    count = w[0]
    for i in range(count):
        start = w[3 + 3 * i]
        stop = w[6 + 3 * i]
        if start < end and begin < stop:
            low, high = max(begin, start) - start, min(end, stop) - start
            call_body(w[1 + 3 * i], w[2 + 3 * i], low, high)
    return 0


# ---------------------------------------------------------------------------------------- binding
class Copy(NamedTuple):
    """The work of one copy: items of about equal size, that `body` does in any order."""

    body: Native
    block: Block
    items: int


def copy(to: Array, x: Array, threads: int) -> Entry | None:
    """Return the entry of `to[...] = x`, arrays of one shape and type that do not overlap.

    They may be the same array, and x may repeat elements (strides of 0). None where the type has
    no kernel.
    """
    return copies([(to, x)], threads)


def copies(pairs: Sequence[tuple[Array, Array]], threads: int) -> Entry | None:
    """Return one entry of several copies `(to, x)` that do not depend on each other."""
    threads = useful_threads(threads, sum(2 * to.nbytes for to, _ in pairs))
    work: list[Copy] = []
    for to, x in pairs:
        if not _served(to, x):
            return None
        same = address(x) == address(to) and x.strides == to.strides
        if to.size and not same:
            work.append(_plan(to, x, threads))
    if not work:
        return noop()
    if len(work) == 1:
        return parallel_for(work[0].body, work[0].block, work[0].items, threads)
    starts = list(itertools.accumulate((one.items for one in work), initial=0))
    table = [(one.body.address, one.block, at) for one, at in zip(work, starts)]
    block = pack(len(work), table, 0, 0, starts[-1], keep=tuple(one.body for one in work))
    return parallel_for(_copy_several, block, starts[-1], threads)


def _served(to: Array, x: Array) -> bool:
    aligned = x.flags.aligned and to.flags.aligned
    return bool(x.dtype == to.dtype and to.itemsize in (1, 2, 4, 8) and aligned)


def _plan(to: Array, x: Array, threads: int) -> Copy:
    size = to.itemsize
    order = sorted(range(to.ndim), key=lambda d: -abs(to.strides[d]))
    extents, (xs, ts) = merge(
        [to.shape[d] for d in order], [[a.strides[d] for d in order] for a in (x, to)]
    )
    if to.size == 1:
        xs = ts = (size,)
    dims = list(range(len(extents)))
    crossing = [d for d in dims[:-1] if xs[d] == size]
    if ts[-1] == size and xs[-1] not in (size, 0) and crossing:
        b = crossing[-1]
        if min(extents[-1], extents[b]) >= _NARROW and size != 2:
            return _plan_squares(to, x, (extents, xs, ts), b)
        if extents[-1] < _NARROW:  # the rows are too short: go along the other dim
            dims.append(dims.pop(b))
    outer, last = dims[:-1], dims[-1]
    length, x_step, to_step = extents[last], xs[last], ts[last]
    mode = _STRIDED
    if to_step == size and x_step in (size, 0):
        mode = _WHOLE if x_step == size else _FILL
    table = [extents[d] for d in outer], [xs[d] for d in outer], [ts[d] for d in outer]
    if not outer:
        table = [1], [0], [0]
    rows = math.prod(table[0])
    columns = min(length, _ITEM_BYTES // size)
    if mode == _WHOLE and rows == 1:  # as few calls as there are threads
        columns = -(-length // threads)
    if mode == _WHOLE and length * size <= _SMALL_BYTES and length * size % 4 == 0:
        mode = _SMALL
    group = max(1, _ITEM_BYTES // size // length)
    across = -(-length // columns)
    block = pack(
        (x, to, size, mode, rows, length, x_step, to_step, columns, across, group, len(table[0])),
        table,
    )
    return Copy(_copy_rows, block, -(-rows // group) * across)


def _plan_squares(
    to: Array, x: Array, dims: tuple[Sequence[int], Sequence[int], Sequence[int]], b: int
) -> Copy:
    extents, xs, ts = dims
    others = [d for d in range(len(extents) - 1) if d != b]
    # Going along the longer dim first keeps the other side's lines in the cache, and its memory
    # pages few; measured, this is up to three times as fast as the other way.
    a_first = extents[-1] >= extents[b]
    side_a, side_b = (_LONG, _SHORT) if a_first else (_SHORT, _LONG)
    tiles_a, tiles_b = -(-extents[-1] // side_a), -(-extents[b] // side_b)
    table: tuple[Sequence[int], ...] = ([1], [0], [0])
    if others:
        table = tuple([numbers[d] for d in others] for numbers in (extents, xs, ts))
    block = pack(
        (x, to, to.itemsize, extents[-1], extents[b], xs[-1], ts[b], tiles_a, tiles_b),
        (side_a, side_b, a_first, len(table[0])),
        table,
    )
    return Copy(_copy_squares, block, math.prod(table[0]) * tiles_a * tiles_b)


def fill(to: Array, value: float | bool, threads: int) -> Entry | None:
    """Return the entry of `to[...] = value`."""
    return copies([filling(to, value)], threads)


def filling(to: Array, value: float | bool) -> tuple[Array, Array]:
    """Return the copy `to[...] = value`, for `copies`."""
    return to, np.broadcast_to(np.full((), value, to.dtype), to.shape)
