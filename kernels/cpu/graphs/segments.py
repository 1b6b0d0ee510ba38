"""Softmax over segments of rows, and its gradient: sixteen columns at a time down each segment."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.graphs.segments import segments
from soapstone.kernels.cpu.graphs.blocks import first_row
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.layout import is_float32, rows_contiguous
from soapstone.kernels.cpu.substrate.mathematics import vexp
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.intrinsics import i64p
from soapstone.native.simd import load_first, splat, store_first, vmax
from soapstone.native.threads.parallel import parallel_for, useful_threads

# `rows` segments of the `entries` rows of x, n floats each, in `parts` parts; x of the gradient is
# y, and dy is 0 in the other direction.
_SEGMENTS = Fields("indptr rows entries parts n x x_step dy dy_step y y_step")
_segments_of = _SEGMENTS.at


@helper
def _cleared(w: Any, first: Any, past: Any) -> None:
    for entry in range(first, past):
        for at in range(0, w.n, 16):
            store_first(w.y + entry * w.y_step, at, splat(np.float32(0)), w.n - at)


@native("body")
def _softmax(block: Any, begin: int, end: int) -> int:
    w = _segments_of(block)
    p, n = i64p(w.indptr), w.n
    low, high = p[0], p[w.rows]
    if low < 0 or high < low or high > w.entries:
        return 1
    if begin == 0:
        _cleared(w, np.int64(0), low)
    if end == w.parts:
        _cleared(w, high, w.entries)
    for row in range(first_row(w, begin), first_row(w, end)):
        first, past = p[row], p[row + 1]
        if first < 0 or past < first or past > w.entries:
            return 1
        for at in range(0, n, 16):
            lanes = n - at
            total = splat(np.float32(0))
            if w.dy != 0:
                for entry in range(first, past):
                    dy = load_first(w.dy + entry * w.dy_step, at, lanes)
                    total = total + dy * load_first(w.x + entry * w.x_step, at, lanes)
                for entry in range(first, past):
                    dy = load_first(w.dy + entry * w.dy_step, at, lanes)
                    value = load_first(w.x + entry * w.x_step, at, lanes) * (dy - total)
                    store_first(w.y + entry * w.y_step, at, value, lanes)
            else:
                top = splat(-np.float32(np.inf))
                for entry in range(first, past):
                    top = vmax(top, load_first(w.x + entry * w.x_step, at, lanes))
                for entry in range(first, past):
                    value = vexp(load_first(w.x + entry * w.x_step, at, lanes) - top)
                    total = total + value
                    store_first(w.y + entry * w.y_step, at, value, lanes)
                for entry in range(first, past):
                    to = w.y + entry * w.y_step
                    store_first(to, at, load_first(to, at, lanes) / total, lanes)
    return 0


def _entry(call: Call, x: Array, dy: Array | None) -> Entry | None:
    (y,), indptr = call.outputs, call.inputs[-1]
    rows = [x, y] if dy is None else [x, y, dy]
    plain = indptr.dtype == np.int64 and indptr.flags.c_contiguous and indptr.flags.aligned
    if not (plain and is_float32(*rows) and rows_contiguous(*rows)):
        return None
    if y.size == 0:
        return noop()
    count = indptr.size - 1
    parts = max(1, min(useful_threads(call.threads, 12 * y.size), count))
    block = _SEGMENTS.pack(
        indptr=indptr,
        rows=count,
        entries=len(y),
        parts=parts,
        n=y.shape[1],
        x=x,
        x_step=x.strides[0],
        dy=0 if dy is None else dy,
        dy_step=0 if dy is None else dy.strides[0],
        y=y,
        y_step=y.strides[0],
    )
    said = outside(call.operator, segments, indptr, len(y))
    return parallel_for(_softmax, block, parts, parts, said)


@variant("segment_softmax", "numba")
def segment_softmax(call: Call) -> Entry | None:
    """Softmax of each column over each segment of rows."""
    return _entry(call, call.inputs[0], None)


@variant("segment_softmax_grad", "numba")
def segment_softmax_grad(call: Call) -> Entry | None:
    """What a gradient of the results is to the operands."""
    dy, y, _ = call.inputs
    return _entry(call, y, dy)
