"""Kernels that choose from all of an axis: argmax, argmin, top_k.

Lines along the axis are shared out over threads. Where the axis is not the innermost in memory,
argmax goes through it once for a chunk of neighbouring lines, so that memory is read in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop, routine
from soapstone.native.intrinsics import f32p, i32p, i64p, stack
from soapstone.native.lanes import F32, I32, LANES, Lanes, load_lanes, load_some, where
from soapstone.native.moves import row_at
from soapstone.native.simd import load, max_lanes, splat, vectorised, vmax
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

_CHUNK = 256  # neighbouring lines that are gone through together


class Lines(NamedTuple):
    """The lines along an axis: `columns` neighbours at `steps`, and a table of the other dims."""

    columns: int
    steps: Sequence[int]
    rows: int
    rank: int
    table: tuple[Any, ...]


def lines_along(shape: Sequence[int], arrays: Sequence[Array], axis: int) -> Lines:
    """Return the lines of arrays that have this shape but for the axis, x first."""
    dims = [d for d in memory_order(arrays[0].strides) if d != axis]
    walked = merge(shape, [a.strides for a in arrays], dims)
    columns, steps = 1, (0,) * len(arrays)
    if abs(walked.steps[0]) < abs(arrays[0].strides[axis]):
        columns, steps, walked = walked.extents[-1], walked.steps, walked.rows
    return Lines(columns, steps, walked.size, walked.rank, walked)


# ---------------------------------------------------------------------------------- argmax, argmin
@helper
def _takes(value: float, best: float, last: int) -> bool:
    """Whether a value takes the place of the best before it; NaN is above all numbers."""
    if last != 0:
        return value >= best or value != value
    return value > best or (value != value and best == best)


@routine
def _run_takes(x: int, n: int, negate: int, last: int) -> Any:
    """Where of n contiguous floats the one is that takes the place of all: chunk by chunk."""
    sign = np.float32(-1.0) if negate != 0 else np.float32(1.0)
    best, chunk = f32p(x)[0] * sign, 0
    for start in range(0, n, 256):
        count = min(256, n - start)
        top = _greatest(x + start * 4, sign, count)
        if _takes(top, best, last):
            best, chunk = top, start
    stop = min(n, chunk + 256)
    found = chunk
    for i in range(chunk, stop):
        value = f32p(x)[i] * sign
        if value == best or (value != value and best != best):
            found = i
            if last == 0:
                break
    return found


@routine
def _greatest(x: int, sign: Any, n: int) -> Any:
    full = n & -16
    tops = splat(-np.inf)
    for i in range(0, full, 16):
        tops = vmax(load(x, i) * sign, tops)
    top = max_lanes(tops)
    for i in range(full, n):
        value = f32p(x)[i] * sign
        if value > top or value != value:
            top = value
    return top


@vectorised
def _take_each(
    best: Lanes, where_best: Lanes, x: Lanes, sign: Lanes, last: Lanes, index: Lanes, n: Lanes
) -> None:
    """Let n floats at x take the places of those in `best`, where they do."""
    b = n.builder

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        value = get(x, i, width, mask) * sign.cast(F32).splat(width)
        old = get(best, i, width, mask)
        unordered = value.compare("!=", value)
        first = (value > old) | (unordered & old.compare("==", old))
        latest = (value >= old) | unordered
        late = b.icmp_signed("!=", last.value, last.like(0).value)
        takes = Lanes(b, b.select(late, latest.value, first.value))
        if mask is None:
            places = load_lanes(where_best, i, I32, width)
        else:
            places = load_some(where_best, i, mask, 0, I32, width)
        put(best, i, where(takes, value, old), mask)
        put(where_best, i, where(takes, index.cast(I32).splat(width), places), mask)

    loop(b, n, body, LANES)


# step: of x along the axis; least: the minimum is sought; last: of equals; across: from one of the
# columns to the next; chunks: of columns. Then the walk of the other dims, of `rank`, in x and y.
_ARG = Fields("x y length step least last columns across(x y) chunks rank")
_arg_of, _arg_table = _ARG.at, _ARG.table


@native("body")
def _arg(block: Any, begin: int, end: int) -> int:
    w, table = _arg_of(block), _arg_table(block)
    length, step, last, rank = w.length, w.step, w.last, w.rank
    sign = np.float32(-1.0) if w.least != 0 else np.float32(1.0)
    tops, places = stack(1024), stack(1024)
    best, place = f32p(tops), i32p(places)
    for item in range(begin, end):
        row, column = item // w.chunks, item % w.chunks * _CHUNK
        n = min(_CHUNK, w.columns - column)
        x = w.x + row_at(table, rank, 0, row) + column * w.across_x
        y = w.y + row_at(table, rank, 1, row) + column * w.across_y
        if n == 1 and step == 4 and length >= 64:
            i64p(y)[0] = _run_takes(x, length, w.least, last)
            continue
        if n == 1:
            top, index = f32p(x)[0] * sign, 0
            for i in range(1, length):
                value = f32p(x + i * step)[0] * sign
                if _takes(value, top, last):
                    top, index = value, i
            i64p(y)[0] = index
            continue
        for j in range(n):
            best[j] = f32p(x + j * w.across_x)[0] * sign
            place[j] = 0
        for i in range(1, length):
            x += step
            if w.across_x == 4:
                _take_each(tops, places, x, sign, last, i, n)
                continue
            for j in range(n):
                value = f32p(x + j * w.across_x)[0] * sign
                if _takes(value, best[j], last):
                    best[j] = value
                    place[j] = np.int32(i)
        for j in range(n):
            i64p(y + j * w.across_y)[0] = np.int64(place[j])
    return 0


@variant(("argmax", "argmin"), "numba")
def arg(call: Call) -> Entry | None:
    """Where the maximum or minimum along the axis is."""
    (x,), (y,), a = call.inputs, call.outputs, call.attributes
    if not is_float32(x) or x.shape[a["axis"]] >= 1 << 31:
        return None
    if y.size == 0:
        return noop()
    axis = a["axis"]
    kept = y if a["keepdims"] else np.expand_dims(y, axis)
    lines = lines_along(x.shape, [x, kept], axis)
    chunks = -(-lines.columns // _CHUNK)
    block = _ARG.pack(
        lines.table,
        x=x,
        y=y,
        length=x.shape[axis],
        step=x.strides[axis],
        least=call.operator == "argmin",
        last=a["select_last_index"],
        columns=lines.columns,
        across=lines.steps,
        chunks=chunks,
        rank=lines.rank,
    )
    threads = useful_threads(call.threads, x.nbytes)
    return parallel_for(_arg, block, lines.rows * chunks, threads)


# ------------------------------------------------------------------------------------------ top_k
@helper
def _key(value: Any, place: int, largest: int) -> Any:
    """The bits of a float as a number of the same order: NaN above all, both zeros equal."""
    f32p(place)[0] = value + np.float32(0.0)
    bits = np.int64(i32p(place)[0])
    key = bits if bits >= 0 else -(bits & 0x7FFFFFFF) - 1
    if value != value:
        key = np.int64(0x7FFFFFFF)
    return key if largest != 0 else -key - 1


@helper
def _better(key: Any, index: int, other: Any, other_index: int) -> Any:
    return key > other or (key == other and index < other_index)


@routine
def _sift(keys: int, key_step: int, ids: int, id_step: int, at: int, n: int) -> None:
    """Let the element at a place of the heap, whose root is the worst, sink to where it belongs."""
    key, index = np.int64(i32p(keys + at * key_step)[0]), i64p(ids + at * id_step)[0]
    while 2 * at + 1 < n:
        child = 2 * at + 1
        worst, place = np.int64(i32p(keys + child * key_step)[0]), i64p(ids + child * id_step)[0]
        if child + 1 < n:
            other = np.int64(i32p(keys + (child + 1) * key_step)[0])
            other_place = i64p(ids + (child + 1) * id_step)[0]
            if _better(worst, place, other, other_place):
                child, worst, place = child + 1, other, other_place
        if not _better(key, index, worst, place):
            break
        i32p(keys + at * key_step)[0] = np.int32(worst)
        i64p(ids + at * id_step)[0] = place
        at = child
    i32p(keys + at * key_step)[0] = np.int32(key)
    i64p(ids + at * id_step)[0] = index


@routine
def _heap(keys: int, key_step: int, ids: int, id_step: int, n: int) -> None:
    for at in range(n // 2 - 1, -1, -1):
        _sift(keys, key_step, ids, id_step, at, n)


@routine
def _sort_heap(keys: int, key_step: int, ids: int, id_step: int, n: int) -> None:
    """The best first."""
    for last in range(n - 1, 0, -1):
        key, index = i32p(keys)[0], i64p(ids)[0]
        i32p(keys)[0] = i32p(keys + last * key_step)[0]
        i64p(ids)[0] = i64p(ids + last * id_step)[0]
        i32p(keys + last * key_step)[0] = key
        i64p(ids + last * id_step)[0] = index
        _sift(keys, key_step, ids, id_step, 0, last)


# step: along the axis; largest: the greatest are sought. Then the walk of the other dims, of
# `rank`, in x, values and ids.
_TOP = Fields("x values ids length k step(x values ids) largest sorted rank")
_top_of, _top_table = _TOP.at, _TOP.table


@native("body")
def _top_k(block: Any, begin: int, end: int) -> int:
    # The outputs themselves are the heap; keys stand where values will.
    w, table = _top_of(block), _top_table(block)
    k, largest, rank = w.k, w.largest, w.rank
    step, key_step, id_step = w.step_x, w.step_values, w.step_ids
    place = stack(64)
    for row in range(begin, end):
        x = w.x + row_at(table, rank, 0, row)
        keys = w.values + row_at(table, rank, 1, row)
        ids = w.ids + row_at(table, rank, 2, row)
        for i in range(k):
            key = _key(f32p(x + i * step)[0], place, largest)
            i32p(keys + i * key_step)[0] = np.int32(key)
            i64p(ids + i * id_step)[0] = i
        _heap(keys, key_step, ids, id_step, k)
        limit = f32p(x + i64p(ids)[0] * step)[0]
        for i in range(k, w.length):
            value = f32p(x + i * step)[0]
            if (value <= limit) if largest != 0 else (value >= limit):
                continue  # most are; NaN is not
            key = _key(f32p(x + i * step)[0], place, largest)
            if key > np.int64(i32p(keys)[0]):  # of equals the first stays
                i32p(keys)[0] = np.int32(key)
                i64p(ids)[0] = i
                _sift(keys, key_step, ids, id_step, 0, k)
                limit = f32p(x + i64p(ids)[0] * step)[0]
        if w.sorted == 0:  # in order of index: all keys alike
            for i in range(k):
                i32p(keys + i * key_step)[0] = 0
            _heap(keys, key_step, ids, id_step, k)
        _sort_heap(keys, key_step, ids, id_step, k)
        for i in range(k):
            f32p(keys + i * key_step)[0] = f32p(x + i64p(ids + i * id_step)[0] * step)[0]
    return 0


@variant("top_k", "numba")
def top_k(call: Call) -> Entry | None:
    """The k greatest or least elements along the axis, and where they are."""
    (x,), (values, indices), a = call.inputs, call.outputs, call.attributes
    if not is_float32(x, values):
        return None
    if values.size == 0:
        return noop()
    axis = a["axis"]
    arrays = (x, values, indices)
    dims = [d for d in memory_order(x.strides) if d != axis]
    extents, strides = merge(x.shape, [v.strides for v in arrays], dims)
    block = _TOP.pack(
        *(extents, strides),
        x=x,
        values=values,
        ids=indices,
        length=x.shape[axis],
        k=a["k"],
        step=[v.strides[axis] for v in arrays],
        largest=a["largest"],
        sorted=a["sorted"],
        rank=len(extents),
    )
    threads = useful_threads(call.threads, x.nbytes)
    return parallel_for(_top_k, block, math.prod(extents), threads)
