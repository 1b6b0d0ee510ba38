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

from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, native, noop, routine
from soapstone.native.intrinsics import call_body
from soapstone.native.lanes import (
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
from soapstone.native.memory import Array, Block, Entry, address, pack, run
from soapstone.native.moves import copy_bytes, copy_small, fill_run, row_at, strided_run
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

_ITEM_BYTES = 32768  # of rows copied one element after the other, in one item
_SHORT, _LONG = 64, 256  # elements a side of the tiles whose squares are transposed in one item
_NARROW = 4  # a dim shorter than this is not worth transposing
_SMALL_BYTES = 64  # a row of this many is one masked move; a call of memcpy takes longer
_WHOLE, _FILL, _STRIDED, _SMALL = range(4)


# ------------------------------------------------------------------------------------ row by row
# mode: how a row is copied; steps: along the row; across: items beside each other, of `columns`
# each; group: rows an item. Then the extents and strides of `rank` other dims.
_ROWS = Fields(
    "source target size mode rows length source_step target_step columns across group rank"
)
_rows_of, _rows_table = _ROWS.at, _ROWS.table


@native("body")
def _copy_rows(block: Any, begin: int, end: int) -> int:
    w, table = _rows_of(block), _rows_table(block)
    size, mode, rank = w.size, w.mode, w.rank
    x_step, to_step, columns = w.source_step, w.target_step, w.columns
    last, x_row, to_row = table[rank - 1], table[2 * rank - 1], table[3 * rank - 1]
    for item in range(begin, end):
        column = item % w.across * columns
        n = min(columns, w.length - column)
        row = item // w.across * w.group
        stop = min(w.rows, row + w.group)
        while row < stop:  # rows along the last of the other dims lie at equal steps
            run = min(stop - row, last - row % last)
            x = w.source + row_at(table, rank, 0, row) + column * x_step
            to = w.target + row_at(table, rank, 1, row) + column * to_step
            row += run
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


# The target is contiguous along dim a, the source along dim b, and each has a step along the other;
# both dims have tiles, of `side` elements; a_first: whether squares go along a first. Then the
# extents and strides of `rank` other dims.
_SQUARES = Fields(
    "source target size extent_a extent_b source_step target_step tiles_a tiles_b side_a side_b"
    " a_first rank"
)
_squares_of, _squares_table = _SQUARES.at, _SQUARES.table


@native("body")
def _copy_squares(block: Any, begin: int, end: int) -> int:
    w, table = _squares_of(block), _squares_table(block)
    size, rank, a_first = w.size, w.rank, w.a_first != 0
    x_step, to_step = w.source_step, w.target_step
    for item in range(begin, end):
        a = item % w.tiles_a * w.side_a
        b = item // w.tiles_a % w.tiles_b * w.side_b
        row = item // w.tiles_a // w.tiles_b
        na, nb = min(w.side_a, w.extent_a - a), min(w.side_b, w.extent_b - b)
        x = w.source + row_at(table, rank, 0, row) + a * x_step + b * size
        to = w.target + row_at(table, rank, 1, row)
        to += b * to_step + a * size
        if size == 4:
            _square_4(to, to_step, x, x_step, na, nb, a_first)
        elif size == 8:
            _square_8(to, to_step, x, x_step, na, nb, a_first)
        else:
            _square_1(to, to_step, x, x_step, na, nb, a_first)
    return 0


# ------------------------------------------------------------------------------- several in one
# A table of them ends with one that begins where the last has ended.
_ONE = Fields("body block start")
_one_at = _ONE.at
_ONE_BYTES = 8 * _ONE.words
_SEVERAL = Fields("table count")
_several_of = _SEVERAL.at


@native("body")
def _copy_several(block: Any, begin: int, end: int) -> int:
    w = _several_of(block)
    for i in range(w.count):
        one, following = _one_at(w.table + i * _ONE_BYTES), _one_at(w.table + (i + 1) * _ONE_BYTES)
        if one.start < end and begin < following.start:
            low, high = max(begin, one.start), min(end, following.start)
            call_body(one.body, one.block, low - one.start, high - one.start)
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


def copy_now(to: Array, x: Array, threads: int) -> None:
    """Copy x to `to`, which does not overlap it, of the same shape and type."""
    entry = copy(to, x, threads)
    if entry is None:
        to[...] = x
    else:
        run(entry)


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
    table = [
        _ONE.row(body=one.body.address, block=one.block, start=at) for one, at in zip(work, starts)
    ]
    table.append(_ONE.row(body=0, block=0, start=starts[-1]))
    keep = tuple(one.body for one in work)
    block = _SEVERAL.pack(table=pack(table), count=len(work), keep=keep)
    return parallel_for(_copy_several, block, starts[-1], threads)


def _served(to: Array, x: Array) -> bool:
    aligned = x.flags.aligned and to.flags.aligned
    return bool(x.dtype == to.dtype and to.itemsize in (1, 2, 4, 8) and aligned)


def _plan(to: Array, x: Array, threads: int) -> Copy:
    size = to.itemsize
    extents, (xs, ts) = merge(to.shape, (x.strides, to.strides), memory_order(to.strides))
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
    block = _ROWS.pack(
        *table,
        source=x,
        target=to,
        size=size,
        mode=mode,
        rows=rows,
        length=length,
        source_step=x_step,
        target_step=to_step,
        columns=columns,
        across=across,
        group=group,
        rank=len(table[0]),
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
    block = _SQUARES.pack(
        *table,
        source=x,
        target=to,
        size=to.itemsize,
        extent_a=extents[-1],
        extent_b=extents[b],
        source_step=xs[-1],
        target_step=ts[b],
        tiles_a=tiles_a,
        tiles_b=tiles_b,
        side_a=side_a,
        side_b=side_b,
        a_first=a_first,
        rank=len(table[0]),
    )
    return Copy(_copy_squares, block, math.prod(table[0]) * tiles_a * tiles_b)


def fill(to: Array, value: float | bool, threads: int) -> Entry | None:
    """Return the entry of `to[...] = value`."""
    return copies([filling(to, value)], threads)


def filling(to: Array, value: float | bool) -> tuple[Array, Array]:
    """Return the copy `to[...] = value`, for `copies`."""
    return to, np.broadcast_to(np.full((), value, to.dtype), to.shape)
