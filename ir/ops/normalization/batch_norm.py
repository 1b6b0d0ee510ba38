"""Batch normalisation and its gradient: composites of reductions and arithmetic.

Dims: n c and, for images, h w; n, h, w are split only after lowering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.ops.signatures import DimTable, along, finish, lettered, named
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

_EPSILON = {"epsilon": Attribute("float", 1e-5, minimum=0)}
_DIMS = {2: ("n", "c"), 3: ("n", "c", "w"), 4: ("n", "c", "h", "w"), 5: ("n", "c", "d", "h", "w")}


def _batch_signature(
    inputs: Sequence[TensorSpec], pattern: str, outputs: str, composite: bool
) -> Signature:
    """Return the signature of operands each written as x: (n, c, …) or c: (c,)."""
    names = _DIMS.get(inputs[0].rank)
    if names is None:
        raise ShapeError(
            f"input 0 has rank {inputs[0].rank} (shape {inputs[0].shape}); 2 to 5 needed (n c …)"
        )
    kinds = {name: Kind.LOWERED for name in names if name != "c"} if composite else {}
    return lettered(inputs, {"x": names, "c": ("c",)}, pattern, outputs, kinds)


def axes_over(rank: int) -> tuple[int, ...]:
    """Return the axes over which a batch's statistics are taken."""
    return tuple(axis for axis in range(rank) if axis != 1)


def _spread(values: Array, rank: int) -> Array:
    """Return values of each channel in a shape that broadcasts over (n, c, …)."""
    return values.reshape(1, values.size, *(1,) * (rank - 2))


def _batch_norm(
    attributes: Attributes, x: Array, gamma: Array, beta: Array, old_mean: Array, old_var: Array
) -> tuple[Array, ...]:
    over, rank = axes_over(x.ndim), x.ndim
    count = math.prod(x.shape[axis] for axis in over)
    mean = x.sum(axis=over) / x.dtype.type(max(count, 1))
    centred = x - _spread(mean, rank)
    var = (centred * centred).sum(axis=over) / x.dtype.type(max(count, 1))
    rstd = 1 / np.sqrt(var + x.dtype.type(attributes["epsilon"]))
    y = centred * _spread(rstd * gamma, rank) + _spread(beta, rank)
    new = x.dtype.type(attributes["momentum"])
    # A batch of one value has no unbiased variance; its biased one, zero, stands in.
    unbiased = var * x.dtype.type(count / max(count - 1, 1))
    return y, old_mean * (1 - new) + mean * new, old_var * (1 - new) + unbiased * new, mean, rstd


def _follow_batch(emit: Emitter, rank: int) -> Emitter:
    return emit.renamed({f"d{axis}": name for axis, name in enumerate(_DIMS[rank])})


def _channels(emit: Emitter, value: str, rank: int) -> str:
    """Emit a value of each channel in a shape that broadcasts over (n, c, …)."""
    shape = (1, emit.spec(value).size, *(1,) * (rank - 2))
    return emit("reshape", value, shape=shape, rename={"f0": "c"})


def _batch_norm_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, *vectors = node.inputs
    spec = emit.spec(x)
    count = math.prod(spec.shape[axis] for axis in axes_over(spec.rank))
    given = {name: node.attributes[name] for name in ("epsilon", "momentum")}
    sums = emit("batch_norm_sums", x, x)
    made = emit.all("batch_norm_statistics", sums, x, *vectors, count=count, **given)
    e = _follow_batch(emit, spec.rank)
    scale, shift = (_channels(emit, value, spec.rank) for value in made[:2])
    return [e("add", e("mul", x, scale), shift), *made[2:]]


def _batch_norm_gradient(g: GradientContext) -> Sequence[str | None]:
    dy = g.only_grad()
    x, gamma = g.inputs[:2]
    return [*g.emit.all("batch_norm_grad", dy, x, gamma, *g.outputs[3:]), None, None]


