"""Forward pooling of dense channels-last images, in two passes over an output row.

First the rows of a window become one, in runs that know no pixels; then its columns. Nine elements
of a 3x3 window thus cost six reads, or fewer. Maxima look for NaN in the first pass only: a row
that has one, as in a diverged step alone, is done again by windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.pooling.loops import AVERAGE, MAX
from soapstone.kernels.cpu.pooling.window_loops import (
    any_lane,
    block_of,
    larger,
    max_rows_of_windows,
    output_row,
    row_share,
    unordered,
    window,
    window_rows,
)
from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import f32p, i64p, stack
from soapstone.native.simd import load, splat, store, vectorised

MOST_FLOATS = 65536  # of a row of x


@routine
def _max_down(to: int, rows: Any, count: int, n: int) -> Any:
    """Write the largest of the rows, n floats; tell whether one is NaN."""
    full = n & -64
    first = rows[0]
    zero = splat(0.0)
    nan = unordered(zero, zero)
    for i in range(0, full, 64):
        a0, a1, a2, a3 = (
            load(first, i),
            load(first, i + 16),
            load(first, i + 32),
            load(first, i + 48),
        )
        nan = nan | unordered(a0, a1) | unordered(a2, a3)
        for r in range(1, count):
            p = rows[r]
            u, v = load(p, i), load(p, i + 16)
            nan = nan | unordered(u, v)
            a0, a1 = larger(u, a0), larger(v, a1)
            u, v = load(p, i + 32), load(p, i + 48)
            nan = nan | unordered(u, v)
            a2, a3 = larger(u, a2), larger(v, a3)
        store(to, i, a0)
        store(to, i + 16, a1)
        store(to, i + 32, a2)
        store(to, i + 48, a3)
    for i in range(full, n, 16):
        mask = first_lanes(n - i)
        a0 = load_where(first, i, mask)
        nan = nan | unordered(a0, a0)
        for r in range(1, count):
            u = load_where(rows[r], i, mask)
            nan = nan | unordered(u, u)
            a0 = larger(u, a0)
        store_where(to, i, a0, mask)
    return any_lane(nan)


@routine
def _add_down(to: int, rows: Any, count: int, n: int) -> None:
    """Write the sum of the rows, n floats."""
    full = n & -64
    first = rows[0]
    for i in range(0, full, 64):
        a0, a1, a2, a3 = (
            load(first, i),
            load(first, i + 16),
            load(first, i + 32),
            load(first, i + 48),
        )
        for r in range(1, count):
            p = rows[r]
            a0, a1 = a0 + load(p, i), a1 + load(p, i + 16)
            a2, a3 = a2 + load(p, i + 32), a3 + load(p, i + 48)
        store(to, i, a0)
        store(to, i + 16, a1)
        store(to, i + 32, a2)
        store(to, i + 48, a3)
    for i in range(full, n, 16):
        mask = first_lanes(n - i)
        a0 = load_where(first, i, mask)
        for r in range(1, count):
            a0 += load_where(rows[r], i, mask)
        store_where(to, i, a0, mask)


def _across(combine: Any, finish: Any) -> Any:
    """Write what is combined of `taps` runs of n floats, `step` bytes apart, and then finished."""

    @routine
    def across(to: int, at: int, n: int, taps: int, step: int, share: float) -> None:
        s = splat(share)
        full = n & -64
        for i in range(0, full, 64):
            a0, a1, a2, a3 = load(at, i), load(at, i + 16), load(at, i + 32), load(at, i + 48)
            p = at
            for _ in range(1, taps):
                p += step
                a0, a1 = combine(load(p, i), a0), combine(load(p, i + 16), a1)
                a2, a3 = combine(load(p, i + 32), a2), combine(load(p, i + 48), a3)
            store(to, i, finish(a0, s))
            store(to, i + 16, finish(a1, s))
            store(to, i + 32, finish(a2, s))
            store(to, i + 48, finish(a3, s))
        for i in range(full, n, 16):
            mask = first_lanes(n - i)
            a0 = load_where(at, i, mask)
            p = at
            for _ in range(1, taps):
                p += step
                a0 = combine(load_where(p, i, mask), a0)
            store_where(to, i, finish(a0, s), mask)

    return across


_max_across = _across(larger, vectorised(lambda v, share: v))  # of rows without NaN
_add_across = _across(vectorised(lambda a, b: a + b), vectorised(lambda v, share: v * share))


@routine
def _alike(w: Any, ow: int) -> int:
    """How many windows from `ow` on read one pixel after the other, all of the same kernel."""
    along = w.windows_w
    last = ow + 1
    if w.y_step_w != 4 * w.channels:
        return 1
    while (
        last < w.count_w
        and window(along, last).start == window(along, last - 1).start + 1
        and window(along, last).first == window(along, ow).first
        and window(along, last).last == window(along, ow).last
    ):
        last += 1
    return last - ow


@helper
def _row_across(w: Any, row: int, y: int, mode: int, share: float, empty: float) -> None:
    """Write a pooled row from what its window rows became; `empty` where a window has none."""
    along, channels = w.windows_w, w.channels
    pixel = 4 * channels
    ow = 0
    while ow < w.count_w:
        alike = _alike(w, ow)
        taps = window(along, ow).last - window(along, ow).first
        to = y + ow * w.y_step_w
        if taps == 0 or row == 0:
            for c in range(channels * alike):
                f32p(to)[c] = empty
            ow += alike
            continue
        at = row + (window(along, ow).start + window(along, ow).first * w.dilation_w) * pixel
        if mode != AVERAGE:
            _max_across(to, at, channels * alike, taps, w.dilation_w * pixel, 1.0)
            ow += alike
            continue
        # Averages that count the padding's end differ although the kernels inside do not.
        whole = 1
        while whole < alike and f32p(w.share_w)[ow + whole] == f32p(w.share_w)[ow]:
            whole += 1
        each = share * f32p(w.share_w)[ow]
        _add_across(to, at, channels * whole, taps, w.dilation_w * pixel, each)
        ow += whole


@native("body")
def max_rows(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image."""
    w = block_of(block)
    rows, places = i64p(stack(8192)), i64p(stack(8192))
    row = stack(262144)
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        if count == 0 or _max_down(row, rows, count, w.row):
            max_rows_of_windows(block, item, item + 1)
        else:
            _row_across(w, row, output_row(w, item), MAX, 1.0, -np.inf)
    return 0


@native("body")
def average_rows(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image."""
    w = block_of(block)
    rows, places = i64p(stack(8192)), i64p(stack(8192))
    row = stack(262144)
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        if count > 0:
            _add_down(row, rows, count, w.row)
        made = row if count > 0 else 0
        _row_across(w, made, output_row(w, item), AVERAGE, row_share(w, item), 0.0)
    return 0
