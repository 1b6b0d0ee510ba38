"""Maximum and average pooling and their gradients, plain and channels-last."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.lanes import LANES
from soapstone.kernels.cpu.layout import is_float32
from soapstone.kernels.cpu.native import Native, noop, pack, parallel_for, useful_threads
from soapstone.kernels.cpu.pooling_kernels import (
    AVERAGE,
    INDEXED,
    MAX,
    ROW_FLOATS,
    pool_last,
    pool_last_grad,
    pool_plain,
    pool_plain_average_grad,
    pool_scatter,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant


def _shares(count: int, kernel: int, stride: int, low: int, size: int, whole: bool) -> Array:
    """One over the number of elements that each window counts along one dim."""
    start = np.arange(count) * stride - low
    inside = np.minimum(start + kernel, size) - np.maximum(start, 0)
    return (1.0 / (np.full(count, kernel) if whole else np.maximum(inside, 1))).astype(np.float32)


def _holders(size: int, kernel: int, stride: int, low: int, count: int) -> Array:
    """The first window that holds each position along one dim, and the one after the last."""
    at = np.arange(size) + low
    first = np.maximum(0, (at - kernel + stride) // stride)
    return np.stack([first, np.minimum(count, at // stride + 1)], 1).astype(np.int64)


def _bind(
    call: Call,
    image: Array,
    pooled: Array,
    index: Array | None,
    mode: int,
    channel_kernel: Native,
    plain_kernel: Native,
) -> Entry | None:
    """The entry of the kernel that suits the layout of the arrays."""
    a = call.attributes
    (kh, kw), (sh, sw) = a["kernel"], a["stride"]
    top, left = a["padding"][:2]
    n, c, h, w = image.shape
    oh, ow = pooled.shape[2:]
    if not is_float32(image, pooled) or kh * kw > 256:
        return None
    if index is not None and index.dtype != np.uint8:
        return None
    whole = bool(a.get("include_pad", True))
    moved = a.get("origin", (0, 0)) != (0, 0) or a.get("full_size", (h, w)) != (h, w)
    if mode == AVERAGE and not whole and moved:
        return None
    if image.size == 0 or pooled.size == 0:
        # An image without windows has no gradient, which would have to be written.
        return noop() if call.outputs[0].size == 0 else None
    arrays = [image, pooled] if index is None else [image, pooled, index]
    last = all(x.strides[1] == x.itemsize or c == 1 for x in arrays)
    plain = all(x.strides[3] == x.itemsize or x.shape[3] == 1 for x in arrays)
    # One channel, or one column, fits both: the longer dim gives the lanes more to do.
    by_channel = last and (not plain or c >= ow)
    space = ((w + left + kw) // sw + 48) // 16 * 16
    if not by_channel and (not plain or space * sw > ROW_FLOATS or ow > ROW_FLOATS // 2 - 16):
        return None
    rows = _shares(oh, kh, sh, top, h, whole)
    columns = _shares(ow, kw, sw, left, w, whole)
    first = np.zeros(ow + 16, np.int32)
    first[:ow] = np.maximum(0, left - np.arange(ow) * sw)
    gradient = call.operator.endswith("_grad")
    scatter = gradient and mode != AVERAGE and (not by_channel or c < LANES)
    channels = c if by_channel else 1
    offsets = (np.arange(kh)[:, None] * image.strides[2] + np.arange(kw) * image.strides[3]).ravel()
    words: list[Any] = [mode, kh, kw, sh, sw, top, left, h, w, oh, ow, c, image, pooled]
    block = pack(
        words,
        0 if index is None else index,
        image.strides,
        pooled.strides,
        (0, 0, 0, 0) if index is None else index.strides,
        (rows, columns, first, space),
        (_holders(h, kh, sh, top, oh), _holders(w, kw, sw, left, ow)),
        (channels, offsets),
    )
    threads = useful_threads(call.threads, 2 * image.nbytes)
    if scatter:
        return parallel_for(pool_scatter, block, n * c // channels, threads)
    if not by_channel:
        return parallel_for(plain_kernel, block, n * c, threads)
    return parallel_for(channel_kernel, block, n * (h if gradient else oh), threads)


@variant("max_pool2d", "numba")
def max_pool2d(call: Call) -> Entry | None:
    """The maxima of the windows and, if asked for, their positions."""
    index = call.outputs[1] if call.attributes["indices"] else None
    mode = MAX if index is None else INDEXED
    return _bind(call, call.inputs[0], call.outputs[0], index, mode, pool_last, pool_plain)


@variant("avg_pool2d", "numba")
def avg_pool2d(call: Call) -> Entry | None:
    """The averages of the windows."""
    return _bind(call, call.inputs[0], call.outputs[0], None, AVERAGE, pool_last, pool_plain)


@variant("max_pool2d_grad", "numba")
def max_pool2d_grad(call: Call) -> Entry | None:
    """dx from dy and the positions of the maxima."""
    dy, index = call.inputs
    return _bind(call, call.outputs[0], dy, index, INDEXED, pool_last_grad, pool_scatter)


@variant("avg_pool2d_grad", "numba")
def avg_pool2d_grad(call: Call) -> Entry | None:
    """dx from dy."""
    dx, (dy,) = call.outputs[0], call.inputs
    return _bind(call, dx, dy, None, AVERAGE, pool_last_grad, pool_plain_average_grad)
