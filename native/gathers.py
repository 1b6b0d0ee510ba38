"""Native kernels that move or combine rows that lie at given offsets."""

from __future__ import annotations

from functools import cache
from typing import Any

from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, helper, native, routine
from soapstone.native.folds import combined
from soapstone.native.intrinsics import i32p, i64p
from soapstone.native.moves import copy_run, row_offset

# Where the rows of each side begin: at offsets from the first (an address of int64 bytes), or at
# equal steps where that is 0. Then `axes` extents of a row, and its strides in target and source;
# the last axis is the inner loop.
ROWS = Fields("rows unit target source target_at target_step source_at source_step axes")
_rows_of, _table_of = ROWS.at, ROWS.table


@helper
def _place(first: int, offsets: int, step: int, row: int) -> int:
    return first + (i64p(offsets)[row] if offsets != 0 else row * step)


def _element_loops(pointer: Any) -> tuple[Any, Any]:
    """The loops of rows that are one element: of a packed target, of a packed source."""

    @routine
    def gather(to: int, x: int, offsets: int, n: int) -> None:
        for i in range(n):
            pointer(to)[i] = pointer(x + i64p(offsets)[i])[0]

    @routine
    def scatter(to: int, offsets: int, x: int, n: int) -> None:
        for i in range(n):
            pointer(to + i64p(offsets)[i])[0] = pointer(x)[i]

    return gather, scatter


_gather_4, _scatter_4 = _element_loops(i32p)
_gather_8, _scatter_8 = _element_loops(i64p)


@native()
def move_rows(block: Any) -> int:
    """Copy rows; those of one element have loops of their own."""
    w, table = _rows_of(block), _table_of(block)
    rows, unit, axes = w.rows, w.unit, w.axes
    outer = 1
    for axis in range(axes - 1):
        outer *= table[axis]
    n, to, by = table[axes - 1], table[2 * axes - 1], table[3 * axes - 1]
    if axes == 1 and n == 1 and (unit == 4 or unit == 8):
        if w.target_at == 0 and w.source_at != 0 and w.target_step == unit:
            if unit == 4:
                _gather_4(w.target, w.source, w.source_at, rows)
            else:
                _gather_8(w.target, w.source, w.source_at, rows)
            return 0
        if w.source_at == 0 and w.target_at != 0 and w.source_step == unit:
            if unit == 4:
                _scatter_4(w.target, w.target_at, w.source, rows)
            else:
                _scatter_8(w.target, w.target_at, w.source, rows)
            return 0
    for row in range(rows):
        target = _place(w.target, w.target_at, w.target_step, row)
        source = _place(w.source, w.source_at, w.source_step, row)
        for line in range(outer):
            there = target + row_offset(table, axes, axes - 1, line)
            here = source + row_offset(table, 2 * axes, axes - 1, line)
            copy_run(unit, there, to, here, by, n)
    return 0


@cache
def combine_rows(dtype: str, reduction: str) -> Native:
    """The kernel that combines rows of one dtype into the target, one after another."""
    fold = combined(dtype, reduction)

    @native()
    def combine(block: Any) -> int:
        w, table = _rows_of(block), _table_of(block)
        axes = w.axes
        outer = 1
        for axis in range(axes - 1):
            outer *= table[axis]
        n, to = table[axes - 1], table[2 * axes - 1]
        by = table[3 * axes - 1]
        for row in range(w.rows):
            target = _place(w.target, w.target_at, w.target_step, row)
            source = _place(w.source, w.source_at, w.source_step, row)
            for line in range(outer):
                there = target + row_offset(table, axes, axes - 1, line)
                here = source + row_offset(table, 2 * axes, axes - 1, line)
                fold(there, to, here, by, n)
        return 0

    return combine
