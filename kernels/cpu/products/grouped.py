"""Convolutions of many small groups of channels, those of one channel each among them.

A group of four or eight channels fills a part of a vector. Here a vector is sixteen filters, of one
group or several: each channel of x goes to the lanes of its group's filters. Of sixteen channels
the rows that a window reaches are kept side by side, with what is padded, so that what follows
reads neither bounds nor distant lines; each is put there once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.products.conv_epilogue import ConvEpilogue, conv_epilogue
from soapstone.kernels.cpu.products.grouped_lanes import FEW, PIXELS, STRIDES, block
from soapstone.kernels.cpu.substrate.layout import is_float32, overlaps
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import Native, helper, native, sequence
from soapstone.native.intrinsics import stack, words
from soapstone.native.memory import aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.simd import load, load_first, splat, store, store_first
from soapstone.native.threads.parallel import parallel_for

_LANES = 16
_ROOM = 65536  # bytes of the rows that are kept
_TIGHT = 24576  # of them, of several blocks of channels: they stay in the nearest cache
_MOST_WIDE = 4  # blocks of channels that are taken together
_MOST_ROWS = 15  # of a window
_SHARES = 8  # of each thread: they end together
_KINDS = {1: (3, 5, 7), 4: (3,), 8: (3,), 16: (3,)}  # columns of windows, by channels of a group

# blocks: of sixteen channels; wide: so many are taken together; pieces: of the rows of an image;
# width: pixels of a row that is kept; bias: padded to whole blocks.
_GROUPED = Fields(
    "images channels blocks wide pieces x x_step(n h w) x_size(h w) y y_step(n h w) y_size(h w)"
    " rows stride(h w) low(h w) width weights weight_step bias",
    reals="least most",
)
_grouped_of = _GROUPED.at


@helper
def _put(source: int, step: int, target: int, pixels: int, count: int) -> None:
    """Copy the first `count` channels of pixels that are `step` bytes apart, and zeros after."""
    if count >= 16:
        for i in range(pixels):
            store(target, i * 16, load(source + i * step, 0))
    else:
        for i in range(pixels):
            store(target, i * 16, load_first(source + i * step, 0, count))


@helper
def _clear(place: int, pixels: int) -> None:
    for i in range(pixels):
        store(place, i * 16, splat(0.0))


def _body(group: int, window: int) -> Native:
    """Return the loop over blocks of channels and pieces of rows, for one kind of window."""
    form = block(group, window)

    @native("body")
    def grouped(given: Any, begin: int, end: int) -> int:
        w = _grouped_of(given)
        kept, table, some = stack(65536), stack(128), stack(1024)
        line, several = w.width * 64, (w.blocks + w.wide - 1) // w.wide
        ring = line * w.rows
        nothing = kept + ring * w.wide
        _clear(nothing, w.width)
        places = words(table)
        for item in range(begin, end):
            piece, rest = item % w.pieces, item // w.pieces
            image, first = rest // several, rest % several * w.wide
            count = min(w.wide, w.blocks - first)
            x = w.x + image * w.x_step_n + first * 64
            y = w.y + image * w.y_step_n + first * 64
            for number in range(count * w.rows):
                _clear(kept + number * line, w.low_w)
                right = w.low_w + w.x_size_w
                _clear(kept + number * line + right * 64, w.width - right)
            there = 0  # rows of x before this one were put where they belong
            for i in range(piece * w.y_size_h // w.pieces, (piece + 1) * w.y_size_h // w.pieces):
                top = i * w.stride_h - w.low_h
                for row in range(max(there, top), min(top + w.rows, w.x_size_h)):
                    for number in range(count):
                        _put(
                            x + row * w.x_step_h + number * 64,
                            w.x_step_w,
                            kept + number * ring + row % w.rows * line + w.low_w * 64,
                            w.x_size_w,
                            w.channels - (first + number) * 16,
                        )
                there = max(there, top + w.rows)
                for number in range(count):
                    for k in range(w.rows):
                        row = top + k
                        inside = row >= 0 and row < w.x_size_h
                        places[k] = nothing
                        if inside:
                            places[k] = kept + number * ring + row % w.rows * line
                    channels = w.channels - (first + number) * 16
                    weights = w.weights + (first + number) * w.weight_step
                    bias = w.bias + (first + number) * 64
                    j = 0
                    while j < w.y_size_w:
                        pixels = w.y_size_w - j
                        for size in PIXELS:
                            if pixels >= size:
                                pixels = size
                                break
                        to = y + i * w.y_step_h + j * w.y_step_w + number * 64
                        target, step = to, w.y_step_w
                        if channels < 16:
                            target, step = some, 64
                        form(
                            pixels,
                            w.stride_w,
                            table,
                            w.rows,
                            j * w.stride_w * 64,
                            weights,
                            bias,
                            w.least,
                            w.most,
                            target,
                            step,
                        )
                        if channels < 16:
                            for p in range(pixels):
                                store_first(to + p * w.y_step_w, 0, load(some, p * 16), channels)
                        j += pixels
        return 0

    return grouped


_BODIES = {
    (group, window): _body(group, window) for group, windows in _KINDS.items() for window in windows
}


def _weights(w: Array) -> Array:
    """Return the weights (filters, group, h, w) as (blocks, h, group, w, 16), padded with zeros."""
    filters, group, *window = w.shape
    made = np.zeros((-(-filters // _LANES) * _LANES, group, *window), np.float32)
    made[:filters] = w
    split = made.reshape(-1, _LANES, group, *window)
    store = aligned_array(tuple(split.shape[k] for k in (0, 3, 2, 4, 1)), np.float32)
    store[...] = split.transpose(0, 3, 2, 4, 1)
    return store


def bind(call: Call, epilogue: ConvEpilogue) -> Entry | None:
    """Return the entry of epilogue(conv2d(x, w) + b), or None where unserved."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    at, images = call.attributes, (x, y)
    if 1 not in call.constants or len(rest) != bool(at.get("bias", False)):
        return None
    if not is_float32(x, w, y, *rest) or 0 in (x.size, w.size, y.size) or overlaps(y):
        return None
    filters, group, rows, window = w.shape
    if (group, window) not in _BODIES or filters != x.shape[1] or filters != group * at["groups"]:
        return None
    if filters == group or any(array.strides[1] != 4 for array in images):
        return None
    top, left, *_ = at["padding"]
    stride, (height, width) = tuple(at["stride"]), y.shape[2:]
    if min(at["padding"]) < 0 or tuple(at["dilation"]) != (1, 1) or stride[1] not in STRIDES:
        return None
    if epilogue.added is not None or rows > _MOST_ROWS:
        return None
    across = max((width - 1) * stride[1] + window, left + x.shape[3])
    line, blocks = across * 64, -(-filters // _LANES)
    wide = max(1, min(_MOST_WIDE, blocks, (_TIGHT // line - 1) // rows))
    if (wide * rows + 1) * line > _ROOM:
        return None
    entries = []
    bias = aligned_array((blocks * _LANES,), np.float32, zero=True)
    if rest:
        entries.append(copy(bias[:filters], rest[0], 1))
    weights = packed(w, ("grouped",), lambda w: _weights(held(w)))
    shares = x.shape[0] * -(-blocks // wide)
    pieces = max(1, min(height // (2 * rows), -(-_SHARES * call.threads // shares)))
    given = _GROUPED.pack(
        images=x.shape[0],
        channels=filters,
        blocks=blocks,
        wide=wide,
        pieces=pieces,
        x=x,
        x_step=(x.strides[0], *x.strides[2:]),
        x_size=x.shape[2:],
        y=y,
        y_step=(y.strides[0], *y.strides[2:]),
        y_size=(height, width),
        rows=rows,
        stride=stride,
        low=(top, left),
        width=across,
        weights=weights,
        weight_step=weights.strides[0],
        bias=bias,
        least=epilogue.low,
        most=epilogue.high,
    )
    entries.append(parallel_for(_BODIES[group, window], given, shares * pieces, call.threads))
    return sequence([each for each in entries if each is not None])


def _expected(call: Call) -> float:
    """Return what is expected: oneDNN is as fast where it fills vectors of sixteen lanes.

    And where it makes few results.
    """
    at = call.inner.attributes
    kind = call.inputs[1].shape[1::2]
    strided = max(at.get("stride", (1,))) > 1
    as_fast = (1, 3) if strided else None if FEW else (_LANES, 3)
    return 1.1 if kind == as_fast else 0.7


@variant(("conv2d", "with_epilogue"), "grouped", expected=_expected, promises=True)
def grouped(call: Call) -> Entry | None:
    """Return the entry of a convolution of small groups, with what follows it."""
    found = conv_epilogue(call)
    if found is None or found[0].operator != "conv2d":
        return None
    return bind(*found)
