"""Group and instance normalization and their gradients, plain and channels-last.

As batch normalization, but by sample: sums by channel, a small step that joins the channels of a
group, and a multiply-add over the array that the elementwise machine does.
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
from soapstone.native.entries import bind, native, routine, sequence
from soapstone.native.intrinsics import as_float, f32p, f64p, words
from soapstone.native.memory import aligned_array

# Words: 0 sums, 1 channels, 2 padded channels, 3 parts, 4 elements of a channel, 5 epsilon,
# 6 samples, 7 groups, 8 gamma, 9 beta, 10 x, 11-12 its strides of samples and channels, 13 mean and
# 14 rstd (samples, groups), 15-17 arrays (samples, channels): scale and shift, or a, b and d;
# 18 pivots (samples, channels), 19 dgamma, 20 dbeta.


@routine
def _sum_of(w: Any, sample: int, which: int, c: int) -> float:
    total = 0.0
    for part in range(w[3]):
        total += f64p(w[0])[((sample * w[3] + part) * 2 + which) * w[2] + c]
    return total


@native()
def _pivots(block: Any) -> int:
    """The first value of each channel of each sample."""
    w = words(block)
    for sample in range(w[6]):
        for c in range(w[1]):
            f32p(w[18])[sample * w[1] + c] = f32p(w[10] + sample * w[11] + c * w[12])[0]
    return 0


@native()
def _statistics(block: Any) -> int:
    """Mean and rstd of each group, and the scale and shift of each channel of each sample."""
    w = words(block)
    channels, count = w[1], as_float(w[4])
    inner = channels // w[7]
    for sample in range(w[6]):
        for group in range(w[7]):
            mean = 0.0
            for c in range(group * inner, (group + 1) * inner):
                pivot = np.float64(f32p(w[18])[sample * channels + c])
                mean += pivot + _sum_of(w, sample, 0, c) / count
            mean /= inner
            square = 0.0
            for c in range(group * inner, (group + 1) * inner):
                away = _sum_of(w, sample, 0, c) / count
                own = np.float64(f32p(w[18])[sample * channels + c]) + away
                within = _sum_of(w, sample, 1, c) / count - away * away
                square += max(within, 0.0) + (own - mean) * (own - mean)
            rstd = 1.0 / np.sqrt(square / inner + as_float(w[5]))
            f32p(w[13])[sample * w[7] + group] = mean
            f32p(w[14])[sample * w[7] + group] = rstd
            for c in range(group * inner, (group + 1) * inner):
                scale = f32p(w[8])[c] * rstd
                f32p(w[15])[sample * channels + c] = scale
                f32p(w[16])[sample * channels + c] = f32p(w[9])[c] - mean * scale
    return 0


@native()
def _means(block: Any) -> int:
    """The mean of its group for each channel of each sample."""
    w = words(block)
    inner = w[1] // w[7]
    for sample in range(w[6]):
        for c in range(w[1]):
            f32p(w[18])[sample * w[1] + c] = f32p(w[13])[sample * w[7] + c // inner]
    return 0


@native()
def _slopes(block: Any) -> int:
    """dgamma, dbeta, and the factors of dx = a * dy + b * (x - mean) + d."""
    w = words(block)
    channels, count = w[1], as_float(w[4])
    inner = channels // w[7]
    for c in range(channels):
        first = second = 0.0
        for sample in range(w[6]):
            first += _sum_of(w, sample, 0, c)
            rstd = f32p(w[14])[sample * w[7] + c // inner]
            second += _sum_of(w, sample, 1, c) * rstd
        f32p(w[19])[c] = second
        f32p(w[20])[c] = first
    for sample in range(w[6]):
        for group in range(w[7]):
            rstd = np.float64(f32p(w[14])[sample * w[7] + group])
            p = q = 0.0
            for c in range(group * inner, (group + 1) * inner):
                gamma = np.float64(f32p(w[8])[c])
                p += gamma * _sum_of(w, sample, 0, c)
                q += gamma * _sum_of(w, sample, 1, c)
            total = count * inner
            for c in range(group * inner, (group + 1) * inner):
                f32p(w[15])[sample * channels + c] = f32p(w[8])[c] * rstd
                f32p(w[16])[sample * channels + c] = -rstd * rstd * rstd * q / total
                f32p(w[17])[sample * channels + c] = -rstd * p / total
    return 0


def _served(call: Call, images: tuple[Array, ...], vectors: tuple[Array, ...]) -> int | None:
    """The number of groups, or None where the kernels do not serve the call."""
    x = images[0]
    groups = int(call.attributes.get("num_groups", x.shape[1]))
    flat = all(v.flags.c_contiguous for v in vectors)
    if x.ndim < 3 or x.size == 0 or not flat or not is_float32(*images, *vectors):
        return None
    return groups if groups and x.shape[1] % groups == 0 else None


@variant(("group_norm", "instance_norm"), "numba")
def group_norm(call: Call) -> Entry | None:
    """y, mean and rstd of x (n, c, ...)."""
    x, gamma, beta = call.inputs
    y, mean, rstd = call.outputs
    groups = _served(call, (x, y), (gamma, beta, mean, rstd))
    if groups is None:
        return None
    scale, shift, pivots = (aligned_array(x.shape[:2], np.float32) for _ in range(3))
    sums = ChannelSums(x, x, pivots, call.threads, centred=True)
    apply = by_channel(SCALE_AND_SHIFT, [x], [scale, shift], y, call.threads)
    if sums.entry is None or apply is None:
        return None
    given = float(call.attributes["epsilon"]), x.shape[0], groups, gamma, beta, x, x.strides[:2]
    block = *sums.words(), *given, mean, rstd, scale, shift, 0, pivots
    return sequence([bind(_pivots, *block), sums.entry, bind(_statistics, *block), apply])


@variant(("group_norm_grad", "instance_norm_grad"), "numba")
def group_norm_grad(call: Call) -> Entry | None:
    """dx, dgamma and dbeta from dy, x, gamma, mean and rstd."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    groups = _served(call, (x, dy, dx), (gamma, mean, rstd, dgamma, dbeta))
    if groups is None:
        return None
    a, b, d, means = (aligned_array(x.shape[:2], np.float32) for _ in range(4))
    sums = ChannelSums(dy, x, means, call.threads)
    apply = by_channel(SLOPES, [dy, x], [means, a, b, d], dx, call.threads)
    if sums.entry is None or apply is None:
        return None
    given = 0, x.shape[0], groups, gamma, 0, x, x.strides[:2]
    block = *sums.words(), *given, mean, rstd, a, b, d, means, dgamma, dbeta
    return sequence([bind(_means, *block), sums.entry, bind(_slopes, *block), apply])
