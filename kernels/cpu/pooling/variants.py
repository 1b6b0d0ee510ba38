"""Maximum and average pooling and their gradients along one to three axes, in any layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.dtypes import name_of
from soapstone.kernels.cpu.pooling.loops import (
    AVERAGE,
    INDEXED,
    MAX,
    PLANES,
    ROW_FLOATS,
    pool_last_grad,
    pool_plain,
    pool_plain_average_grad,
    pool_scatter,
)
from soapstone.kernels.cpu.pooling.rows import MOST_FLOATS, average_rows, max_rows
from soapstone.kernels.cpu.pooling.window_loops import (
    BLOCK,
    MOST_TAPS,
    average_last,
    indexed_last,
    max_halves,
    max_last,
    pool_any,
    pool_any_grad,
)
from soapstone.kernels.cpu.substrate.layout import is_float32, lifted
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.kernels.select import select
from soapstone.native.entries import Native, noop, sequence
from soapstone.native.lanes import LANES
from soapstone.native.memory import aligned_array
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.records import dataclass

_RANKS = (1, 2, 3)
_BY_ROW: dict[int, Native] = {MAX: max_rows, INDEXED: indexed_last, AVERAGE: average_rows}
_BY_CHANNEL: dict[int, Native] = {MAX: max_last, INDEXED: indexed_last, AVERAGE: average_last}


@dataclass(frozen=True)
class _Axis:
    """Windows along one axis."""

    size: int
    count: int
    kernel: int
    stride: int
    low: int
    dilation: int
    counted: int  # positions up to the end of the padding that averages count

    @property
    def starts(self) -> Array:
        return np.arange(self.count) * self.stride - self.low

    def table(self) -> Array:
        """The first input position of each window, and the kernel's range that is inside."""
        first = np.clip(-(self.starts // self.dilation), 0, self.kernel)
        last = np.clip(-((self.starts - self.size) // self.dilation), 0, self.kernel)
        return np.stack([self.starts, first, np.maximum(first, last)], 1).astype(np.int64)

    def shares(self, whole: bool) -> Array:
        """One over the positions that each window's average counts."""
        at = self.starts[:, None] + np.arange(self.kernel) * self.dilation
        held = (at < self.counted) if whole else (at >= 0) & (at < self.size)
        return np.asarray(1.0 / np.maximum(held.sum(axis=1), 1), np.float32)

    def holders(self) -> Array:
        """The first window that holds each position, and the one after the last; undilated."""
        at = np.arange(self.size) + self.low
        first = np.maximum(0, (at - self.kernel + self.stride) // self.stride)
        return np.stack([first, np.minimum(self.count, at // self.stride + 1)], 1).astype(np.int64)


@dataclass(frozen=True)
class _Pool:
    """A call's arrays as (n, c, d, h, w), and its windows along d h w."""

    image: Array
    pooled: Array
    index: Array | None
    axes: tuple[_Axis, ...]
    mode: int
    whole: bool  # whether averages count the padding

    @property
    def arrays(self) -> list[Array]:
        given = [self.image, self.pooled]
        return given if self.index is None else [*given, self.index]

    @property
    def last(self) -> bool:
        """Whether channels are contiguous."""
        return all(x.strides[1] == x.itemsize or x.shape[1] == 1 for x in self.arrays)

    @property
    def dense(self) -> bool:
        """Whether pixels and their channels follow each other in rows of x, and channels in y."""
        x, channels = self.image, self.image.shape[1]
        pixels = x.shape[4] == 1 or x.strides[4] == channels * x.itemsize
        return self.last and pixels and x.shape[4] * channels <= MOST_FLOATS

    @property
    def flat(self) -> bool:
        """Whether this is an image of undilated windows with contiguous rows."""
        return (
            self.axes[0] == _Axis(1, 1, 1, 1, 0, 1, 1)
            and all(axis.dilation == 1 for axis in self.axes)
            and all(x.strides[4] == x.itemsize or x.shape[4] == 1 for x in self.arrays)
        )

    def block(self) -> Any:
        """The block of the kernels of `window_loops`."""
        image, pooled, index = self.image, self.pooled, self.index
        return BLOCK.pack(
            count=pooled.shape[2:],
            channels=image.shape[1],
            x=image,
            y=pooled,
            index=0 if index is None else index,
            x_step=image.strides,
            y_step=pooled.strides,
            index_step=(0,) * 5 if index is None else index.strides,
            kernel=[axis.kernel for axis in self.axes],
            dilation=[axis.dilation for axis in self.axes],
            windows=[axis.table() for axis in self.axes],
            share=[axis.shares(self.whole) for axis in self.axes],
            mode=self.mode,
            size=image.shape[2:],
            row=image.shape[4] * image.shape[1],
        )


def _of_halves(*arrays: Array) -> bool:
    """Return whether all arrays hold aligned bfloat16."""
    return all(name_of(x.dtype) == BFLOAT16 and x.flags.aligned for x in arrays)


def _pool(call: Call, image: Array, pooled: Array, index: Array | None, mode: int) -> _Pool | None:
    """The call's problem, or None where the kernels do not serve it."""
    at = call.attributes
    halves = mode == MAX and _of_halves(image, pooled)
    if not (halves or is_float32(image, pooled)) or not 3 <= image.ndim <= 5:
        return None
    if index is not None and index.dtype != np.uint8:
        return None
    rank = image.ndim - 2
    ones, zeros = (1,) * rank, (0,) * rank
    whole = bool(at.get("include_pad", True))
    size = tuple(at.get("full_size", image.shape[2:]))
    moved = tuple(at.get("origin", zeros)) != zeros or size != image.shape[2:]
    if (mode == AVERAGE and not whole and moved) or math.prod(at["kernel"]) > MOST_TAPS:
        return None
    low, high = at["padding"][:rank], at["padding"][rank:]
    excess = at.get("excess", zeros)
    ends = (size + top - beyond for size, top, beyond in zip(image.shape[2:], high, excess))
    fields = (image.shape[2:], pooled.shape[2:], at["kernel"], at["stride"], low)
    axes = [_Axis(*map(int, numbers)) for numbers in zip(*fields, at.get("dilation", ones), ends)]
    missing = [_Axis(1, 1, 1, 1, 0, 1, 1)] * (3 - rank)
    places = None if index is None else lifted(index)
    return _Pool(lifted(image), lifted(pooled), places, (*missing, *axes), mode, whole)


def _plane_block(pool: _Pool, *, by_channel: bool) -> Any | None:
    """The block of the kernels of `loops`, or None where rows are too long."""
    down, along = pool.axes[1:]
    image, pooled, index = (
        None if a is None else a[:, :, 0] for a in (pool.image, pool.pooled, pool.index)
    )
    if image is None or pooled is None:
        return None
    space = ((along.size + along.low + along.kernel) // along.stride + 48) // 16 * 16
    too_long = space * along.stride > ROW_FLOATS or along.count > ROW_FLOATS // 2 - 16
    if not by_channel and too_long:
        return None
    first = aligned_array((along.count + 16,), np.int32, zero=True)
    first[: along.count] = np.maximum(0, -along.starts)
    offsets = np.arange(down.kernel)[:, None] * image.strides[2]
    offsets = (offsets + np.arange(along.kernel) * image.strides[3]).ravel()
    both = (down, along)
    return PLANES.pack(
        mode=pool.mode,
        kernel=[axis.kernel for axis in both],
        stride=[axis.stride for axis in both],
        low=[axis.low for axis in both],
        size=image.shape[2:],
        count=pooled.shape[2:],
        channels=image.shape[1],
        x=image,
        y=pooled,
        index=0 if index is None else index,
        x_step=image.strides,
        y_step=pooled.strides,
        index_step=(0,) * 4 if index is None else index.strides,
        share=[axis.shares(pool.whole) for axis in both],
        first=first,
        space=space,
        holders=[axis.holders() for axis in both],
        group=image.shape[1] if by_channel else 1,
        offsets=offsets,
    )


def _forward(call: Call, index: Array | None, mode: int) -> Entry | None:
    (x,), y = call.inputs, call.outputs[0]
    if y.size == 0:
        return noop()
    pool = _pool(call, x, y, index, mode)
    if pool is None or x.size == 0:
        return None
    n, c, depth, rows, columns = pool.pooled.shape
    threads = useful_threads(call.threads, 2 * x.nbytes)
    if _of_halves(x):
        if not pool.last:
            return _widened(call)
        return parallel_for(max_halves, pool.block(), n * depth * rows, threads)
    # One channel, or one column, fits both: the longer dim gives the lanes more to do.
    if pool.last and (not pool.flat or c >= columns):
        # Windows that hardly overlap along a row gain nothing from reading it in two passes.
        kernels = _BY_ROW if pool.dense and pool.axes[2].stride == 1 else _BY_CHANNEL
        return parallel_for(kernels[mode], pool.block(), n * depth * rows, threads)
    block = _plane_block(pool, by_channel=False) if pool.flat else None
    if block is not None:
        return parallel_for(pool_plain, block, n * c, threads)
    return parallel_for(pool_any, pool.block(), n * depth * rows, threads)


def _widened(call: Call) -> Entry | None:
    """The maxima of a copy in float32."""
    (x,), (y,) = call.inputs, call.outputs
    wide, made = (aligned_array(each.shape, np.float32) for each in (x, y))
    casts = ((x, wide), (made, y))
    before, after = (
        select(Call("cast", {"to": name_of(b.dtype)}, (a,), (b,), call.threads))[1]
        for a, b in casts
    )
    _, pooled = select(replace(call, inputs=(wide,), outputs=(made,)))
    return sequence([before, pooled, after])


def _backward(call: Call, index: Array | None, mode: int) -> Entry | None:
    dy, dx = call.inputs[0], call.outputs[0]
    if dx.size == 0:
        return noop()
    pool = _pool(call, dx, dy, index, mode)
    if pool is None or dy.size == 0:
        return None  # an image without windows has no gradient, which would have to be written
    n, c, _, height, _ = pool.image.shape
    threads = useful_threads(call.threads, 2 * dx.nbytes)
    by_channel = pool.last and (not pool.flat or c >= pool.pooled.shape[4])
    plane = pool.axes[0] == _Axis(1, 1, 1, 1, 0, 1, 1) and all(a.dilation == 1 for a in pool.axes)
    block = _plane_block(pool, by_channel=by_channel) if plane else None
    if block is None or not (by_channel or pool.flat):
        return parallel_for(pool_any_grad, pool.block(), n * c, threads)
    if mode != AVERAGE and (not by_channel or c < LANES):
        return parallel_for(pool_scatter, block, n if by_channel else n * c, threads)
    if not by_channel:
        return parallel_for(pool_plain_average_grad, block, n * c, threads)
    return parallel_for(pool_last_grad, block, n * height, threads)


@variant([f"max_pool{rank}d" for rank in _RANKS], "numba", expected=0.6)
def max_pool2d(call: Call) -> Entry | None:
    """The maxima of the windows and, if asked for, their positions."""
    index = call.outputs[1] if call.attributes["indices"] else None
    return _forward(call, index, MAX if index is None else INDEXED)


@variant([f"avg_pool{rank}d" for rank in _RANKS], "numba")
def avg_pool2d(call: Call) -> Entry | None:
    """The averages of the windows."""
    return _forward(call, None, AVERAGE)


@variant([f"max_pool{rank}d_grad" for rank in _RANKS], "numba")
def max_pool2d_grad(call: Call) -> Entry | None:
    """dx from dy and the positions of the maxima."""
    return _backward(call, call.inputs[1], INDEXED)


@variant([f"avg_pool{rank}d_grad" for rank in _RANKS], "numba")
def avg_pool2d_grad(call: Call) -> Entry | None:
    """dx from dy."""
    return _backward(call, None, AVERAGE)
