"""The loops of pooling of plain images, by rows, and of the gradients of images."""

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
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native
from soapstone.native.intrinsics import f32p, i64p, stack, u8p
from soapstone.native.simd import choose, load, splat, store

MAX, INDEXED, AVERAGE = 0, 1, 2
ROW_FLOATS = 8192  # of a plain row with its padding, cut into phases

# size: of the image, x; count: of windows, and so the size of y; low: padding before; share: one
# over the extent of each window; first: the first tap inside by column, and space: the floats of a
# phase (plain); holders: the range of windows that hold each position; group: channels of an item
# of `pool_scatter`; offsets: of a window's positions from its corner.
PLANES = Fields(
    "mode kernel(h w) stride(h w) low(h w) size(h w) count(h w) channels x y index x_step(n c h w)"
    " y_step(n c h w) index_step(n c h w) share(h w) first space holders(h w) group offsets"
)
_HOLDERS = Fields("first end")
_planes_of, _holders_of = PLANES.at, _HOLDERS.at
_HOLDERS_BYTES = 8 * _HOLDERS.words


@helper
def _holders(table: int, position: int) -> Any:
    """The first window that holds a position, and the one after the last."""
    return _holders_of(table + position * _HOLDERS_BYTES)


@native("body")
def pool_last_grad(block: Any, begin: int, end: int) -> int:
    """Items: rows of every image. Each element gathers from the windows that hold it."""
    w = _planes_of(block)
    mode, kw_n, stride_h, stride_w = w.mode, w.kernel_w, w.stride_h, w.stride_w
    for item in range(begin, end):
        n, ih = item // w.size_h, item % w.size_h
        h = ih + w.low_h
        rows = _holders(w.holders_h, ih)
        for iw in range(w.size_w):
            v = iw + w.low_w
            columns = _holders(w.holders_w, iw)
            dx = w.x + n * w.x_step_n + ih * w.x_step_h + iw * w.x_step_w
            for c in range(0, w.channels, 16):
                mask = first_lanes(w.channels - c)
                total = splat(0.0)
                for oh in range(rows.first, rows.end):
                    for ow in range(columns.first, columns.end):
                        dy = w.y + n * w.y_step_n + oh * w.y_step_h + ow * w.y_step_w
                        g = load_where(dy, c, mask)
                        if mode == AVERAGE:
                            total = total + g * splat(f32p(w.share_h)[oh] * f32p(w.share_w)[ow])
                        else:
                            place = (h - oh * stride_h) * kw_n + (v - ow * stride_w)
                            at = (
                                w.index
                                + n * w.index_step_n
                                + oh * w.index_step_h
                                + ow * w.index_step_w
                            )
                            hit = bytes_equal(load_bytes_where(at, c, mask), place)
                            total = total + choose(hit, g, splat(0.0))
                store_where(dx, c, total, mask)
    return 0


@native("body")
def pool_plain(block: Any, begin: int, end: int) -> int:
    """Items: planes (image, channel). Lanes: pooled columns, of rows split by the stride."""
    w = _planes_of(block)
    mode, kh_n, kw_n, stride = w.mode, w.kernel_h, w.kernel_w, w.stride_w
    columns, space = w.count_w, w.space
    buffer = stack(32768)
    best_row = stack(16384)
    place_row = stack(16384)
    padding = 0.0 if mode == AVERAGE else -float("inf")
    for item in range(begin, end):
        n, channel = item // w.channels, item % w.channels
        x = w.x + n * w.x_step_n + channel * w.x_step_c
        fill_row(buffer, padding, space * stride)
        for oh in range(w.count_h):
            y = w.y + n * w.y_step_n + channel * w.y_step_c + oh * w.y_step_h
            h = oh * w.stride_h - w.low_h
            kh0, kh1 = max(0, -h), min(kh_n, w.size_h - h)
            for o in range(0, columns, 16):
                store(best_row, o, splat(padding))
                if mode == INDEXED:
                    store(place_row, o, load_ints(w.first, o) + splat_int(kh0 * kw_n))
            for kh in range(kh0, kh1):
                split_row(buffer, space, x + (h + kh) * w.x_step_h, w.size_w, w.low_w, stride)
                phase, shift = 0, 0
                for kw in range(kw_n):
                    source = buffer + (phase * space + shift) * 4
                    place = kh * kw_n + kw
                    if mode == AVERAGE:
                        for o in range(0, columns, 16):
                            store(best_row, o, load(best_row, o) + load(source, o))
                    elif mode == INDEXED:
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
            share = splat(f32p(w.share_h)[oh])
            at = w.index + n * w.index_step_n + channel * w.index_step_c + oh * w.index_step_h
            for o in range(0, columns, 16):
                mask = first_lanes(columns - o)
                v = load(best_row, o)
                if mode == AVERAGE:
                    v = v * (share * load_where(w.share_w, o, mask))
                store_where(y, o, v, mask)
                if mode == INDEXED:
                    store_bytes_where(at, o, load_ints(place_row, o), mask)
    return 0


