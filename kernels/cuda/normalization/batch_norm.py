"""Batch normalisation: statistics in one pass over x, y in another; and its gradient likewise.

Sums are of x less its first value in each channel, which keeps the variance from cancelling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.ir.ops.normalization.batch_norm import axes_over
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]


def channels(view: View, rank: int) -> View:
    """Return (c,) in a shape that broadcasts over (n, c, …)."""
    after = (1,) * (rank - 2)
    return View(
        view.span,
        (1, *view.shape, *after),
        (0, *view.strides, *(0 for _ in after)),
        view.dtype,
        view.offset,
    )


def first_values(x: View) -> View:
    """Return the first value of each channel, as (1, c, 1, …)."""
    for axis in axes_over(len(x.shape)):
        x = x.cut(axis, 0, 1)
    return x


def _powers(text: Text, values: Values) -> list[Value]:
    x, first = values
    away = text.set(f"{x.name} - {first.name}", x.type)
    return [away, text.set(f"{away.name} * {away.name}", x.type)]


def _statistics(
    text: Text, sums: Values, first: Value, old: Values, count: int, attributes: dict[str, float]
) -> tuple[Value, Value, list[Value]]:
    """Return the mean, one over the deviation, and the running mean and variance."""
    kind = sums[0].type

    def t(value: float) -> str:
        return literal(value, kind)

    away, square = (text.set(f"{one.name} / {t(max(count, 1))}", kind) for one in sums)
    mean = text.set(f"{first.name} + {away.name}", kind)
    raw = text.set(f"{square.name} - {away.name} * {away.name}", kind)
    var = text.set(f"({t(0)} if {raw.name} < {t(0)} else {raw.name})", kind)
    rstd = text.set(f"{t(1)} / sqrt({var.name} + {t(attributes['epsilon'])})", kind)
    new = attributes["momentum"]
    unbiased = text.set(f"{var.name} * {t(count / max(count - 1, 1))}", kind)
    running = [
        text.set(f"{before.name} * {t(1 - new)} + {value.name} * {t(new)}", kind)
        for before, value in zip(old, (mean, unbiased))
    ]
    return mean, rstd, running


@variant("batch_norm", "numba", processor="cuda")
def batch_norm(call: Call) -> DeviceEntry | None:
    """Return the entry of a batch's normalisation by its own statistics."""
    (x, gamma, beta, *old), (y, *kept) = views(call)
    if x.size == 0:
        return None
    rank, kind = len(x.shape), wide(x.dtype)
    axes = axes_over(rank)
    count = math.prod(x.shape[axis] for axis in axes)

    def end(text: Text, values: Values) -> list[Value]:
        total, square, first, *before = values
        mean, rstd, running = _statistics(
            text, (total, square), first, before, count, dict(call.attributes)
        )
        return [*running, mean, rstd]

    def write(text: Text, values: Values) -> list[Value]:
        v, mean, rstd, g, b = (value.name for value in values)
        return [text.set(f"({v} - {mean}) * ({rstd} * {g}) + {b}", kind)]

    first = first_values(x)
    sums = fold(
        [x, first],
        axes,
        [("sum", kind)] * 2,
        [channels(view, rank) for view in kept],
        _powers,
        end,
        [first, *(channels(view, rank) for view in old)],
    )
    of = [channels(view, rank) for view in (*kept[2:], gamma, beta)]
    return sequence((sums, pointwise(write, (x, *of), (y,))))


