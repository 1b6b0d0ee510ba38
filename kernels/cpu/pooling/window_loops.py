"""The loops of forward pooling over windows of any rank: by channels, or element by element."""

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
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import f32p, i64p, stack, u8p
from soapstone.native.lanes import I16, LANES, Lanes, first, load_some, store_some, where
from soapstone.native.simd import choose, load, splat, store, vectorised

MOST_TAPS = 1024

# A window along one axis: the first input position, and the first and the last tap inside x.
WINDOW = Fields("start first last")
# count: of windows; x, y and index with their steps; windows: tables of them; share: one over the
# positions that the average of each counts; row: floats of a row of x.
BLOCK = Fields(
    "count(d h w) channels x y index x_step(n c d h w) y_step(n c d h w) index_step(n c d h w)"
    " kernel(d h w) dilation(d h w) windows(d h w) share(d h w) mode size(d h w) row"
)
block_of, _window_of = BLOCK.at, WINDOW.at
_WINDOW_BYTES = 8 * WINDOW.words


@helper
def window(table: int, number: int) -> Any:
    """A window of those along an axis."""
    return _window_of(table + number * _WINDOW_BYTES)


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

# bfloat16, as integers of the same order: its bits, of negative numbers the lower ones inverted.
_HALVES, _LOWEST = 2 * LANES, -32641  # lanes of a vector; minus infinity


def _ordered(bits: Lanes) -> Lanes:
    """The integers of the bits, and back."""
    b = bits.builder
    return bits ^ (Lanes(b, b.ashr(bits.value, bits.like(15).value)) & 0x7FFF)


def _load_halves(p: Lanes, i: Lanes, n: Lanes) -> Lanes:
    return load_some(p, i, first(n, _HALVES), 0, I16, _HALVES)


def _store_halves(p: Lanes, i: Lanes, most: Lanes, size: Lanes, n: Lanes) -> None:
    """Write the largest, or NaN where the largest size is of one."""
    store_some(p, i, where(size > 0x7F80, 0x7FC0, _ordered(most)), first(n, _HALVES))


load_halves, store_halves = vectorised(_load_halves), vectorised(_store_halves)
larger_half = vectorised(lambda bits, most: _larger(_ordered(bits), most))
larger_size = vectorised(lambda bits, size: _larger(bits & 0x7FFF, size))
splat_half = vectorised(lambda n: n.cast(I16).splat(_HALVES))


@helper
def _row(w: Any, item: int) -> tuple[int, int, int]:
    """The numbers of an item: n, od, oh."""
    rest = item // w.count_h
    return rest // w.count_d, rest % w.count_d, item % w.count_h


@helper
def window_rows(w: Any, item: int, rows: Any, places: Any) -> int:
    """The addresses of the window rows of an item (n, od, oh) and the places of their first tap."""
    n, od, oh = _row(w, item)
    down, deep = w.windows_h, w.windows_d
    count = 0
    for kd in range(window(deep, od).first, window(deep, od).last):
        d = window(deep, od).start + kd * w.dilation_d
        for kh in range(window(down, oh).first, window(down, oh).last):
            h = window(down, oh).start + kh * w.dilation_h
            rows[count] = w.x + n * w.x_step_n + d * w.x_step_d + h * w.x_step_h
            places[count] = (kd * w.kernel_h + kh) * w.kernel_w
            count += 1
    return count


@helper
def output_row(w: Any, item: int) -> Any:
    """The address of the item's row of y."""
    n, od, oh = _row(w, item)
    return w.y + n * w.y_step_n + od * w.y_step_d + oh * w.y_step_h


@helper
def _index_row(w: Any, item: int) -> Any:
    n, od, oh = _row(w, item)
    return w.index + n * w.index_step_n + od * w.index_step_d + oh * w.index_step_h


@helper
def row_share(w: Any, item: int) -> Any:
    """The share of the item's row: one over the positions that count along d and h."""
    _, od, oh = _row(w, item)
    return f32p(w.share_d)[od] * f32p(w.share_h)[oh]


@helper
def _taps(w: Any, ow: int, count: int, rows: Any, taps: Any) -> int:
    """The addresses of the elements that window `ow` of the rows holds, in order."""
    along = window(w.windows_w, ow)
    first, last = along.first, along.last
    step = w.dilation_w * w.x_step_w
    held = 0
    for row in range(count):
        at = rows[row] + along.start * w.x_step_w
        for kw in range(first, last):
            taps[held] = at + kw * step
            held += 1
    return held


