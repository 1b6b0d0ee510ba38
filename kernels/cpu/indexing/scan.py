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
from soapstone.native.entries import native, noop, parallel_for, routine, useful_threads
from soapstone.native.intrinsics import f32p, f64p, i64p, stack, words
from soapstone.native.memory import pack
from soapstone.native.moves import copy_run, row_offset, zero_run
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


# Words: 0 x, 1 y, 2 length, 3 and 4 steps along the axis, 5 whether it leaves out the element, 6
# whether it begins at the end, 7 columns, 8 and 9 steps from one to the next, 10 chunks of them,
# 11 rank, 12.. extents, strides of both.
@native("body")
def _cumsum(block: Any, begin: int, end: int) -> int:
    w = words(block)
    length, exclusive, rank = w[2], w[5] != 0, w[11]
    x_step, y_step = (-w[3], -w[4]) if w[6] != 0 else (w[3], w[4])
    totals = f64p(stack(2048))
    for item in range(begin, end):
        row, column = item // w[10], item % w[10] * 256
        n = min(256, w[7] - column)
        x = w[0] + row_offset(w, 12, 12 + rank, rank, row) + column * w[8]
        y = w[1] + row_offset(w, 12, 12 + 2 * rank, rank, row) + column * w[9]
        if w[6] != 0:
            x += (length - 1) * w[3]
            y += (length - 1) * w[4]
        if n == 1:
            _sums(x, x_step, y, y_step, length, exclusive)
            continue
        for j in range(n):
            totals[j] = 0.0
        for _ in range(length):
            if w[8] == 4 and w[9] == 4:
                _row_sums(totals, f32p(x), f32p(y), n, exclusive)
                x += x_step
                y += y_step
                continue
            for j in range(n):
                before = totals[j]
                total = before + f32p(x + j * w[8])[0]
                totals[j] = total
                f32p(y + j * w[9])[0] = before if exclusive else total
            x += x_step
            y += y_step
    return 0


@native("body")
def _cumsum_integers(block: Any, begin: int, end: int) -> int:
    w = words(block)
    length, exclusive, rank = w[2], w[5] != 0, w[11]
    x_step, y_step = (-w[3], -w[4]) if w[6] != 0 else (w[3], w[4])
    for item in range(begin, end):
        row, column = item // w[10], item % w[10] * 256
        for j in range(column, min(w[7], column + 256)):
            x = w[0] + row_offset(w, 12, 12 + rank, rank, row) + j * w[8]
            y = w[1] + row_offset(w, 12, 12 + 2 * rank, rank, row) + j * w[9]
            if w[6] != 0:
                x += (length - 1) * w[3]
                y += (length - 1) * w[4]
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
    block = pack(
        (x, y, x.shape[axis], x.strides[axis], y.strides[axis], a["exclusive"], a["reverse"]),
        (lines.columns, lines.steps, chunks, lines.rank, lines.table),
    )
    threads = useful_threads(call.threads, x.nbytes + y.nbytes)
    return parallel_for(body, block, lines.rows * chunks, threads)


# ------------------------------------------------------------------------------------------ trilu
# Words: 0 x, 1 y, 2 bytes an element, 3 rows of a matrix, 4 its columns, 5 and 6 steps of both from
# row to row, 7 and 8 along a row, 9 diagonal, 10 whether the upper part stays,
# 11 rank of the other dims, 12.. extents, strides of both.
@native("body")
def _trilu(block: Any, begin: int, end: int) -> int:
    w = words(block)
    size, rows, columns, rank = w[2], w[3], w[4], w[11]
    for item in range(begin, end):
        matrix = item // rows
        row = item - matrix * rows
        x = w[0] + row_offset(w, 12, 12 + rank, rank, matrix) + row * w[5]
        y = w[1] + row_offset(w, 12, 12 + 2 * rank, rank, matrix) + row * w[6]
        first, last = 0, columns
        if w[10] != 0:
            first = max(0, min(columns, row + w[9]))
        else:
            last = max(0, min(columns, row + w[9] + 1))
        if first < last:
            copy_run(size, y + first * w[8], w[8], x + first * w[7], w[7], last - first)
        zero_run(size, y, w[8], first)
        if last < columns:
            zero_run(size, y + last * w[8], w[8], columns - last)
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
    block = pack(
        (x, y, size, x.shape[-2:], x.strides[-2], y.strides[-2], x.strides[-1], y.strides[-1]),
        (a["k"], a["upper"], len(extents), extents, strides),
    )
    threads = useful_threads(call.threads, 2 * y.nbytes)
    return parallel_for(_trilu, block, x.shape[-2] * math.prod(extents), threads)
