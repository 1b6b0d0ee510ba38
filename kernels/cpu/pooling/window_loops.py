"""The loops of forward pooling over windows of any rank: by channels, or element by element.

Words of every block: 0-2 windows along d h w, 3 channels; 4 x, 5 y, 6 index; 7-11, 12-16, 17-21
their strides (n c d h w) in bytes; 22-24 kernel, 25-27 dilation; 28-30 tables by output position
along d h w: the first input position, and the first and the last kernel positions inside x;
31-33 shares: one over the positions that an average counts along d h w; 34 mode, 35-37 size of x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.kernels.cpu.pooling.windows import (
    first_lanes,
    load_where,
    splat_int,
    store_bytes_where,
    store_where,
)
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import f32p, i64p, stack, u8p, words
from soapstone.native.simd import Lanes, choose, load, splat, store, vectorised, where

MOST_TAPS = 1024


def _larger(a: Lanes, b: Lanes) -> Lanes:
    return where(a > b, a, b)


def _any(mask: Lanes) -> Lanes:
    b, bits = mask.builder, ir.IntType(mask.kind.count)
    return Lanes(b, b.icmp_unsigned("!=", b.bitcast(mask.value, bits), bits(0)))


# The larger, one instruction; where either is NaN it is b. `unordered` tells where that was so.
larger = vectorised(_larger)
unordered = vectorised(lambda a, b: a.compare("uno", b))
any_lane = vectorised(_any)
not_a_number = vectorised(lambda mask, v: where(mask, float("nan"), v))


@helper
def window_rows(w: Any, item: int, rows: Any, places: Any) -> int:
    """The addresses of the window rows of an item (n, od, oh) and the places of their first tap."""
    oh = item % w[1]
    od = item // w[1] % w[0]
    n = item // (w[0] * w[1])
    down, deep = i64p(w[29]), i64p(w[28])
    count = 0
    for kd in range(deep[3 * od + 1], deep[3 * od + 2]):
        d = deep[3 * od] + kd * w[25]
        for kh in range(down[3 * oh + 1], down[3 * oh + 2]):
            h = down[3 * oh] + kh * w[26]
            rows[count] = w[4] + n * w[7] + d * w[9] + h * w[10]
            places[count] = (kd * w[23] + kh) * w[24]
            count += 1
    return count


@helper
def output_row(w: Any, item: int, first: int) -> Any:
    """The address of the item's row of the output whose strides begin at word `first`."""
    oh = item % w[1]
    od = item // w[1] % w[0]
    n = item // (w[0] * w[1])
    return n * w[first] + od * w[first + 2] + oh * w[first + 3]


@helper
def _taps(w: Any, ow: int, count: int, rows: Any, taps: Any) -> int:
    """The addresses of the elements that window `ow` of the rows holds, in order."""
    along = i64p(w[30])
    first, last = along[3 * ow + 1], along[3 * ow + 2]
    step = w[27] * w[11]
    held = 0
    for row in range(count):
        at = rows[row] + along[3 * ow] * w[11]
        for kw in range(first, last):
            taps[held] = at + kw * step
            held += 1
    return held