def _batch_norm_grad(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, ...]:
    over, rank = axes_over(x.ndim), x.ndim
    count = x.dtype.type(max(1, math.prod(x.shape[axis] for axis in over)))
    normal = (x - _spread(mean, rank)) * _spread(rstd, rank)
    dbeta, dgamma = dy.sum(axis=over), (dy * normal).sum(axis=over)
    inner = dy - _spread(dbeta / count, rank) - normal * _spread(dgamma / count, rank)
    return inner * _spread(gamma * rstd, rank), dgamma, dbeta


def _batch_norm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, mean, rstd = node.inputs
    spec = emit.spec(x)
    count = math.prod(spec.shape[axis] for axis in axes_over(spec.rank))
    sums = emit("batch_norm_grad_sums", dy, x, mean)
    dgamma, dbeta, *factors = emit.all("batch_norm_slopes", sums, gamma, rstd, count=count)
    e = _follow_batch(emit, spec.rank)
    wide, a, b, d = (_channels(emit, value, spec.rank) for value in (mean, *factors))
    dx = e("mul", e("sub", x, wide), b)
    return [e("add", e("add", e("mul", dy, a), dx), d), dgamma, dbeta]


def _inference(
    attributes: Attributes, x: Array, gamma: Array, beta: Array, mean: Array, var: Array
) -> Array:
    scale = gamma / np.sqrt(var + x.dtype.type(attributes["epsilon"]))
    rank = x.ndim
    return np.asarray((x - _spread(mean, rank)) * _spread(scale, rank) + _spread(beta, rank))


def _inference_gradient(g: GradientContext) -> Sequence[str | None]:
    x, gamma, _, mean, var = g.inputs
    dy, rank = g.grad(), g.spec(x).rank
    over = axes_over(rank)
    e = _follow_batch(g.emit, rank)
    c = g.emit.renamed({"d0": "c"})
    shifted = c("affine", var, shift=g.attributes["epsilon"])
    rstd = c("power", shifted, exponent=-0.5)
    scale = c("mul", gamma, rstd)
    centred = e("sub", x, _channels(g.emit, mean, rank))
    dbeta = e("reduce_sum", dy, axes=over, keepdims=False)
    dscale = e("reduce_sum", e("mul", dy, centred), axes=over, keepdims=False)
    dx = e("mul", dy, _channels(g.emit, scale, rank))
    dmean = c("neg", c("mul", dbeta, scale))
    slope = c("affine", c("div", scale, shifted), scale=-0.5)
    return [dx, c("mul", dscale, rstd), dbeta, dmean, c("mul", dscale, slope)]


def _first(operand: Operand) -> Operand:
    """Return an operand of which every tile reads the first position of each channel."""
    axes: list[Axis] = [
        axis
        if isinstance(axis, Affine) and axis.dim == "c"
        else Affine(axis.dims[0], axis.extent, stride=0)
        for axis in operand.axes
    ]
    return Operand(tuple(axes))


def _sums_signature(inputs: tuple[TensorSpec, ...], gradient: bool) -> Signature:
    """Return the signature of (x, first) or (dy, x, mean) to sums (2, c)."""
    whole = _batch_signature(inputs, "xxc"[: len(inputs)], "x", False)
    first, second, *rest = whole.inputs
    operands = (first, second if gradient else _first(second), *rest)
    table = DimTable()
    for dim in whole.dims:
        table.add(dim.name, dim.extent, "input 0")
    c = next(axis for axis in first.axes if axis.dims == ("c",))
    return finish(table, operands, [Operand((Whole(2), c))], [inputs[0].dtype])


def _sums(attributes: Attributes, x: Array, first: Array) -> Array:
    over, rank = axes_over(x.ndim), x.ndim
    if x.size == 0:
        return np.zeros((2, x.shape[1]), x.dtype)
    away = x - _spread(_pivot(first), rank)
    return np.stack([away.sum(axis=over), (away * away).sum(axis=over)])


def _pivot(first: Array) -> Array:
    """Return the first value of each channel; zero where there is none."""
    if first.size == 0:
        return np.zeros(first.shape[1], first.dtype)
    return first.reshape(*first.shape[:2], -1)[0, :, 0]


def _grad_sums(attributes: Attributes, dy: Array, x: Array, mean: Array) -> Array:
    over = axes_over(x.ndim)
    return np.stack([dy.sum(axis=over), (dy * (x - _spread(mean, x.ndim))).sum(axis=over)])


