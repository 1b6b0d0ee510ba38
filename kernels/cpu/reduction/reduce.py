"""Reductions over any dims: sums (of absolute values, squares, powers), products, extremes.

Dims are walked in memory order. Where the innermost is reduced, runs are folded into 64 lanes;
where it is kept, rows are added to a row of totals, several at a time. Totals are float64, so a sum
of float32 keeps their precision. How work is cut, and so every bit of a result, depends on shapes
and threads only.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from soapstone.kernels.cpu.reduction.integers import FOLDS, folded
from soapstone.kernels.cpu.substrate.integers import is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.runs import (
    ABSOLUTE,
    HUGE,
    LOOPS,
    MAX,
    MIN,
    POWERS,
    PRODUCT,
    SQUARE,
    SUM,
    advance,
    gather,
    powers_below,
    powers_below_each,
    start,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, helper, native, noop, sequence
from soapstone.native.folds import plus, times
from soapstone.native.intrinsics import f32p, f64p, i64p, stack, words
from soapstone.native.memory import aligned_array, pack
from soapstone.native.moves import row_at
from soapstone.native.simd import (
    load_doubles,
    max_lanes,
    min_lanes,
    sum_lanes,
    vectorised,
    vmax,
    vmin,
)
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import in_places, memory_order, merge

_PLAIN, _ROOT, _LOGARITHM, _ABOVE = range(4)  # what is done to a total at the end
_MONOIDS = {
    "reduce_sum": (SUM, _PLAIN),
    "reduce_mean": (SUM, _PLAIN),
    "reduce_max": (MAX, _PLAIN),
    "reduce_min": (MIN, _PLAIN),
    "reduce_prod": (PRODUCT, _PLAIN),
    "reduce_l1": (ABSOLUTE, _PLAIN),
    "reduce_sum_square": (SQUARE, _PLAIN),
    "reduce_l2": (SQUARE, _ROOT),
    "reduce_log_sum": (SUM, _LOGARITHM),
}
_IDENTITIES = {MAX: -math.inf, MIN: math.inf, PRODUCT: 1.0}
_COLUMNS = 1024  # totals of a row: 8 KB of the cache
_SEGMENT = 4096  # floats of a run between two looks at the counter
# inner_kept: the run is kept, else reduced; inner, y_inner: steps along it; chunk: columns of an
# item, of which there are `chunks`; partials: of the parts, `outputs` each; kept, reduced: walks of
# the other dims, of such ranks: of the former in x, y and tops; last: what is done to a total.
_REDUCE = Fields(
    "monoid x y inner_kept length inner y_inner chunk chunks parts partials outputs kept reduced"
    " kept_rank reduced_rank reduced_rows last tops group",
    reals="scale identity",
)
_reduce_of = _REDUCE.at

MONOIDS = {  # and the names of their kernels
    SUM: "sum",
    MAX: "max",
    MIN: "min",
    PRODUCT: "product",
    ABSOLUTE: "absolute",
    SQUARE: "square",
    POWERS: "powers",
}
_product_lanes = vectorised(lambda v: v.fold(lambda a, b: a * b))
# How the lanes of a total become one number: two vectors, and all lanes of one.
_FOLDS = {MAX: (vmax, max_lanes), MIN: (vmin, min_lanes), PRODUCT: (times, _product_lanes)}
_SUMMED = plus, sum_lanes


@helper
def _within(top: float) -> float:
    if top > HUGE:
        return HUGE
    if top < -HUGE:
        return -HUGE
    return top


@helper
def _finish(last: int, total: float, top: int) -> Any:
    """What is written for a total; `top` is the address of the maximum that powers are below."""
    if last == _ROOT:
        return math.sqrt(total)
    if last == _LOGARITHM:
        return math.log(total)
    if last == _ABOVE:
        return math.log(total) + _within(np.float64(f32p(top)[0]))
    return total


@helper
def _run(buffer: int, address: int, stride: int, n: int, top: int) -> int:
    return gather(buffer, address, stride, n)


@helper
def _run_of_powers(buffer: int, address: int, stride: int, n: int, top: int) -> int:
    powers_below(buffer, gather(buffer, address, stride, n), _within(np.float64(f32p(top)[0])), n)
    return buffer


@helper
def _row_of_powers(buffer: int, address: int, stride: int, n: int, tops: int) -> int:
    powers_below_each(buffer, gather(buffer, address, stride, n), tops, n)
    return buffer


@cache
def reducing(monoid: int) -> Native:
    """Return the kernel of one of `MONOIDS`, made once it is asked for: without code of others."""
    powers = monoid == POWERS
    reduce_run, reduce_row, reduce_rows = LOOPS[SUM if powers else monoid]
    run_of, row_of = (_run_of_powers, _row_of_powers) if powers else (_run, _run)
    folded, one = _FOLDS.get(monoid, _SUMMED)

    def reduce(block: Any, begin: int, end: int) -> int:
        # An item is (kept row, chunk of columns, part of the reduced rows).
        w = _reduce_of(block)
        scale, identity = w.scale, w.identity
        inner_kept, length, inner, y_inner = w.inner_kept, w.length, w.inner, w.y_inner
        chunk, chunks, parts, partials, outputs = w.chunk, w.chunks, w.parts, w.partials, w.outputs
        kept, kept_rank, last_step = i64p(w.kept), w.kept_rank, w.last
        down, rank, reduced_rows = i64p(w.reduced), w.reduced_rank, w.reduced_rows
        extent, step = down[rank - 1], down[2 * rank - 1]  # of the last reduced dim
        totals = stack(8192)
        buffer = stack(16384)
        counter = words(stack(512))
        t = f64p(totals)
        for item in range(begin, end):
            part = item % parts
            column = item // parts % chunks * chunk
            row = item // parts // chunks
            source = w.x + row_at(kept, kept_rank, 0, row)
            target = w.y + row_at(kept, kept_rank, 1, row)
            top = w.tops + row_at(kept, kept_rank, 2, row)
            first = part * reduced_rows // parts
            last = (part + 1) * reduced_rows // parts
            if inner_kept != 0:
                n = min(chunk, length - column)
                for i in range((n + 15) & -16):
                    t[i] = identity
                if inner == 4 and not powers:
                    number = first
                    while number < last:  # rows along the last reduced dim lie at equal steps
                        count = min(min(last - number, extent - number % extent), w.group)
                        at = source + column * 4 + row_at(down, rank, 0, number)
                        reduce_rows(totals, at, step, count, n)
                        number += count
                else:
                    start(down, rank, counter, first)
                    at = source + column * inner + row_at(down, rank, 0, first)
                    for _ in range(first, last):
                        reduce_row(totals, row_of(buffer, at, inner, n, top + column * 4), n)
                        at = advance(down, rank, counter, at)
                if parts > 1:
                    to = f64p(partials)
                    for i in range(n):
                        to[part * outputs + row * length + column + i] = t[i]
                elif y_inner == 4 and last_step == _PLAIN:
                    out = f32p(target + column * 4)
                    for i in range(n):
                        out[i] = t[i] * scale
                else:
                    for i in range(column, column + n):
                        value = _finish(last_step, t[i - column] * scale, top + i * 4)
                        f32p(target + i * y_inner)[0] = value
            else:
                for i in range(64):
                    t[i] = identity
                # Reduced rows are cut into segments, so that one long run can be shared too.
                segments = (length + _SEGMENT - 1) // _SEGMENT
                begin_row, segment = first // segments, first % segments
                start(down, rank, counter, begin_row)
                at = source + row_at(down, rank, 0, begin_row)
                for _ in range(first, last):
                    n = min(_SEGMENT, length - segment * _SEGMENT)
                    run = run_of(buffer, at + segment * _SEGMENT * inner, inner, n, top)
                    reduce_run(totals, run, n)
                    segment += 1
                    if segment == segments:
                        segment = 0
                        at = advance(down, rank, counter, at)
                a, b = load_doubles(totals, 0), load_doubles(totals, 16)
                c, d = load_doubles(totals, 32), load_doubles(totals, 48)
                value = one(folded(folded(a, b), folded(c, d)))
                if parts > 1:
                    f64p(partials)[part * outputs + row] = value
                else:
                    f32p(target)[0] = _finish(last_step, value * scale, top)
        return 0

    reduce.__name__ = reduce.__qualname__ = f"reduce_{MONOIDS[monoid]}"
    return native("body")(reduce)


@native()
def _join(block: Any) -> int:
    """Fold the parts, in order."""
    w = _reduce_of(block)
    monoid, scale, last_step = w.monoid, w.scale, w.last
    length, y_inner, parts, outputs = w.length, w.y_inner, w.parts, w.outputs
    partials, kept = f64p(w.partials), i64p(w.kept)
    if w.inner_kept == 0:
        length = 1
    for row in range(outputs // length):
        target = w.y + row_at(kept, w.kept_rank, 1, row)
        top = w.tops + row_at(kept, w.kept_rank, 2, row)
        for i in range(length):
            total = partials[row * length + i]
            for part in range(1, parts):
                value = partials[part * outputs + row * length + i]
                if monoid == PRODUCT:
                    total *= value
                elif monoid != MAX and monoid != MIN:
                    total += value
                elif value != value or (value > total) == (monoid == MAX):
                    total = value
            f32p(target + i * y_inner)[0] = _finish(last_step, total * scale, top + i * 4)
    return 0


def _axes(call: Call) -> tuple[int, ...]:
    rank = call.inputs[0].ndim
    axes = call.attributes.get("axes")
    return tuple(range(rank)) if axes is None else tuple(sorted(int(a) % rank for a in axes))


@variant(tuple(_MONOIDS), "numba")
def reduce(call: Call) -> Entry | None:
    """Sums, means, products, norms, maxima and minima over any dims."""
    (x,), (y,) = call.inputs, call.outputs
    axes = _axes(call)
    if call.operator in FOLDS and is_integer(x):
        kept = y.reshape(_kept_shape(x, axes))
        return folded(FOLDS[call.operator], x, kept, axes, call.threads)
    if not is_float32(x, y):
        return None
    if y.size == 0:
        return noop()
    monoid, last = _MONOIDS[call.operator]
    if x.size == 0:
        if monoid in _IDENTITIES:
            return None
        x = np.zeros([max(1, extent) for extent in x.shape], np.float32)
    count = float(call.attributes["count"]) if call.operator == "reduce_mean" else 1.0
    kept = y.reshape(_kept_shape(x, axes))
    return reduce_into(x, kept, axes, monoid, 1.0 / count, call.threads, last)


@variant("reduce_log_sum_exp", "numba")
def log_sum_exp(call: Call) -> Entry | None:
    """The logarithm of the sum of powers, of x below its maximum: two passes."""
    (x,), (y,) = call.inputs, call.outputs
    if not is_float32(x, y) or x.size == 0:
        return None if y.size else noop()
    axes = _axes(call)
    y = y.reshape(_kept_shape(x, axes))
    # a row of maxima is read as it is written: contiguous where a row of x is
    order = memory_order(x.strides)
    top = in_places(aligned_array(tuple(y.shape[d] for d in order), np.float32), order)
    first = reduce_into(x, top, axes, MAX, 1.0, call.threads)
    then = reduce_into(x, y, axes, POWERS, 1.0, call.threads, _ABOVE, top)
    return sequence([first, then])


def _kept_shape(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in axes else extent for d, extent in enumerate(x.shape))


def reduce_into(
    x: Array,
    y: Array,
    axes: tuple[int, ...],
    monoid: int,
    scale: float,
    threads: int,
    last: int = _PLAIN,
    top: Array | None = None,
) -> Entry | None:
    """Return the entry of y = scale * (x reduced over the axes); y has extent 1 along them.

    last: what is done to the totals at the end. top: of y's shape, what powers are below.
    """
    top = y if top is None else top
    dims = [d for d in memory_order(x.strides) if x.shape[d] != 1]
    inner_kept = bool(dims) and dims[-1] not in axes
    # The innermost dim and those merged with it are the run; the others are walked.
    groups: dict[bool, list[int]] = {
        kept: [d for d in dims if (d not in axes) == kept] for kept in (True, False)
    }
    run: list[int] = []
    while dims and (dims[-1] not in axes) == inner_kept:
        if run:
            inner = run[0]
            views = (x, y, top) if inner_kept else (x,)
            if any(v.strides[dims[-1]] != v.strides[inner] * x.shape[inner] for v in views):
                break
        run.insert(0, dims.pop())
    length = math.prod(x.shape[d] for d in run)
    inner = x.strides[run[-1]] if run else 4
    y_inner = y.strides[run[-1]] if run and inner_kept else 4
    kept = [d for d in groups[True] if d not in run]
    reduced = [d for d in groups[False] if d not in run]
    kept_extents, kept_strides = merge(x.shape, [v.strides for v in (x, y, top)], kept)
    reduced_extents, reduced_strides = merge(x.shape, [x.strides], reduced)
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
    partials = aligned_array((outputs * parts if parts > 1 else 1,), np.float64, zero=True)
    block = _REDUCE.pack(
        monoid=monoid,
        x=x,
        y=y,
        inner_kept=inner_kept,
        length=length,
        inner=inner,
        y_inner=y_inner,
        chunk=chunk,
        chunks=chunks,
        parts=parts,
        partials=partials,
        outputs=outputs,
        kept=pack(kept_extents, kept_strides),
        reduced=pack(reduced_extents, reduced_strides),
        kept_rank=len(kept_extents),
        reduced_rank=len(reduced_extents),
        reduced_rows=reduced_rows,
        last=last,
        tops=top,
        group=max(16, 8192 // length),
        scale=scale,
        identity=_IDENTITIES.get(monoid, 0.0),
    )
    entry = parallel_for(reducing(monoid), block, kept_rows * chunks * parts, threads)
    if parts == 1:
        return entry
    join = Entry(_join.address, block)
    return sequence([entry, join])
