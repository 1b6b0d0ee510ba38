"""Group and instance normalization and their gradients, plain and channels-last.

As batch normalization, but by sample: sums by channel, a small step that joins the channels of a
group, and a multiply-add over the array that the element-wise machine does.
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
from soapstone.native.blocks import Fields
from soapstone.native.entries import bind, native, routine, sequence
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.memory import aligned_array

# mean and rstd: (samples, groups); pivots, scale and shift, or means, a, b and d: (samples,
# channels); step: of x.
_SUMS = "sums channels padded parts samples groups gamma mean rstd"
_STATISTICS = Fields(
    f"{_SUMS} beta scale shift pivots x step(sample channel)", reals="count epsilon"
)
_SLOPES = Fields(f"{_SUMS} means dgamma dbeta a b d", reals="count")
_statistics_of, _slopes_of = _STATISTICS.at, _SLOPES.at


@routine
def _sum_of(w: Any, sample: int, which: int, c: int) -> float:
    total = 0.0
    for part in range(w.parts):
        total += f64p(w.sums)[((sample * w.parts + part) * 2 + which) * w.padded + c]
    return total


@native()
def _pivots(block: Any) -> int:
    """The first value of each channel of each sample."""
    w = _statistics_of(block)
    for sample in range(w.samples):
        for c in range(w.channels):
            f32p(w.pivots)[sample * w.channels + c] = f32p(
                w.x + sample * w.step_sample + c * w.step_channel
            )[0]
    return 0


@native()
def _statistics(block: Any) -> int:
    """Mean and rstd of each group, and the scale and shift of each channel of each sample."""
    w = _statistics_of(block)
    channels, count = w.channels, w.count
    inner = channels // w.groups
    for sample in range(w.samples):
        for group in range(w.groups):
            mean = 0.0
            for c in range(group * inner, (group + 1) * inner):
                pivot = np.float64(f32p(w.pivots)[sample * channels + c])
                mean += pivot + _sum_of(w, sample, 0, c) / count
            mean /= inner
            square = 0.0
            for c in range(group * inner, (group + 1) * inner):
                away = _sum_of(w, sample, 0, c) / count
                own = np.float64(f32p(w.pivots)[sample * channels + c]) + away
                within = _sum_of(w, sample, 1, c) / count - away * away
                square += max(within, 0.0) + (own - mean) * (own - mean)
            rstd = 1.0 / np.sqrt(square / inner + w.epsilon)
            f32p(w.mean)[sample * w.groups + group] = mean
            f32p(w.rstd)[sample * w.groups + group] = rstd
            for c in range(group * inner, (group + 1) * inner):
                scale = f32p(w.gamma)[c] * rstd
                f32p(w.scale)[sample * channels + c] = scale
                f32p(w.shift)[sample * channels + c] = f32p(w.beta)[c] - mean * scale
    return 0


@native()
def _means(block: Any) -> int:
    """The mean of its group for each channel of each sample."""
    w = _slopes_of(block)
    inner = w.channels // w.groups
    for sample in range(w.samples):
        for c in range(w.channels):
            f32p(w.means)[sample * w.channels + c] = f32p(w.mean)[sample * w.groups + c // inner]
    return 0


@native()
def _slopes(block: Any) -> int:
    """dgamma, dbeta, and the factors of dx = a * dy + b * (x - mean) + d."""
    w = _slopes_of(block)
    channels, count = w.channels, w.count
    inner = channels // w.groups
    for c in range(channels):
        first = second = 0.0
        for sample in range(w.samples):
            first += _sum_of(w, sample, 0, c)
            rstd = f32p(w.rstd)[sample * w.groups + c // inner]
            second += _sum_of(w, sample, 1, c) * rstd
        f32p(w.dgamma)[c] = second
        f32p(w.dbeta)[c] = first
    for sample in range(w.samples):
        for group in range(w.groups):
            rstd = np.float64(f32p(w.rstd)[sample * w.groups + group])
            p = q = 0.0
            for c in range(group * inner, (group + 1) * inner):
                gamma = np.float64(f32p(w.gamma)[c])
                p += gamma * _sum_of(w, sample, 0, c)
                q += gamma * _sum_of(w, sample, 1, c)
            total = count * inner
            for c in range(group * inner, (group + 1) * inner):
                f32p(w.a)[sample * channels + c] = f32p(w.gamma)[c] * rstd
                f32p(w.b)[sample * channels + c] = -rstd * rstd * rstd * q / total
                f32p(w.d)[sample * channels + c] = -rstd * p / total
    return 0


def _served(call: Call, images: tuple[Array, ...], vectors: tuple[Array, ...]) -> int | None:
    """The number of groups, or None where the kernels do not serve the call."""
    x = images[0]
    groups = int(call.attributes.get("num_groups", x.shape[1]))
    flat = all(v.flags.c_contiguous for v in vectors)
    if x.ndim < 3 or x.size == 0 or not flat or not is_float32(*images, *vectors):
        return None
    return groups if groups and x.shape[1] % groups == 0 else None


@variant(("group_norm", "instance_norm"), "numba", promises=True)
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
    block = _STATISTICS.pack(
        **sums.fields(),
        samples=x.shape[0],
        groups=groups,
        gamma=gamma,
        beta=beta,
        mean=mean,
        rstd=rstd,
        scale=scale,
        shift=shift,
        pivots=pivots,
        x=x,
        step=x.strides[:2],
        epsilon=call.attributes["epsilon"],
    )
    return sequence([bind(_pivots, block), sums.entry, bind(_statistics, block), apply])


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
    block = _SLOPES.pack(
        **sums.fields(),
        samples=x.shape[0],
        groups=groups,
        gamma=gamma,
        mean=mean,
        rstd=rstd,
        means=means,
        dgamma=dgamma,
        dbeta=dbeta,
        a=a,
        b=b,
        d=d,
    )
    return sequence([bind(_means, block), sums.entry, bind(_slopes, block), apply])
