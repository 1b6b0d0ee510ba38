"""What kernels do to one contiguous run of floats, and where a row of a strided array starts."""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.native import f32p, helper, routine
from soapstone.kernels.cpu.simd import (
    load,
    load_doubles,
    load_first,
    load_first_high,
    load_first_low,
    store,
    vmax,
    vmin,
    widen,
)

SUM, MAX, MIN = 0, 1, 2


@helper
def row_offset(w: Any, extents: int, strides: int, rank: int, index: int) -> Any:
    """The offset in bytes of row number `index`; the tables lie at those words of the block."""
    offset = 0
    for d in range(rank - 1, 0, -1):
        extent = w[extents + d]
        offset += (index % extent) * w[strides + d]
        index = index // extent
    return offset + index * w[strides]


@helper
def advance(w: Any, extents: int, strides: int, rank: int, counter: Any, offset: int) -> int:
    """The offset of the row after the one that the counter is at."""
    for d in range(rank - 1, -1, -1):
        counter[d] += 1
        offset += w[strides + d]
        if counter[d] < w[extents + d]:
            break
        offset -= w[strides + d] * counter[d]
        counter[d] = 0
    return offset


@helper
def start(w: Any, extents: int, rank: int, counter: Any, index: int) -> None:
    """Set the counter to row number `index`."""
    for d in range(rank - 1, -1, -1):
        counter[d] = index % w[extents + d]
        index = index // w[extents + d]


@routine
def gather(buffer: int, address: int, stride: int, n: int) -> int:
    """The address of n contiguous floats: `address` itself, or the buffer they were copied to."""
    if stride == 4 or n == 1:
        return address
    to = f32p(buffer)
    for i in range(n):
        to[i] = f32p(address + i * stride)[0]
    return buffer


def _along(combine: Any, tail: Any) -> tuple[Any, Any]:
    """The loops of one monoid: over a run into 64 lanes, and of a row into as many totals."""

    @routine
    def run(totals: int, x: int, n: int) -> None:
        a, b = load_doubles(totals, 0), load_doubles(totals, 16)
        c, d = load_doubles(totals, 32), load_doubles(totals, 48)
        full = n & -64
        for i in range(0, full, 64):
            a = combine(a, widen(load(x, i)))
            b = combine(b, widen(load(x, i + 16)))
            c = combine(c, widen(load(x, i + 32)))
            d = combine(d, widen(load(x, i + 48)))
        for i in range(full, n, 16):
            a = combine(a, widen(tail(x, i, n - i)))
        store(totals, 0, a)
        store(totals, 16, b)
        store(totals, 32, c)
        store(totals, 48, d)

    @routine
    def row(totals: int, x: int, n: int) -> None:
        full = n & -16
        for i in range(0, full, 16):
            store(totals, i, combine(load_doubles(totals, i), widen(load(x, i))))
        if full < n:
            rest = widen(tail(x, full, n - full))
            store(totals, full, combine(load_doubles(totals, full), rest))

    return run, row


@helper
def _plus(a: Any, b: Any) -> Any:
    return a + b


sum_run, sum_row = _along(_plus, load_first)
_max_run, _max_row = _along(vmax, load_first_low)
_min_run, _min_row = _along(vmin, load_first_high)


@routine
def reduce_run(monoid: int, totals: int, x: int, n: int) -> None:
    """Combine n floats at x into 64 float64 totals; `fold_run` makes one of them."""
    if monoid == 0:
        sum_run(totals, x, n)
    elif monoid == 1:
        _max_run(totals, x, n)
    else:
        _min_run(totals, x, n)


@routine
def reduce_row(monoid: int, totals: int, x: int, n: int) -> None:
    """Combine n floats at x, each into its own float64 total; totals end on a multiple of 16."""
    if monoid == 0:
        sum_row(totals, x, n)
    elif monoid == 1:
        _max_row(totals, x, n)
    else:
        _min_row(totals, x, n)
