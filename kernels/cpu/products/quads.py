"""Products of bytes where one instruction adds four of them, of rows with constant weights.

Rows are those of a matrix, or the positions of an image that a 1x1 window sees. A panel of weights
stays in the nearest cache while the rows of a block pass, six at a time; meanwhile the next panel
is asked for: in a network weights come from far away, for which oneDNN's products wait.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.cache.environment import features
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.products.byte_epilogue import (
    PRODUCTS,
    ByteEpilogue,
    Part,
    product_epilogue,
)
from soapstone.kernels.cpu.products.quads_lanes import (
    PANEL,
    RESULTS,
    ROWS,
    finish,
    form,
    has_quads,
    products,
)
from soapstone.kernels.cpu.substrate.layout import along, channels_last, lifted, rows
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import Native, native, noop, sequence
from soapstone.native.intrinsics import i32p, stack, u8p
from soapstone.native.memory import aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for

_BLOCK_BYTES = 1 << 18  # of rows of x: they stay in a core's cache
_LEAST_DEPTH = 1024  # that a block is sized for: results take room, too
_FEW = 192  # rows of a thread, below which threads share panels instead
_MACS = 400_000  # that a thread must have to be worth waking

# parts: one a thread, of the items: each is a block of an image's rows by a share of the panels.
# line, along, added_along: bytes from a row of x, of y and of what is added to the next. flip: what
# makes a byte one without a sign, 0 or 128; wide: whether the zero is of 32 bits.
_QUADS = Fields(
    "parts items blocks shares rows x x_image line depth flip zero wide weights totals panels scale"
    " bias numbers how y y_image along y_size added added_image added_along added_size"
)
_quads_of = _QUADS.at


def _over_items() -> Native:
    """Return the loop over items, where the processor has the instructions of `products`."""

    @native("body")
    def quads(block: Any, begin: int, end: int) -> int:
        w = _quads_of(block)
        sums = stack(1536)  # (ROWS, PANEL) of 32 bits
        zero = np.int64(u8p(w.zero)[0]) ^ w.flip
        if w.wide:
            zero = np.int64(i32p(w.zero)[0]) + w.flip
        size = w.depth * PANEL
        for item in range(begin * w.items // w.parts, end * w.items // w.parts):
            share, rest = item % w.shares, item // w.shares
            image, number = rest // w.blocks, rest % w.blocks
            first = number * w.rows // w.blocks
            count = (number + 1) * w.rows // w.blocks - first
            tiles = (count + ROWS - 1) // ROWS
            pace = (4 * PANEL + tiles - 1) // tiles
            last = (share + 1) * w.panels // w.shares - 1
            for panel in range(share * w.panels // w.shares, last + 1):
                column = panel * PANEL
                weights, later = w.weights + panel * size, w.weights + min(panel + 1, last) * size
                for tile in range(tiles):
                    row = first + tile * count // tiles
                    several = first + (tile + 1) * count // tiles - row
                    products(
                        several,
                        w.x + image * w.x_image + row * w.line,
                        w.line,
                        w.depth,
                        w.flip,
                        weights,
                        w.totals + column * 4,
                        zero,
                        sums,
                        later + tile * (size // tiles),
                        pace,
                    )
                    finish(
                        several,
                        sums,
                        w.scale + column * 4,
                        w.bias + column * 4,
                        w.numbers,
                        w.how,
                        w.added
                        + image * w.added_image
                        + row * w.added_along
                        + column * w.added_size,
                        w.added_along,
                        w.y + image * w.y_image + row * w.along + column * w.y_size,
                        w.along,
                    )
        return 0

    return quads


_LOOP = _over_items() if has_quads() else None


def _weights(w: Array) -> Array:
    """Return weights (columns, depth) in panels (panels, depth / 4, PANEL, 4), then their sums."""
    columns, depth = w.shape
    made = aligned_array((w.size + 4 * columns,), np.int8)
    laid = made[: w.size].reshape(-1, depth // 4, PANEL, 4)
    laid[...] = w.reshape(-1, PANEL, depth // 4, 4).swapaxes(1, 2)
    made[w.size :].view(np.int32)[:] = w.sum(1, dtype=np.int32)
    return made


def _cut(images: int, count: int, panels: int, depth: int, threads: int) -> tuple[int, int]:
    """Return into how many blocks the rows of an image are cut, and panels into how many shares.

    Threads share the panels where there are few rows and as many for each: a weight is read once.
    """
    blocks = -(-count * max(depth, _LEAST_DEPTH) // _BLOCK_BYTES)
    if images % threads == 0:
        return blocks, 1
    if count >= threads * _FEW or panels % threads:
        return min(count, -(-blocks // threads) * threads), 1
    return blocks, threads


def _numbers(end: ByteEpilogue) -> Array | None:
    """Return `quads_lanes.NUMBERS`, or None where an epilogue is more than these hold."""
    first, second, third = end.first, end.second or Part(), end.third
    rise, start, last = first.rise, first.start, first if end.second is None else third
    rise_2, start_2 = second.rise * third.rise, second.start * third.rise + third.start
    if end.second is not None and not first.rounds:
        if first.bounded:
            return None
        rise, start = rise * rise_2, start * rise_2 + start_2
    real = end.last or Part()
    if real.bounded:
        return None
    ends = rise_2, start_2, third.rise, real.rise, real.start, last.low, last.high, end.zero
    return np.array([rise, start, first.low, first.high, *ends], np.float32)


def _bound(
    call: Call,
    x: Array,
    y: Array,
    weights: Array,
    columns: int,
    end: ByteEpilogue,
    added: Array | None,
) -> Entry | None:
    """Return the entry of a product of images (n, c, d, h, w); weights: as `_weights` packs them.

    columns: of the weights. added: to results, as an image.
    """
    _, _, zero, *given = call.inputs
    depth, entries, result = x.shape[1], list[Entry | None](), y
    numbers, reach = _numbers(end), 0 if added is None else along(added)
    made = "rounded" if end.third.rounds else y.dtype.name
    vectors = [held(v) if 3 + n in call.constants else v for n, v in enumerate(given)]
    if _LOOP is None or numbers is None or reach is None or any(v.strides != (4,) for v in vectors):
        return None
    if along(x) is None:
        dense = channels_last(x)
        entries.append(copy(dense, x, call.threads))
        x = dense
    if along(y) is None:
        result = channels_last(y)
    scale = vectors[0] if vectors else np.ones(columns, np.float32)
    bias = vectors[1] if len(vectors) > 1 else np.zeros(columns, np.float32)
    panels, count = columns // PANEL, math.prod(y.shape[2:])
    threads = max(1, min(call.threads, y.size * depth // _MACS))
    blocks, shares = _cut(len(x), count, panels, depth, threads)
    items = len(x) * blocks * shares
    kind = "none" if added is None else added.dtype.name
    block = _QUADS.pack(
        parts=min(items, threads),
        items=items,
        blocks=blocks,
        shares=shares,
        rows=count,
        x=x,
        x_image=x.strides[0],
        line=along(x),
        depth=depth,
        flip=128 if x.dtype == np.int8 else 0,
        zero=zero,
        wide=zero.dtype == np.int32,
        weights=weights,
        totals=weights[columns * depth :],
        panels=panels,
        scale=scale,
        bias=bias,
        numbers=numbers,
        how=form(end.first.rounds, kind, made),
        y=result,
        y_image=result.strides[0],
        along=along(result),
        y_size=y.itemsize,
        added=0 if added is None else added,
        added_image=0 if added is None else added.strides[0],
        added_along=reach,
        added_size=0 if added is None else added.itemsize,
    )
    entries.append(parallel_for(_LOOP, block, min(items, threads), threads))
    if result is not y:
        entries.append(copy(y, result, call.threads))
    return sequence(entries)


def _conv(call: Call, end: ByteEpilogue) -> Entry | None:
    """Return the entry of a convolution by windows of one position, in one group."""
    (x, w, *_), (y,), at = call.inputs, call.outputs, call.attributes
    filters, depth, *window = w.shape
    if at["groups"] != 1 or {*window, 1} != {1} or any(at["padding"]) or depth != x.shape[1]:
        return None

    def make(w: Array) -> Array:
        return _weights(held(w).reshape(filters, depth))

    x = x[(slice(None), slice(None), *(slice(None, None, step) for step in at["stride"]))]
    added = None if end.added is None else lifted(end.added)
    weights = packed(w, ("quads",), make)
    return _bound(call, lifted(x), lifted(y), weights, filters, end, added)


def _image(array: Array) -> Array | None:
    """Return rows as an image whose positions they are, or None where strides forbid it."""
    matrix = rows(array) if array.ndim > 1 else array[None]
    return None if matrix is None else matrix.T[None, :, None, None]


def _linear(call: Call, end: ByteEpilogue) -> Entry | None:
    """Return the entry of x's rows times w."""
    (x, w, *_), (y,) = call.inputs, call.outputs
    x_image, y_image = _image(x), _image(y)
    added = None if end.added is None else _image(end.added)
    if x_image is None or y_image is None or (added is None) != (end.added is None):
        return None
    if call.attributes.get("w_zero", 0):
        return None
    weights = packed(w, ("quads",), lambda w: _weights(held(w).T))
    return _bound(call, x_image, y_image, weights, w.shape[1], end, added)


def quads(call: Call) -> Entry | None:
    """Return the entry of a product of bytes with constant weights, and of what follows it."""
    first, end = call.inner, product_epilogue(call, RESULTS)
    if end is None:
        return None
    if first.outputs[0].size == 0:
        return noop()
    x, w, *_ = first.inputs
    linear = first.operator == "quantized_linear"
    columns, depth = w.shape[::-1] if linear else w.shape[:2]
    if columns % PANEL or depth % 4 or 0 in (x.size, w.size):
        return None
    return (_linear if linear else _conv)(first, end)


def _expected(call: Call) -> float:
    """Return what is expected: less than of oneDNN where that was measured."""
    x, w, *_ = call.inner.inputs
    return 0.9 if x.size >= 24 * w.shape[w.ndim > 2] and "sse4a" in features() else 1.1


# Without oneDNN nothing pools bytes.
_runs = _LOOP is not None and onednn.available() and onednn.multiplies_bytes()
variant((*PRODUCTS, "with_epilogue"), "quads", expected=_expected, promises=True, runs=_runs)(quads)
