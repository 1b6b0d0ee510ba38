"""Cross-entropy of logits against labels or probabilities, and its gradients; `correct`.

Rows of logits are contiguous. A few rows make an item whose share of the loss is a float64; the
items are added in order, so that the bits do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.mathematics import exp
from soapstone.kernels.cpu.substrate.rowmath import (
    exp_sum,
    load_wide,
    logarithm,
    row_max,
    row_sum,
    splat_wide,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import (
    bind,
    helper,
    native,
    noop,
    parallel_for,
    routine,
    sequence,
    useful_threads,
)
from soapstone.native.intrinsics import as_float, f32p, f64p, i32p, i64p, words
from soapstone.native.lanes import F32, Lanes
from soapstone.native.memory import aligned_array, pack
from soapstone.native.simd import load_first, splat, sum_lanes, vectorised

_FLOATS = 8192  # of logits, in one item
_RANGE = {1: "label out of range"}

# Words of the blocks: 0 rows, 1 classes, 2 rows an item, 3 partial sums, 4 scale, 5 dloss,
# 6 whether labels are int64; then the address and the stride in bytes of the rows of 8 logits,
# 10 labels or targets, 12 lse, 14 dlogits.


@helper
def _label(w: Any, row: int) -> Any:
    place = w[10] + row * w[11]
    return i64p(place)[0] if w[6] != 0 else np.int64(i32p(place)[0])


@routine
def _below(targets: int, x: int, lse: float, n: int) -> Any:
    """The sum of targets * (lse - x)."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        total = total + load_wide(targets, i) * (lse - load_wide(x, i))
    for i in range(full, n, 16):
        rest = rest + load_first(targets, i, n - i) * (lse - load_first(x, i, n - i))
    return sum_lanes(total) + sum_lanes(rest)


@vectorised
def _scaled_exp(to: Lanes, x: Lanes, n: Lanes, lse: Lanes, scale: Lanes) -> None:
    lse, scale = lse.cast(F32), scale.cast(F32)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, exp(get(x, i, width, mask) - lse) * scale, mask)

    loop(n.builder, n, body)


@vectorised
def _dense_row(
    to: Lanes, x: Lanes, targets: Lanes, n: Lanes, lse: Lanes, total: Lanes, scale: Lanes
) -> None:
    lse, total, scale = lse.cast(F32), total.cast(F32), scale.cast(F32)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        power = exp(get(x, i, width, mask) - lse)
        put(to, i, (power * total - get(targets, i, width, mask)) * scale, mask)

    loop(n.builder, n, body)


@helper
def _lse(x: int, n: int) -> Any:
    largest = row_max(x, n)
    return largest + logarithm(exp_sum(x, largest, n))


