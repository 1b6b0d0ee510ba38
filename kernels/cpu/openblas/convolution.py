"""Convolutions along one to three axes, with their gradients, by OpenBLAS.

Images are channels-last inside: what a window sees of one tap is then a row of channels. A block of
positions is gathered into a matrix (positions, taps, channels) that stays in the cache, and
multiplied by the filters. The gradient of the input multiplies tap by tap and adds rows back to
where they came from. Operands that are not channels-last are staged through copies that are; what
is only a product of pixels is done as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import (
    add_floats,
    copy_floats,
    fill_floats,
)
from soapstone.kernels.cpu.openblas.library import attempt
from soapstone.kernels.cpu.openblas.matmul import activated
from soapstone.kernels.cpu.openblas.products import product, sgemm
from soapstone.kernels.cpu.substrate.layout import flattened, float32, lifted, private
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.kernels.select import select
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy, fill
from soapstone.native.entries import Native, native, noop, routine, sequence
from soapstone.native.intrinsics import i64p, stack
from soapstone.native.threads.parallel import parallel_for

_BLOCK_BYTES = 1 << 18  # of gathered windows: they stay in a core's cache
_MOST_POSITIONS = 1024
_FLOPS = 200_000  # that a thread must have to be worth waking


# y: what is made of x and the filters, or its gradient; x, window, count: extents of x, filters and
# y; low: padding before; channels, filters: of a group; along, across: bytes between positions and
# channels of y; buffers: the parts', of so many bytes each; rows: positions of a block, blocks:
# of an image; pieces: of an item's taps or channels; shares: of its filters.
_BLOCK = Fields(
    "parts items x weights y images size(d h w) window(d h w) count(d h w) stride(d h w) low(d h w)"
    " dilation(d h w) groups channels filters x_image x_step(d h w) y_image along across buffers"
    " bytes rows blocks pieces shares sgemm"
)
_block_of = _BLOCK.at


@routine
def _input(w: Any, position: int, tap: int) -> Any:
    """Bytes from an image's first pixel to the one that a tap sees at a position; -1: padding."""
    v = position % w.count_w * w.stride_w - w.low_w + tap % w.window_w * w.dilation_w
    position, tap = position // w.count_w, tap // w.window_w
    h = position % w.count_h * w.stride_h - w.low_h + tap % w.window_h * w.dilation_h
    position, tap = position // w.count_h, tap // w.window_h
    d = position % w.count_d * w.stride_d - w.low_d + tap % w.window_d * w.dilation_d
    if v < 0 or v >= w.size_w or h < 0 or h >= w.size_h or d < 0 or d >= w.size_d:
        return -1
    return v * w.x_step_w + h * w.x_step_h + d * w.x_step_d


