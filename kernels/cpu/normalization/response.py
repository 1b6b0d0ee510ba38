"""Local response normalization and its gradient: a row of positions, or of channels, at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.mathematics import power
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.intrinsics import f32p, stack
from soapstone.native.moves import row_at, row_offset
from soapstone.native.simd import load, splat, store, vectorised, vsqrt
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import merge

# A window reaches from `low` channels before to `high` after. first, count: of the channels made;
# step: along channels; offset: of dy in x; given: channels of dy; share: alpha / size. Then the
# walk of the positions, of `rank` dims, in x, dy and the output. By rows of positions, its last
# extent is a run, no longer a dim of the items.
_BLOCK = Fields(
    "channels first count low high step(x dy y) offset given x dy y rank", reals="share beta bias"
)
_block_of, _table_of = _BLOCK.at, _BLOCK.table
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
    for k in range(max(0, c - w.low), min(w.channels, c + w.high + 1)):
        v = np.float64(f32p(x + k * w.step_x)[0])
        total += v * v
    return w.bias + w.share * total


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
    w, table = _block_of(block), _table_of(block)
    rank, low, size = w.rank, w.low, w.low + w.high + 1
    share, beta, bias = splat(w.share), w.beta, splat(w.bias)
    squares = stack(16384)
    channels = w.channels
    for i in range(low + channels + w.high + 16):
        f32p(squares)[i] = 0.0
    for item in range(begin, end):
        x = w.x + row_at(table, rank, 0, item)
        y = w.y + row_at(table, rank, 2, item)
        for c in range(0, channels, 16):
            mask = first_lanes(channels - c)
            v = load_where(x, c, mask)
            store_where(squares, low + c, v * v, mask)
        for c in range(0, w.count, 16):
            mask = first_lanes(w.count - c)
            total = splat(0.0)
            for k in range(size):
                total += load(squares, w.first + c + k)
            v = load_where(x, w.first + c, mask)
            store_where(y, c, v * _powers(bias + share * total, beta), mask)
    return 0


@native("body")
def _by_position(block: Any, begin: int, end: int) -> int:
    """Items: runs of positions. Lanes: positions, which are contiguous; channels go by."""
    w, table = _block_of(block), _table_of(block)
    rank, low, size = w.rank - 1, w.low, w.low + w.high + 1
    share, beta, bias = splat(w.share), w.beta, splat(w.bias)
    squares = stack(262144)
    channels, run = w.channels, table[rank]
    for i in range(low):
        store(squares, 16 * i, splat(0.0))
    for i in range(w.high):
        store(squares, 16 * (low + channels + i), splat(0.0))
    wide = rank + 1
    for item in range(begin, end):
        x = w.x + row_offset(table, wide, rank, item)
        y = w.y + row_offset(table, 3 * wide, rank, item)
        for p in range(0, run, 16):
            mask = first_lanes(run - p)
            for c in range(channels):
                v = load_where(x + c * w.step_x, p, mask)
                store(squares, 16 * (low + c), v * v)
            for c in range(w.count):
                total = splat(0.0)
                for k in range(size):
                    total += load(squares, 16 * (w.first + c + k))
                v = load_where(x + (w.first + c) * w.step_x, p, mask)
                store_where(y + c * w.step_y, p, v * _powers(bias + share * total, beta), mask)
    return 0


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w, table = _block_of(block), _table_of(block)
    rank, beta = w.rank, w.beta
    for item in range(begin, end):
        x = w.x + row_at(table, rank, 0, item)
        y = w.y + row_at(table, rank, 2, item)
        # A running sum would drift; windows are short.
        for c in range(w.count):
            at = w.first + c
            scale = _scale(w, x, at)
            f32p(y + c * w.step_y)[0] = f32p(x + at * w.step_x)[0] * _power(scale, beta)
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    w, table = _block_of(block), _table_of(block)
    rank, beta = w.rank, w.beta
    for item in range(begin, end):
        x = w.x + row_at(table, rank, 0, item)
        dy = w.dy + row_at(table, rank, 1, item)
        dx = w.y + row_at(table, rank, 2, item)
        for c in range(w.count):
            at = w.first + c
            inner = own = 0.0
            for k in range(max(w.offset, at - w.high), min(w.offset + w.given, at + w.low + 1)):
                scale = _scale(w, x, k)
                g = f32p(dy + (k - w.offset) * w.step_dy)[0] * _power(scale, beta)
                inner += g * f32p(x + k * w.step_x)[0] / scale
                if k == at:
                    own = g
            factor = 2.0 * w.share * beta * f32p(x + at * w.step_x)[0]
            f32p(dx + c * w.step_y)[0] = own - factor * inner
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
    block = _BLOCK.pack(
        *(extents, strides),
        channels=x.shape[1],
        first=first,
        count=count,
        low=(size - 1) // 2,
        high=size // 2,
        step=(x.strides[1], dy.strides[1], out.strides[1]),
        offset=at.get("offset", 0),
        given=dy.shape[1],
        x=x,
        dy=dy,
        y=out,
        rank=len(extents),
        share=float(at["alpha"]) / size,
        beta=at["beta"],
        bias=at["bias"],
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