@variant("batch_norm_grad", "numba", processor="cuda")
def batch_norm_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of the gradients of x, gamma and beta."""
    (dy, x, gamma, mean, rstd), (dx, *made) = views(call)
    if x.size == 0:
        return None
    rank, kind = len(x.shape), wide(x.dtype)
    axes = axes_over(rank)
    count = literal(math.prod(x.shape[axis] for axis in axes), kind)
    statistics = [channels(view, rank) for view in (mean, rstd)]

    def products(text: Text, values: Values) -> list[Value]:
        d, v, m, r = (value.name for value in values)
        return [text.set(f"{d} * (({v} - {m}) * {r})", kind), values[0]]

    def write(text: Text, values: Values) -> list[Value]:
        d, v, m, r, g, dgamma, dbeta = (value.name for value in values)
        normal = text.set(f"({v} - {m}) * {r}", kind).name
        inner = f"{d} - {dbeta} / {count} - {normal} * ({dgamma} / {count})"
        return [text.set(f"({inner}) * ({g} * {r})", kind)]

    slopes = [channels(view, rank) for view in made]
    sums = fold([dy, x, *statistics], axes, [("sum", kind)] * 2, slopes, products)
    operands = (dy, x, *statistics, channels(gamma, rank), *slopes)
    return sequence((sums, pointwise(write, operands, (dx,))))


@variant("batch_norm_inference", "numba", processor="cuda")
def batch_norm_inference(call: Call) -> DeviceEntry:
    """Return the entry of normalisation by given statistics."""
    (x, *vectors), (y,) = views(call)
    rank, kind = len(x.shape), wide(x.dtype)
    epsilon = literal(call.attributes["epsilon"], kind)

    def write(text: Text, values: Values) -> list[Value]:
        v, g, b, m, s = (value.name for value in values)
        scale = text.set(f"{g} / sqrt({s} + {epsilon})", kind).name
        return [text.set(f"({v} - {m}) * {scale} + {b}", kind)]

    return pointwise(write, (x, *(channels(view, rank) for view in vectors)), (y,))


@variant(("batch_norm_sums", "batch_norm_grad_sums"), "numba", processor="cuda")
def batch_norm_sums(call: Call) -> DeviceEntry | None:
    """Return the entry of the two sums of each channel that statistics, or gradients, need."""
    inputs, (sums,) = views(call)
    x = inputs[0]
    if x.size == 0:
        return None
    rank, kind = len(x.shape), wide(x.dtype)
    outputs = [channels(sums.row(n), rank) for n in (0, 1)]
    if call.operator == "batch_norm_sums":
        operands = [x, first_values(inputs[1])]
        return fold(operands, axes_over(rank), [("sum", kind)] * 2, outputs, _powers)

    def products(text: Text, values: Values) -> list[Value]:
        d, v, m = values
        return [d, text.set(f"{d.name} * ({v.name} - {m.name})", kind)]

    operands = [*inputs[:2], channels(inputs[2], rank)]
    return fold(operands, axes_over(rank), [("sum", kind)] * 2, outputs, products)


@variant("batch_norm_statistics", "numba", processor="cuda")
def batch_norm_statistics(call: Call) -> DeviceEntry | None:
    """Return the entry of a batch's statistics from its sums."""
    (sums, x, *vectors), outputs = views(call)
    if x.size == 0:
        return None
    first = first_values(x).reshaped((x.shape[1],))

    def write(text: Text, values: Values) -> list[Value]:
        total, square, start, gamma, beta, *old = values
        mean, rstd, running = _statistics(
            text, (total, square), start, old, call.attributes["count"], dict(call.attributes)
        )
        scale = text.set(f"{gamma.name} * {rstd.name}", mean.type)
        shift = text.set(f"{beta.name} - {mean.name} * {scale.name}", mean.type)
        return [scale, shift, *running, mean, rstd]

    rows = [sums.row(n) for n in (0, 1)]
    return pointwise(write, (*rows, first, *vectors), outputs)


@variant("batch_norm_slopes", "numba", processor="cuda")
def batch_norm_slopes(call: Call) -> DeviceEntry:
    """Return the entry of dgamma, dbeta and the factors of dx, from the gradients' sums."""
    (sums, gamma, rstd), outputs = views(call)
    kind = wide(sums.dtype)
    count = literal(max(call.attributes["count"], 1), kind)

    def write(text: Text, values: Values) -> list[Value]:
        total, product, g, r = values
        scale = text.set(f"{g.name} * {r.name}", kind).name
        return [
            text.set(f"{product.name} * {r.name}", kind),
            total,
            text.set(scale, kind),
            text.set(f"-{scale} * {r.name} * {r.name} * {product.name} / {count}", kind),
            text.set(f"-{scale} * {total.name} / {count}", kind),
        ]

    rows = [sums.row(n) for n in (0, 1)]
    return pointwise(write, (*rows, gamma, rstd), outputs)
