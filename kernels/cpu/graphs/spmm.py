"""Rows of a matrix gathered along the entries of a sparse one, summed as they are read.

Threads share out rows so that each has about as many entries: offsets are searched when an entry
runs, since they are contents. Each row of a result is made by one thread, in the order of its
entries, so its bits do not depend on how rows are shared out. Sums over many entries go through x
by blocks of rows that stay in a cache (`blocks.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone import system
from soapstone.ir.ops.graphs.spmm import entries
from soapstone.kernels.cpu.graphs.blocks import first_row, rows_at_once, sums_by_blocks
from soapstone.kernels.cpu.graphs.tiles import LINE, WIDTH, request, weighted_sum
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.layout import is_float32, rows_contiguous
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop, sequence
from soapstone.native.intrinsics import f32p, i32p, i64p
from soapstone.native.memory import Statuses, aligned_array
from soapstone.native.simd import load_first, splat, sum_lanes
from soapstone.native.threads.parallel import parallel_for, useful_threads

# A tile of `rows` rows of the matrix, of which there are `parts` parts: their offsets, and of all
# its `entries` the columns and weights; the rows of x, n floats each, are `columns`. An entry's
# weight is found by its number times by_entry and its column times by_column.
_MATRIX = Fields(
    "indptr indices weights by_entry by_column rows entries columns parts x x_step y y_step n mean"
    " chosen chosen_step base numbers numbered"
)
_matrix_of = _MATRIX.at
_SHARES = Fields("indptr shares")
_shares_of = _SHARES.at


_ONE = np.ones(1, np.float32)  # the weight of every entry of a matrix that has none
AHEAD = 8  # entries whose rows of x are asked for before they are used


@helper
def bad_row(w: Any, row: int) -> bool:
    """Whether a row's offsets or columns are outside."""
    p, column = i64p(w.indptr), i32p(w.indices)
    begin, end = p[row], p[row + 1]
    if begin < 0 or end < begin or end > w.entries:
        return True
    bad = False
    for entry in range(begin, end):
        bad |= column[entry] < 0 or column[entry] >= w.columns
    return bad


