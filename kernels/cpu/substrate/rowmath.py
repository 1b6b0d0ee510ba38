"""What kernels compute on a row of contiguous floats: maxima, sums, exponentials, scalings.

x, y and so on are addresses, n counts floats; an output may be an input. Bulk goes by 64 lanes, so
that sums run in several chains, the rest by 16 under a mask.
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.elementwise.lane_loops import WIDE, get, loop, put
from soapstone.kernels.cpu.substrate.mathematics import vexp, vlog
from soapstone.native.entries import routine
from soapstone.native.lanes import F32, Lanes, load_lanes, store_lanes
from soapstone.native.simd import (
    load_first,
    load_first_low,
    max_lanes,
    splat,
    store_first,
    sum_lanes,
    vectorised,
    vmax,
)

load_wide = vectorised(lambda p, i: load_lanes(p, i, count=WIDE))
store_wide = vectorised(lambda p, i, v: store_lanes(p, i, v))
splat_wide = vectorised(lambda x: x.cast(F32).splat(WIDE))


@routine
def row_max(x: int, n: int) -> Any:
    """The largest of n floats, NaN if one is; -infinity of none."""
    full = n & -64
    low = splat_wide(-float("inf"))
    for i in range(0, full, 64):
        low = vmax(low, load_wide(x, i))
    rest = splat(max_lanes(low)) if full > 0 else splat(-float("inf"))
    for i in range(full, n, 16):
        rest = vmax(rest, load_first_low(x, i, n - i))
    return max_lanes(rest)


@routine
def row_sum(x: int, n: int) -> Any:
    """The sum of n floats."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        total = total + load_wide(x, i)
    for i in range(full, n, 16):
        rest = rest + load_first(x, i, n - i)
    return sum_lanes(total) + sum_lanes(rest)


@routine
def row_dot(x: int, y: int, n: int) -> Any:
    """The sum of the products of n pairs of floats."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        total = total + load_wide(x, i) * load_wide(y, i)
    for i in range(full, n, 16):
        rest = rest + load_first(x, i, n - i) * load_first(y, i, n - i)
    return sum_lanes(total) + sum_lanes(rest)


@routine
def exp_sum(x: int, shift: float, n: int) -> Any:
    """The sum of exp(x - shift)."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        total = total + vexp(load_wide(x, i) - shift)
    for i in range(full, n, 16):  # lanes past the end are exp(-infinity)
        rest = rest + vexp(load_first_low(x, i, n - i) - shift)
    return sum_lanes(total) + sum_lanes(rest)


@routine
def exp_sum_into(y: int, x: int, shift: float, n: int) -> Any:
    """The sum of exp(x - shift), which is written to y."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        value = vexp(load_wide(x, i) - shift)
        store_wide(y, i, value)
        total = total + value
    for i in range(full, n, 16):
        last = vexp(load_first_low(x, i, n - i) - shift)
        store_first(y, i, last, n - i)
        rest = rest + last
    return sum_lanes(total) + sum_lanes(rest)


@routine
def logarithm(x: float) -> Any:
    """The natural logarithm of one float32."""
    return max_lanes(vlog(splat(x)))


# Each element by itself. p and q are numbers.


@vectorised
def scale_row(to: Lanes, x: Lanes, n: Lanes, p: Lanes) -> None:
    """to = x * p."""
    p = p.cast(F32)
    loop(n.builder, n, lambda i, width, mask: put(to, i, get(x, i, width, mask) * p, mask))


@vectorised
def shift_row(to: Lanes, x: Lanes, n: Lanes, p: Lanes, q: Lanes) -> None:
    """to = (x - p) - q."""
    p, q = p.cast(F32), q.cast(F32)
    loop(n.builder, n, lambda i, width, mask: put(to, i, get(x, i, width, mask) - p - q, mask))


@vectorised
def scaled_difference(to: Lanes, y: Lanes, x: Lanes, n: Lanes, p: Lanes) -> None:
    """to = y * (x - p)."""
    p = p.cast(F32)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(y, i, width, mask) * (get(x, i, width, mask) - p), mask)

    loop(n.builder, n, body)