def _statistics_signature(inputs: tuple[TensorSpec, ...], first: bool, results: int) -> Signature:
    """Return the signature of sums (2, c), with `first` x, then values of each channel."""
    need_float(inputs, *range(len(inputs)))
    need_rank(inputs, 0, "2 c")
    if inputs[0].shape[0] != 2:
        raise ShapeError(f"input 0 has shape {inputs[0].shape}; (2, c) needed")
    table = DimTable()
    operands = [Operand((Whole(2), along(table, "c", inputs[0].shape[1], "input 0")))]
    if first:
        shape = inputs[1].shape
        if inputs[1].rank not in _DIMS:
            raise ShapeError(f"input 1 has rank {inputs[1].rank} (shape {shape}); 2 to 5 needed")
        table.add("one", 1, "the first position", Kind.WHOLE)
        axes: list[Axis] = [Affine("one", extent) for extent in shape]
        axes[1] = along(table, "c", shape[1], "input 1")
        operands.append(Operand(tuple(axes)))
    for number in range(len(operands), len(inputs)):
        need_rank(inputs, number, "c")
        operands.append(named(table, "c", inputs[number].shape, f"input {number}"))
    made = Operand((Affine("c", table.extent("c")),))
    return finish(table, operands, [made] * results, [inputs[0].dtype] * results)


def _statistics(
    attributes: Attributes,
    sums: Array,
    first: Array,
    *vectors: Array,
) -> tuple[Array, ...]:
    gamma, beta, old_mean, old_var = vectors
    real = sums.dtype.type
    count = max(attributes["count"], 1)
    away, square = sums / real(count)
    mean = _pivot(first) + away
    var = np.maximum(square - away * away, 0)
    rstd = 1 / np.sqrt(var + real(attributes["epsilon"]))
    new = real(attributes["momentum"])
    # A batch of one value has no unbiased variance; its biased one, zero, stands in.
    unbiased = var * real(count / max(count - 1, 1))
    scale = gamma * rstd
    running = old_mean * (1 - new) + mean * new, old_var * (1 - new) + unbiased * new
    return scale, beta - mean * scale, *running, mean, rstd


def _slopes(attributes: Attributes, sums: Array, gamma: Array, rstd: Array) -> tuple[Array, ...]:
    total, product = sums
    scale, count = gamma * rstd, sums.dtype.type(max(attributes["count"], 1))
    factors = scale, -scale * rstd * rstd * product / count, -scale * total / count
    return product * rstd, total.copy(), *factors


