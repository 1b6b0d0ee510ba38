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
from soapstone.native.entries import native, parallel_for, routine, useful_threads
from soapstone.native.intrinsics import f32p, i64p, stack, words
from soapstone.native.memory import aligned_array, pack
from soapstone.native.simd import load, splat, store

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


# Words: 0 x, 1 dy, 2 dw, 3 totals (blocks, window, 64), 4 channels; extents: 5 images, 6-7 of x,
# 8-9 of dy, 10-11 of the window; 12-13 stride, 14-15 padding before, 16-17 dilation; bytes between:
# 18 images, 19 rows, 20 columns of x, 21-23 of dy, 24 channels, 25 rows, 26 columns of dw.
@native("body")
def _grad_weight(block: Any, begin: int, end: int) -> int:
    w = words(block)
    places = i64p(stack(64))
    places[0], places[1] = w[13] * w[20], w[23]
    taps = w[10] * w[11]
    for item in range(begin, end):
        first = item * 64
        channels = min(64, w[4] - first)
        places[2] = channels
        totals = w[3] + item * taps * 256
        for k in range(taps * 64):
            f32p(totals)[k] = 0.0
        for image in range(w[5]):
            for i in range(w[8]):
                dy = w[1] + first * 4 + image * w[21] + i * w[22]
                for ky in range(w[10]):
                    row = i * w[12] + ky * w[16] - w[14]
                    if row < 0 or row >= w[6]:
                        continue
                    x = w[0] + first * 4 + image * w[18] + row * w[19]
                    for kx in range(w[11]):
                        shift = kx * w[17] - w[15]  # the column of x under the first of dy
                        start = max(0, (w[13] - 1 - shift) // w[13])
                        stop = min(w[9], (w[7] - 1 - shift) // w[13] + 1)
                        if start < stop:
                            _row(
                                totals + (ky * w[11] + kx) * 256,
                                x + (start * w[13] + shift) * w[20],
                                dy + start * w[23],
                                places,
                                stop - start,
                            )
        for tap in range(taps):
            to = w[2] + first * w[24] + tap // w[11] * w[25] + tap % w[11] * w[26]
            for c in range(channels):
                f32p(to + c * w[24])[0] = f32p(totals)[tap * 64 + c]
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
    block = pack(
        (x, dy, dw, totals, channels, x.shape[0], *x.shape[2:], *dy.shape[2:], *dw.shape[2:]),
        (*at["stride"], *at["padding"][:2], *at["dilation"]),
        (x.strides[0], *x.strides[2:], dy.strides[0], *dy.strides[2:]),
        (dw.strides[0], *dw.strides[2:]),
    )
    threads = useful_threads(call.threads, x.nbytes + dy.nbytes)
    return parallel_for(_grad_weight, block, blocks, threads)
