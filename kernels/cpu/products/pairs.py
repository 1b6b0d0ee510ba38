"""Products of bytes where no instruction adds four of them, but one adds two of 16 bits.

Bytes are widened to 16 bits, less their zero, as the windows of a block of positions are put side
by side in memory that stays in the cache. Sums are exact, whatever the weights, and take half of
the instructions that those of float32 take. What follows them is done to the sums of a block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import fill_floats
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.products.byte_epilogue import PRODUCTS, ByteEpilogue, product_epilogue
from soapstone.kernels.cpu.products.pairs_lanes import (
    KINDS,
    ROWS,
    STEP,
    finish,
    has_pairs,
    products,
    wide_products,
    widen,
)
from soapstone.kernels.cpu.substrate.layout import (
    along,
    channels_last,
    flattened,
    lifted,
    rows,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import native, noop, routine, sequence
from soapstone.native.intrinsics import i16p, i32p, stack, u8p
from soapstone.native.memory import aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for
from soapstone.records import dataclass

_LANES = 16
_BLOCK_BYTES = 1 << 18  # of widened windows: they stay in a core's cache
_MOST_POSITIONS = 96
_CHUNK = 1024  # numbers of the depth at a time: their weights stay in the nearest cache
_MACS = 200_000  # that a thread must have to be worth waking
_SHARES = 4  # of each thread: they end together

# x, window, count: extents of x, weights and y; low: padding before; whole: whether positions are
# their own windows, side by side; line: bytes of a widened window; columns: of y, in panels of 16;
# shares: of the panels; blocks: of `rows` positions of an image; flip: see `widen`; wide: whether
# the zero is of 32 bits; w_size, y_size, added_size: bytes of an element; kind: of y; second: see
# `finish`.
_PAIRS = Fields(
    "parts items x x_image size(d h w) x_step(d h w) window(d h w) count(d h w) stride(d h w)"
    " low(d h w) dilation(d h w) channels whole depth line weights w_size panels columns scale bias"
    " zero wide flip buffers bytes rows blocks shares y y_image along kind y_size numbers second"
    " added added_image added_along added_size"
)
_pairs_of = _PAIRS.at


@routine
def _gather(w: Any, image: int, zero: int, first: int, count: int, to: int) -> None:
    """Widen what windows see at positions, rows of `depth` numbers, one after another."""
    if w.whole:
        widen(image + first * w.channels, count * w.channels, w.flip, zero, to)
        return
    n = w.channels
    for position in range(first, first + count):
        at = to + (position - first) * w.line
        for number in range(w.channels * w.window_d * w.window_h * w.window_w, w.depth):
            i16p(at)[number] = 0
        v = position % w.count_w * w.stride_w - w.low_w
        h = position // w.count_w % w.count_h * w.stride_h - w.low_h
        d = position // w.count_w // w.count_h * w.stride_d - w.low_d
        inside = v >= 0 and v + w.window_w <= w.size_w
        together = inside and w.dilation_w == 1 and w.x_step_w == n
        for i in range(w.window_d):
            for j in range(w.window_h):
                z, y = d + i * w.dilation_d, h + j * w.dilation_h
                seen = z >= 0 and z < w.size_d and y >= 0 and y < w.size_h
                source = image + z * w.x_step_d + y * w.x_step_h + v * w.x_step_w
                if seen and together:
                    widen(source, n * w.window_w, w.flip, zero, at)
                    at += n * w.window_w * 2
                    continue
                for k in range(w.window_w):
                    x = v + k * w.dilation_w
                    if seen and x >= 0 and x < w.size_w:
                        widen(source + k * w.dilation_w * w.x_step_w, n, w.flip, zero, at)
                    else:
                        fill_floats(at, np.float32(0.0), n // 2)
                        if n % 2:
                            i16p(at)[n - 1] = 0
                    at += n * 2


@routine
def _copy_bytes(to: int, source: int, count: int) -> None:
    for k in range(count):
        u8p(to)[k] = u8p(source)[k]


@routine
def _sums(w: Any, x: int, weights: int, start: int, count: int, to: int) -> None:
    """Add the products of a chunk of the depth, from `start`, to sums (count, 16)."""
    depth, kept, row = min(_CHUNK, w.depth - start), -(start > 0), 0
    while row < count:
        several = 1
        for number in ROWS:
            if number <= count - row:
                several = number
                break
        place = x + row * w.line
        if w.w_size == 1:
            products(several, place, w.line, depth, weights, kept, to + row * 64)
        else:
            wide_products(several, place, w.line, depth, weights, kept, to + row * 64)
        row += several


@native("body")
def _pairs(block: Any, begin: int, end: int) -> int:
    w = _pairs_of(block)
    sums, made, more = stack(8192), stack(8192), stack(8192)
    zero = np.int64(u8p(w.zero)[0]) ^ w.flip
    if w.wide:
        zero = np.int64(i32p(w.zero)[0]) + w.flip
    positions = w.count_d * w.count_h * w.count_w
    for part in range(begin, end):
        kept, before = w.buffers + part * w.bytes, -1
        for item in range(part * w.items // w.parts, (part + 1) * w.items // w.parts):
            share, rest = item % w.shares, item // w.shares
            image, first = rest // w.blocks, rest % w.blocks * w.rows
            count = min(w.rows, positions - first)
            if rest != before:
                _gather(w, w.x + image * w.x_image, zero, first, count, kept)
                before = rest
            for panel in range(share * w.panels // w.shares, (share + 1) * w.panels // w.shares):
                columns = min(_LANES, w.columns - panel * _LANES)
                weights = w.weights + panel * w.depth * _LANES * w.w_size
                for start in range(0, w.depth, _CHUNK):
                    _sums(
                        w, kept + 2 * start, weights + start * _LANES * w.w_size, start, count, sums
                    )
                to = w.y + image * w.y_image + first * w.along + panel * _LANES * w.y_size
                added = w.added + image * w.added_image + first * w.added_along
                added += panel * _LANES * w.added_size
                target, step, source, reach = to, w.along, added, w.added_along
                if columns < _LANES:
                    target, step, source, reach = made, 64, more, 64
                    for k in range(count):
                        near = added + k * w.added_along
                        _copy_bytes(more + k * 64, near, columns * w.added_size)
                finish(
                    count,
                    sums,
                    w.scale + panel * 64,
                    w.bias + panel * 64,
                    w.numbers,
                    w.second,
                    source,
                    reach,
                    w.kind,
                    target,
                    step,
                )
                if columns < _LANES:
                    for k in range(count):
                        _copy_bytes(to + k * w.along, made + k * 64, columns * w.y_size)
    return 0


def _weights(w: Array, zero: int) -> Array:
    """Return weights (columns, depth) less their zero in panels, (panels, depth / 2, 16, 2).

    They stay bytes where nothing is subtracted.
    """
    dtype = np.int16 if zero else np.int8
    columns, depth = w.shape
    panels, pairs = -(-columns // _LANES), -(-depth // STEP) * STEP // 2
    whole = np.zeros((panels * _LANES, pairs * 2), dtype)
    whole[:columns, :depth] = w
    whole[:columns, :depth] -= dtype(zero)
    made = aligned_array((panels, pairs, _LANES, 2), dtype)
    made[...] = whole.reshape(panels, _LANES, pairs, 2).swapaxes(1, 2)
    return made


def _filled(vector: Array | None, columns: int, other: float) -> tuple[Array, Entry | None]:
    """Return a vector filled up to whole panels, and the entry that puts it there."""
    made = aligned_array((-(-columns // _LANES) * _LANES,), np.float32)
    made[...] = other
    return made, noop() if vector is None else copy(made[:columns], vector, 1)


@dataclass(frozen=True)
class _Problem:
    """Images (n, c, d, h, w) of a product, and the windows by which x is read."""

    x: Array
    y: Array
    added: Array | None
    window: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1, 1)
    low: tuple[int, ...] = (0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)

    @property
    def pointwise(self) -> bool:
        """Whether a position's window is the position."""
        ones = set(self.window) | set(self.stride) == {1}
        return ones and self.x.shape[2:] == self.y.shape[2:] and not any(self.low)


