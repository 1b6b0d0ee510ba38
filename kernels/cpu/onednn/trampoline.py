"""The native loop that runs an entry's steps, and the small steps that are no primitives.

Imported lazily: it needs Numba.

The address of dnnl_primitive_execute comes from the block, not from the code, so that the compiled
loop can be cached on disk whichever library is loaded.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from soapstone.cache.compiled import cfunc


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _execute(
    typing: Any, function: Any, primitive: Any, stream: Any, count: Any, arguments: Any
) -> Any:
    """`status = function(primitive, stream, count, arguments)`, all given as integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(word, [pointer, pointer, word, pointer])
        address, primitive, stream, count, arguments = values
        return builder.call(
            builder.inttoptr(address, kind.as_pointer()),
            [
                builder.inttoptr(primitive, pointer),
                builder.inttoptr(stream, pointer),
                builder.trunc(count, word),
                builder.inttoptr(arguments, pointer),
            ],
        )

    long = types.int64
    return types.int32(long, long, long, long, long), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _call(typing: Any, function: Any, block: Any) -> Any:
    """`status = function(block)`, both given as integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer]).as_pointer()
        return builder.call(
            builder.inttoptr(values[0], kind), [builder.inttoptr(values[1], pointer)]
        )

    return types.int32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _pointer(typing: Any, address: Any) -> Any:
    """A pointer to the address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(error_model="numpy", forceinline=True)  # type: ignore[untyped-decorator, unused-ignore]
def _floats(address: Any, size: Any) -> Any:
    return carray(_pointer(address), (size,), np.float32)


def execute(block: Any) -> Any:
    """Run a Program's steps in order; return the first non-zero status."""
    head = carray(block, (3,), np.int64)
    words = carray(block, (3 + 3 * head[2],), np.int64)
    for index in range(head[2]):
        base = 3 + 3 * index
        if words[base] == 0:
            status = _call(words[base + 1], words[base + 2])
        else:
            status = _execute(head[0], words[base], head[1], words[base + 1], words[base + 2])
        if status != 0:
            return status
    return 0


def running_statistics(block: Any) -> Any:
    """Batch statistics to running ones and rstd.

    Words: channels; mean, variance (biased), old mean, old variance, new mean, new variance, rstd;
    epsilon, momentum, count / (count - 1).
    """
    words = carray(block, (11,), np.int64)
    reals = carray(block, (11,), np.float64)
    channels = words[0]
    mean, variance = _floats(words[1], channels), _floats(words[2], channels)
    old_mean, old_variance = _floats(words[3], channels), _floats(words[4], channels)
    new_mean, new_variance = _floats(words[5], channels), _floats(words[6], channels)
    rstd = _floats(words[7], channels)
    epsilon, momentum, unbias = reals[8], reals[9], reals[10]
    for c in range(channels):
        new_mean[c] = (1 - momentum) * old_mean[c] + momentum * mean[c]
        new_variance[c] = (1 - momentum) * old_variance[c] + momentum * unbias * variance[c]
        rstd[c] = 1 / np.sqrt(variance[c] + epsilon)
    return 0


def reciprocal_deviation(block: Any) -> Any:
    """1 / sqrt(variance + epsilon). Words: size, variance, rstd, epsilon."""
    words = carray(block, (4,), np.int64)
    epsilon = carray(block, (4,), np.float64)[3]
    variance, rstd = _floats(words[1], words[0]), _floats(words[2], words[0])
    for i in range(words[0]):
        rstd[i] = 1 / np.sqrt(variance[i] + epsilon)
    return 0


def variance_of(block: Any) -> Any:
    """1 / rstd², the variance with epsilon inside. Words: size, rstd, variance."""
    words = carray(block, (3,), np.int64)
    rstd, variance = _floats(words[1], words[0]), _floats(words[2], words[0])
    for i in range(words[0]):
        variance[i] = 1 / (np.float64(rstd[i]) * rstd[i])
    return 0


@njit(error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _pool_plane(words: Any, x: Any, y: Any, index: Any, x_at: Any, y_at: Any) -> None:
    """Pool one channel of one image again, NaN winning; see `repair_maxima`."""
    height, width, rows, columns = words[2], words[3], words[4], words[5]
    step_x, step_y = words[15], words[16]
    for row in range(rows):
        for column in range(columns):
            best, where = np.float32(-np.inf), -1
            for i in range(words[6]):
                down = row * words[8] + i - words[10]
                if down < 0 or down >= height:
                    continue
                for j in range(words[7]):
                    right = column * words[9] + j - words[11]
                    if right < 0 or right >= width:
                        continue
                    value = x[x_at + (down * width + right) * step_x]
                    if where < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                        best, where = value, i * words[7] + j
            to = y_at + (row * columns + column) * step_y
            y[to] = best
            if words[14] != 0:
                index[to] = where


def repair_maxima(block: Any) -> Any:
    """Pool again where oneDNN's maxima are not ours: it skips NaN, and calls -inf -3.4e38.

    Nothing is done when x is finite, as it is in every step but a diverging one. Words: n, c; h, w
    of x; h, w of y; kernel; stride; top, left padding; addresses of x, y, index (or 0), all dense;
    the distance between neighbouring pixels of x and of y: 1, or c when channels-last.
    """
    words = carray(block, (17,), np.int64)
    images, channels = words[0], words[1]
    x_plane, y_plane = words[2] * words[3], words[4] * words[5]
    x_size, y_size = images * channels * x_plane, images * channels * y_plane
    bits = carray(_pointer(words[12]), (x_size,), np.uint32)
    suspect = np.uint32(0)
    for i in range(x_size):
        suspect |= np.uint32((bits[i] & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000))
    if suspect == 0:
        return 0
    x, y = _floats(words[12], x_size), _floats(words[13], y_size)
    index = carray(_pointer(words[14]), (y_size,), np.uint8)
    for image in range(images):
        for channel in range(channels):
            if words[15] == 1:
                plane = image * channels + channel
                _pool_plane(words, x, y, index, plane * x_plane, plane * y_plane)
            else:
                first = image * channels
                x_at, y_at = first * x_plane + channel, first * y_plane + channel
                _pool_plane(words, x, y, index, x_at, y_at)
    return 0


_FUNCTIONS = {
    f.__name__: f
    for f in (execute, running_statistics, reciprocal_deviation, variance_of, repair_maxima)
}
_COMPILING = threading.Lock()


@cache
def _compiled(name: str) -> Any:
    return cfunc("int32(voidptr)", error_model="numpy")(_FUNCTIONS[name])


def compiled(name: str) -> Any:
    """Return the function `name` of this module as a compiled C callback."""
    with _COMPILING:  # two workers may bind their first entries at once
        return _compiled(name)
