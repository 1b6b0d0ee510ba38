"""The range of an array as the scale and zero of bytes: one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.runs import MAX, MIN, reduce_run
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, sequence
from soapstone.native.intrinsics import f32p, f64p, stack, u8p
from soapstone.native.memory import aligned_array
from soapstone.native.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order

_PART = 16_384  # floats: 64 KB
_STRETCH = 2048  # floats that are still in the first cache when they are looked at again
# partials: the least and the greatest value of each part.
_RANGE = Fields("x size parts partials scale zero")
_range_of = _RANGE.at


@native("body")
def _extremes(block: Any, begin: int, end: int) -> int:
    w = _range_of(block)
    low, high, out = stack(512), stack(512), f64p(w.partials)
    least, most = f64p(low), f64p(high)
    for part in range(begin, end):
        for i in range(64):
            least[i] = 0.0
            most[i] = 0.0
        first, last = part * _PART, min((part + 1) * _PART, w.size)
        while first < last:
            n = min(_STRETCH, last - first)
            reduce_run(MIN, low, w.x + first * 4, n)
            reduce_run(MAX, high, w.x + first * 4, n)
            first += n
        for i in range(1, 64):
            least[0] = min(least[0], least[i])
            most[0] = max(most[0], most[i])
        out[2 * part] = least[0]
        out[2 * part + 1] = most[0]
    return 0


@native()
def _scaled(block: Any) -> int:
    w = _range_of(block)
    partials = f64p(w.partials)
    low, high = np.float32(0), np.float32(0)
    for part in range(w.parts):
        low = min(low, np.float32(partials[2 * part]))
        high = max(high, np.float32(partials[2 * part + 1]))
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
    partials = aligned_array((2 * max(parts, 1),), np.float64, zero=True)
    block = _RANGE.pack(x=x, size=x.size, parts=parts, partials=partials, scale=scale, zero=zero)
    count = useful_threads(call.threads, 2 * x.nbytes)
    return sequence([parallel_for(_extremes, block, parts, count), Entry(_scaled.address, block)])