def _bound(p: _Problem, call: Call, weights: Array, end: ByteEpilogue) -> Entry | None:
    """Return the entry of a product; weights: as `_weights` packs them."""
    _, _, zero, *vectors = call.inputs
    x, y, entries = p.x, p.y, list[Entry | None]()
    if (x.shape[1] > 1 and x.strides[1] != 1) or min(x.strides) < 0:
        x = channels_last(p.x)
        entries.append(copy(x, p.x, call.threads))
    if along(y) is None:
        y = channels_last(p.y)
    added = () if p.added is None else (p.added,)
    alongs = [along(image) for image in (y, *added)]
    if None in alongs:
        return None
    columns, channels = y.shape[1], x.shape[1]
    scale, of_scale = _filled(vectors[0] if vectors else None, columns, 1.0)
    bias, of_bias = _filled(vectors[1] if len(vectors) > 1 else None, columns, 0.0)
    entries += [of_scale, of_bias]
    depth, positions = weights.shape[1] * 2, math.prod(y.shape[2:])
    line, most = depth * 2, ROWS[0]
    block = max(most, min(_MOST_POSITIONS, _BLOCK_BYTES // line) // most * most)
    block = min(block, positions)
    items = x.shape[0] * -(-positions // block)
    threads = max(1, min(call.threads, y.size * depth // _MACS))
    wanted = _SHARES * threads if threads > 1 else 1
    shares = max(1, min(len(weights), -(-wanted // items)))
    parts = min(items * shares, wanted)
    nbytes = -(-block * line // 64) * 64
    view = flattened(x, 2, 3)
    whole = p.pointwise and channels == depth and view is not None and view.strides[2] == channels
    given = _PAIRS.pack(
        parts=parts,
        items=items * shares,
        x=x,
        x_image=x.strides[0],
        size=x.shape[2:],
        x_step=x.strides[2:],
        window=p.window,
        count=y.shape[2:],
        stride=p.stride,
        low=p.low,
        dilation=p.dilation,
        channels=channels,
        whole=whole,
        depth=depth,
        line=line,
        weights=weights,
        w_size=weights.itemsize,
        panels=len(weights),
        columns=columns,
        scale=scale,
        bias=bias,
        zero=zero,
        wide=zero.dtype == np.int32,
        flip=128 if x.dtype == np.int8 else 0,
        buffers=aligned_array((parts, nbytes), np.uint8),
        bytes=nbytes,
        rows=block,
        blocks=-(-positions // block),
        shares=shares,
        y=y,
        y_image=y.strides[0],
        along=alongs[0],
        kind=KINDS[y.dtype.name],
        y_size=y.itemsize,
        numbers=end.numbers,
        second=end.kind,
        added=added[0] if added else 0,
        added_image=added[0].strides[0] if added else 0,
        added_along=alongs[1] if added else 0,
        added_size=added[0].itemsize if added else 0,
    )
    entries.append(parallel_for(_pairs, given, parts, threads))
    if y is not p.y:
        entries.append(copy(p.y, y, call.threads))
    return sequence(entries)


def _conv(call: Call, end: ByteEpilogue) -> Entry | None:
    """Return the entry of a convolution of one group."""
    (x, w, *_), (y,), at = call.inputs, call.outputs, call.attributes
    filters, channels, *window = w.shape
    rank, before = len(window), (1,) * (3 - len(window))
    low = tuple(at["padding"][:rank])
    if at["groups"] != 1 or min(at["padding"]) < 0 or channels != x.shape[1]:
        return None
    p = _Problem(
        *(lifted(x), lifted(y), None if end.added is None else lifted(end.added)),
        *((*before, *window), (*before, *at["stride"]), (*(0,) * len(before), *low)),
        (*before, *at["dilation"]),
    )

    def make(w: Array) -> Array:
        return _weights(np.moveaxis(held(w), 1, -1).reshape(filters, -1), 0)

    return _bound(p, call, packed(w, ("pairs",), make), end)


def _linear(call: Call, end: ByteEpilogue) -> Entry | None:
    """Return the entry of x's rows times w: of an image whose positions are rows."""
    (x, w, *_), (y,) = call.inputs, call.outputs
    zero = call.attributes.get("w_zero", 0)

    def image(array: Array) -> Array | None:
        matrix = rows(array) if array.ndim > 1 else array[None]
        return None if matrix is None else matrix.T[None, :, None, None]

    entries, x_image, y_image = list[Entry | None](), image(x), image(y)
    if x_image is None:
        dense = aligned_array(x.shape, x.dtype)
        entries.append(copy(dense, x, call.threads))
        x_image = image(dense)
    added = None if end.added is None else image(end.added)
    if x_image is None or y_image is None or (added is None) != (end.added is None):
        return None
    weights = packed(w, ("pairs", zero), lambda w: _weights(held(w).T, zero))
    p = _Problem(x_image, y_image, added, (1, 1, 1))
    return sequence([*entries, _bound(p, call, weights, end)])


def pairs(call: Call) -> Entry | None:
    """Return the entry of a product of bytes with constant weights, and of what follows it."""
    first, end = call.inner, product_epilogue(call, KINDS)
    if end is None or end.third.rounds:
        return None
    if first.outputs[0].size == 0:
        return noop()
    if 0 in (first.inputs[0].size, first.inputs[1].size):
        return None
    return (_linear if first.operator == "quantized_linear" else _conv)(first, end)


# Without oneDNN nothing pools bytes. Of several groups sums are short, and fill no vectors: those
# stay in float32.
_runs = has_pairs() and onednn.available() and not onednn.multiplies_bytes()
variant((*PRODUCTS, "with_epilogue"), "pairs", expected=0.9, promises=True, runs=_runs)(pairs)