@native("body")
def _spmm(block: Any, begin: int, end: int) -> int:
    w = _matrix_of(block)
    p, last = i64p(w.indptr), np.int64(w.entries - 1)
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        first, past = p[row], p[row + 1]
        scale = np.float32(1)
        if w.mean != 0 and past > first:
            scale = np.float32(1) / np.float32(past - first)
        for at in range(0, 4 * w.n, 4 * WIDTH):
            weighted_sum(
                w.y + row * w.y_step + at,
                w.x + at,
                min(w.n - at // 4, np.int64(WIDTH)),
                w.x_step,
                w.indices,
                first,
                past,
                last,
                w.weights,
                w.by_entry,
                w.by_column,
                scale,
                np.int64(0),
            )
    return 0


@native("body")
def _shares(block: Any, begin: int, end: int) -> int:
    """What a weight of each row is, for `spmm_mean_grad`: one over its number of entries."""
    w = _shares_of(block)
    p, to = i64p(w.indptr), f32p(w.shares)
    for row in range(begin, end):
        count = p[row + 1] - p[row]
        to[row] = np.float32(1) / np.float32(max(count, np.int64(1)))
    return 0


@helper
def _ahead(w: Any, entry: int) -> None:
    """Ask for the row of x that an entry to come names."""
    source = np.int64(i32p(w.indices)[min(entry + AHEAD, w.entries - 1)])
    for line in range(0, 4 * w.n, LINE):
        request(w.x + source * w.x_step + line)


@native("body")
def _sddmm(block: Any, begin: int, end: int) -> int:
    w = _matrix_of(block)
    p, column, to = i64p(w.indptr), i32p(w.indices), f32p(w.weights)
    n = w.n
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        a = w.y + row * w.y_step
        for entry in range(p[row], p[row + 1]):
            _ahead(w, entry)
            b = w.x + np.int64(column[entry]) * w.x_step
            total = splat(np.float32(0))
            for at in range(0, n, 16):
                total = total + load_first(a, at, n - at) * load_first(b, at, n - at)
            to[entry] = sum_lanes(total)
    return 0


@native("body")
def _spmm_max(block: Any, begin: int, end: int) -> int:
    w = _matrix_of(block)
    p, column, n = i64p(w.indptr), i32p(w.indices), w.n
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        y, chosen = f32p(w.y + row * w.y_step), i32p(w.chosen + row * w.chosen_step)
        for i in range(n):
            y[i] = 0.0
            chosen[i] = -1
        for entry in range(p[row], p[row + 1]):
            _ahead(w, entry)
            s = column[entry]
            number = i32p(w.numbers)[s] if w.numbered != 0 else s
            x = f32p(w.x + np.int64(s) * w.x_step)
            for i in range(n):
                larger = x[i] > y[i] or (x[i] != x[i] and y[i] == y[i]) or chosen[i] < 0
                y[i] = x[i] if larger else y[i]
                chosen[i] = number if larger else chosen[i]
    return 0


@native("body")
def _spmm_max_grad(block: Any, begin: int, end: int) -> int:
    w = _matrix_of(block)
    p, column, n = i64p(w.indptr), i32p(w.indices), w.n
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        dx = f32p(w.y + row * w.y_step)
        for i in range(n):
            dx[i] = 0.0
        for entry in range(p[row], p[row + 1]):
            _ahead(w, entry)
            s = np.int64(column[entry])
            if entry > p[row] and s == column[entry - 1]:
                continue
            dy, chosen = f32p(w.x + s * w.x_step), i32p(w.chosen + s * w.chosen_step)
            for i in range(n):
                dx[i] += dy[i] if chosen[i] == row + w.base else np.float32(0)
    return 0


def _served(indptr: Array, indices: Array, *rows: Array) -> bool:
    """Whether kernels take offsets and indices of these types, and rows of these strides."""
    whole = indptr.dtype == np.int64 and indices.dtype == np.int32
    plain = all(a.flags.c_contiguous and a.flags.aligned for a in (indptr, indices))
    return whole and plain and is_float32(*rows) and rows_contiguous(*rows)


def _values(
    call: Call,
    indptr: Array,
    indices: Array,
    x: Array,
    y: Array,
    chosen: Array | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the fields of a tile of the matrix and its operands."""
    rows, n = max(indptr.size - 1, 0), x.shape[1]
    threads = useful_threads(call.threads, 4 * indices.size * n + 4 * rows * n)
    values: dict[str, Any] = {
        **dict.fromkeys(("mean", "chosen", "chosen_step", "base", "by_entry", "by_column"), 0),
        **dict.fromkeys(("numbers", "numbered"), 0),
        "weights": _ONE,
        "indptr": indptr,
        "indices": indices,
        "rows": rows,
        "entries": indices.size,
        "columns": len(x),
        "parts": max(1, min(threads, rows)),
        "x": x,
        "x_step": x.strides[0],
        "y": y,
        "y_step": y.strides[0],
        "n": n,
    }
    if chosen is not None:
        values |= {"chosen": chosen, "chosen_step": chosen.strides[0]}
    return values | more


def _bad_matrix(call: Call, values: dict[str, Any]) -> Statuses:
    """Return what the status of bad offsets or columns means."""
    checked = (values[name] for name in ("indptr", "indices", "columns"))
    return outside(call.operator, entries, *checked)


def _entry(call: Call, body: Any, values: dict[str, Any]) -> Entry:
    """Return the entry that runs a body over the parts of a matrix."""
    parts, block = values["parts"], _MATRIX.pack(**values)
    return parallel_for(body, block, parts, parts, _bad_matrix(call, values))


def _sums(call: Call, values: dict[str, Any], cache_bytes: int | None) -> Entry:
    """Return the entry of weighted sums, by blocks where they pay."""
    nbytes = system.cache_bytes(3) if cache_bytes is None else cache_bytes
    sizes = {name: values[name] for name in ("rows", "columns", "entries", "n")}
    at_once = rows_at_once(**sizes, cache_bytes=nbytes)
    if at_once:
        return sums_by_blocks(values, at_once, _bad_matrix(call, values))
    return _entry(call, _spmm, values)


@variant("spmm", "numba")
def spmm(call: Call, cache_bytes: int | None = None) -> Entry | None:
    """The sum or mean of the rows of x that each row of the matrix names.

    cache_bytes: of the cache that blocks are to stay in; None for the machine's last level.
    """
    x, indptr, indices, _, _, *weights = call.inputs
    (y,) = call.outputs
    if not _served(indptr, indices, x, y):
        return None
    if any(not is_float32(w) or not w.flags.c_contiguous for w in weights[:1]):
        return None
    if y.size == 0:
        return noop()
    mean = call.attributes["reduction"] == "mean"
    more: dict[str, Any] = {"weights": weights[0], "by_entry": 1} if weights else {}
    return _sums(call, _values(call, indptr, indices, x, y, mean=mean, **more), cache_bytes)


@variant("spmm_mean_grad", "numba")
def spmm_mean_grad(call: Call, cache_bytes: int | None = None) -> Entry | None:
    """The rows of dy over their entries' number, summed over the entries of each column.

    cache_bytes: as of `spmm`.
    """
    dy, degrees, indptr, indices = call.inputs
    (dx,) = call.outputs
    if not _served(indptr, indices, dy, dx) or not _served(degrees, indices):
        return None
    if dx.size == 0:
        return noop()
    shares = aligned_array((len(dy),), np.float32)
    block = _SHARES.pack(indptr=degrees, shares=shares)
    filled = parallel_for(_shares, block, len(dy), 1)
    values = _values(call, indptr, indices, dy, dx, weights=shares, by_column=1)
    return sequence((filled, _sums(call, values, cache_bytes)))


@variant("sddmm", "numba")
def sddmm(call: Call) -> Entry | None:
    """The product of a row of `a` and a row of `b` at each entry."""
    a, b, indptr, indices = call.inputs
    (y,) = call.outputs
    if not _served(indptr, indices, a, b) or not is_float32(y) or not y.flags.c_contiguous:
        return None
    if y.size == 0:
        return noop()
    return _entry(call, _sddmm, _values(call, indptr, indices, b, a, weights=y))


@variant("spmm_max", "numba")
def spmm_max(call: Call) -> Entry | None:
    """The maxima of the rows of x that each row of the matrix names, and which rows they are."""
    x, indptr, indices, _, _, *numbers = call.inputs
    y, chosen = call.outputs
    if not _served(indptr, indices, x, y) or not _int32_rows(chosen):
        return None
    if any(n.dtype != np.int32 or not n.flags.c_contiguous for n in numbers):
        return None
    if y.size == 0:
        return noop()
    more: dict[str, Any] = {"numbers": numbers[0], "numbered": 1} if numbers else {}
    return _entry(call, _spmm_max, _values(call, indptr, indices, x, y, chosen, **more))


@variant("spmm_max_grad", "numba")
def spmm_max_grad(call: Call) -> Entry | None:
    """The rows of dy added to the rows of x that were chosen."""
    dy, chosen, indptr, indices = call.inputs
    (dx,) = call.outputs
    if not _served(indptr, indices, dy, dx) or not _int32_rows(chosen):
        return None
    if dx.size == 0:
        return noop()
    base = call.attributes["base"]
    values = _values(call, indptr, indices, dy, dx, chosen, base=base)
    return _entry(call, _spmm_max_grad, values)


def _int32_rows(array: Array) -> bool:
    return array.dtype == np.int32 and array.flags.aligned and rows_contiguous(array)
