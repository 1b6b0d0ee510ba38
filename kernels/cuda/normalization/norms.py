"""Layer, root-mean-square, group and instance normalisation, and batch normalisation's parts.

Variances are sums of squared differences from means that are known, as the reference has them. The
gradients of weights are folds over the other axes, a launch of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from soapstone.ir.ops.normalization.layer_norm import leading
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.normalization.rowwise import Phase, rowwise
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]


def mean_phase(kind: str, count: int) -> Phase:
    """Return the fold to the mean of operand 0."""
    return Phase([("sum", kind)], lambda t, x, known: [x[0]], partial(_over, count))


def _over(count: int, text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
    return [
        text.set(f"{one.name} / {literal(max(count, 1), one.type)}", one.type) for one in folded
    ]


def rstd_phase(kind: str, count: int, epsilon: float, centred: bool) -> Phase:
    """Return the fold to one over the deviation from the statistic before, or from zero."""

    def square(text: Text, x: Values, known: Values) -> list[Value]:
        away = text.set(f"{x[0].name} - {known[-1].name}", kind) if centred else x[0]
        return [text.set(f"{away.name} * {away.name}", kind)]

    def root(text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
        (mean,) = _over(count, text, folded, operands, known)
        made = f"{literal(1, kind)} / sqrt({mean.name} + {literal(epsilon, kind)})"
        return [text.set(made, kind)]

    return Phase([("sum", kind)], square, root)


def _normalise(
    x: View,
    axes: Sequence[int],
    weights: Sequence[View],
    y: View,
    kept: Sequence[View],
    epsilon: float,
    centred: bool,
) -> DeviceEntry:
    """Return the entry of a normalisation; weights: gamma, perhaps beta; kept: the statistics."""
    kind, count = wide(x.dtype), math.prod(x.shape[axis] for axis in axes)
    phases = [mean_phase(kind, count)] if centred else []
    phases.append(rstd_phase(kind, count, epsilon, centred))

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        away = text.set(f"{v[0].name} - {known[0].name}", kind) if centred else v[0]
        made = text.set(f"{away.name} * {known[-1].name} * {v[1].name}", kind)
        return [text.set(f"{made.name} + {v[2].name}", kind) if len(v) > 2 else made]

    return rowwise(
        [x, *weights], axes, phases, [y], item, kept, lambda text, known, operands, _: known
    )


def _slope(
    dy: View, x: View, gamma: View, statistics: Sequence[View], axes: Sequence[int], dx: View
) -> DeviceEntry:
    """Return the entry of dx; statistics: the mean, if it was taken away, and rstd."""
    kind, count = wide(x.dtype), math.prod(x.shape[axis] for axis in axes)
    centred = len(statistics) > 1

    def parts(text: Text, v: Values) -> tuple[Value, Value]:
        scaled = text.set(f"{v[0].name} * {v[2].name}", kind)
        away = text.set(f"{v[1].name} - {v[3].name}", kind) if centred else v[1]
        return scaled, text.set(f"{away.name} * {v[-1].name}", kind)

    def both(text: Text, v: Values, known: Values) -> list[Value]:
        scaled, normal = parts(text, v)
        product = text.set(f"{scaled.name} * {normal.name}", kind)
        return [product, scaled] if centred else [product]

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        scaled, normal = parts(text, v)
        inner = text.set(f"{scaled.name} - {known[1].name}", kind) if centred else scaled
        made = f"({inner.name} - {normal.name} * {known[0].name}) * {v[-1].name}"
        return [text.set(made, kind)]

    sums = [("sum", kind)] * (2 if centred else 1)
    phase = Phase(sums, both, partial(_over, count))
    return rowwise([dy, x, gamma, *statistics], axes, [phase], [dx], item)


def _weight_slopes(
    dy: View, x: View, statistics: Sequence[View], axes: Sequence[int], made: Sequence[View]
) -> DeviceEntry:
    """Return the entry of dgamma, and of dbeta where the mean was taken away."""
    kind, centred = wide(x.dtype), len(statistics) > 1

    def products(text: Text, v: Values) -> list[Value]:
        away = text.set(f"{v[1].name} - {v[2].name}", kind) if centred else v[1]
        product = text.set(f"{v[0].name} * ({away.name} * {v[-1].name})", kind)
        return [product, v[0]] if centred else [product]

    return fold([dy, x, *statistics], axes, [("sum", kind)] * len(made), made, products)


def _column(view: View, rank: int) -> View:
    """Return statistics of the leading axes with axes of one after them."""
    return View(
        view.span,
        (*view.shape, *(1,) * (rank - len(view.shape))),
        (*view.strides, *(0,) * (rank - len(view.shape))),
        view.dtype,
        view.offset,
    )


def _row_norm(centred: bool, call: Call) -> DeviceEntry:
    (x, *weights), (y, *kept) = views(call)
    rank = len(x.shape)
    lead = leading(call.attributes, rank)
    return _normalise(x, range(lead, rank), weights, y, kept, call.attributes["epsilon"], centred)


def _row_norm_grad(call: Call) -> DeviceEntry:
    (dy, x, gamma, *statistics), (dx, *made) = views(call)
    rank = len(x.shape)
    lead = leading(call.attributes, rank)
    columns = [_column(view, rank) for view in statistics]
    return sequence(
        (
            _slope(dy, x, gamma, columns, range(lead, rank), dx),
            _weight_slopes(dy, x, columns, range(lead), made),
        )
    )


variant("layer_norm", "numba", processor="cuda")(partial(_row_norm, True))
variant("rms_norm", "numba", processor="cuda")(partial(_row_norm, False))
variant(("layer_norm_grad", "rms_norm_grad"), "numba", processor="cuda")(_row_norm_grad)


# ---------------------------------------------------------------------------- groups of channels


def _grouped(view: View, groups: int) -> View:
    """Return (n, c, …) as (n, groups, channels of a group, …)."""
    n, c, *rest = view.shape
    return view.reshaped((n, groups, c // groups, *rest))


def _of_channels(view: View, groups: int, rank: int) -> View:
    """Return (c,) as (groups, channels of a group, 1, …) beside n."""
    made = view.reshaped((groups, view.shape[0] // groups))
    return _column(made, rank - 1)


def _group_norm(call: Call) -> DeviceEntry:
    (x, *weights), (y, *kept) = views(call)
    groups = call.attributes.get("num_groups", x.shape[1])
    wide_x = _grouped(x, groups)
    rank = len(wide_x.shape)
    weights = [_of_channels(view, groups, rank) for view in weights]
    over = range(2, rank)
    return _normalise(
        wide_x, over, weights, _grouped(y, groups), kept, call.attributes["epsilon"], True
    )


def _group_norm_grad(call: Call) -> DeviceEntry:
    (dy, x, gamma, *statistics), (dx, *made) = views(call)
    groups = call.attributes.get("num_groups", x.shape[1])
    dy, x, dx = (_grouped(view, groups) for view in (dy, x, dx))
    rank = len(x.shape)
    gamma = _of_channels(gamma, groups, rank)
    statistics = [_column(view, rank) for view in statistics]
    outputs = [
        View(v.span, (1, *v.shape), (0, *v.strides), v.dtype, v.offset)
        for v in (_of_channels(view, groups, rank) for view in made)
    ]
    axes = (0, *range(3, rank))
    return sequence(
        (
            _slope(dy, x, gamma, statistics, range(2, rank), dx),
            _weight_slopes(dy, x, statistics, axes, outputs),
        )
    )


variant(("group_norm", "instance_norm"), "numba", processor="cuda")(_group_norm)
variant(("group_norm_grad", "instance_norm_grad"), "numba", processor="cuda")(_group_norm_grad)


@variant("mean_variance_norm", "numba", processor="cuda")
def mean_variance_norm(call: Call) -> DeviceEntry:
    """Return the entry of x less its mean, over its deviation."""
    (x,), (y,) = views(call)
    axes = sorted({axis % len(x.shape) for axis in call.attributes["axes"]})
    kind, count = wide(x.dtype), math.prod(x.shape[axis] for axis in axes)

    def square(text: Text, v: Values, known: Values) -> list[Value]:
        away = text.set(f"{v[0].name} - {known[0].name}", kind)
        return [text.set(f"{away.name} * {away.name}", kind)]

    def deviation(text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
        (mean,) = _over(count, text, folded, operands, known)
        return [text.set(f"sqrt({mean.name}) + {literal(1e-9, kind)}", kind)]

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        return [text.set(f"({v[0].name} - {known[0].name}) / {known[1].name}", kind)]

    phases = [mean_phase(kind, count), Phase([("sum", kind)], square, deviation)]
    return rowwise([x], axes, phases, [y], item)
