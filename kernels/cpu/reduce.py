"""Reductions over any dims: sum, mean, maximum, minimum.

Dims are walked in memory order. Where the innermost is reduced, runs are folded into 64 lanes;
where it is kept, rows are added to a row of totals. Totals are float64, so a sum of float32 keeps
their precision. How work is cut, and so every bit of a result, depends on shapes and threads only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.layout import is_float32, merge
from soapstone.kernels.cpu.native import (
    as_float,
    f32p,
    f64p,
    helper,
    native,
    noop,
    pack,
    parallel_for,
    sequence,
    stack,
    useful_threads,
    words,
)
from soapstone.kernels.cpu.runs import (
    MAX,
    MIN,
    SUM,
    advance,
    gather,
    reduce_row,
    reduce_run,
    row_offset,
    start,
)
from soapstone.kernels.cpu.simd import load_doubles, max_lanes, min_lanes, sum_lanes, vmax, vmin
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_MONOIDS = {"reduce_sum": SUM, "reduce_mean": SUM, "reduce_max": MAX, "reduce_min": MIN}
_IDENTITIES = {SUM: 0.0, MAX: -math.inf, MIN: math.inf}
_COLUMNS = 1024  # totals of a row: 8 KB of the cache
_SEGMENT = 4096  # floats of a run between two looks at the counter
_HEADER = 20


@helper
def _fold(monoid: int, totals: int) -> Any:
    a, b = load_doubles(totals, 0), load_doubles(totals, 16)
    c, d = load_doubles(totals, 32), load_doubles(totals, 48)
    if monoid == SUM:
        return sum_lanes((a + b) + (c + d))
    if monoid == MAX:
        return max_lanes(vmax(vmax(a, b), vmax(c, d)))
    return min_lanes(vmin(vmin(a, b), vmin(c, d)))


@native("body")
def _reduce(block: Any, begin: int, end: int) -> int:
    # An item is (kept row, chunk of columns, part of the reduced rows).
    w = words(block)
    monoid, scale, identity = w[0], as_float(w[1]), as_float(w[2])
    x, y, inner_kept, length, inner, y_inner = w[3], w[4], w[5], w[6], w[7], w[8]
    chunk, chunks, parts, partials, outputs = w[9], w[10], w[11], w[12], w[13]
    kept, reduced, reduced_rows = w[14], w[15], w[16]
    kept_extents = 20
    kept_x = kept_extents + kept
    kept_y = kept_x + kept
    reduced_extents = kept_y + kept
    reduced_x = reduced_extents + reduced
    totals = stack(8192)
    buffer = stack(16384)
    counter = words(stack(512))
    t = f64p(totals)
    for item in range(begin, end):
        part = item % parts
        column = item // parts % chunks * chunk
        row = item // parts // chunks
        source = x + row_offset(w, kept_extents, kept_x, kept, row)
        target = y + row_offset(w, kept_extents, kept_y, kept, row)
        first = part * reduced_rows // parts
        last = (part + 1) * reduced_rows // parts
        if inner_kept != 0:
            n = min(chunk, length - column)
            for i in range((n + 15) & -16):
                t[i] = identity
            start(w, reduced_extents, reduced, counter, first)
            at = source + column * inner
            at += row_offset(w, reduced_extents, reduced_x, reduced, first)
            for _ in range(first, last):
                reduce_row(monoid, totals, gather(buffer, at, inner, n), n)
                at = advance(w, reduced_extents, reduced_x, reduced, counter, at)
            if parts > 1:
                to = f64p(partials)
                for i in range(n):
                    to[part * outputs + row * length + column + i] = t[i]
            elif y_inner == 4:
                out = f32p(target + column * 4)
                for i in range(n):
                    out[i] = t[i] * scale
            else:
                for i in range(n):
                    f32p(target + (column + i) * y_inner)[0] = t[i] * scale
        else:
            for i in range(64):
                t[i] = identity
            # Reduced rows are cut into segments, so that one long run can be shared too.
            segments = (length + 4095) // 4096
            begin_row, segment = first // segments, first % segments
            start(w, reduced_extents, reduced, counter, begin_row)
            at = source + row_offset(w, reduced_extents, reduced_x, reduced, begin_row)
            for _ in range(first, last):
                n = min(4096, length - segment * 4096)
                place = at + segment * 4096 * inner
                reduce_run(monoid, totals, gather(buffer, place, inner, n), n)
                segment += 1
                if segment == segments:
                    segment = 0
                    at = advance(w, reduced_extents, reduced_x, reduced, counter, at)
            value = _fold(monoid, totals)
            if parts > 1:
                f64p(partials)[part * outputs + row] = value
            else:
                f32p(target)[0] = value * scale
    return 0


@native()
def _join(block: Any) -> int:
    """Fold the parts, in order."""
    w = words(block)
    monoid, scale = w[0], as_float(w[1])
    y, length, y_inner, parts, outputs, kept = w[4], w[6], w[8], w[11], w[13], w[14]
    partials = f64p(w[12])
    if w[5] == 0:
        length = 1
    for row in range(outputs // length):
        target = y + row_offset(w, 20, 20 + 2 * kept, kept, row)
        for i in range(length):
            total = partials[row * length + i]
            for part in range(1, parts):
                value = partials[part * outputs + row * length + i]
                if monoid == SUM:
                    total += value
                elif value != value or (value > total) == (monoid == MAX):
                    total = value
            f32p(target + i * y_inner)[0] = total * scale
    return 0


def _axes(call: Call) -> tuple[int, ...]:
    rank = call.inputs[0].ndim
    axes = call.attributes.get("axes")
    return tuple(range(rank)) if axes is None else tuple(sorted(int(a) % rank for a in axes))


@variant(tuple(_MONOIDS), "numba")
def reduce(call: Call) -> Entry | None:
    """Sums, means, maxima and minima over any dims."""
    (x,), (y,) = call.inputs, call.outputs
    if not is_float32(x, y):
        return None
    if y.size == 0:
        return noop()
    axes = _axes(call)
    monoid = _MONOIDS[call.operator]
    if x.size == 0:
        if monoid != SUM:
            return None
        x = np.zeros([max(1, extent) for extent in x.shape], np.float32)
    count = float(call.attributes["count"]) if call.operator == "reduce_mean" else 1.0
    return reduce_into(x, y.reshape(_kept_shape(x, axes)), axes, monoid, 1.0 / count, call.threads)


def _kept_shape(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in axes else extent for d, extent in enumerate(x.shape))


def reduce_into(
    x: Array, y: Array, axes: tuple[int, ...], monoid: int, scale: float, threads: int
) -> Entry | None:
    """Return the entry of y = scale * (x reduced over the axes); y has extent 1 along them."""
    dims = sorted(range(x.ndim), key=lambda d: -abs(x.strides[d]))
    dims = [d for d in dims if x.shape[d] != 1]
    inner_kept = bool(dims) and dims[-1] not in axes
    # The innermost dim and those merged with it are the run; the others are walked.
    groups: dict[bool, list[int]] = {
        kept: [d for d in dims if (d not in axes) == kept] for kept in (True, False)
    }
    run: list[int] = []
    while dims and (dims[-1] not in axes) == inner_kept:
        if run:
            inner = run[0]
            views = (x, y) if inner_kept else (x,)
            if any(v.strides[dims[-1]] != v.strides[inner] * x.shape[inner] for v in views):
                break
        run.insert(0, dims.pop())
    length = math.prod(x.shape[d] for d in run)
    inner = x.strides[run[-1]] if run else 4
    y_inner = y.strides[run[-1]] if run and inner_kept else 4
    kept = [d for d in groups[True] if d not in run]
    reduced = [d for d in groups[False] if d not in run]
    kept_extents, kept_strides = merge(
        [x.shape[d] for d in kept], [[v.strides[d] for d in kept] for v in (x, y)]
    )
    reduced_extents, reduced_strides = merge(
        [x.shape[d] for d in reduced], [[x.strides[d] for d in reduced]]
    )
    if max(len(kept_extents), len(reduced_extents)) > 60:
        return None
    kept_rows, reduced_rows = math.prod(kept_extents), math.prod(reduced_extents)
    threads = useful_threads(threads, x.nbytes)
    if inner_kept:
        chunk = min(_COLUMNS, max(128, -(-length // threads // 16) * 16))
        chunks = -(-length // chunk)
        outputs = kept_rows * length
    else:
        chunk, chunks, outputs = 1, 1, kept_rows
        reduced_rows *= -(-length // _SEGMENT)
    parts = 1 if kept_rows * chunks >= threads else min(threads, max(1, reduced_rows))
    partials = np.zeros(outputs * parts if parts > 1 else 1, np.float64)
    block = pack(
        (monoid, float(scale), _IDENTITIES[monoid], x, y, inner_kept, length, inner, y_inner),
        (chunk, chunks, parts, partials, outputs, len(kept_extents), len(reduced_extents)),
        (reduced_rows, 0, 0, 0),
        (kept_extents, kept_strides, reduced_extents, reduced_strides),
    )
    entry = parallel_for(_reduce, block, kept_rows * chunks * parts, threads)
    if parts == 1:
        return entry
    join = Entry(_join.address, block.address, block)
    return sequence([entry, join])
