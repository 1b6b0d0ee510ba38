"""What kernels do to one contiguous run of floats, and where a row of a strided array starts."""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.mathematics import exp
from soapstone.native.entries import helper, routine
from soapstone.native.folds import plus, times
from soapstone.native.intrinsics import f32p
from soapstone.native.lanes import F32, LANES, Lanes, first, load_some, where
from soapstone.native.simd import (
    load,
    load_doubles,
    load_first,
    load_first_high,
    load_first_low,
    store,
    vectorised,
    vmax,
    vmin,
    widen,
)

SUM, MAX, MIN, PRODUCT, ABSOLUTE, SQUARE, POWERS = range(7)
HUGE = 3.4028234663852886e38  # the greatest float32: of an infinity, x - top would be no number


@helper
def advance(t: Any, rank: int, counter: Any, offset: int) -> int:
    """The offset of the row after the one that the counter is at, in the first array of a walk."""
    for d in range(rank - 1, -1, -1):
        counter[d] += 1
        offset += t[rank + d]
        if counter[d] < t[d]:
            break
        offset -= t[rank + d] * counter[d]
        counter[d] = 0
    return offset


@helper
def start(t: Any, rank: int, counter: Any, index: int) -> None:
    """Set the counter to row number `index` of a walk: see `row_at`."""
    for d in range(rank - 1, -1, -1):
        counter[d] = index % t[d]
        index = index // t[d]


@routine
def gather(buffer: int, address: int, stride: int, n: int) -> int:
    """The address of n contiguous floats: `address` itself, or the buffer they were copied to."""
    if stride == 4 or n == 1:
        return address
    to = f32p(buffer)
    for i in range(n):
        to[i] = f32p(address + i * stride)[0]
    return buffer


def _along(combine: Any, tail: Any, of: Any) -> tuple[Any, Any, Any]:
    """The loops of one monoid, over doubles that `of` makes of the elements.

    Over a run into 64 lanes; of a row into as many totals; of rows at equal steps into as many
    totals, which stay in registers from row to row.
    """

    @routine
    def run(totals: int, x: int, n: int) -> None:
        a, b = load_doubles(totals, 0), load_doubles(totals, 16)
        c, d = load_doubles(totals, 32), load_doubles(totals, 48)
        full = n & -64
        for i in range(0, full, 64):
            a = combine(a, of(widen(load(x, i))))
            b = combine(b, of(widen(load(x, i + 16))))
            c = combine(c, of(widen(load(x, i + 32))))
            d = combine(d, of(widen(load(x, i + 48))))
        for i in range(full, n, 16):
            a = combine(a, of(widen(tail(x, i, n - i))))
        store(totals, 0, a)
        store(totals, 16, b)
        store(totals, 32, c)
        store(totals, 48, d)

    @routine
    def row(totals: int, x: int, n: int) -> None:
        full = n & -16
        for i in range(0, full, 16):
            store(totals, i, combine(load_doubles(totals, i), of(widen(load(x, i)))))
        if full < n:
            rest = of(widen(tail(x, full, n - full)))
            store(totals, full, combine(load_doubles(totals, full), rest))

    @routine
    def rows(totals: int, x: int, step: int, count: int, n: int) -> None:
        full = n & -64
        for i in range(0, full, 64):
            a, b = load_doubles(totals, i), load_doubles(totals, i + 16)
            c, d = load_doubles(totals, i + 32), load_doubles(totals, i + 48)
            at = x
            for _ in range(count):
                a = combine(a, of(widen(load(at, i))))
                b = combine(b, of(widen(load(at, i + 16))))
                c = combine(c, of(widen(load(at, i + 32))))
                d = combine(d, of(widen(load(at, i + 48))))
                at += step
            store(totals, i, a)
            store(totals, i + 16, b)
            store(totals, i + 32, c)
            store(totals, i + 48, d)
        for i in range(full, n, 16):
            a = load_doubles(totals, i)
            at = x
            for _ in range(count):
                a = combine(a, of(widen(tail(at, i, n - i))))
                at += step
            store(totals, i, a)

    return run, row, rows


@helper
def _itself(a: Any) -> Any:
    return a


@helper
def _square(a: Any) -> Any:
    return a * a


_absolute = vectorised(lambda v: where(v < 0.0, -v, v))
# Lanes past the end are 1, the identity of a product.
_load_first_one = vectorised(lambda p, i, n: load_some(p, i, first(n), 1.0))

# The loops of each monoid: of a run, run(totals, x, n): n floats at x into 64 float64 totals; of a
# row, row(totals, x, n): each of n floats into its own float64 total, which end on a multiple of
# 16; of rows, rows(totals, x, step, count, n): so for `count` rows of n floats, `step` bytes apart.
LOOPS = {
    SUM: _along(plus, load_first, _itself),
    MAX: _along(vmax, load_first_low, _itself),
    MIN: _along(vmin, load_first_high, _itself),
    PRODUCT: _along(times, _load_first_one, _itself),
    ABSOLUTE: _along(plus, load_first, _absolute),
    SQUARE: _along(plus, load_first, _square),
}


@vectorised
def powers_below(to: Lanes, x: Lanes, top: Lanes, n: Lanes) -> None:
    """Write exp(x - top) of n floats at x; `top` is a number."""

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, exp(get(x, i, width, mask) - top.cast(F32).splat(width)), mask)

    loop(n.builder, n, body, LANES)


@vectorised
def powers_below_each(to: Lanes, x: Lanes, tops: Lanes, n: Lanes) -> None:
    """Write exp(x - top) of n floats at x, and their own `tops` (an address)."""

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        top = get(tops, i, width, mask)
        top = where(top > HUGE, HUGE, where(top < -HUGE, -HUGE, top))
        put(to, i, exp(get(x, i, width, mask) - top), mask)

    loop(n.builder, n, body, LANES)
