"""Resizing of images along their last two axes: nearest, linear and cubic alike, by taps.

Channels-last, lanes are channels and an output is the sum over its taps of both axes. Plain, rows
are first blended into one, lanes being columns, and outputs then picked from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.windows.resize import Taps, axis_taps
from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native, noop, parallel_for, routine, useful_threads
from soapstone.native.intrinsics import as_float, f32p, i64p, stack, words
from soapstone.native.memory import pack
from soapstone.native.simd import splat, store

ROW_FLOATS = 16384

# Words: 0 rows and 1 columns made, 2 channels, 3 columns given; 4 x, 5 y, 6-9 strides of x, 10-13
# of y (n c h w); 14-15 taps of a row and a column; by output 16-17 their offsets along h and w, in
# bytes (of a column of plain rows: in floats), 18-19 their weights, 20-21 whether they lie outside;
# 22 the value there, 23 whether a column does.


@native("body")
def _by_channel(block: Any, begin: int, end: int) -> int:
    """Items: rows of every image. Lanes: channels."""
    w = words(block)
    taps_h, taps_w, value = w[14], w[15], as_float(w[22])
    for item in range(begin, end):
        n, oh = item // w[0], item % w[0]
        x, y = w[4] + n * w[6], w[5] + n * w[10] + oh * w[12]
        down, down_by = w[16] + oh * taps_h * 8, f32p(w[18] + oh * taps_h * 4)
        for ow in range(w[1]):
            along, along_by = w[17] + ow * taps_w * 8, f32p(w[19] + ow * taps_w * 4)
            to = y + ow * w[13]
            outside = i64p(w[20])[oh] + i64p(w[21])[ow] > 0
            for c in range(0, w[2], 16):
                mask = first_lanes(w[2] - c)
                total = splat(0.0)
                if outside:
                    total = splat(value)
                else:
                    for i in range(taps_h):
                        row = x + i64p(down)[i]
                        for j in range(taps_w):
                            v = load_where(row + i64p(along)[j], c, mask)
                            total += v * splat(down_by[i] * along_by[j])
                store_where(to, c, total, mask)
    return 0


@routine
def _pick(w: Any, source: Any, y: int, share: float) -> None:
    """One row of outputs from the blended row."""
    columns, taps, step = w[1], w[15], w[13]
    at, by, outside = i64p(w[17]), f32p(w[19]), i64p(w[21])
    if taps == 1:
        for ow in range(columns):
            f32p(y + ow * step)[0] = source[at[ow]] * by[ow] * share
    elif taps == 2:
        for ow in range(columns):
            left, right = source[at[2 * ow]] * by[2 * ow], source[at[2 * ow + 1]] * by[2 * ow + 1]
            f32p(y + ow * step)[0] = (left + right) * share
    else:
        for ow in range(columns):
            total = np.float32(0.0)
            for j in range(taps):
                total += source[at[ow * taps + j]] * by[ow * taps + j]
            f32p(y + ow * step)[0] = total * share
    for ow in range(columns if w[23] != 0 else 0):
        if outside[ow] > 0:
            f32p(y + ow * step)[0] = as_float(w[22])


@native("body")
def _by_row(block: Any, begin: int, end: int) -> int:
    """Items: rows of every channel of every image, contiguous in x."""
    w = words(block)
    taps_h, wide, value = w[14], w[3], as_float(w[22])
    blended = stack(65536)
    for item in range(begin, end):
        oh, plane = item % w[0], item // w[0]
        n, c = plane // w[2], plane % w[2]
        x = w[4] + n * w[6] + c * w[7]
        y = w[5] + n * w[10] + c * w[11] + oh * w[12]
        down, down_by = i64p(w[16] + oh * taps_h * 8), f32p(w[18] + oh * taps_h * 4)
        source = f32p(x + down[0])
        if taps_h > 1:
            for k in range(0, wide, 16):
                mask = first_lanes(wide - k)
                total = splat(0.0)
                for i in range(taps_h):
                    total += load_where(x + down[i], k, mask) * splat(down_by[i])
                store(blended, k, total)
            source = f32p(blended)
        one: Any = np.float32(1.0)
        if i64p(w[20])[oh] > 0:
            for ow in range(w[1]):
                f32p(y + ow * w[13])[0] = value
        else:
            _pick(w, source, y, down_by[0] if taps_h == 1 else one)
    return 0


def _table(taps: Taps, stride: int) -> tuple[Array, Array, Array]:
    """The offsets in bytes, the weights, and whether outputs lie outside."""
    return (
        np.ascontiguousarray(taps.index * stride),
        np.ascontiguousarray(taps.weight, np.float32),
        taps.outside.astype(np.int64),
    )


@variant("resize", "numba")
def resize(call: Call) -> Entry | None:
    """y of x (n, c, h, w) or (n, c, w)."""
    (x,), (y,) = call.inputs, call.outputs
    if not is_float32(x, y) or not 3 <= x.ndim <= 4:
        return None
    if y.size == 0:
        return noop()
    taps = [axis_taps(call.attributes, axis, extent) for axis, extent in enumerate(x.shape)]
    if not (taps[0].identity and taps[1].identity and x.shape[:2] == y.shape[:2]):
        return None
    if x.ndim == 3:
        x, y = x[:, :, None], y[:, :, None]
        one = np.zeros((1, 1), np.int64)
        taps.insert(2, Taps(one, np.ones((1, 1)), np.zeros(1, bool)))
    n, c, _, wide = x.shape
    rows, columns = y.shape[2:]
    by_channel = x.strides[1] == y.strides[1] == 4 and (c > 1 or x.strides[3] != 4)
    plain = (x.strides[3] == 4 or wide == 1) and wide <= ROW_FLOATS
    if not by_channel and not plain:
        return None
    down = _table(taps[2], x.strides[2])
    along = _table(taps[3], x.strides[3] if by_channel else 1)
    block = pack(
        (rows, columns, c, wide, x, y, x.strides, y.strides),
        (down[0].shape[1], along[0].shape[1]),
        *zip(down, along),
        float(call.attributes["extrapolation_value"]),
        bool(taps[3].outside.any()),
    )
    threads = useful_threads(call.threads, x.nbytes + y.nbytes)
    if by_channel:
        return parallel_for(_by_channel, block, n * rows, threads)
    return parallel_for(_by_row, block, n * c * rows, threads)
