"""The loops of pooling of plain images, by rows, and of the gradients of images.

Words of every block: 0 mode (MAX, INDEXED, AVERAGE), 1-2 kernel, 3-4 stride, 5-6 padding (top,
left), 7-8 size of the image, 9-10 size of the pooled image, 11 channels; 12 image, 13 pooled,
14 index; 15-18, 19-22, 23-26 their strides (n, c, h, w) in bytes; 27-28 the shares (1 / extent of
the window) by pooled row and column; 29 the first valid kw by pooled column (plain), 30 the
floats of a phase (plain); 31-32 the ranges of windows that hold each row and column; 33 channels
of an item of `pool_scatter`, 34 the offsets from a window's corner by position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.pooling.windows import (
    bytes_equal,
    fill_row,
    first_lanes,
    join_row,
    load_bytes_where,
    load_ints,
    load_where,
    splat_int,
    split_row,
    store_bytes_where,
    store_where,
    takes,
)
from soapstone.native.entries import native
from soapstone.native.intrinsics import f32p, i64p, stack, u8p, words
from soapstone.native.simd import choose, load, splat, store

MAX, INDEXED, AVERAGE = 0, 1, 2
ROW_FLOATS = 8192  # of a plain row with its padding, cut into phases


@native("body")
def pool_last_grad(block: Any, begin: int, end: int) -> int:
    """Items: rows of every image. Each element gathers from the windows that hold it."""
    w = words(block)
    mode, kw_n, stride_h, stride_w = w[0], w[2], w[3], w[4]
    for item in range(begin, end):
        n, ih = item // w[7], item % w[7]
        h = ih + w[5]
        oh0, oh1 = i64p(w[31])[2 * ih], i64p(w[31])[2 * ih + 1]
        for iw in range(w[8]):
            v = iw + w[6]
            ow0, ow1 = i64p(w[32])[2 * iw], i64p(w[32])[2 * iw + 1]
            dx = w[12] + n * w[15] + ih * w[17] + iw * w[18]
            for c in range(0, w[11], 16):
                mask = first_lanes(w[11] - c)
                total = splat(0.0)
                for oh in range(oh0, oh1):
                    for ow in range(ow0, ow1):
                        dy = w[13] + n * w[19] + oh * w[21] + ow * w[22]
                        g = load_where(dy, c, mask)
                        if mode == 2:
                            total = total + g * splat(f32p(w[27])[oh] * f32p(w[28])[ow])
                        else:
                            place = (h - oh * stride_h) * kw_n + (v - ow * stride_w)
                            at = w[14] + n * w[23] + oh * w[25] + ow * w[26]
                            hit = bytes_equal(load_bytes_where(at, c, mask), place)
                            total = total + choose(hit, g, splat(0.0))
                store_where(dx, c, total, mask)
    return 0


@native("body")
def pool_plain(block: Any, begin: int, end: int) -> int:
    """Items: planes (image, channel). Lanes: pooled columns, of rows split by the stride."""
    w = words(block)
    mode, kh_n, kw_n, stride = w[0], w[1], w[2], w[4]
    columns, space = w[10], w[30]
    buffer = stack(32768)
    best_row = stack(16384)
    place_row = stack(16384)
    padding = 0.0 if mode == 2 else -float("inf")
    for item in range(begin, end):
        n, channel = item // w[11], item % w[11]
        x = w[12] + n * w[15] + channel * w[16]
        fill_row(buffer, padding, space * stride)
        for oh in range(w[9]):
            y = w[13] + n * w[19] + channel * w[20] + oh * w[21]
            h = oh * w[3] - w[5]
            kh0, kh1 = max(0, -h), min(kh_n, w[7] - h)
            for o in range(0, columns, 16):
                store(best_row, o, splat(padding))
                if mode == 1:
                    store(place_row, o, load_ints(w[29], o) + splat_int(kh0 * kw_n))
            for kh in range(kh0, kh1):
                split_row(buffer, space, x + (h + kh) * w[17], w[8], w[6], stride)
                phase, shift = 0, 0
                for kw in range(kw_n):
                    source = buffer + (phase * space + shift) * 4
                    place = kh * kw_n + kw
                    if mode == 2:
                        for o in range(0, columns, 16):
                            store(best_row, o, load(best_row, o) + load(source, o))
                    elif mode == 1:
                        for o in range(0, columns, 16):
                            v, best = load(source, o), load(best_row, o)
                            t = takes(v, best)
                            store(best_row, o, choose(t, v, best))
                            old = load_ints(place_row, o)
                            store(place_row, o, choose(t, splat_int(place), old))
                    else:
                        for o in range(0, columns, 16):
                            v, best = load(source, o), load(best_row, o)
                            store(best_row, o, choose(takes(v, best), v, best))
                    phase += 1
                    if phase == stride:
                        phase = 0
                        shift += 1
            share = splat(f32p(w[27])[oh])
            at = w[14] + n * w[23] + channel * w[24] + oh * w[25]
            for o in range(0, columns, 16):
                mask = first_lanes(columns - o)
                v = load(best_row, o)
                if mode == 2:
                    v = v * (share * load_where(w[28], o, mask))
                store_where(y, o, v, mask)
                if mode == 1:
                    store_bytes_where(at, o, load_ints(place_row, o), mask)
    return 0


@native("body")
def pool_scatter(block: Any, begin: int, end: int) -> int:
    """Items: images or planes of `w[33]` channels. Each window adds dy to its maximum's element."""
    w = words(block)
    channels, offsets, positions = w[33], i64p(w[34]), w[1] * w[2]
    for item in range(begin, end):
        n, channel = item // (w[11] // channels), item % (w[11] // channels) * channels
        dx = w[12] + n * w[15] + channel * w[16]
        dy = w[13] + n * w[19] + channel * w[20]
        index = w[14] + n * w[23] + channel * w[24]
        for h in range(w[7]):
            if w[18] == 4 * channels:
                fill_row(dx + h * w[17], 0.0, w[8] * channels)
            else:
                for v in range(w[8]):
                    fill_row(dx + h * w[17] + v * w[18], 0.0, channels)
        for oh in range(w[9]):
            for ow in range(w[10]):
                top, left = oh * w[3] - w[5], ow * w[4] - w[6]
                corner = dx + top * w[17] + left * w[18]
                inside = top >= 0 and left >= 0 and top + w[1] <= w[7] and left + w[2] <= w[8]
                g = f32p(dy + oh * w[21] + ow * w[22])
                at = u8p(index + oh * w[25] + ow * w[26])
                for c in range(channels):
                    position = np.int64(at[c])
                    if not inside:  # no maximum lies in the padding, whatever the index says
                        h, v = top + position // w[2], left + position % w[2]
                        if h < 0 or v < 0 or h >= w[7] or v >= w[8]:
                            continue
                    if position < positions:
                        f32p(corner + offsets[position])[c] += g[c]
    return 0


@native("body")
def pool_plain_average_grad(block: Any, begin: int, end: int) -> int:
    """Items: planes (image, channel). Rows of dx are built split by the stride."""
    w = words(block)
    kw_n, stride = w[2], w[4]
    columns, space = w[10], w[30]
    buffer = stack(32768)
    for item in range(begin, end):
        n, channel = item // w[11], item % w[11]
        for ih in range(w[7]):
            fill_row(buffer, 0.0, space * stride)
            for oh in range(i64p(w[31])[2 * ih], i64p(w[31])[2 * ih + 1]):
                dy = w[13] + n * w[19] + channel * w[20] + oh * w[21]
                share = splat(f32p(w[27])[oh])
                phase, shift = 0, 0
                for _ in range(kw_n):
                    to = buffer + (phase * space + shift) * 4
                    for o in range(0, columns, 16):
                        mask = first_lanes(columns - o)
                        g = load_where(dy, o, mask) * (share * load_where(w[28], o, mask))
                        store(to, o, load(to, o) + g)
                    phase += 1
                    if phase == stride:
                        phase = 0
                        shift += 1
            dx = w[12] + n * w[15] + channel * w[16] + ih * w[17]
            join_row(dx, buffer, space, w[8], w[6], stride)
    return 0