@routine
def _gather(w: Any, image: int, to: int, first: int, count: int, taps: Any) -> None:
    """Put what taps see at positions, rows of channels, one after another. taps: first, end."""
    n = w.channels
    for position in range(first, first + count):
        for tap in range(taps[0], taps[1]):
            offset = _input(w, position, tap)
            if offset < 0:
                fill_floats(to, np.float32(0.0), n)
            else:
                copy_floats(to, image + offset, n)
            to += n * 4


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    taps = i64p(stack(16))
    taps[0], taps[1] = 0, w.window_d * w.window_h * w.window_w
    depth, positions = taps[1] * w.channels, w.count_d * w.count_h * w.count_w
    for part in range(begin, end):
        held = w.buffers + part * w.bytes
        for item in range(part * w.items // w.parts, (part + 1) * w.items // w.parts):
            first = item % w.blocks * w.rows
            group = item // w.blocks % w.groups
            image = item // w.blocks // w.groups
            count = min(w.rows, positions - first)
            x = w.x + image * w.x_image + group * w.channels * 4
            _gather(w, x, held, first, count, taps)
            filters = w.weights + group * w.filters * depth * 4
            y = w.y + image * w.y_image + group * w.filters * w.across + first * w.along
            if w.across == 4:
                lead = max(1, w.along // 4)
                sgemm(
                    w.sgemm, 0, 1, count, w.filters, depth, held, depth, filters, depth, 0, y, lead
                )
            else:
                lead = max(1, w.across // 4)
                sgemm(
                    w.sgemm, 0, 1, w.filters, count, depth, filters, depth, held, depth, 0, y, lead
                )
    return 0


@native("body")
def _grad_weight(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    taps = i64p(stack(16))
    window, positions = w.window_d * w.window_h * w.window_w, w.count_d * w.count_h * w.count_w
    whole = window * w.channels
    for part in range(begin, end):
        held = w.buffers + part * w.bytes
        for item in range(part * w.items // w.parts, (part + 1) * w.items // w.parts):
            piece, rest = item % w.pieces, item // w.pieces
            share, group = rest % w.shares, rest // w.shares
            taps[0], taps[1] = piece * window // w.pieces, (piece + 1) * window // w.pieces
            low, high = share * w.filters // w.shares, (share + 1) * w.filters // w.shares
            depth = (taps[1] - taps[0]) * w.channels
            to = w.weights + ((group * w.filters + low) * whole + taps[0] * w.channels) * 4
            more = 0
            for image in range(w.images):
                x = w.x + image * w.x_image + group * w.channels * 4
                y = w.y + image * w.y_image + (group * w.filters + low) * w.across
                for first in range(0, positions, w.rows):
                    count = min(w.rows, positions - first)
                    _gather(w, x, held, first, count, taps)
                    dy = y + first * w.along
                    if w.across == 4:
                        lead = max(1, w.along // 4)
                        sgemm(
                            *(w.sgemm, 1, 0, high - low, depth, count),
                            *(dy, lead, held, depth, more, to, whole),
                        )
                    else:
                        lead = max(1, w.across // 4)
                        sgemm(
                            *(w.sgemm, 0, 0, high - low, depth, count),
                            *(dy, lead, held, depth, more, to, whole),
                        )
                    more = 1
    return 0


@native("body")
def _grad_input(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    window, positions = w.window_d * w.window_h * w.window_w, w.count_d * w.count_h * w.count_w
    pixels = w.size_d * w.size_h * w.size_w
    for part in range(begin, end):
        held = w.buffers + part * w.bytes
        for item in range(part * w.items // w.parts, (part + 1) * w.items // w.parts):
            piece, rest = item % w.pieces, item // w.pieces
            group, image = rest % w.groups, rest // w.groups
            low, high = piece * w.channels // w.pieces, (piece + 1) * w.channels // w.pieces
            n = high - low
            dx = w.x + image * w.x_image + (group * w.channels + low) * 4
            for pixel in range(pixels):
                at = (
                    pixel // w.size_w // w.size_h * w.x_step_d
                    + pixel // w.size_w % w.size_h * w.x_step_h
                )
                fill_floats(dx + at + pixel % w.size_w * w.x_step_w, np.float32(0.0), n)
            for first in range(0, positions, w.rows):
                count = min(w.rows, positions - first)
                dy = w.y + image * w.y_image + group * w.filters * w.across + first * w.along
                for tap in range(window):
                    filters = (
                        w.weights + ((group * window + tap) * w.filters * w.channels + low) * 4
                    )
                    turned = 0 if w.across == 4 else 1
                    lead = max(1, (w.along if w.across == 4 else w.across) // 4)
                    sgemm(
                        *(w.sgemm, turned, 0, count, n, w.filters),
                        *(dy, lead, filters, w.channels, 0, held, n),
                    )
                    for row in range(count):
                        offset = _input(w, first + row, tap)
                        if offset >= 0:
                            add_floats(dx + offset, held + row * n * 4, n)
    return 0


@dataclass(frozen=True)
class _Problem:
    """A convolution along three axes: x (n, c, d, h, w), w (filters, c / groups, ...), y."""

    x: Array
    w: Array
    y: Array
    groups: int
    stride: tuple[int, ...]
    low: tuple[int, ...]
    dilation: tuple[int, ...]
    threads: int

    @property
    def channels(self) -> int:
        """Of a group."""
        return int(self.w.shape[1])

    @property
    def filters(self) -> int:
        """Of a group."""
        return int(self.w.shape[0]) // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.w.shape[2:])

    @property
    def positions(self) -> int:
        return math.prod(self.y.shape[2:])

    @property
    def pointwise(self) -> bool:
        """Whether this is a product over pixels."""
        same = self.x.shape[2:] == self.y.shape[2:]
        return self.taps == 1 and same and set(self.stride) == {1} and set(self.low) == {0}


def _problem(call: Call, x: Array, w: Array, y: Array) -> _Problem | None:
    """Return the problem of a call, or None where its sizes do not agree."""
    at, rank = call.attributes, x.ndim - 2
    groups, padding = int(at["groups"]), tuple(at["padding"])
    if not 1 <= rank <= 3 or w.ndim != x.ndim or y.ndim != x.ndim:
        return None
    if x.shape[1] != groups * w.shape[1] or y.shape[1] != w.shape[0] or w.shape[0] % groups:
        return None
    before = 3 - rank

    def numbers(name: str) -> tuple[int, ...]:
        return (*(1,) * before, *map(int, at[name]))

    low = (*(0,) * before, *map(int, padding[:rank]))
    stride, dilation = numbers("stride"), numbers("dilation")
    x, w, y = (lifted(array) for array in (x, w, y))
    return _Problem(x, w, y, groups, stride, low, dilation, call.threads)


def _channels_last(array: Array) -> Array:
    """Return uninitialised memory for an image whose channels lie side by side."""
    n, c, *size = array.shape
    return np.moveaxis(private(n, *size, c), -1, 1)


def _flat(y: Array) -> tuple[int, int] | None:
    """Return the bytes between positions and channels of y, or None where one is not uniform."""
    view = flattened(y, 2, 3)
    if view is None:
        return None
    # An axis of extent 1 has any stride: take the one that fits.
    _, channels, positions = view.shape
    _, across, along = view.strides
    along = across * channels if positions == 1 else along
    across = along * positions if channels == 1 and along == 4 else across
    if channels == 1 and along != 4:
        across = 4
    if across == 4 and along >= 4 * channels:
        return along, across
    if along == 4 and across >= 4 * positions:
        return along, across
    return None


def _run(
    body: Native, p: _Problem, filters: Array, items: int, row: int, pieces: tuple[int, int]
) -> Entry | None:
    """Return the entry of a kernel. row: floats that it holds of a position."""
    library, _ = attempt()
    flat = _flat(p.y)
    if library is None or flat is None:
        return None
    held = max(1, min(p.positions, _MOST_POSITIONS, max(32, _BLOCK_BYTES // 4 // row)))
    blocks = -(-p.positions // held)
    items *= blocks if body is _forward else 1
    flops = 2 * p.y.size * p.channels * p.taps
    parts = max(1, min(p.threads, items, flops // _FLOPS))
    nbytes = -(-held * row * 4 // 64) * 64
    buffers = private(parts, nbytes // 4)
    block = _BLOCK.pack(
        parts=parts,
        items=items,
        x=p.x,
        weights=filters,
        y=p.y,
        images=p.x.shape[0],
        size=p.x.shape[2:],
        window=p.w.shape[2:],
        count=p.y.shape[2:],
        stride=p.stride,
        low=p.low,
        dilation=p.dilation,
        groups=p.groups,
        channels=p.channels,
        filters=p.filters,
        x_image=p.x.strides[0],
        x_step=p.x.strides[2:],
        y_image=p.y.strides[0],
        along=flat[0],
        across=flat[1],
        buffers=buffers,
        bytes=nbytes,
        rows=held,
        blocks=blocks,
        pieces=pieces[0],
        shares=pieces[1],
        sgemm=library.sgemm,
    )
    return parallel_for(body, block, parts, parts)


def _pixels(array: Array, groups: int) -> Array | None:
    """Return an image as (n, groups, pixels, channels), or None where strides forbid it."""
    view = flattened(array, 2, 3)
    if view is None:
        return None
    n, c, positions = view.shape
    far, across, along = view.strides
    shape, steps = (n, groups, positions, c // groups), (far, across * (c // groups), along, across)
    return np.lib.stride_tricks.as_strided(view, shape, steps)


def _matrices(p: _Problem) -> Array:
    """Return the filters of a 1x1 convolution as (1, groups, channels, filters)."""
    w = p.w[:, :, 0, 0, 0]
    steps = (0, p.filters * w.strides[0], w.strides[1], w.strides[0])
    shape = (1, p.groups, p.channels, p.filters)
    return np.lib.stride_tricks.as_strided(w, shape, steps)


def _staged(array: Array) -> Array:
    """Return the image itself where its channels lie side by side, or memory for one."""
    aligned = array.strides[1] == 4 or array.shape[1] == 1
    return array if aligned and min(array.strides) > 0 else _channels_last(array)


def _dense(w: Array, order: Sequence[int], constant: bool) -> tuple[Array, Entry | None]:
    """Return the filters with their axes in an order, and the entry that puts them there."""
    turned = w.transpose(order)
    store = private(*turned.shape)
    if constant:
        store[...] = turned
        return store, noop()
    return store, copy(store, turned, 1)


def _convolved(p: _Problem, constant: bool) -> list[Entry | None]:
    """Return the entries of y = conv(x, w)."""
    if p.pointwise:
        ends = _pixels(p.x, p.groups), _pixels(p.y, p.groups)
        if ends[0] is not None and ends[1] is not None:
            return [product(ends[0], _matrices(p), ends[1], p.threads)]
    entries: list[Entry | None] = []
    x, y = _staged(p.x), p.y if _flat(p.y) else _channels_last(p.y)
    if x is not p.x:
        entries.append(copy(x, p.x, p.threads))
    filters, filled = _dense(p.w, (0, 2, 3, 4, 1), constant)
    inner = replace(p, x=x, y=y)
    items = p.x.shape[0] * p.groups
    row = p.taps * p.channels
    entries += [filled, _run(_forward, inner, filters, items, row, (1, 1))]
    if y is not p.y:
        entries.append(copy(p.y, y, p.threads))
    return entries


def _of_input(p: _Problem, constant: bool) -> list[Entry | None]:
    """Return the entries of dx, which is p.x, from the gradient of y, which is p.y."""
    if p.pointwise:
        ends = _pixels(p.y, p.groups), _pixels(p.x, p.groups)
        if ends[0] is not None and ends[1] is not None:
            return [product(ends[0], _matrices(p).swapaxes(-1, -2), ends[1], p.threads)]
    entries: list[Entry | None] = []
    x, y = _staged(p.x), p.y if _flat(p.y) else _channels_last(p.y)
    if y is not p.y:
        entries.append(copy(y, p.y, p.threads))
    grouped = p.w.reshape(p.groups, p.filters, p.channels, *p.w.shape[2:])
    filters, filled = _dense(grouped, (0, 3, 4, 5, 1, 2), constant)
    count = p.x.shape[0] * p.groups
    pieces = max(1, min(p.channels // 16, -(-p.threads // count)))
    inner = replace(p, x=x, y=y)
    entries += [filled, _run(_grad_input, inner, filters, count * pieces, p.channels, (pieces, 1))]
    if x is not p.x:
        entries.append(copy(p.x, x, p.threads))
    return entries


def _of_weight(p: _Problem) -> list[Entry | None]:
    """Return the entries of dw, which is p.w, from x and the gradient of y, which is p.y."""
    entries: list[Entry | None] = []
    x, y = _staged(p.x), p.y if _flat(p.y) else _channels_last(p.y)
    for held, given in ((x, p.x), (y, p.y)):
        if held is not given:
            entries.append(copy(held, given, p.threads))
    made = private(p.w.shape[0], *p.w.shape[2:], p.channels)
    pieces = min(p.taps, -(-p.threads // p.groups))
    shares = max(1, min(p.filters, -(-p.threads // (p.groups * pieces))))
    inner = replace(p, x=x, y=y)
    items, row = p.groups * pieces * shares, p.taps * p.channels
    entries.append(_run(_grad_weight, inner, made, items, row, (pieces, shares)))
    entries.append(copy(p.w, np.moveaxis(made, -1, 1), p.threads))
    return entries


def _each(name: str) -> tuple[str, ...]:
    return tuple(name.replace("#", str(rank)) for rank in (1, 2, 3))


def _with_bias(y: Array, bias: Array, threads: int) -> Entry | None:
    """Return the entry that adds a number a channel in place."""
    shape = (-1, *(1,) * (y.ndim - 2))
    return select(Call("add", {}, (y, bias.reshape(shape)), (y,), threads))[1]


@variant(_each("conv#d"), "openblas")
def convolution(call: Call) -> Entry | None:
    """Return the entry of y = activation(conv(x, w) + b)."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    problem = _problem(call, x, w, y)
    if problem is None or not float32(call) or len(rest) != bool(call.attributes.get("bias")):
        return None
    if y.size == 0:
        return noop()
    if 0 in (x.size, w.size):
        return None
    entries = _convolved(problem, 1 in call.constants)
    if rest:
        entries.append(_with_bias(y, rest[0], call.threads))
    entries += activated(y, call.attributes.get("activation"), call.threads)
    return sequence(entries)


@variant(_each("conv#d_grad_input"), "openblas")
def grad_input(call: Call) -> Entry | None:
    """Return the entry of dx from (dy, w)."""
    (dy, w), (dx,) = call.inputs, call.outputs
    problem = _problem(call, dx, w, dy)
    if problem is None or not float32(call):
        return None
    if dx.size == 0:
        return noop()
    if 0 in (dy.size, w.size):
        return fill(dx, 0.0, call.threads)
    return sequence(_of_input(problem, 1 in call.constants))


@variant(_each("conv#d_grad_weight"), "openblas")
def grad_weight(call: Call) -> Entry | None:
    """Return the entry of dw, and db where the attribute `bias` asks for it, from (x, dy)."""
    x, dy = call.inputs
    dw, *rest = call.outputs
    problem = _problem(call, x, dw, dy)
    if problem is None or not float32(call) or 0 in (x.size, dy.size, dw.size):
        return None
    entries = _of_weight(problem)
    if rest:
        at = {"axes": (0, *range(2, dy.ndim)), "keepdims": False}
        entries.append(select(Call("reduce_sum", at, (dy,), (rest[0],), call.threads))[1])
    return sequence(entries)


@variant(_each("conv_transpose#d"), "openblas")
def transposed(call: Call) -> Entry | None:
    """Return the entry of y = conv_transpose(x, w) + b: the gradient of a convolution's input."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    problem = _problem(call, y, w, x)
    if problem is None or not float32(call):
        return None
    if y.size == 0:
        return noop()
    empty = 0 in (x.size, w.size)
    entries = [fill(y, 0.0, call.threads)] if empty else _of_input(problem, 1 in call.constants)
    if rest:
        entries.append(_with_bias(y, rest[0], call.threads))
    return sequence(entries)
