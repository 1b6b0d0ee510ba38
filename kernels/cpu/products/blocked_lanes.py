"""The inner block of `blocked`: a few rows of x by sixteen or more columns of weights."""

from __future__ import annotations

from functools import partial

from soapstone.native.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    chosen,
    first,
    held,
    load_lanes,
    load_one,
    load_some,
    prefetch,
    store_lanes,
    store_some,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

ROWS = 6  # of a block, at most: what 16 registers of 8 lanes hold with LANES columns
VECTORS = (2, 4) if held() >= 32 else (1,)  # of columns: 32 registers of 16 lanes hold four
_STEPS = 8  # values of k in one turn of the loop
WIDTH = VECTORS[-1] * LANES  # columns of a panel
AHEAD = 32  # bytes of weights that are asked for at a value of k


def _block(
    rows: int,
    vectors: int,
    x: Lanes,
    places: Lanes,
    depth: Lanes,
    weights: Lanes,
    begin: Lanes,
    begin_step: Lanes,
    sums: Lanes,
    step: Lanes,
    later: Lanes,
) -> None:
    builder = x.builder
    left = [x + load_one(places + row * 8, I64) for row in range(rows)]

    def turn(k: Lanes, totals: list[Lanes], steps: int) -> list[Lanes]:
        totals = list(totals)
        line = weights + k * (WIDTH * 4)
        for each in range(0, steps * AHEAD, 64):
            prefetch(later + k * AHEAD + each, 2)
        for each in range(steps):
            right = [load_lanes(line, each * WIDTH + v * LANES) for v in range(vectors)]
            for row in range(rows):
                value = load_one(left[row] + k * 4 + each * 4).splat()
                for v in range(vectors):
                    place = row * vectors + v
                    totals[place] = totals[place] + value * right[v]
        return totals

    numbers = [(row, v * LANES) for row in range(rows) for v in range(vectors)]
    totals = [load_lanes(begin + begin_step * row, lane) for row, lane in numbers]
    whole = (depth & -_STEPS).value
    totals = stretch(builder, (I64(0), whole), _STEPS, totals, lambda k, t: turn(k, t, _STEPS))
    totals = stretch(builder, (whole, depth.value), 1, totals, lambda k, t: turn(k, t, 1))
    for total, (row, lane) in zip(totals, numbers):
        store_lanes(sums + step * row, lane, total)


@vectorised
def block_product(
    rows: Lanes,
    vectors: Lanes,
    x: Lanes,
    places: Lanes,
    depth: Lanes,
    weights: Lanes,
    begin: Lanes,
    begin_step: Lanes,
    sums: Lanes,
    step: Lanes,
    later: Lanes,
) -> None:
    """Write to `sums` the products of up to ROWS rows with a panel of weights, and what is before.

    x: where the rows' offsets, int64 at `places`, count from; each has `depth` numbers. vectors:
    one of VECTORS; weights: (depth, WIDTH), of which so many vectors are read; begin: what sums
    begin with, a row every `begin_step` bytes; sums: (rows, vectors, 16), a row every `step` bytes;
    later: weights that are needed next: at a value of k AHEAD bytes of them are asked for.
    """

    def of_rows(count: int) -> None:
        given = x, places, depth, weights, begin, begin_step, sums, step, later
        chosen(vectors, {n: partial(_block, count, n, *given) for n in VECTORS})

    chosen(rows, {count: partial(of_rows, count) for count in range(1, ROWS + 1)})


@vectorised
def finish_lanes(
    sums: Lanes, added: Lanes, to: Lanes, count: Lanes, before: Lanes, low: Lanes, high: Lanes
) -> None:
    """Write the first `count` of sixteen sums: raised, added to and kept within bounds.

    added: what is added after they were raised to `before`, or 0 for nothing.
    """
    floor, lowest, highest = (bound.cast(F32).splat() for bound in (before, low, high))

    def write(adds: bool, whole: bool) -> None:
        mask = first(count)
        value = load_lanes(sums, 0)
        if adds:
            value = where(value < floor, floor, value)
            value = value + (load_lanes(added, 0) if whole else load_some(added, 0, mask))
        value = where(value < lowest, lowest, value)  # NaN stays
        value = where(value > highest, highest, value)
        if whole:
            store_lanes(to, 0, value)
        else:
            store_some(to, 0, value, mask)

    def adding(adds: bool) -> None:
        whole = count.compare(">=", LANES)
        chosen(whole, {k: partial(write, adds, bool(k)) for k in (0, 1)})

    chosen(added.compare("!=", 0), {k: partial(adding, bool(k)) for k in (0, 1)})