@native("body")
def _sparse(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n = w[0], w[1]
    for item in range(begin, end):
        total = 0.0
        for row in range(item * w[2], min(rows, (item + 1) * w[2])):
            x = w[8] + row * w[9]
            label = _label(w, row)
            if label < 0 or label >= n:
                return 1
            lse = _lse(x, n)
            f32p(w[12] + row * w[13])[0] = lse
            total += np.float64(lse - f32p(x)[label])
        f64p(w[3])[item] = total
    return 0


@native("body")
def _dense(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n = w[0], w[1]
    for item in range(begin, end):
        total = 0.0
        for row in range(item * w[2], min(rows, (item + 1) * w[2])):
            x = w[8] + row * w[9]
            lse = _lse(x, n)
            f32p(w[12] + row * w[13])[0] = lse
            total += np.float64(_below(w[10] + row * w[11], x, lse, n))
        f64p(w[3])[item] = total
    return 0


@native("body")
def _sparse_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n = w[0], w[1]
    scale = np.float32(f32p(w[5])[0] * as_float(w[4]))
    for row in range(begin * w[2], min(rows, end * w[2])):
        label = _label(w, row)
        if label < 0 or label >= n:
            return 1
        to = w[14] + row * w[15]
        _scaled_exp(to, w[8] + row * w[9], n, f32p(w[12] + row * w[13])[0], scale)
        f32p(to)[label] -= scale
    return 0


@native("body")
def _dense_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n = w[0], w[1]
    scale = f32p(w[5])[0] * as_float(w[4])
    for row in range(begin * w[2], min(rows, end * w[2])):
        targets = w[10] + row * w[11]
        lse = f32p(w[12] + row * w[13])[0]
        x, to = w[8] + row * w[9], w[14] + row * w[15]
        _dense_row(to, x, targets, n, lse, row_sum(targets, n), scale)
    return 0


@native("body")
def _correct(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, n = w[0], w[1]
    for item in range(begin, end):
        total = 0
        for row in range(item * w[2], min(rows, (item + 1) * w[2])):
            label = _label(w, row)
            if label < 0 or label >= n:
                continue
            x = f32p(w[8] + row * w[9])
            largest = row_max(w[8] + row * w[9], n)
            i = 0
            if largest != largest:  # as in NumPy, the first NaN is the largest
                while x[i] == x[i]:
                    i += 1
            else:
                while x[i] != largest:
                    i += 1
            if i == label:
                total += 1
        f64p(w[3])[item] = np.float64(total)
    return 0


@native()
def add_partials(block: Any) -> int:
    """Add float64 sums in order. Words: 0 the sums, 1 how many, 2 a factor, 3 the result."""
    w = words(block)
    total = 0.0
    for i in range(w[1]):
        total += f64p(w[0])[i]
    f32p(w[3])[0] = total * as_float(w[2])
    return 0


def _rows_contiguous(*arrays: Array) -> bool:
    return is_float32(*arrays) and all(
        a.size == 0 or a.shape[1] == 1 or a.strides[1] == 4 for a in arrays
    )


def _is_integer(labels: Array) -> bool:
    return labels.dtype in (np.int32, np.int64) and labels.flags.aligned


def _items(logits: Array) -> tuple[int, int]:
    """Return the rows an item, and the items."""
    rows, classes = logits.shape
    group = max(1, _FLOATS // max(classes, 1))
    return group, -(-rows // group)


def _table(
    logits: Array, expected: Array, lse: Array, to: Array, head: Sequence[Any]
) -> tuple[Any, ...]:
    group, _ = _items(logits)
    pairs = [(a, a.strides[0]) for a in (logits, expected, lse, to)]
    partials, scale, dloss = head
    wide = expected.dtype == np.int64
    return (*logits.shape, group, partials, scale, dloss, wide, 0, pairs)


@variant(("cross_entropy", "cross_entropy_dense"), "numba")
def cross_entropy(call: Call) -> Entry | None:
    """The mean cross-entropy of rows of logits, and the logarithm of their sums of exponentials."""
    (logits, expected), (loss, lse) = call.inputs, call.outputs
    sparse = call.operator == "cross_entropy"
    if not _rows_contiguous(logits) or not is_float32(loss, lse):
        return None
    if not (_is_integer(expected) if sparse else _rows_contiguous(expected)):
        return None
    _, items = _items(logits)
    partials = aligned_array((max(items, 1),), np.float64, zero=True)
    block = pack(_table(logits, expected, lse, lse, (partials, 0, 0)))
    threads = useful_threads(call.threads, 4 * logits.nbytes)
    scale = 1.0 / (call.attributes["count"] or max(logits.shape[0], 1))
    rows = parallel_for(_sparse if sparse else _dense, block, items, threads, _RANGE)
    return sequence([rows, bind(add_partials, partials, items, scale, loss)])


@variant(("cross_entropy_grad", "cross_entropy_dense_grad"), "numba")
def cross_entropy_grad(call: Call) -> Entry | None:
    """The gradient of the logits, from the forward pass's logarithms."""
    (dloss, logits, expected, lse), (dlogits,) = call.inputs, call.outputs
    sparse = call.operator == "cross_entropy_grad"
    if not _rows_contiguous(logits, dlogits) or not is_float32(dloss, lse):
        return None
    if not (_is_integer(expected) if sparse else _rows_contiguous(expected)):
        return None
    if dlogits.size == 0 and not (sparse and logits.shape[0]):
        return noop()
    scale = 1.0 / (call.attributes["count"] or max(logits.shape[0], 1))
    block = pack(_table(logits, expected, lse, dlogits, (0, scale, dloss)))
    threads = useful_threads(call.threads, 4 * logits.nbytes)
    body = _sparse_grad if sparse else _dense_grad
    return parallel_for(body, block, _items(logits)[1], threads, _RANGE)


@variant("correct", "numba")
def correct(call: Call) -> Entry | None:
    """How many rows have their first largest value at the label."""
    (logits, labels), (count,) = call.inputs, call.outputs
    if not _rows_contiguous(logits) or not is_float32(count) or not _is_integer(labels):
        return None
    _, items = _items(logits)
    partials = aligned_array((max(items, 1),), np.float64, zero=True)
    block = pack(_table(logits, labels, logits, logits, (partials, 0, 0)))
    threads = useful_threads(call.threads, logits.nbytes)
    rows = parallel_for(_correct, block, items, threads)
    return sequence([rows, bind(add_partials, partials, items, 1.0, count)])
