"""Local response normalization and its gradient: a row of positions, or of channels, at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.mathematics import power
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import helper, native, noop, parallel_for, useful_threads
from soapstone.native.intrinsics import as_float, f32p, stack, words
from soapstone.native.memory import pack
from soapstone.native.moves import row_offset
from soapstone.native.simd import load, splat, store, vectorised, vsqrt
from soapstone.native.walks import merge

# Words: 0 channels of x, 1 first and 2 count of the channels made, 3 low, 4 high reach, 5 alpha /
# size, 6 beta, 7 bias, 8-10 strides of channels of x, of dy, of the output, 11 offset of dy in x
# and 12 its channels; 13 x, 14 dy, 15 output, 16 rank; 17 extents, then strides of x, dy, the
# output. By rows of positions, the last extent is a run, no longer a dim of the items.
MOST_CHANNELS = 4000

vpower = vectorised(power)


@helper
def _power(scale: Any, beta: float) -> Any:
    """scale to the power -beta; the usual exponents by square roots."""
    if beta == 0.75:
        root = np.sqrt(scale)
        return 1.0 / (root * np.sqrt(root))
    if beta == 0.5:
        return 1.0 / np.sqrt(scale)
    return scale ** (-beta)


@helper
def _scale(w: Any, x: int, c: int) -> Any:
    total = 0.0
    for k in range(max(0, c - w[3]), min(w[0], c + w[4] + 1)):
        v = np.float64(f32p(x + k * w[8])[0])
        total += v * v
    return as_float(w[7]) + as_float(w[5]) * total


@helper
def _powers(scale: Any, beta: float) -> Any:
    """Lanes of scale to the power -beta."""
    if beta == 0.75:
        root = vsqrt(scale)
        return splat(1.0) / (root * vsqrt(root))
    return vpower(scale, splat(-beta))


@native("body")
def _by_channel(block: Any, begin: int, end: int) -> int:
    """Items: positions. Lanes: channels, which are contiguous."""
    w = words(block)
    rank, low, size = w[16], w[3], w[3] + w[4] + 1
    share, beta, bias = splat(as_float(w[5])), as_float(w[6]), splat(as_float(w[7]))
    squares = stack(16384)
    channels = w[0]
    for i in range(low + channels + w[4] + 16):
        f32p(squares)[i] = 0.0
    for item in range(begin, end):
        x = w[13] + row_offset(w, 17, 17 + rank, rank, item)
        y = w[15] + row_offset(w, 17, 17 + 3 * rank, rank, item)
        for c in range(0, channels, 16):
            mask = first_lanes(channels - c)
            v = load_where(x, c, mask)
            store_where(squares, low + c, v * v, mask)
        for c in range(0, w[2], 16):
            mask = first_lanes(w[2] - c)
            total = splat(0.0)
            for k in range(size):
                total += load(squares, w[1] + c + k)
            v = load_where(x, w[1] + c, mask)
            store_where(y, c, v * _powers(bias + share * total, beta), mask)
    return 0


@native("body")
def _by_position(block: Any, begin: int, end: int) -> int:
    """Items: runs of positions. Lanes: positions, which are contiguous; channels go by."""
    w = words(block)
    rank, low, size = w[16] - 1, w[3], w[3] + w[4] + 1
    share, beta, bias = splat(as_float(w[5])), as_float(w[6]), splat(as_float(w[7]))
    squares = stack(262144)
    channels, run = w[0], w[17 + rank]
    for i in range(low):
        store(squares, 16 * i, splat(0.0))
    for i in range(w[4]):
        store(squares, 16 * (low + channels + i), splat(0.0))
    wide = rank + 1
    for item in range(begin, end):
        x = w[13] + row_offset(w, 17, 17 + wide, rank, item)
        y = w[15] + row_offset(w, 17, 17 + 3 * wide, rank, item)
        for p in range(0, run, 16):
            mask = first_lanes(run - p)
            for c in range(channels):
                v = load_where(x + c * w[8], p, mask)
                store(squares, 16 * (low + c), v * v)
            for c in range(w[2]):
                total = splat(0.0)
                for k in range(size):
                    total += load(squares, 16 * (w[1] + c + k))
                v = load_where(x + (w[1] + c) * w[8], p, mask)
                store_where(y + c * w[10], p, v * _powers(bias + share * total, beta), mask)
    return 0


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank, beta = w[16], as_float(w[6])
    for item in range(begin, end):
        x = w[13] + row_offset(w, 17, 17 + rank, rank, item)
        y = w[15] + row_offset(w, 17, 17 + 3 * rank, rank, item)
        # A running sum would drift; windows are short.
        for c in range(w[2]):
            at = w[1] + c
            scale = _scale(w, x, at)
            f32p(y + c * w[10])[0] = f32p(x + at * w[8])[0] * _power(scale, beta)
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank, beta = w[16], as_float(w[6])
    for item in range(begin, end):
        x = w[13] + row_offset(w, 17, 17 + rank, rank, item)
        dy = w[14] + row_offset(w, 17, 17 + 2 * rank, rank, item)
        dx = w[15] + row_offset(w, 17, 17 + 3 * rank, rank, item)
        for c in range(w[2]):
            at = w[1] + c
            inner = own = 0.0
            for k in range(max(w[11], at - w[4]), min(w[11] + w[12], at + w[3] + 1)):
                scale = _scale(w, x, k)
                g = f32p(dy + (k - w[11]) * w[9])[0] * _power(scale, beta)
                inner += g * f32p(x + k * w[8])[0] / scale
                if k == at:
                    own = g
            factor = 2.0 * as_float(w[5]) * beta * f32p(x + at * w[8])[0]
            f32p(dx + c * w[10])[0] = own - factor * inner
    return 0


def _bind(call: Call, x: Array, dy: Array, out: Array) -> Entry | None:
    if not is_float32(x, dy, out):
        return None
    if out.size == 0:
        return noop()
    at = call.attributes
    size = int(at["size"])
    first, count = at.get("channels", (0, x.shape[1]))
    rest = [np.moveaxis(a, 1, 0)[0] for a in (x, dy, out)]
    extents, strides = merge(rest[0].shape, [a.strides for a in rest])
    block = pack(
        (x.shape[1], first, count, (size - 1) // 2, size // 2, float(at["alpha"]) / size),
        (float(at["beta"]), float(at["bias"]), x.strides[1], dy.strides[1], out.strides[1]),
        (int(at.get("offset", 0)), dy.shape[1], x, dy, out, len(extents), extents, strides),
    )
    threads = useful_threads(call.threads, 8 * x.nbytes)
    items = rest[0].size
    if call.operator.endswith("_grad"):
        return parallel_for(_backward, block, items, threads)
    few = x.shape[1] + size <= MOST_CHANNELS and rest[0].size > 0
    if few and x.strides[1] == out.strides[1] == 4:
        return parallel_for(_by_channel, block, items, threads)
    if few and (extents[-1] == 1 or strides[0][-1] == strides[2][-1] == 4):
        return parallel_for(_by_position, block, items // extents[-1], threads)
    return parallel_for(_forward, block, items, threads)


@variant("lrn", "numba")
def lrn(call: Call) -> Entry | None:
    """y of x (n, c, ...)."""
    return _bind(call, call.inputs[0], call.inputs[0], call.outputs[0])


@variant("lrn_grad", "numba")
def lrn_grad(call: Call) -> Entry | None:
    """dx from dy and x."""
    return _bind(call, call.inputs[1], call.inputs[0], call.outputs[0])
