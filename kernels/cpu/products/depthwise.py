"""The weight gradient of a depthwise convolution: each channel by itself, one filter a channel.

oneDNN runs it at 2 to 3 GFLOP/s. Here lanes are channels: of channels-last images, 64 channels of
one output row are summed in registers for one place of the window, then added to its total.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, routine
from soapstone.native.intrinsics import f32p, i64p, stack
from soapstone.native.memory import aligned_array
from soapstone.native.simd import load, splat, store
from soapstone.native.threads.parallel import parallel_for, useful_threads

_BLOCK = 64  # channels an item


@routine
def _row(total: int, x: int, dy: int, places: Any, n: int) -> None:
    """Add n products of 64 channels to their totals. places: steps of x and dy, channels."""
    step_x, step_dy, channels = places[0], places[1], places[2]
    k0, k1 = first_lanes(channels), first_lanes(channels - 16)
    k2, k3 = first_lanes(channels - 32), first_lanes(channels - 48)
    a0 = a1 = a2 = a3 = splat(0.0)
    for _ in range(n):
        a0 += load_where(x, 0, k0) * load_where(dy, 0, k0)
        a1 += load_where(x, 16, k1) * load_where(dy, 16, k1)
        a2 += load_where(x, 32, k2) * load_where(dy, 32, k2)
        a3 += load_where(x, 48, k3) * load_where(dy, 48, k3)
        x += step_x
        dy += step_dy
    store(total, 0, load(total, 0) + a0)
    store(total, 16, load(total, 16) + a1)
    store(total, 32, load(total, 32) + a2)
    store(total, 48, load(total, 48) + a3)


# totals: (blocks, window, 64); size: of x, count: of dy; low: padding before; step: bytes between
# images, rows and columns, or channels, rows and columns.
_GRADIENT = Fields(
    "x dy dw totals channels images size(h w) count(h w) window(h w) stride(h w) low(h w)"
    " dilation(h w) x_step(n h w) dy_step(n h w) dw_step(c h w)"
)
_block_of = _GRADIENT.at


@native("body")
def _grad_weight(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    places = i64p(stack(64))
    places[0], places[1] = w.stride_w * w.x_step_w, w.dy_step_w
    taps = w.window_h * w.window_w
    for item in range(begin, end):
        first = item * 64
        channels = min(64, w.channels - first)
        places[2] = channels
        totals = w.totals + item * taps * 256
        for k in range(taps * 64):
            f32p(totals)[k] = 0.0
        for image in range(w.images):
            for i in range(w.count_h):
                dy = w.dy + first * 4 + image * w.dy_step_n + i * w.dy_step_h
                for ky in range(w.window_h):
                    row = i * w.stride_h + ky * w.dilation_h - w.low_h
                    if row < 0 or row >= w.size_h:
                        continue
                    x = w.x + first * 4 + image * w.x_step_n + row * w.x_step_h
                    for kx in range(w.window_w):
                        shift = kx * w.dilation_w - w.low_w  # the column of x under the first of dy
                        start = max(0, (w.stride_w - 1 - shift) // w.stride_w)
                        stop = min(w.count_w, (w.size_w - 1 - shift) // w.stride_w + 1)
                        if start < stop:
                            _row(
                                totals + (ky * w.window_w + kx) * 256,
                                x + (start * w.stride_w + shift) * w.x_step_w,
                                dy + start * w.dy_step_w,
                                places,
                                stop - start,
                            )
        for tap in range(taps):
            to = (
                w.dw
                + first * w.dw_step_c
                + tap // w.window_w * w.dw_step_h
                + tap % w.window_w * w.dw_step_w
            )
            for c in range(channels):
                f32p(to + c * w.dw_step_c)[0] = f32p(totals)[tap * 64 + c]
    return 0


@variant("conv2d_grad_weight", "depthwise")
def conv2d_grad_weight(call: Call) -> Entry | None:
    """dw of one filter a channel, without a bias, from channels-last x and dy."""
    x, dy = call.inputs
    dw, *rest = call.outputs
    at = call.attributes
    if (
        rest
        or not is_float32(x, dy, dw)
        or 0 in (x.size, dy.size, dw.size)
        or not at["groups"] == x.shape[1] == dy.shape[1] == dw.shape[0] > 1
        or dw.shape[1] != 1
        or x.strides[1] != 4
        or dy.strides[1] != 4
    ):
        return None
    channels = x.shape[1]
    blocks = -(-channels // _BLOCK)
    totals = aligned_array((blocks, *dw.shape[2:], _BLOCK), np.float32)
    block = _GRADIENT.pack(
        x=x,
        dy=dy,
        dw=dw,
        totals=totals,
        channels=channels,
        images=x.shape[0],
        size=x.shape[2:],
        count=dy.shape[2:],
        window=dw.shape[2:],
        stride=at["stride"],
        low=at["padding"][:2],
        dilation=at["dilation"],
        x_step=(x.strides[0], *x.strides[2:]),
        dy_step=(dy.strides[0], *dy.strides[2:]),
        dw_step=(dw.strides[0], *dw.strides[2:]),
    )
    threads = useful_threads(call.threads, x.nbytes + dy.nbytes)
    return parallel_for(_grad_weight, block, blocks, threads)
