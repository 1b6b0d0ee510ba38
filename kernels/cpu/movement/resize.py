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
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.intrinsics import f32p, i64p, stack
from soapstone.native.simd import splat, store
from soapstone.native.threads.parallel import parallel_for, useful_threads

ROW_FLOATS = 16384

# rows, columns: made; wide: columns given; taps: of an output, along h and w; by output offset: in
# bytes (of a column of plain rows: in floats), weight, outside: whether it lies there, where the
# value is; beyond: whether a column does.
_BLOCK = Fields(
    "rows columns channels wide x y x_step(n c h w) y_step(n c h w) taps(h w) offset(h w)"
    " weight(h w) outside(h w) beyond",
    reals="value",
)
_block_of = _BLOCK.at


@native("body")
def _by_channel(block: Any, begin: int, end: int) -> int:
    """Items: rows of every image. Lanes: channels."""
    w = _block_of(block)
    taps_h, taps_w, value = w.taps_h, w.taps_w, w.value
    for item in range(begin, end):
        n, oh = item // w.rows, item % w.rows
        x, y = w.x + n * w.x_step_n, w.y + n * w.y_step_n + oh * w.y_step_h
        down, down_by = w.offset_h + oh * taps_h * 8, f32p(w.weight_h + oh * taps_h * 4)
        for ow in range(w.columns):
            along, along_by = w.offset_w + ow * taps_w * 8, f32p(w.weight_w + ow * taps_w * 4)
            to = y + ow * w.y_step_w
            outside = i64p(w.outside_h)[oh] + i64p(w.outside_w)[ow] > 0
            for c in range(0, w.channels, 16):
                mask = first_lanes(w.channels - c)
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
    columns, taps, step = w.columns, w.taps_w, w.y_step_w
    at, by, outside = i64p(w.offset_w), f32p(w.weight_w), i64p(w.outside_w)
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
    for ow in range(columns if w.beyond != 0 else 0):
        if outside[ow] > 0:
            f32p(y + ow * step)[0] = w.value


@native("body")
def _by_row(block: Any, begin: int, end: int) -> int:
    """Items: rows of every channel of every image, contiguous in x."""
    w = _block_of(block)
    taps_h, wide, value = w.taps_h, w.wide, w.value
    blended = stack(65536)
    for item in range(begin, end):
        oh, plane = item % w.rows, item // w.rows
        n, c = plane // w.channels, plane % w.channels
        x = w.x + n * w.x_step_n + c * w.x_step_c
        y = w.y + n * w.y_step_n + c * w.y_step_c + oh * w.y_step_h
        down, down_by = i64p(w.offset_h + oh * taps_h * 8), f32p(w.weight_h + oh * taps_h * 4)
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
        if i64p(w.outside_h)[oh] > 0:
            for ow in range(w.columns):
                f32p(y + ow * w.y_step_w)[0] = value
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
    offset, weight, outside = zip(down, along)
    block = _BLOCK.pack(
        rows=rows,
        columns=columns,
        channels=c,
        wide=wide,
        x=x,
        y=y,
        x_step=x.strides,
        y_step=y.strides,
        taps=[each.shape[1] for each in offset],
        offset=offset,
        weight=weight,
        outside=outside,
        beyond=taps[3].outside.any(),
        value=call.attributes["extrapolation_value"],
    )
    threads = useful_threads(call.threads, x.nbytes + y.nbytes)
    if by_channel:
        return parallel_for(_by_channel, block, n * rows, threads)
    return parallel_for(_by_row, block, n * c * rows, threads)
