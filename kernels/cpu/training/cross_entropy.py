"""Cross-entropy of logits against labels or probabilities, and its gradients; `correct`.

Rows of logits are contiguous. A few rows make an item whose share of the loss is a float64; the
items are added in order, so that the bits do not depend on the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import float_rows, is_float32
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
from soapstone.native.blocks import Fields
from soapstone.native.entries import bind, helper, native, noop, routine, sequence
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.lanes import F32, Lanes
from soapstone.native.memory import Block, aligned_array
from soapstone.native.simd import load_first, splat, sum_lanes, vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads

_FLOATS = 8192  # of logits, in one item
_RANGE = {1: "label out of range"}

# group: rows an item; sums: a float64 an item; expected: labels, `wide` where they are int64, or,
# where `dense`, targets; step: bytes between rows.
_BLOCK = Fields(
    "rows classes group sums dloss dense wide logits expected lse dlogits"
    " step(logits expected lse dlogits)",
    reals="scale",
)
_TOTAL = Fields("sums count to", reals="scale")
_block_of, _total_of = _BLOCK.at, _TOTAL.at


@helper
def _label(w: Any, row: int) -> Any:
    return integer_at(w.expected + row * w.step_expected, w.wide)


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
def _loss(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    rows, n, dense = w.rows, w.classes, w.dense != 0
    for item in range(begin, end):
        total = 0.0
        for row in range(item * w.group, min(rows, (item + 1) * w.group)):
            x = w.logits + row * w.step_logits
            lse = _lse(x, n)
            f32p(w.lse + row * w.step_lse)[0] = lse
            if dense:
                total += np.float64(_below(w.expected + row * w.step_expected, x, lse, n))
                continue
            label = _label(w, row)
            if label < 0 or label >= n:
                return 1
            total += np.float64(lse - f32p(x)[label])
        f64p(w.sums)[item] = total
    return 0


@native("body")
def _sparse_grad(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    rows, n = w.rows, w.classes
    scale = np.float32(f32p(w.dloss)[0] * w.scale)
    for row in range(begin * w.group, min(rows, end * w.group)):
        label = _label(w, row)
        if label < 0 or label >= n:
            return 1
        to = w.dlogits + row * w.step_dlogits
        _scaled_exp(to, w.logits + row * w.step_logits, n, f32p(w.lse + row * w.step_lse)[0], scale)
        f32p(to)[label] -= scale
    return 0


@native("body")
def _dense_grad(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    rows, n = w.rows, w.classes
    scale = f32p(w.dloss)[0] * w.scale
    for row in range(begin * w.group, min(rows, end * w.group)):
        targets = w.expected + row * w.step_expected
        lse = f32p(w.lse + row * w.step_lse)[0]
        x, to = w.logits + row * w.step_logits, w.dlogits + row * w.step_dlogits
        _dense_row(to, x, targets, n, lse, row_sum(targets, n), scale)
    return 0


@native("body")
def _correct(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    rows, n = w.rows, w.classes
    for item in range(begin, end):
        total = 0
        for row in range(item * w.group, min(rows, (item + 1) * w.group)):
            label = _label(w, row)
            if label < 0 or label >= n:
                continue
            x = f32p(w.logits + row * w.step_logits)
            largest = row_max(w.logits + row * w.step_logits, n)
            i = 0
            if largest != largest:  # as in NumPy, the first NaN is the largest
                while x[i] == x[i]:
                    i += 1
            else:
                while x[i] != largest:
                    i += 1
            if i == label:
                total += 1
        f64p(w.sums)[item] = np.float64(total)
    return 0


@native()
def _add_partials(block: Any) -> int:
    """Add float64 sums in order, and scale the total."""
    w = _total_of(block)
    total = 0.0
    for i in range(w.count):
        total += f64p(w.sums)[i]
    f32p(w.to)[0] = total * w.scale
    return 0


def total_of(sums: Array | None, scale: float, to: Array) -> Entry:
    """Return the entry of `to`, the total of float64 sums (none: 0), scaled."""
    count = 0 if sums is None else sums.size
    block = _TOTAL.pack(sums=0 if sums is None else sums, count=count, to=to, scale=scale)
    return bind(_add_partials, block)


def _items(logits: Array) -> tuple[int, int]:
    """Return the rows an item, and the items."""
    rows, classes = logits.shape
    group = max(1, _FLOATS // max(classes, 1))
    return group, -(-rows // group)


def _pack(
    logits: Array, expected: Array, lse: Array, to: Array, *, sums: Any = 0, **gradient: Any
) -> Block:
    rows, classes = logits.shape
    return _BLOCK.pack(
        rows=rows,
        classes=classes,
        group=_items(logits)[0],
        sums=sums,
        dense=expected.ndim > 1,
        wide=expected.dtype == np.int64,
        logits=logits,
        expected=expected,
        lse=lse,
        dlogits=to,
        step=[a.strides[0] for a in (logits, expected, lse, to)],
        **{"dloss": 0, "scale": 0.0} | gradient,
    )


@variant(("cross_entropy", "cross_entropy_dense"), "numba")
def cross_entropy(call: Call) -> Entry | None:
    """The mean cross-entropy of rows of logits, and the logarithm of their sums of exponentials."""
    (logits, expected), (loss, lse) = call.inputs, call.outputs
    sparse = call.operator == "cross_entropy"
    if not float_rows(logits) or not is_float32(loss, lse):
        return None
    if not (is_integer(expected) if sparse else float_rows(expected)):
        return None
    _, items = _items(logits)
    sums = aligned_array((items,), np.float64, zero=True)
    block = _pack(logits, expected, lse, lse, sums=sums)
    threads = useful_threads(call.threads, 4 * logits.nbytes)
    scale = 1.0 / (call.attributes["count"] or max(logits.shape[0], 1))
    rows = parallel_for(_loss, block, items, threads, _RANGE)
    return sequence([rows, total_of(sums, scale, loss)])


@variant(("cross_entropy_grad", "cross_entropy_dense_grad"), "numba")
def cross_entropy_grad(call: Call) -> Entry | None:
    """The gradient of the logits, from the forward pass's logarithms."""
    (dloss, logits, expected, lse), (dlogits,) = call.inputs, call.outputs
    sparse = call.operator == "cross_entropy_grad"
    if not float_rows(logits, dlogits) or not is_float32(dloss, lse):
        return None
    if not (is_integer(expected) if sparse else float_rows(expected)):
        return None
    if dlogits.size == 0 and not (sparse and logits.shape[0]):
        return noop()
    scale = 1.0 / (call.attributes["count"] or max(logits.shape[0], 1))
    block = _pack(logits, expected, lse, dlogits, scale=scale, dloss=dloss)
    threads = useful_threads(call.threads, 4 * logits.nbytes)
    body = _sparse_grad if sparse else _dense_grad
    return parallel_for(body, block, _items(logits)[1], threads, _RANGE)


@variant("correct", "numba")
def correct(call: Call) -> Entry | None:
    """How many rows have their first largest value at the label."""
    (logits, labels), (count,) = call.inputs, call.outputs
    if not float_rows(logits) or not is_float32(count) or not is_integer(labels):
        return None
    _, items = _items(logits)
    sums = aligned_array((items,), np.float64, zero=True)
    block = _pack(logits, labels, logits, logits, sums=sums)
    threads = useful_threads(call.threads, logits.nbytes)
    rows = parallel_for(_correct, block, items, threads)
    return sequence([rows, total_of(sums, 1.0, count)])
