"""Batch normalization, its inference form and its gradient, over dim 1 of arrays of any rank.

Each is three steps: sums by channel, a small step on the channels, and a multiply-add over the
array that the element-wise machine does. Split over samples, the three are operators of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from soapstone.native.entries import bind, native, noop, routine, sequence
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.memory import aligned_array

# Sums are of parts, in float64, or whole, in float32 (2, channels): then `parts` is 0.
_ARRAYS = (
    *("gamma", "beta", "old_mean", "old_variance"),
    *("new_mean", "new_variance", "mean", "rstd", "scale", "shift"),
)
_STATISTICS = Fields(
    f"sums channels padded parts {' '.join(_ARRAYS)} pivot pivot_step",
    reals="count epsilon momentum",
)
_INFERENCE = Fields("channels gamma beta mean variance scale shift", reals="epsilon")
_SLOPES = Fields("sums channels padded parts gamma rstd dgamma dbeta a b d", reals="count")
_STORE = Fields("sums channels padded parts to step", reals="count")
_statistics_of, _inference_of, _slopes_of, _store_of = (
    fields.at for fields in (_STATISTICS, _INFERENCE, _SLOPES, _STORE)
)


@routine
def _folded(sums: int, parts: int, channels: int, padded: int, c: int) -> tuple[float, float]:
    """The two sums of a channel over all parts, in order."""
    if parts == 0:
        whole = f32p(sums)
        return np.float64(whole[c]), np.float64(whole[channels + c])
    each = f64p(sums)
    first = second = 0.0
    for part in range(parts):
        first += each[part * padded * 2 + c]
        second += each[part * padded * 2 + padded + c]
    return first, second


@native()
def _statistics(block: Any) -> int:
    """Mean, rstd, running statistics, and the scale and shift of y, of each channel."""
    w = _statistics_of(block)
    count, epsilon, momentum = w.count, w.epsilon, w.momentum
    for c in range(w.channels):
        total, square = _folded(w.sums, w.parts, w.channels, w.padded, c)
        away = total / count
        mean = np.float64(f32p(w.pivot + c * w.pivot_step)[0]) + away
        variance = square / count - away * away
        if variance < 0.0:
            variance = 0.0
        rstd = 1.0 / np.sqrt(variance + epsilon)
        unbiased = variance * count / max(count - 1.0, 1.0)
        f32p(w.new_mean)[c] = (1.0 - momentum) * f32p(w.old_mean)[c] + momentum * mean
        f32p(w.new_variance)[c] = (1.0 - momentum) * f32p(w.old_variance)[c] + momentum * unbiased
        f32p(w.mean)[c] = mean
        f32p(w.rstd)[c] = rstd
        f32p(w.scale)[c] = f32p(w.gamma)[c] * rstd
        f32p(w.shift)[c] = f32p(w.beta)[c] - mean * rstd * f32p(w.gamma)[c]
    return 0


@native()
def _inference(block: Any) -> int:
    """The scale and shift of y from the running statistics."""
    w = _inference_of(block)
    for c in range(w.channels):
        scale = f32p(w.gamma)[c] / np.sqrt(f32p(w.variance)[c] + w.epsilon)
        f32p(w.scale)[c] = scale
        f32p(w.shift)[c] = f32p(w.beta)[c] - f32p(w.mean)[c] * scale
    return 0


@native()
def _slopes(block: Any) -> int:
    """dgamma, dbeta, and the factors of dx = a * dy + b * (x - mean) + d, of each channel."""
    w = _slopes_of(block)
    count = w.count
    for c in range(w.channels):
        total, product = _folded(w.sums, w.parts, w.channels, w.padded, c)
        rstd = np.float64(f32p(w.rstd)[c])
        scale = f32p(w.gamma)[c] * rstd
        f32p(w.dgamma)[c] = product * rstd
        f32p(w.dbeta)[c] = total
        f32p(w.a)[c] = scale
        f32p(w.b)[c] = -scale * rstd * rstd * product / count
        f32p(w.d)[c] = -scale * total / count
    return 0


@native()
def _store_sums(block: Any) -> int:
    """The sums folded into (2, channels) float32."""
    w = _store_of(block)
    for c in range(w.channels):
        total, square = _folded(w.sums, w.parts, w.channels, w.padded, c)
        f32p(w.to)[c] = total
        f32p(w.to + w.step)[c] = square
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
    arrays = (*vectors, *results, scale, shift)
    middle = _statistics_entry(call, sums.fields(), arrays, pivot)
    return sequence([sums.entry, middle, apply])


def _statistics_entry(
    call: Call, sums: dict[str, Any], arrays: Sequence[Array], pivot: Array
) -> Entry:
    """The entry of the statistics; arrays: in the order of the block's fields."""
    named = dict(zip(_ARRAYS, arrays, strict=True))
    block = _STATISTICS.pack(
        **sums,
        **named,
        pivot=pivot,
        pivot_step=pivot.strides[0],
        epsilon=call.attributes["epsilon"],
        momentum=call.attributes["momentum"],
    )
    return bind(_statistics, block)


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
    arrays = dict(zip(("gamma", "beta", "mean", "variance"), vectors, strict=True))
    block = _INFERENCE.pack(
        channels=x.shape[1],
        **arrays,
        scale=scale,
        shift=shift,
        epsilon=call.attributes["epsilon"],
    )
    return sequence([bind(_inference, block), apply])


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
    factors = {"dgamma": dgamma, "dbeta": dbeta, "a": a, "b": b, "d": d}
    block = _SLOPES.pack(**sums.fields(), gamma=gamma, rstd=rstd, **factors)
    return sequence([sums.entry, bind(_slopes, block), apply])


