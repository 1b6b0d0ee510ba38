"""Batch normalization, its inference form and its gradient, over dim 1 of arrays of any rank.

Each is three steps: sums by channel, a small step on the channels, and a multiply-add over the
array that the elementwise machine does. Split over samples, the three are operators of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.normalization.channel_sums import (
    SCALE_AND_SHIFT,
    SLOPES,
    ChannelSums,
    by_channel,
)
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import bind, native, noop, routine, sequence
from soapstone.native.intrinsics import as_float, f32p, f64p, words
from soapstone.native.memory import aligned_array

# Words: 0 sums, 1 channels, 2 padded channels, 3 parts, 4 count, 5 epsilon, 6 momentum, 7.. arrays:
# gamma, beta, old mean, old variance; new mean, new variance, mean, rstd, scale, shift; 17 pivot
# and 18 its stride.
_Pair = tuple[float, float]


@routine
def _folded(w: Any, c: int) -> _Pair:
    """The two sums of a channel over all parts, in order."""
    sums = f64p(w[0])
    first = second = 0.0
    for part in range(w[3]):
        first += sums[part * w[2] * 2 + c]
        second += sums[part * w[2] * 2 + w[2] + c]
    return first, second


@routine
def _statistics_of(w: Any, c: int, total: float, square: float) -> None:
    """Mean, rstd, running statistics, and the scale and shift of y, of one channel."""
    count, epsilon, momentum = as_float(w[4]), as_float(w[5]), as_float(w[6])
    away = total / count
    mean = np.float64(f32p(w[17] + c * w[18])[0]) + away
    variance = square / count - away * away
    if variance < 0.0:
        variance = 0.0
    rstd = 1.0 / np.sqrt(variance + epsilon)
    unbiased = variance * count / max(count - 1.0, 1.0)
    f32p(w[11])[c] = (1.0 - momentum) * f32p(w[9])[c] + momentum * mean
    f32p(w[12])[c] = (1.0 - momentum) * f32p(w[10])[c] + momentum * unbiased
    f32p(w[13])[c] = mean
    f32p(w[14])[c] = rstd
    f32p(w[15])[c] = f32p(w[7])[c] * rstd
    f32p(w[16])[c] = f32p(w[8])[c] - mean * rstd * f32p(w[7])[c]


@native()
def _statistics(block: Any) -> int:
    w = words(block)
    for c in range(w[1]):
        total, square = _folded(w, c)
        _statistics_of(w, c, total, square)
    return 0


@native()
def _statistics_of_sums(block: Any) -> int:
    """The same from float32 sums (2, channels)."""
    w = words(block)
    for c in range(w[1]):
        sums = f32p(w[0])
        _statistics_of(w, c, np.float64(sums[c]), np.float64(sums[w[1] + c]))
    return 0


@native()
def _inference(block: Any) -> int:
    """The scale and shift of y from the running statistics."""
    w = words(block)
    for c in range(w[1]):
        scale = f32p(w[7])[c] / np.sqrt(f32p(w[10])[c] + as_float(w[5]))
        f32p(w[11])[c] = scale
        f32p(w[12])[c] = f32p(w[8])[c] - f32p(w[9])[c] * scale
    return 0


@routine
def _slopes_of(w: Any, c: int, total: float, product: float) -> None:
    """dgamma, dbeta, and the factors of dx = a * dy + b * (x - mean) + d, of one channel."""
    count = as_float(w[4])
    rstd = np.float64(f32p(w[8])[c])
    scale = f32p(w[7])[c] * rstd
    f32p(w[9])[c] = product * rstd
    f32p(w[10])[c] = total
    f32p(w[11])[c] = scale
    f32p(w[12])[c] = -scale * rstd * rstd * product / count
    f32p(w[13])[c] = -scale * total / count


@native()
def _slopes(block: Any) -> int:
    w = words(block)
    for c in range(w[1]):
        total, product = _folded(w, c)
        _slopes_of(w, c, total, product)
    return 0


@native()
def _slopes_of_sums(block: Any) -> int:
    """The same from float32 sums (2, channels)."""
    w = words(block)
    for c in range(w[1]):
        sums = f32p(w[0])
        _slopes_of(w, c, np.float64(sums[c]), np.float64(sums[w[1] + c]))
    return 0


@native()
def _store_sums(block: Any) -> int:
    """The sums folded into (2, channels) float32. Words: 5 their address, 6 their row's stride."""
    w = words(block)
    for c in range(w[1]):
        total, square = _folded(w, c)
        f32p(w[5])[c] = total
        f32p(w[5] + w[6])[c] = square
    return 0


def _served(arrays: tuple[Array, ...], vectors: tuple[Array, ...]) -> bool:
    x = arrays[0]
    return x.ndim >= 2 and is_float32(*arrays) and _vectors(vectors, x.shape[1])


def _vectors(vectors: tuple[Array, ...], channels: int) -> bool:
    """Whether each holds a contiguous float32 number by channel, in any shape."""
    return is_float32(*vectors) and all(
        v.size == channels and (v.size == 1 or v.strides[int(np.argmax(v.shape))] == 4)
        for v in vectors
    )