@routine
def max_rows_of_windows(block: Any, begin: int, end: int) -> None:
    """Pool rows by maximum. Lanes: channels. NaN wins."""
    w = words(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    channels = w[3]
    full = channels & -64
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y = w[5] + output_row(w, item, 12)
        for ow in range(w[2]):
            held = _taps(w, ow, count, rows, taps)
            to = y + ow * w[16]
            if held == 0:
                for c in range(channels):
                    f32p(to)[c] = -np.inf
                continue
            taps[held] = taps[held - 1]  # taps go in pairs
            for c in range(0, full, 64):
                first = taps[0]
                a0, a1 = load(first, c), load(first, c + 16)
                a2, a3 = load(first, c + 32), load(first, c + 48)
                n0, n1, n2, n3 = (
                    unordered(a0, a0),
                    unordered(a1, a1),
                    unordered(a2, a2),
                    unordered(a3, a3),
                )
                for tap in range(1, held, 2):
                    p, q = taps[tap], taps[tap + 1]
                    u, v = load(p, c), load(q, c)
                    n0 = n0 | unordered(u, v)
                    a0 = larger(larger(u, v), a0)
                    u, v = load(p, c + 16), load(q, c + 16)
                    n1 = n1 | unordered(u, v)
                    a1 = larger(larger(u, v), a1)
                    u, v = load(p, c + 32), load(q, c + 32)
                    n2 = n2 | unordered(u, v)
                    a2 = larger(larger(u, v), a2)
                    u, v = load(p, c + 48), load(q, c + 48)
                    n3 = n3 | unordered(u, v)
                    a3 = larger(larger(u, v), a3)
                store(to, c, not_a_number(n0, a0))
                store(to, c + 16, not_a_number(n1, a1))
                store(to, c + 32, not_a_number(n2, a2))
                store(to, c + 48, not_a_number(n3, a3))
            for c in range(full, channels, 48):
                m0, m1 = first_lanes(channels - c), first_lanes(channels - c - 16)
                m2 = first_lanes(channels - c - 32)
                first = taps[0]
                a0, a1 = load_where(first, c, m0), load_where(first, c + 16, m1)
                a2 = load_where(first, c + 32, m2)
                n0, n1, n2 = unordered(a0, a0), unordered(a1, a1), unordered(a2, a2)
                for tap in range(1, held, 2):
                    p, q = taps[tap], taps[tap + 1]
                    u, v = load_where(p, c, m0), load_where(q, c, m0)
                    n0 = n0 | unordered(u, v)
                    a0 = larger(larger(u, v), a0)
                    u, v = load_where(p, c + 16, m1), load_where(q, c + 16, m1)
                    n1 = n1 | unordered(u, v)
                    a1 = larger(larger(u, v), a1)
                    u, v = load_where(p, c + 32, m2), load_where(q, c + 32, m2)
                    n2 = n2 | unordered(u, v)
                    a2 = larger(larger(u, v), a2)
                store_where(to, c, not_a_number(n0, a0), m0)
                store_where(to, c + 16, not_a_number(n1, a1), m1)
                store_where(to, c + 32, not_a_number(n2, a2), m2)


@native("body")
def max_last(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image."""
    max_rows_of_windows(block, begin, end)
    return 0


@routine
def _indexed(x: Any, ids: Any, held: int, to: int, index: int, c: int, left: int) -> None:
    """The maxima of up to 64 channels and the places of their first taps: first NaN, if any."""
    m0, m1 = first_lanes(left), first_lanes(left - 16)
    m2, m3 = first_lanes(left - 32), first_lanes(left - 48)
    p = x[0]
    a0, a1 = load_where(p, c, m0), load_where(p, c + 16, m1)
    a2, a3 = load_where(p, c + 32, m2), load_where(p, c + 48, m3)
    nan = unordered(a0, a1) | unordered(a2, a3)
    i0 = i1 = i2 = i3 = splat_int(ids[0])
    for tap in range(1, held):
        p, place = x[tap], splat_int(ids[tap])
        u, v = load_where(p, c, m0), load_where(p, c + 16, m1)
        nan = nan | unordered(u, v)
        i0, a0 = choose(u > a0, place, i0), larger(u, a0)
        i1, a1 = choose(v > a1, place, i1), larger(v, a1)
        u, v = load_where(p, c + 32, m2), load_where(p, c + 48, m3)
        nan = nan | unordered(u, v)
        i2, a2 = choose(u > a2, place, i2), larger(u, a2)
        i3, a3 = choose(v > a3, place, i3), larger(v, a3)
    store_where(to, c, a0, m0)
    store_where(to, c + 16, a1, m1)
    store_where(to, c + 32, a2, m2)
    store_where(to, c + 48, a3, m3)
    store_bytes_where(index, c, i0, m0)
    store_bytes_where(index, c + 16, i1, m1)
    store_bytes_where(index, c + 32, i2, m2)
    store_bytes_where(index, c + 48, i3, m3)
    if any_lane(nan):
        for k in range(c, c + min(left, 64)):
            best, place_of = f32p(x[0])[k], ids[0]
            for tap in range(1, held):
                value = f32p(x[tap])[k]
                if value > best or (value != value and best == best):
                    best, place_of = value, ids[tap]
            f32p(to)[k] = best
            u8p(index)[k] = place_of


@native("body")
def indexed_last(block: Any, begin: int, end: int) -> int:
    """As `max_last`, with the place of each maximum in its window: the first, or the first NaN."""
    w = words(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    ids = i64p(stack(8192))
    channels = w[3]
    along = i64p(w[30])
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y, index = w[5] + output_row(w, item, 12), w[6] + output_row(w, item, 17)
        for ow in range(w[2]):
            held = _taps(w, ow, count, rows, taps)
            to, at = y + ow * w[16], index + ow * w[21]
            if held == 0:
                for c in range(channels):
                    f32p(to)[c] = -np.inf
                    u8p(at)[c] = 0
                continue
            tap = 0
            for row in range(count):
                for kw in range(along[3 * ow + 1], along[3 * ow + 2]):
                    ids[tap] = places[row] + kw
                    tap += 1
            for c in range(0, channels, 64):
                _indexed(taps, ids, held, to, at, c, channels - c)
    return 0


@native("body")
def average_last(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image. Lanes: channels."""
    w = words(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    channels = w[3]
    full = channels & -64
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y = w[5] + output_row(w, item, 12)
        share = f32p(w[31])[item // w[1] % w[0]] * f32p(w[32])[item % w[1]]
        for ow in range(w[2]):
            held = _taps(w, ow, count, rows, taps)
            to = y + ow * w[16]
            s = splat(share * f32p(w[33])[ow])
            for c in range(0, full, 64):
                a0 = a1 = a2 = a3 = splat(0.0)
                for tap in range(held):
                    p = taps[tap]
                    a0 += load(p, c)
                    a1 += load(p, c + 16)
                    a2 += load(p, c + 32)
                    a3 += load(p, c + 48)
                store(to, c, a0 * s)
                store(to, c + 16, a1 * s)
                store(to, c + 32, a2 * s)
                store(to, c + 48, a3 * s)
            for c in range(full, channels, 48):
                m0, m1 = first_lanes(channels - c), first_lanes(channels - c - 16)
                m2 = first_lanes(channels - c - 32)
                a0 = a1 = a2 = splat(0.0)
                for tap in range(held):
                    p = taps[tap]
                    a0 += load_where(p, c, m0)
                    a1 += load_where(p, c + 16, m1)
                    a2 += load_where(p, c + 32, m2)
                store_where(to, c, a0 * s, m0)
                store_where(to, c + 16, a1 * s, m1)
                store_where(to, c + 32, a2 * s, m2)
    return 0


@helper
def _pool_one(w: Any, mode: int, count: int, rows: Any, places: Any, shift: int, ow: int) -> Any:
    """One window's value and place: mode 0 and 1 the maximum, 2 the sum."""
    along = i64p(w[30])
    best = np.float32(0.0) if mode == 2 else np.float32(-np.inf)
    place = -1
    for row in range(count):
        at = rows[row] + shift + along[3 * ow] * w[11]
        for kw in range(along[3 * ow + 1], along[3 * ow + 2]):
            v = f32p(at + kw * w[27] * w[11])[0]
            if mode == 2:
                best += v
            elif place < 0 or v > best or (v != v and best == best):
                best, place = v, places[row] + kw
    return best, max(place, 0)


@native("body")
def pool_any(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image, in any layout."""
    w = words(block)
    rows, places = i64p(stack(8192)), i64p(stack(8192))
    mode = w[34]
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y, index = w[5] + output_row(w, item, 12), w[6] + output_row(w, item, 17)
        share = f32p(w[31])[item // w[1] % w[0]] * f32p(w[32])[item % w[1]]
        for c in range(w[3]):
            for ow in range(w[2]):
                value, place = _pool_one(w, mode, count, rows, places, c * w[8], ow)
                if mode == 2:
                    value *= share * f32p(w[33])[ow]
                f32p(y + c * w[13] + ow * w[16])[0] = value
                if mode == 1:
                    u8p(index + c * w[18] + ow * w[21])[0] = place
    return 0


@native("body")
def pool_any_grad(block: Any, begin: int, end: int) -> int:
    """Items: channels of every image, in any layout; all of dx is written."""
    w = words(block)
    mode = w[34]
    deep, down, along = i64p(w[28]), i64p(w[29]), i64p(w[30])
    for item in range(begin, end):
        n, c = item // w[3], item % w[3]
        dx = w[4] + n * w[7] + c * w[8]
        for d in range(w[35]):
            for h in range(w[36]):
                for v in range(w[37]):
                    f32p(dx + d * w[9] + h * w[10] + v * w[11])[0] = 0.0
        for od in range(w[0]):
            for oh in range(w[1]):
                share = f32p(w[31])[od] * f32p(w[32])[oh]
                dy = w[5] + n * w[12] + c * w[13] + od * w[14] + oh * w[15]
                index = w[6] + n * w[17] + c * w[18] + od * w[19] + oh * w[20]
                for ow in range(w[2]):
                    g = f32p(dy + ow * w[16])[0]
                    place = np.int64(0)
                    if mode == 2:
                        g *= share * f32p(w[33])[ow]
                    else:
                        place = np.int64(u8p(index + ow * w[21])[0])
                    for kd in range(deep[3 * od + 1], deep[3 * od + 2]):
                        d = deep[3 * od] + kd * w[25]
                        for kh in range(down[3 * oh + 1], down[3 * oh + 2]):
                            h = down[3 * oh] + kh * w[26]
                            at = dx + d * w[9] + h * w[10]
                            for kw in range(along[3 * ow + 1], along[3 * ow + 2]):
                                v = along[3 * ow] + kw * w[27]
                                if mode == 2 or (kd * w[23] + kh) * w[24] + kw == place:
                                    f32p(at + v * w[11])[0] += g
    return 0
