"""Kernels of cumsum and trilu.

Where the axis of a sum is not the innermost in memory, it is gone through once for a chunk of
neighbouring lines, so that memory is read in order. Totals are float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.indexing.selection import lines_along
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.intrinsics import f32p, f64p, i64p, stack
from soapstone.native.moves import copy_run, row_at, zero_run
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import merge

_CHUNK = 256  # neighbouring lines that are gone through together


# ----------------------------------------------------------------------------------------- cumsum
@routine
def _sums(x: int, x_step: int, y: int, y_step: int, n: int, exclusive: bool) -> None:
    total = 0.0
    for _ in range(n):
        before = total
        total += f32p(x)[0]
        f32p(y)[0] = before if exclusive else total
        x += x_step
        y += y_step


@routine
def _row_sums(totals: Any, x: Any, y: Any, n: int, exclusive: bool) -> None:
    if exclusive:
        for j in range(n):
            before = totals[j]
            totals[j] = before + x[j]
            y[j] = before
    else:
        for j in range(n):
            total = totals[j] + x[j]
            totals[j] = total
            y[j] = total


# step: along the axis; across: from one of the columns to the next; chunks: of columns. Then the
# walk of the other dims, of `rank`, in x and y.
_SUMS = Fields("x y length step(x y) exclusive reverse columns across(x y) chunks rank")
_sums_of, _sums_table = _SUMS.at, _SUMS.table


@native("body")
def _cumsum(block: Any, begin: int, end: int) -> int:
    w, table = _sums_of(block), _sums_table(block)
    length, exclusive, rank = w.length, w.exclusive != 0, w.rank
    x_step, y_step = (-w.step_x, -w.step_y) if w.reverse != 0 else (w.step_x, w.step_y)
    totals = f64p(stack(2048))
    for item in range(begin, end):
        row, column = item // w.chunks, item % w.chunks * _CHUNK
        n = min(_CHUNK, w.columns - column)
        x = w.x + row_at(table, rank, 0, row) + column * w.across_x
        y = w.y + row_at(table, rank, 1, row) + column * w.across_y
        if w.reverse != 0:
            x += (length - 1) * w.step_x
            y += (length - 1) * w.step_y
        if n == 1:
            _sums(x, x_step, y, y_step, length, exclusive)
            continue
        for j in range(n):
            totals[j] = 0.0
        for _ in range(length):
            if w.across_x == 4 and w.across_y == 4:
                _row_sums(totals, f32p(x), f32p(y), n, exclusive)
                x += x_step
                y += y_step
                continue
            for j in range(n):
                before = totals[j]
                total = before + f32p(x + j * w.across_x)[0]
                totals[j] = total
                f32p(y + j * w.across_y)[0] = before if exclusive else total
            x += x_step
            y += y_step
    return 0


@native("body")
def _cumsum_integers(block: Any, begin: int, end: int) -> int:
    w, table = _sums_of(block), _sums_table(block)
    length, exclusive, rank = w.length, w.exclusive != 0, w.rank
    x_step, y_step = (-w.step_x, -w.step_y) if w.reverse != 0 else (w.step_x, w.step_y)
    for item in range(begin, end):
        row, column = item // w.chunks, item % w.chunks * _CHUNK
        for j in range(column, min(w.columns, column + _CHUNK)):
            x = w.x + row_at(table, rank, 0, row) + j * w.across_x
            y = w.y + row_at(table, rank, 1, row) + j * w.across_y
            if w.reverse != 0:
                x += (length - 1) * w.step_x
                y += (length - 1) * w.step_y
            total = 0
            for _ in range(length):
                before = total
                total += i64p(x)[0]
                i64p(y)[0] = before if exclusive else total
                x += x_step
                y += y_step
    return 0


@variant("cumsum", "numba")
def cumsum(call: Call) -> Entry | None:
    """The sums of all elements up to each one along the axis, in float64 on the way."""
    (x,), (y,), a = call.inputs, call.outputs, call.attributes
    body = _cumsum
    if x.dtype == np.int64 and x.flags.aligned and y.flags.aligned:
        body = _cumsum_integers
    elif not is_float32(x, y):
        return None
    if y.size == 0:
        return noop()
    axis = a["axis"]
    lines = lines_along(x.shape, [x, y], axis)
    chunks = -(-lines.columns // _CHUNK)
    block = _SUMS.pack(
        lines.table,
        x=x,
        y=y,
        length=x.shape[axis],
        step=(x.strides[axis], y.strides[axis]),
        exclusive=a["exclusive"],
        reverse=a["reverse"],
        columns=lines.columns,
        across=lines.steps,
        chunks=chunks,
        rank=lines.rank,
    )
    threads = useful_threads(call.threads, x.nbytes + y.nbytes)
    return parallel_for(body, block, lines.rows * chunks, threads)


# ------------------------------------------------------------------------------------------ trilu
# size: bytes an element; rows, columns: of a matrix; down: from row to row; step: along a row;
# upper: whether that part stays. Then the walk of the other dims, of `rank`, in x and y.
_TRIANGLES = Fields("x y size rows columns down(x y) step(x y) diagonal upper rank")
_triangles_of, _triangles_table = _TRIANGLES.at, _TRIANGLES.table


@native("body")
def _trilu(block: Any, begin: int, end: int) -> int:
    w, table = _triangles_of(block), _triangles_table(block)
    size, rows, columns, rank = w.size, w.rows, w.columns, w.rank
    for item in range(begin, end):
        matrix = item // rows
        row = item - matrix * rows
        x = w.x + row_at(table, rank, 0, matrix) + row * w.down_x
        y = w.y + row_at(table, rank, 1, matrix) + row * w.down_y
        first, last = 0, columns
        if w.upper != 0:
            first = max(0, min(columns, row + w.diagonal))
        else:
            last = max(0, min(columns, row + w.diagonal + 1))
        if first < last:
            copy_run(
                size, y + first * w.step_y, w.step_y, x + first * w.step_x, w.step_x, last - first
            )
        zero_run(size, y, w.step_y, first)
        if last < columns:
            zero_run(size, y + last * w.step_y, w.step_y, columns - last)
    return 0


@variant("trilu", "numba")
def trilu(call: Call) -> Entry | None:
    """What is on one side of a diagonal of the last two axes, and zeros."""
    (x,), (y,), a = call.inputs, call.outputs, call.attributes
    size = x.itemsize
    if size not in (1, 2, 4, 8) or not (x.flags.aligned and y.flags.aligned):
        return None
    if y.size == 0:
        return noop()
    extents, strides = merge(x.shape[:-2], [x.strides[:-2], y.strides[:-2]])
    rows, columns = x.shape[-2:]
    block = _TRIANGLES.pack(
        *(extents, strides),
        x=x,
        y=y,
        size=size,
        rows=rows,
        columns=columns,
        down=(x.strides[-2], y.strides[-2]),
        step=(x.strides[-1], y.strides[-1]),
        diagonal=a["k"],
        upper=a["upper"],
        rank=len(extents),
    )
    threads = useful_threads(call.threads, 2 * y.nbytes)
    return parallel_for(_trilu, block, rows * math.prod(extents), threads)
