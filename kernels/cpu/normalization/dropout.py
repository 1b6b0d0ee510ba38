"""Dropout whose draw depends on the seed, the step and the place in the whole tensor alone.

Nothing is stored: the gradient draws the same bits again. Each element's number is the row-major
one of the whole tensor, whatever the layout and the tile; where rows of the first axis have a step
each, that of its row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.ir.ops.normalization.dropout import INDEX, MASK, MIX_1, MIX_2, SEED, STEP
from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.spans import span, span_at, span_step, spans, turned
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import native, noop, sequence
from soapstone.native.intrinsics import i64p
from soapstone.native.lanes import F32, I64, LANES, Lanes, where
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads

# SplitMix64's finaliser on a weighted sum, as in `ir.ops.normalization.dropout.random_bits`.
_MIX_1, _MIX_2 = MIX_1 - 2**64, MIX_2 - 2**64


@vectorised
def _drop(
    to: Lanes, x: Lanes, n: Lanes, start: Lanes, step: Lanes, threshold: Lanes, scale: Lanes
) -> None:
    """Write n elements; their weighted sums are start, start + step, …"""
    builder, factor = n.builder, scale.cast(F32)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        iota = Lanes(builder, ir.Constant(ir.VectorType(I64, width), list(range(width))))
        z = iota * step + (start + i * step)
        z = (z ^ (z >> 30)) * _MIX_1
        z = (z ^ (z >> 27)) * _MIX_2
        kept = ((z ^ (z >> 31)) >> 32) >= threshold
        put(to, i, where(kept, get(x, i, width, mask) * factor, 0.0), mask)

    loop(builder, n, body, 2 * LANES)


# Weighted sums are constant + step * step_weight + index * index_weight; step: an address, to which
# the last table of spans leads from row to row.
_BLOCK = Fields("spans x y step constant step_weight index_weight threshold", reals="scale")
_block_of = _BLOCK.at


@native("body")
def _dropout(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    t = w.spans
    weight, threshold, scale = w.index_weight, w.threshold, w.scale
    stride = span_step(t, 4, 2)
    for item in range(begin, end):
        row, stop, column, n = span(t, item)
        while row < stop:
            x = w.x + span_at(t, 0, row) + column * 4
            y = w.y + span_at(t, 1, row) + column * 4
            index = span_at(t, 2, row) + column * stride
            base = w.constant + i64p(w.step + span_at(t, 3, row))[0] * w.step_weight
            _drop(y, x, n, base + index * weight, stride * weight, threshold, scale)
            row += 1
    return 0


@variant("dropout", "numba")
def dropout(call: Call) -> Entry | None:
    """x scaled by 1 / (1 - rate), or 0 where the draw says so."""
    (x, step), (y,) = call.inputs, call.outputs
    if not is_float32(x, y) or step.dtype != np.int64:
        return None
    if y.size == 0:
        return noop()
    if turned(x, y):  # rows of one element would take 50 times as long
        moved = copy(y, x, call.threads)
        drawn = dropout(replace(call, inputs=(y, step)))
        return sequence([moved, drawn])
    apart = [0] * x.ndim  # what a step along each dim adds to the address of the step
    if step.ndim:
        wide = [d for d in range(x.ndim) if y.shape[d] > 1]
        if wide and min(wide, key=lambda d: abs(y.strides[d])) == 0:
            return None  # neighbours in memory have steps of their own
        apart[0] = step.strides[0]
    a = call.attributes
    whole = a.get("full_shape", x.shape)
    steps = [0 if d < step.ndim else math.prod(whole[d + 1 :]) for d in range(x.ndim)]
    first = sum(o * s for o, s in zip(a.get("origin", (0,) * x.ndim), steps))
    # first * INDEX goes into the constant part of the weighted sum
    constant = (a["seed"] * SEED + first * INDEX) & MASK
    threshold = math.ceil(a["rate"] * 2**32)
    made = spans(x.shape, (x, y), numbers=[steps, apart])
    block = _BLOCK.pack(
        spans=made.block,
        x=x,
        y=y,
        step=step,
        constant=constant,
        step_weight=STEP,
        index_weight=INDEX,
        threshold=threshold,
        scale=1 / (1 - a["rate"]),
    )
    threads = useful_threads(call.threads, 4 * x.nbytes)
    return parallel_for(_dropout, block, made.items, threads)
