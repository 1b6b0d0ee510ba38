"""The range of an array as the scale and zero of bytes: one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.rowmath import load_wide, splat_wide
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, routine, sequence
from soapstone.native.intrinsics import f32p, u8p
from soapstone.native.memory import aligned_array
from soapstone.native.simd import choose, load_first, max_lanes, min_lanes, splat, vmax
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order

_PART = 16_384  # floats: 64 KB
# partials: the least and the greatest value of each part.
_RANGE = Fields("x size parts partials scale zero")
_range_of = _RANGE.at


@routine
def _range(to: int, x: int, n: int) -> None:
    """Write the least and the greatest of n floats and 0; the greatest is NaN if one is."""
    low, high = splat_wide(0.0), splat_wide(0.0)
    full = n & -64
    for i in range(0, full, 64):
        values = load_wide(x, i)
        low = choose(values < low, values, low)
        high = vmax(high, values)
    least, most = splat(min_lanes(low)), splat(max_lanes(high))
    for i in range(full, n, 16):
        values = load_first(x, i, n - i)
        least = choose(values < least, values, least)
        most = vmax(most, values)
    f32p(to)[0] = min_lanes(least)
    f32p(to)[1] = max_lanes(most)


@native("body")
def _extremes(block: Any, begin: int, end: int) -> int:
    w = _range_of(block)
    for part in range(begin, end):
        first = part * _PART
        _range(w.partials + part * 8, w.x + first * 4, min(_PART, w.size - first))
    return 0


@native()
def _scaled(block: Any) -> int:
    w = _range_of(block)
    low, high, partials = np.float32(0), np.float32(0), f32p(w.partials)
    for part in range(w.parts):
        least, most = partials[2 * part], partials[2 * part + 1]
        low = min(low, least)
        if most > high or most != most:
            high = most
    scale = (high - low) / np.float32(255) if high > low else np.float32(1)
    f32p(w.scale)[0] = scale
    u8p(w.zero)[0] = np.uint8(np.rint(min(max(-low / scale, np.float32(0)), np.float32(255))))
    return 0


@variant("byte_scale", "numba")
def byte_scale(call: Call) -> Entry | None:
    """The entry of both, of an array whose elements follow each other in any order of axes."""
    (x,), (scale, zero) = call.inputs, call.outputs
    if not is_float32(x, scale) or zero.dtype != np.uint8:
        return None
    if not x.transpose(memory_order(x.strides)).flags.c_contiguous:
        return None
    parts = -(-x.size // _PART)
    partials = aligned_array((2 * max(parts, 1),), np.float32)
    block = _RANGE.pack(x=x, size=x.size, parts=parts, partials=partials, scale=scale, zero=zero)
    count = useful_threads(call.threads, x.nbytes // 2)
    return sequence([parallel_for(_extremes, block, parts, count), Entry(_scaled.address, block)])
