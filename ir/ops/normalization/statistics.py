"""Means and deviations that normalisations share, in NumPy and as graph operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from soapstone.ir.builder import Emitter
from soapstone.ir.tensor import Array


def mean(x: Array, over: Sequence[int]) -> Array:
    """Return the mean over axes, which are kept; it is zero where there is nothing to average."""
    count = max(1, math.prod(x.shape[axis] for axis in over))
    return np.asarray(x.sum(axis=tuple(over), keepdims=True) / x.dtype.type(count))


def normalised(x: Array, over: Sequence[int], epsilon: float) -> tuple[Array, Array, Array]:
    """Return x less its mean, over its deviation; the mean; and one over the deviation."""
    middle = mean(x, over)
    centred = x - middle
    rstd = 1 / np.sqrt(mean(centred * centred, over) + x.dtype.type(epsilon))
    return centred * rstd, middle, rstd


def slope(
    scaled: Array, normal: Array, rstd: Array, over: Sequence[int], centred: bool = True
) -> Array:
    """Return dx where normal = (x - mean) * rstd has gradient `scaled`; not centred: x * rstd."""
    inner = scaled - mean(scaled, over) if centred else scaled
    return np.asarray((inner - normal * mean(scaled * normal, over)) * rstd)


def emit_mean(e: Emitter, value: str, over: Sequence[int]) -> str:
    """Emit the mean over axes, which are kept; it is zero where there is nothing to average."""
    count = max(1, math.prod(e.spec(value).shape[axis] for axis in over))
    return e("affine", e("reduce_sum", value, axes=tuple(over), keepdims=True), scale=1 / count)


def emit_centred(e: Emitter, x: str, over: Sequence[int]) -> tuple[str, str, str]:
    """Emit x less its mean, the mean, and the variance."""
    middle = emit_mean(e, x, over)
    centred = e("sub", x, middle)
    return centred, middle, emit_mean(e, e("mul", centred, centred), over)


def emit_rstd(e: Emitter, variance: str, epsilon: float) -> str:
    """Emit one over the deviation."""
    return e("power", e("affine", variance, shift=epsilon), exponent=-0.5)


def emit_slope(
    e: Emitter, scaled: str, normal: str, rstd: str, over: Sequence[int], centred: bool = True
) -> str:
    """Emit what `slope` returns."""
    inner = e("sub", scaled, emit_mean(e, scaled, over)) if centred else scaled
    share = e("mul", normal, emit_mean(e, e("mul", scaled, normal), over))
    return e("mul", e("sub", inner, share), rstd)