@routine
def max_rows_of_windows(block: Any, begin: int, end: int) -> None:
    """Pool rows by maximum. Lanes: channels. NaN wins."""
    w = block_of(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    channels = w.channels
    full = channels & -64
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y = output_row(w, item)
        for ow in range(w.count_w):
            held = _taps(w, ow, count, rows, taps)
            to = y + ow * w.y_step_w
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


@native("body")
def max_halves(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image, of bfloat16. Lanes: channels. NaN wins."""
    w = block_of(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8192))
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y = output_row(w, item)
        for ow in range(w.count_w):
            held = _taps(w, ow, count, rows, taps)
            for c in range(0, w.channels, 32):
                most, size = splat_half(_LOWEST), splat_half(0)
                for tap in range(held):
                    bits = load_halves(taps[tap], c, w.channels - c)
                    most, size = larger_half(bits, most), larger_size(bits, size)
                store_halves(y + ow * w.y_step_w, c, most, size, w.channels - c)
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
    w = block_of(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    ids = i64p(stack(8192))
    channels = w.channels
    along = w.windows_w
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y, index = output_row(w, item), _index_row(w, item)
        for ow in range(w.count_w):
            held = _taps(w, ow, count, rows, taps)
            to, at = y + ow * w.y_step_w, index + ow * w.index_step_w
            if held == 0:
                for c in range(channels):
                    f32p(to)[c] = -np.inf
                    u8p(at)[c] = 0
                continue
            tap = 0
            for row in range(count):
                for kw in range(window(along, ow).first, window(along, ow).last):
                    ids[tap] = places[row] + kw
                    tap += 1
            for c in range(0, channels, 64):
                _indexed(taps, ids, held, to, at, c, channels - c)
    return 0


@native("body")
def average_last(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image. Lanes: channels."""
    w = block_of(block)
    rows, places, taps = i64p(stack(8192)), i64p(stack(8192)), i64p(stack(8208))
    channels = w.channels
    full = channels & -64
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y = output_row(w, item)
        share = row_share(w, item)
        for ow in range(w.count_w):
            held = _taps(w, ow, count, rows, taps)
            to = y + ow * w.y_step_w
            s = splat(share * f32p(w.share_w)[ow])
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
    along = w.windows_w
    best = np.float32(0.0) if mode == 2 else np.float32(-np.inf)
    place = -1
    for row in range(count):
        at = rows[row] + shift + window(along, ow).start * w.x_step_w
        for kw in range(window(along, ow).first, window(along, ow).last):
            v = f32p(at + kw * w.dilation_w * w.x_step_w)[0]
            if mode == 2:
                best += v
            elif place < 0 or v > best or (v != v and best == best):
                best, place = v, places[row] + kw
    return best, max(place, 0)


@native("body")
def pool_any(block: Any, begin: int, end: int) -> int:
    """Items: pooled rows of every image, in any layout."""
    w = block_of(block)
    rows, places = i64p(stack(8192)), i64p(stack(8192))
    mode = w.mode
    for item in range(begin, end):
        count = window_rows(w, item, rows, places)
        y, index = output_row(w, item), _index_row(w, item)
        share = row_share(w, item)
        for c in range(w.channels):
            for ow in range(w.count_w):
                value, place = _pool_one(w, mode, count, rows, places, c * w.x_step_c, ow)
                if mode == 2:
                    value *= share * f32p(w.share_w)[ow]
                f32p(y + c * w.y_step_c + ow * w.y_step_w)[0] = value
                if mode == 1:
                    u8p(index + c * w.index_step_c + ow * w.index_step_w)[0] = place
    return 0


@native("body")
def pool_any_grad(block: Any, begin: int, end: int) -> int:
    """Items: channels of every image, in any layout; all of dx is written."""
    w = block_of(block)
    mode = w.mode
    deep, down, along = w.windows_d, w.windows_h, w.windows_w
    for item in range(begin, end):
        n, c = item // w.channels, item % w.channels
        dx = w.x + n * w.x_step_n + c * w.x_step_c
        for d in range(w.size_d):
            for h in range(w.size_h):
                for v in range(w.size_w):
                    f32p(dx + d * w.x_step_d + h * w.x_step_h + v * w.x_step_w)[0] = 0.0
        for od in range(w.count_d):
            for oh in range(w.count_h):
                share = f32p(w.share_d)[od] * f32p(w.share_h)[oh]
                dy = w.y + n * w.y_step_n + c * w.y_step_c + od * w.y_step_d + oh * w.y_step_h
                index = (
                    w.index
                    + n * w.index_step_n
                    + c * w.index_step_c
                    + od * w.index_step_d
                    + oh * w.index_step_h
                )
                for ow in range(w.count_w):
                    g = f32p(dy + ow * w.y_step_w)[0]
                    place = np.int64(0)
                    if mode == 2:
                        g *= share * f32p(w.share_w)[ow]
                    else:
                        place = np.int64(u8p(index + ow * w.index_step_w)[0])
                    for kd in range(window(deep, od).first, window(deep, od).last):
                        d = window(deep, od).start + kd * w.dilation_d
                        for kh in range(window(down, oh).first, window(down, oh).last):
                            h = window(down, oh).start + kh * w.dilation_h
                            at = dx + d * w.x_step_d + h * w.x_step_h
                            for kw in range(window(along, ow).first, window(along, ow).last):
                                v = window(along, ow).start + kw * w.dilation_w
                                if mode == 2 or (kd * w.kernel_h + kh) * w.kernel_w + kw == place:
                                    f32p(at + v * w.x_step_w)[0] += g
    return 0