def _pivot(x: Array) -> Array:
    """The first value of each channel."""
    first: Any = (0, slice(None), *(0,) * (x.ndim - 2))
    return np.asarray(x[first])


@variant("batch_norm", "numba")
def batch_norm(call: Call) -> Entry | None:
    """y, new running mean and variance, mean, rstd of x (n, c, ...)."""
    x, *vectors = call.inputs
    y, *results = call.outputs
    if not _served((x, y), (*vectors, *results)) or x.size == 0:
        return None
    scale, shift = (aligned_array(x.shape[1:2], np.float32) for _ in range(2))
    pivot = _pivot(x)
    sums = ChannelSums(x, x, pivot, call.threads, centred=True)
    apply = by_channel(SCALE_AND_SHIFT, [x], [scale, shift], y, call.threads)
    if sums.entry is None or apply is None:
        return None
    numbers = float(call.attributes["epsilon"]), float(call.attributes["momentum"])
    arrays = vectors, results, scale, shift, pivot, pivot.strides[0]
    middle = bind(_statistics, sums.words(), *numbers, *arrays)
    return sequence([sums.entry, middle, apply])


@variant("batch_norm_inference", "numba")
def batch_norm_inference(call: Call) -> Entry | None:
    """y of x (n, c, ...), gamma, beta, mean and variance."""
    (x, *vectors), (y,) = call.inputs, call.outputs
    if not _served((x, y), tuple(vectors)):
        return None
    if x.size == 0:
        return noop()
    scale, shift = aligned_array(x.shape[1:2], np.float32), aligned_array(x.shape[1:2], np.float32)
    apply = by_channel(SCALE_AND_SHIFT, [x], [scale, shift], y, call.threads)
    if apply is None:
        return None
    epsilon = float(call.attributes["epsilon"])
    first = bind(_inference, 0, x.shape[1], 0, 0, 0, epsilon, 0, vectors, scale, shift)
    return sequence([first, apply])


@variant("batch_norm_grad", "numba")
def batch_norm_grad(call: Call) -> Entry | None:
    """dx, dgamma, dbeta from dy, x, gamma, mean, rstd."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    if not _served((dy, x, dx), (gamma, mean, rstd, dgamma, dbeta)) or x.size == 0:
        return None
    a, b, d = (aligned_array(x.shape[1:2], np.float32) for _ in range(3))
    sums = ChannelSums(dy, x, mean, call.threads)
    apply = by_channel(SLOPES, [dy, x], [mean, a, b, d], dx, call.threads)
    if sums.entry is None or apply is None:
        return None
    middle = bind(_slopes, sums.words(), 0, 0, gamma, rstd, dgamma, dbeta, a, b, d)
    return sequence([sums.entry, middle, apply])


def _sums(call: Call, u: Array, v: Array, pivot: Array, centred: bool) -> Entry | None:
    (out,) = call.outputs
    if not is_float32(u, v, pivot, out) or u.size == 0:
        return None
    if out.shape[1] > 1 and out.strides[1] != 4:
        return None
    sums = ChannelSums(u, v, pivot, call.threads, centred=centred)
    if sums.entry is None:
        return None
    return sequence([sums.entry, bind(_store_sums, sums.words(), out, out.strides[0])])


@variant("batch_norm_sums", "numba")
def batch_norm_sums(call: Call) -> Entry | None:
    """The sums of x and of its squares, around its first values, by channel."""
    x, first = call.inputs
    return _sums(call, x, x, _pivot(first), True) if first.size else None


@variant("batch_norm_grad_sums", "numba")
def batch_norm_grad_sums(call: Call) -> Entry | None:
    """The sums of dy and of dy * (x - mean), by channel."""
    dy, x, mean = call.inputs
    return _sums(call, dy, x, mean, False)


@variant("batch_norm_statistics", "numba")
def batch_norm_statistics(call: Call) -> Entry | None:
    """Statistics, and the scale and shift of y, from the sums."""
    sums, first, *vectors = call.inputs
    scale, shift, *results = call.outputs
    channels = sums.shape[1]
    if not is_float32(sums, first) or not sums.flags.c_contiguous or first.size == 0:
        return None
    if not _vectors((*vectors, *call.outputs), channels):
        return None
    at = call.attributes
    pivot = _pivot(first)
    head = sums, channels, 0, 0, float(max(at["count"], 1))
    numbers = float(at["epsilon"]), float(at["momentum"])
    arrays = vectors, results, scale, shift, pivot, pivot.strides[0]
    return bind(_statistics_of_sums, *head, *numbers, *arrays)


@variant("batch_norm_slopes", "numba")
def batch_norm_slopes(call: Call) -> Entry | None:
    """dgamma, dbeta and the factors of dx, from the sums."""
    sums, gamma, rstd = call.inputs
    if not is_float32(sums) or not sums.flags.c_contiguous:
        return None
    if not _vectors((gamma, rstd, *call.outputs), sums.shape[1]):
        return None
    dgamma, dbeta, *factors = call.outputs
    head = sums, sums.shape[1], 0, 0, float(max(call.attributes["count"], 1))
    return bind(_slopes_of_sums, *head, 0, 0, gamma, rstd, dgamma, dbeta, *factors)