def _sums(call: Call, u: Array, v: Array, pivot: Array, centred: bool) -> Entry | None:
    (out,) = call.outputs
    if not is_float32(u, v, pivot, out) or u.size == 0:
        return None
    if out.shape[1] > 1 and out.strides[1] != 4:
        return None
    sums = ChannelSums(u, v, pivot, call.threads, centred=centred)
    if sums.entry is None:
        return None
    block = _STORE.pack(**sums.fields(), to=out, step=out.strides[0])
    return sequence([sums.entry, bind(_store_sums, block)])


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


def _whole(call: Call, sums: Array) -> dict[str, Any]:
    """What a block says of sums (2, channels) of all parts."""
    count = max(call.attributes["count"], 1)
    return {"sums": sums, "channels": sums.shape[1], "padded": 0, "parts": 0, "count": count}


@variant("batch_norm_statistics", "numba")
def batch_norm_statistics(call: Call) -> Entry | None:
    """Statistics, and the scale and shift of y, from the sums."""
    sums, first, *vectors = call.inputs
    scale, shift, *results = call.outputs
    if not is_float32(sums, first) or not sums.flags.c_contiguous or first.size == 0:
        return None
    if not _vectors((*vectors, *call.outputs), sums.shape[1]):
        return None
    arrays = (*vectors, *results, scale, shift)
    return _statistics_entry(call, _whole(call, sums), arrays, _pivot(first))


@variant("batch_norm_slopes", "numba")
def batch_norm_slopes(call: Call) -> Entry | None:
    """dgamma, dbeta and the factors of dx, from the sums."""
    sums, gamma, rstd = call.inputs
    if not is_float32(sums) or not sums.flags.c_contiguous:
        return None
    if not _vectors((gamma, rstd, *call.outputs), sums.shape[1]):
        return None
    made = dict(zip(("dgamma", "dbeta", "a", "b", "d"), call.outputs, strict=True))
    block = _SLOPES.pack(**_whole(call, sums), gamma=gamma, rstd=rstd, **made)
    return bind(_slopes, block)
