"""Native folds of strided arrays.

Elements are combined one by one in the order of the parts, so a fold gives the same bits however
it is cut over processors. Compiled on first use, one fold for each dtype and reduction.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, helper, native, routine
from soapstone.native.intrinsics import address_of, pointer_cast
from soapstone.native.moves import copy_run, row_offset
from soapstone.native.walks import FIRST, IDENTITY

_CHUNK = 2048  # elements of a row folded at a time, so that the output stays in the first cache

# One stage of a fold: then the extents of its axes, the strides of the output, and of each part its
# address and strides (bytes). The last axis is the inner loop.
STAGE = Fields("mode parts axes output")
_stage_at, _table_at = STAGE.at, STAGE.table
_STAGE_BYTES = 8 * STAGE.words
COUNT = Fields("stages")  # what a fold's block begins with
_count_of = COUNT.at
_COUNT_BYTES = 8 * COUNT.words


@helper
def plus(a: Any, b: Any) -> Any:
    """Return the sum."""
    return a + b


@helper
def times(a: Any, b: Any) -> Any:
    """Return the product."""
    return a * b


@helper
def _larger(a: Any, b: Any) -> Any:
    return a if a >= b or a != a else b


@helper
def _smaller(a: Any, b: Any) -> Any:
    return a if a <= b or a != a else b


_PAIRS = {"sum": plus, "prod": times, "max": _larger, "min": _smaller}


@cache
def combined(dtype: str, reduction: str) -> Any:
    """The loop that combines n elements of a dtype into others, both at any steps in bytes.

    A maximum or minimum of equal numbers, and of NaN, is the first.
    """
    item, cells, pair = np.dtype(dtype).itemsize, pointer_cast(dtype), _PAIRS[reduction]

    @routine
    def combine(to: int, to_step: int, x: int, x_step: int, n: int) -> None:
        if to_step == item and x_step == item:
            out, given = cells(to), cells(x)
            for i in range(n):
                out[i] = pair(out[i], given[i])
            return
        for i in range(n):
            cell = cells(to + i * to_step)
            cell[0] = pair(cell[0], cells(x + i * x_step)[0])

    return combine


@cache
def fold_kernel(dtype: str, reduction: str, start: Any) -> Native:
    """The fold of one dtype and reduction; `start` is the reduction's identity.

    Its block is the number of stages, and the stages.
    """
    item = np.dtype(dtype).itemsize
    cells, combine = pointer_cast(dtype), combined(dtype, reduction)

    @native()
    def fold(block: Any) -> int:
        base = address_of(block) + _COUNT_BYTES
        for _stage in range(_count_of(block).stages):
            stage, table = _stage_at(base), _table_at(base)
            mode, parts, axes = stage.mode, stage.parts, stage.axes
            outer = 1
            for axis in range(axes - 1):
                outer *= table[axis]
            n, to = table[axes - 1], table[2 * axes - 1]
            first = 2 * axes
            for row in range(outer):
                out = stage.output + row_offset(table, axes, axes - 1, row)
                for low in range(0, n, _CHUNK):
                    m = min(_CHUNK, n - low)
                    if mode == IDENTITY:
                        for i in range(m):
                            cells(out + (low + i) * to)[0] = start
                    for part in range(parts):
                        at = first + part * (1 + axes)
                        by = table[at + axes]
                        x = table[at] + row_offset(table, at + 1, axes - 1, row) + low * by
                        if part == 0 and mode == FIRST:
                            copy_run(item, out + low * to, to, x, by, m)
                        else:
                            combine(out + low * to, to, x, by, m)
            base += _STAGE_BYTES + 8 * (first + parts * (1 + axes))
        return 0

    return fold
