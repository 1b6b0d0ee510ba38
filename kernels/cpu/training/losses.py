"""Mean squared error, binary cross-entropy, their gradients, and `is_finite`: one pass each.

The sum of an item of work is a float64; items are added in order, whatever the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.ops.training.loss import CLIP
from soapstone.kernels.cpu.elementwise.lane_loops import WIDE, get, loop, put
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.mathematics import exp, log, log1p, sigmoid
from soapstone.kernels.cpu.substrate.rowmath import splat_wide
from soapstone.kernels.cpu.substrate.spans import laid_as, span, span_at, spans
from soapstone.kernels.cpu.training.cross_entropy import total_of
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import bind, native, noop, routine, sequence
from soapstone.native.intrinsics import f32p, f64p, u8p
from soapstone.native.lanes import F32, LANES, Lanes, chosen, first, load_lanes, load_some, where
from soapstone.native.memory import aligned_array
from soapstone.native.simd import splat, sum_lanes, vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads

_LOW, _HIGH = (float(np.float32(bound)) for bound in (CLIP, 1 - CLIP))


def _clipped(p: Lanes) -> Lanes:
    p = where(p < _LOW, _LOW, p)
    return where(p > _HIGH, _HIGH, p)


def _square(p: Lanes, t: Lanes) -> Lanes:
    return (p - t) * (p - t)


def _entropy(p: Lanes, t: Lanes) -> Lanes:
    p = _clipped(p)
    return -(t * log(p) + (1.0 - t) * log1p(-p))


def _entropy_of_logits(x: Lanes, t: Lanes) -> Lanes:
    # where and not maximum, as NaN must stay
    positive = where(x < 0.0, 0.0, x)
    size = where(x < 0.0, x, -x)
    return positive - x * t + log1p(exp(size))


def _of(formula: Any) -> tuple[Any, Any]:
    """The formula on 64 pairs of lanes, and on the first n of 16 (0 past them)."""

    def wide(p: Lanes, t: Lanes, i: Lanes) -> Lanes:
        made: Lanes = formula(load_lanes(p, i, count=WIDE), load_lanes(t, i, count=WIDE))
        return made

    def rest(p: Lanes, t: Lanes, i: Lanes, n: Lanes) -> Lanes:
        mask = first(n)
        return where(mask, formula(load_some(p, i, mask), load_some(t, i, mask)), 0.0)

    return vectorised(wide), vectorised(rest)


def _summed(formula: Any) -> Any:
    """The sum of the formula over n pairs of floats."""
    wide, rest = _of(formula)

    @routine
    def row(p: int, t: int, n: int) -> Any:
        full = n & -64
        total, last = splat_wide(0.0), splat(0.0)
        for i in range(0, full, 64):
            total = total + wide(p, t, i)
        for i in range(full, n, 16):
            last = last + rest(p, t, i, n - i)
        return sum_lanes(total) + sum_lanes(last)

    return row


_square_row, _entropy_row, _logits_row = map(_summed, (_square, _entropy, _entropy_of_logits))
# A finite number times zero is zero; infinity and NaN give NaN, which stays in the sum.
_zeros_row = _summed(lambda x, _: x * 0.0)

_SUM = Fields("kind spans prediction target sums")
_SLOPE = Fields("kind spans prediction target to dloss", reals="scale")
_FINITE = Fields("spans x sums")
_ALL = Fields("sums count to")
_sum_of, _slope_of, _finite_of, _all_of = (fields.at for fields in (_SUM, _SLOPE, _FINITE, _ALL))


@native("body")
def _sum(block: Any, begin: int, end: int) -> int:
    w = _sum_of(block)
    kind, t = w.kind, w.spans
    for item in range(begin, end):
        total = 0.0
        row, stop, column, n = span(t, item)
        while row < stop:
            p = w.prediction + span_at(t, 0, row) + column * 4
            q = w.target + span_at(t, 1, row) + column * 4
            if kind == 0:
                total += np.float64(_square_row(p, q, n))
            elif kind == 1:
                total += np.float64(_entropy_row(p, q, n))
            else:
                total += np.float64(_logits_row(p, q, n))
            row += 1
        f64p(w.sums)[item] = total
    return 0


def _entropy_slope(p: Lanes, t: Lanes) -> Lanes:
    p = _clipped(p)
    return (p - t) / (p * (1.0 - p))


def _target_slope(p: Lanes, t: Lanes) -> Lanes:
    p = _clipped(p)
    return log1p(-p) - log(p)


_SLOPES: tuple[Callable[[Lanes, Lanes], Lanes], ...] = (
    lambda p, t: p - t,
    _entropy_slope,
    lambda x, t: sigmoid(x) - t,
    _target_slope,
    lambda x, t: -x,
)


@vectorised
def _slope_row(kind: Lanes, to: Lanes, p: Lanes, t: Lanes, n: Lanes, scale: Lanes) -> None:
    """Write the slope of that number at n floats of p and t, times the scale."""

    def write(formula: Callable[[Lanes, Lanes], Lanes]) -> None:
        factor = scale.cast(F32)

        def body(i: Lanes, width: int, mask: Lanes | None) -> None:
            value = formula(get(p, i, width, mask), get(t, i, width, mask))
            put(to, i, value * factor, mask)

        # The wider formulas would not fit in the registers.
        loop(n.builder, n, body, 2 * LANES)

    chosen(kind, {number: partial(write, slope) for number, slope in enumerate(_SLOPES)})


@native("body")
def _slope(block: Any, begin: int, end: int) -> int:
    w = _slope_of(block)
    kind, t = w.kind, w.spans
    scale = f32p(w.dloss)[0] * w.scale
    for item in range(begin, end):
        row, stop, column, n = span(t, item)
        while row < stop:
            p = w.prediction + span_at(t, 0, row) + column * 4
            q = w.target + span_at(t, 1, row) + column * 4
            to = w.to + span_at(t, 2, row) + column * 4
            _slope_row(kind, to, p, q, n, scale)
            row += 1
    return 0


@variant(("mse", "bce"), "numba")
def loss(call: Call) -> Entry | None:
    """The mean squared error or binary cross-entropy of two arrays of one shape."""
    (p, t), (to,) = call.inputs, call.outputs
    if not is_float32(p, t, to):
        return None
    scale = 1.0 / (call.attributes["count"] or max(p.size, 1))
    if p.size == 0:
        return total_of(None, scale, to)
    p, before = laid_as(p, t, call.threads)
    made = spans(p.shape, (p, t))
    partials = aligned_array((made.items,), np.float64, zero=True)
    kind = 0 if call.operator == "mse" else 1 + call.attributes["from_logits"]
    block = _SUM.pack(kind=kind, spans=made.block, prediction=p, target=t, sums=partials)
    sums = parallel_for(_sum, block, made.items, useful_threads(call.threads, 2 * p.nbytes))
    return sequence([*before, sums, total_of(partials, scale, to)])


@variant(("mse_grad", "bce_grad", "bce_target_grad"), "numba")
def loss_grad(call: Call) -> Entry | None:
    """The gradient of the prediction, or of the target of a binary cross-entropy."""
    dloss, p, t, to = call.inputs[0], call.inputs[1], call.inputs[-1], call.outputs[0]
    if not is_float32(dloss, p, t, to):
        return None
    if to.size == 0:
        return noop()
    scale = 1.0 / (call.attributes["count"] or p.size)
    if call.operator == "mse_grad":
        kind, scale = 0, 2 * scale
    else:
        kind = 1 + call.attributes["from_logits"] + 2 * (call.operator == "bce_target_grad")
    p, before = laid_as(p, to, call.threads)
    t, between = laid_as(t, to, call.threads)
    made = spans(p.shape, (p, t, to))
    block = _SLOPE.pack(
        kind=kind, spans=made.block, prediction=p, target=t, to=to, dloss=dloss, scale=scale
    )
    threads = useful_threads(call.threads, 3 * p.nbytes)
    slopes = parallel_for(_slope, block, made.items, threads)
    return sequence([*before, *between, slopes])


@native("body")
def _finite(block: Any, begin: int, end: int) -> int:
    w = _finite_of(block)
    t = w.spans
    for item in range(begin, end):
        total = 0.0
        row, stop, column, n = span(t, item)
        while row < stop:
            x = w.x + span_at(t, 0, row) + column * 4
            total += np.float64(_zeros_row(x, x, n))
            row += 1
        f64p(w.sums)[item] = total
    return 0


@native()
def _all_finite(block: Any) -> int:
    w = _all_of(block)
    total = 0.0
    for i in range(w.count):
        total += f64p(w.sums)[i]
    u8p(w.to)[0] = 1 if total == 0.0 else 0
    return 0


@variant("is_finite", "numba")
def is_finite(call: Call) -> Entry | None:
    """Whether no element is NaN or infinite."""
    (x,), (to,) = call.inputs, call.outputs
    if not is_float32(x) or to.dtype != np.bool_:
        return None
    if x.size == 0:
        return bind(_all_finite, _ALL.pack(sums=0, count=0, to=to))
    made = spans(x.shape, (x,))
    sums = aligned_array((made.items,), np.float64, zero=True)
    block = _FINITE.pack(spans=made.block, x=x, sums=sums)
    entry = parallel_for(_finite, block, made.items, useful_threads(call.threads, x.nbytes))
    last = bind(_all_finite, _ALL.pack(sums=sums, count=made.items, to=to))
    return sequence([entry, last])
