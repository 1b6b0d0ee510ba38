"""The sum of some columns of the rows of x that one row of a sparse matrix names, in registers.

A tile of up to 128 columns is made in one pass over the entries: there is a loop for each number of
vectors that it takes, whose sums never leave the registers where the machine has as many. Rows that
lie in memory are asked for while those of earlier entries are added.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    chosen,
    first,
    load_lanes,
    load_one,
    load_some,
    prefetch,
    store_lanes,
    store_some,
    stretch,
)
from soapstone.native.simd import vectorised

WIDTH = 8 * LANES  # columns of a tile
LINE = 64  # bytes
_LINES = 128  # of rows to come that are asked for


def _request(p: Lanes) -> None:
    """Ask for the line at an address, for the second-level cache.

    A core has more lines under way to it than to the first, and rows from memory are limited by
    how many are.
    """
    prefetch(p, 2)


def _leading(column: Lanes, begin: Lanes, end: Lanes, low: Lanes, high: Lanes) -> Lanes:
    """How many of the entries from begin to before end, 16 at most, are of columns low to high."""
    b = column.builder
    entry = load_some(column, begin, first(end - begin), -1.0, I32)
    inside = entry - low.cast(I32).splat(), (high - low).cast(I32).splat()
    within = b.icmp_unsigned("<", inside[0].value, inside[1].value)
    valid = b.and_(within, first(end - begin).value)
    bits = b.zext(b.not_(b.bitcast(valid, ir.IntType(LANES))), I64)
    return Lanes(b, b.cttz(b.or_(bits, I64(1 << LANES)), ir.Constant(ir.IntType(1), 1)))


def _weighted_sum(
    ahead: bool,
    to: Lanes,
    x: Lanes,
    n: Lanes,
    step: Lanes,
    column: Lanes,
    begin: Lanes,
    end: Lanes,
    last: Lanes,
    weights: Lanes,
    by_entry: Lanes,
    by_column: Lanes,
    scale: Lanes,
    onto: Lanes,
) -> None:
    """Write scale times the sum over entries e of weight[e] x[column[e]] to n (1 to 128) floats.

    x: address of the tile's first column, rows are `step` bytes apart; column: int32. The entries
    are from begin to before end; the last one is the matrix's, up to which rows are asked for if
    they are asked for ahead. The weight of an entry is number e * by_entry + column[e] * by_column
    of `weights`. The sum begins with what is in `to` where onto is 1, with 0 where it is 0.
    """
    b = n.builder

    def tile(count: int) -> None:
        mask = first(n - LANES * (count - 1))
        begins = [
            load_some(to, Lanes(b, I64(LANES * number)), first((n - LANES * number) * onto))
            for number in range(count)
        ]

        def add(entry: Lanes, sums: list[Lanes]) -> list[Lanes]:
            if ahead:
                later = entry + min(max(_LINES // count, 4), 32)
                later = Lanes(b, b.select((later < last).value, later.value, last.value))
                far = x + load_one(column + later * 4, I32).cast(I64) * step
                for line in range(count):
                    _request(far + LINE * line)
            source = load_one(column + entry * 4, I32).cast(I64)
            place = entry * by_entry + source * by_column
            weight = load_one(weights + place * 4).splat()
            row = x + source * step
            made = []
            for number, total in enumerate(sums):
                at = Lanes(b, I64(LANES * number))
                part = load_lanes(row, at) if number < count - 1 else load_some(row, at, mask)
                made.append(part * weight + total)
            return made

        sums = stretch(b, (begin.value, end.value), 1, begins, add)
        for number, total in enumerate(sums):
            made, at = total * scale.cast(F32).splat(), Lanes(b, I64(LANES * number))
            if number < count - 1:
                store_lanes(to, at, made)
            else:
                store_some(to, at, made, mask)

    vectors = (n + (LANES - 1)) >> 4
    chosen(vectors, {count: partial(tile, count) for count in range(1, WIDTH // LANES + 1)})


request = vectorised(_request)
leading = vectorised(_leading)
weighted_sum = vectorised(partial(_weighted_sum, True))
weighted_sum_near = vectorised(partial(_weighted_sum, False))  # of rows that are in a cache
