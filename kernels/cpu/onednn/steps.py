"""The steps of oneDNN entries as native code: a primitive, and small ones that are no primitives.

Imported lazily: it needs Numba. The address of dnnl_primitive_execute comes from the block, not
from the code, so that compiled code can be kept on disk whichever library is loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.native.blocks import Fields
from soapstone.native.entries import native, routine
from soapstone.native.intrinsics import INT, POINTER, calling, f32p, i32p, pointer_cast, u8p

_u32p = pointer_cast("uint32")
_execute = calling(INT, POINTER, POINTER, INT, POINTER)  # dnnl_primitive_execute

# What each step reads, by its name.
FIELDS = {
    "primitive": Fields("execute primitive stream count arguments"),
    "running_statistics": Fields(
        "channels mean variance old_mean old_variance new_mean new_variance rstd",
        reals="epsilon momentum unbias",
    ),
    "reciprocal_deviation": Fields("size variance rstd", reals="epsilon"),
    "variance_of": Fields("size rstd variance"),
    "widened": Fields("byte signed target"),
    # height, width: of x; rows, columns: of y; down, right: the padding there; index: an address
    # or 0; x_step, y_step: between neighbouring pixels, 1, or `channels` when channels-last.
    "repair_maxima": Fields(
        "images channels height width rows columns kernel_height kernel_width stride_height"
        " stride_width top left x y index x_step y_step"
    ),
}
_primitive_of, _running_of, _reciprocal_of, _variance_of, _widened_of, _pool_of = (
    fields.at for fields in FIELDS.values()
)


@native()
def primitive(block: Any) -> Any:
    """Execute a primitive on its arguments; oneDNN's status."""
    w = _primitive_of(block)
    return _execute(w.execute, w.primitive, w.stream, w.count, w.arguments)


@native()
def running_statistics(block: Any) -> Any:
    """Batch statistics (biased variance) to running ones and rstd; unbias: count / (count - 1)."""
    w = _running_of(block)
    mean, variance, rstd = f32p(w.mean), f32p(w.variance), f32p(w.rstd)
    old_mean, old_variance = f32p(w.old_mean), f32p(w.old_variance)
    new_mean, new_variance = f32p(w.new_mean), f32p(w.new_variance)
    epsilon, momentum, unbias = w.epsilon, w.momentum, w.unbias
    for c in range(w.channels):
        new_mean[c] = (1 - momentum) * old_mean[c] + momentum * mean[c]
        new_variance[c] = (1 - momentum) * old_variance[c] + momentum * unbias * variance[c]
        rstd[c] = 1 / np.sqrt(variance[c] + epsilon)
    return 0


@native()
def reciprocal_deviation(block: Any) -> Any:
    """1 / sqrt(variance + epsilon)."""
    w = _reciprocal_of(block)
    variance, rstd, epsilon = f32p(w.variance), f32p(w.rstd), w.epsilon
    for i in range(w.size):
        rstd[i] = 1 / np.sqrt(variance[i] + epsilon)
    return 0


@native()
def variance_of(block: Any) -> Any:
    """1 / rstd², the variance with epsilon inside."""
    w = _variance_of(block)
    rstd, variance = f32p(w.rstd), f32p(w.variance)
    for i in range(w.size):
        variance[i] = 1 / (np.float64(rstd[i]) * rstd[i])
    return 0


@native()
def widened(block: Any) -> Any:
    """A byte as a number of 32 bits."""
    w = _widened_of(block)
    value = np.int32(u8p(w.byte)[0])
    i32p(w.target)[0] = value - 256 if w.signed != 0 and value > 127 else value
    return 0


@routine
def _pool_plane(w: Any, x_at: Any, y_at: Any) -> None:
    """Pool one channel of one image again, NaN winning; see `repair_maxima`."""
    x, y = f32p(w.x), f32p(w.y)
    for row in range(w.rows):
        for column in range(w.columns):
            best, where = np.float32(-np.inf), -1
            for i in range(w.kernel_height):
                down = row * w.stride_height + i - w.top
                if down < 0 or down >= w.height:
                    continue
                for j in range(w.kernel_width):
                    right = column * w.stride_width + j - w.left
                    if right < 0 or right >= w.width:
                        continue
                    value = x[x_at + (down * w.width + right) * w.x_step]
                    if where < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                        best, where = value, i * w.kernel_width + j
            to = y_at + (row * w.columns + column) * w.y_step
            y[to] = best
            if w.index != 0:
                u8p(w.index)[to] = where


@native()
def repair_maxima(block: Any) -> Any:
    """Pool again where oneDNN's maxima are not ours: it skips NaN, and calls -inf -3.4e38.

    Nothing is done when x is finite, as it is in every step but a diverging one. All is dense.
    """
    w = _pool_of(block)
    x_plane, y_plane = w.height * w.width, w.rows * w.columns
    bits = _u32p(w.x)
    suspect = np.uint32(0)
    for i in range(w.images * w.channels * x_plane):
        suspect |= np.uint32((bits[i] & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000))
    if suspect == 0:
        return 0
    for image in range(w.images):
        for channel in range(w.channels):
            if w.x_step == 1:
                plane = image * w.channels + channel
                _pool_plane(w, plane * x_plane, plane * y_plane)
            else:
                first = image * w.channels
                _pool_plane(w, first * x_plane + channel, first * y_plane + channel)
    return 0