define(
    name="batch_norm",
    inputs=("x", "gamma", "beta", "running_mean", "running_var"),
    outputs=("y", "new_running_mean", "new_running_var", "mean", "rstd"),
    signature=lambda inputs, a: _batch_signature(inputs, "xcccc", "xcccc", True),
    reference=_batch_norm,
    attributes=_EPSILON | {"momentum": Attribute("float", 0.1, minimum=0)},
    gradient=_batch_norm_gradient,
    lower=_batch_norm_lower,
    flops_per_point=7,
    updates=((1, 3), (2, 4)),
    cases=(
        Case(("3 2 4 3", "2", "2", "2", "2"), {}, (0, 1, 2)),
        Case(("5 3", "3", "3", "3", "3"), {"momentum": 0.3, "epsilon": 1e-3}, (0, 1, 2)),
        Case(("2 2 4", "2", "2", "2", "2"), {}, (0, 1, 2)),
        Case(("2 1 2 3 2", "1", "1", "1", "1"), {}, (0, 1, 2)),
        Case(("2 1 1 1", "1", "1", "1", "1"), {}, ()),
        Case(("0 2 3 3", "2", "2", "2", "2"), {}, ()),
    ),
    doc="x normalised by its batch's mean and biased variance, scaled and shifted by channel",
)
define(
    name="batch_norm_grad",
    inputs=("dy", "x", "gamma", "mean", "rstd"),
    outputs=("dx", "dgamma", "dbeta"),
    signature=lambda inputs, a: _batch_signature(inputs, "xxccc", "xcc", True),
    reference=_batch_norm_grad,
    lower=_batch_norm_grad_lower,
    flops_per_point=11,
    cases=(
        Case(("3 2 4 3", "3 2 4 3", "2", "2", "2"), {}, (), positive=True),
        Case(("5 3", "5 3", "3", "3", "3"), {}, (), positive=True),
        Case(("2 1 1 1", "2 1 1 1", "1", "1", "1"), {}, (), positive=True),
        Case(("0 2 3 3", "0 2 3 3", "2", "2", "2"), {}, (), positive=True),
    ),
)
define(
    name="batch_norm_inference",
    inputs=("x", "gamma", "beta", "mean", "var"),
    signature=lambda inputs, a: _batch_signature(inputs, "xcccc", "x", False),
    reference=_inference,
    attributes=_EPSILON,
    gradient=_inference_gradient,
    flops_per_point=4,
    onnx="BatchNormalization",
    layer=None,
    cases=(
        Case(("2 3 4 3", "3", "3", "3", "3"), {"epsilon": 1e-3}, positive=True),
        Case(("4 3", "3", "3", "3", "3"), positive=True),
        Case(("1 1 1 1", "1", "1", "1", "1"), positive=True),
        Case(("0 2 3 3", "2", "2", "2", "2"), positive=True),
    ),
    doc="x normalised by given statistics: affine in each channel",
)
_COUNT = {"count": Attribute("int", minimum=0)}
define(
    name="batch_norm_sums",
    inputs=("x", "first"),
    outputs=("sums",),
    signature=lambda inputs, a: _sums_signature(inputs, False),
    reference=_sums,
    flops_per_point=3,
    cases=(
        Case(("3 2 4 3", "3 2 4 3"), {}, ()),
        Case(("5 3", "5 3"), {}, ()),
        Case(("2 3 4", "2 3 4"), {}, ()),
        Case(("2 1 1 1", "2 1 1 1"), {}, ()),
        Case(("0 2 3 3", "0 2 3 3"), {}, ()),
    ),
    doc="by channel, the sums of x less its first value and of the square of that",
)
define(
    name="batch_norm_statistics",
    inputs=("sums", "first", "gamma", "beta", "running_mean", "running_var"),
    outputs=("scale", "shift", "new_running_mean", "new_running_var", "mean", "rstd"),
    signature=lambda inputs, a: _statistics_signature(inputs, True, 6),
    reference=_statistics,
    attributes=_COUNT | _EPSILON | {"momentum": Attribute("float", 0.1, minimum=0)},
    flops_per_point=12,
    cases=(
        Case(("2 3", "2 3 2 2", "3", "3", "3", "3"), {"count": 8}, (), positive=True),
        Case(("2 1", "4 1", "1", "1", "1", "1"), {"count": 4}, (), positive=True),
        Case(("2 2", "0 2 3", "2", "2", "2", "2"), {"count": 0}, (), positive=True),
    ),
    doc="a batch's statistics from its sums; y is x * scale + shift",
)
define(
    name="batch_norm_grad_sums",
    inputs=("dy", "x", "mean"),
    outputs=("sums",),
    signature=lambda inputs, a: _sums_signature(inputs, True),
    reference=_grad_sums,
    flops_per_point=4,
    cases=(
        Case(("3 2 4 3", "3 2 4 3", "2"), {}, ()),
        Case(("5 3", "5 3", "3"), {}, ()),
        Case(("2 1 1 1", "2 1 1 1", "1"), {}, ()),
        Case(("0 2 3 3", "0 2 3 3", "2"), {}, ()),
    ),
    doc="by channel, the sums of dy and of dy * (x - mean)",
)
define(
    name="batch_norm_slopes",
    inputs=("sums", "gamma", "rstd"),
    outputs=("dgamma", "dbeta", "a", "b", "d"),
    signature=lambda inputs, a: _statistics_signature(inputs, False, 5),
    reference=_slopes,
    attributes=_COUNT,
    flops_per_point=9,
    cases=(
        Case(("2 3", "3", "3"), {"count": 8}, ()),
        Case(("2 1", "1", "1"), {"count": 1}, ()),
    ),
    doc="the gradients of gamma and beta; dx is a * dy + b * (x - mean) + d",
)