@native("body")
def pool_scatter(block: Any, begin: int, end: int) -> int:
    """Items: images or planes of `group` channels. Each window adds dy to its maximum's element."""
    w = _planes_of(block)
    channels, offsets, positions = w.group, i64p(w.offsets), w.kernel_h * w.kernel_w
    for item in range(begin, end):
        n, channel = item // (w.channels // channels), item % (w.channels // channels) * channels
        dx = w.x + n * w.x_step_n + channel * w.x_step_c
        dy = w.y + n * w.y_step_n + channel * w.y_step_c
        index = w.index + n * w.index_step_n + channel * w.index_step_c
        for h in range(w.size_h):
            if w.x_step_w == 4 * channels:
                fill_row(dx + h * w.x_step_h, 0.0, w.size_w * channels)
            else:
                for v in range(w.size_w):
                    fill_row(dx + h * w.x_step_h + v * w.x_step_w, 0.0, channels)
        for oh in range(w.count_h):
            for ow in range(w.count_w):
                top, left = oh * w.stride_h - w.low_h, ow * w.stride_w - w.low_w
                corner = dx + top * w.x_step_h + left * w.x_step_w
                inside = (
                    top >= 0
                    and left >= 0
                    and top + w.kernel_h <= w.size_h
                    and left + w.kernel_w <= w.size_w
                )
                g = f32p(dy + oh * w.y_step_h + ow * w.y_step_w)
                at = u8p(index + oh * w.index_step_h + ow * w.index_step_w)
                for c in range(channels):
                    position = np.int64(at[c])
                    if not inside:  # no maximum lies in the padding, whatever the index says
                        h, v = top + position // w.kernel_w, left + position % w.kernel_w
                        if h < 0 or v < 0 or h >= w.size_h or v >= w.size_w:
                            continue
                    if position < positions:
                        f32p(corner + offsets[position])[c] += g[c]
    return 0


@native("body")
def pool_plain_average_grad(block: Any, begin: int, end: int) -> int:
    """Items: planes (image, channel). Rows of dx are built split by the stride."""
    w = _planes_of(block)
    kw_n, stride = w.kernel_w, w.stride_w
    columns, space = w.count_w, w.space
    buffer = stack(32768)
    for item in range(begin, end):
        n, channel = item // w.channels, item % w.channels
        for ih in range(w.size_h):
            fill_row(buffer, 0.0, space * stride)
            rows = _holders(w.holders_h, ih)
            for oh in range(rows.first, rows.end):
                dy = w.y + n * w.y_step_n + channel * w.y_step_c + oh * w.y_step_h
                share = splat(f32p(w.share_h)[oh])
                phase, shift = 0, 0
                for _ in range(kw_n):
                    to = buffer + (phase * space + shift) * 4
                    for o in range(0, columns, 16):
                        mask = first_lanes(columns - o)
                        g = load_where(dy, o, mask) * (share * load_where(w.share_w, o, mask))
                        store(to, o, load(to, o) + g)
                    phase += 1
                    if phase == stride:
                        phase = 0
                        shift += 1
            dx = w.x + n * w.x_step_n + channel * w.x_step_c + ih * w.x_step_h
            join_row(dx, buffer, space, w.size_w, w.low_w, stride)
    return 0
