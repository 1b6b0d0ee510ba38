"""Batch and layer normalisation and their gradients: composites of reductions and arithmetic.

Batch normalisation has dims n c and, for images, h w; n, h, w are split only after lowering. Layer
normalisation has the leading dims b0, b1, … and c, the normalised one, split only after lowering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from soapstone.ir.dims import Affine, Axis, DimTable, Kind, Operand, Signature, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, register
from soapstone.ir.tensor import Array, TensorSpec

_EPSILON = {"epsilon": Attribute("float", 1e-5, minimum=0)}
_DIMS = {2: ("n", "c"), 3: ("n", "c", "w"), 4: ("n", "c", "h", "w"), 5: ("n", "c", "d", "h", "w")}


def _batch_signature(
    inputs: Sequence[TensorSpec], images: int, outputs: str, composite: bool
) -> Signature:
    """Return the signature of `images` inputs (n, c, …) and then values of each channel.

    `outputs` has a letter an output: x for (n, c, …), c for (c,).
    """
    need_float(inputs, *range(len(inputs)))
    names = _DIMS.get(inputs[0].rank)
    if names is None:
        raise ShapeError(
            f"input 0 has rank {inputs[0].rank} (shape {inputs[0].shape}); 2 to 5 needed (n c …)"
        )
    table = DimTable()
    operands = []
    for position, spec in enumerate(inputs):
        axes = names if position < images else ("c",)
        need_rank(inputs, position, " ".join(axes))
        where = f"input {position}"
        operands.append(Operand(tuple(along(table, d, e, where) for d, e in zip(axes, spec.shape))))
    by_letter = {"x": operands[0], "c": Operand((operands[0].axes[1],))}
    kinds = {name: Kind.LOWERED for name in names if name != "c"} if composite else {}
    made = [by_letter[letter] for letter in outputs]
    return finish(table, operands, made, [inputs[0].dtype] * len(made), kinds)


def _over(rank: int) -> tuple[int, ...]:
    """Return the axes over which a batch's statistics are taken."""
    return tuple(axis for axis in range(rank) if axis != 1)


def _spread(values: Array, rank: int) -> Array:
    """Return values of each channel in a shape that broadcasts over (n, c, …)."""
    return values.reshape(1, values.size, *(1,) * (rank - 2))


def _mean(emit: Emitter, value: str, axes: Sequence[int]) -> str:
    """Emit the mean over axes, which are kept; it is zero where there is nothing to average."""
    shape = emit.spec(value).shape
    total = emit("reduce_sum", value, axes=tuple(axes), keepdims=True)
    return emit("affine", total, scale=1 / max(1, math.prod(shape[axis] for axis in axes)))


def _batch_norm(
    attributes: Attributes, x: Array, gamma: Array, beta: Array, old_mean: Array, old_var: Array
) -> tuple[Array, ...]:
    over, rank = _over(x.ndim), x.ndim
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
    x, gamma, beta, old_mean, old_var = node.inputs
    spec = emit.spec(x)
    rank, over = spec.rank, _over(spec.rank)
    count = math.prod(spec.shape[axis] for axis in over)
    new = node.attributes["momentum"]
    e = _follow_batch(emit, rank)
    per_channel = emit.renamed({"d0": "c", "f0": "c"})

    def flat(value: str) -> str:
        return per_channel("reshape", value, shape=(spec.shape[1],))

    def mixed(old: str, batch: str, share: float) -> str:
        kept = per_channel("affine", old, scale=1 - new)
        return per_channel("add", kept, per_channel("affine", batch, scale=share))

    mean = _mean(e, x, over)
    centred = e("sub", x, mean)
    var = _mean(e, e("mul", centred, centred), over)
    rstd = e("power", e("affine", var, shift=node.attributes["epsilon"]), exponent=-0.5)
    scaled = e("mul", centred, e("mul", rstd, _channels(emit, gamma, rank)))
    y = e("add", scaled, _channels(emit, beta, rank))
    new_mean = mixed(old_mean, flat(mean), new)
    new_var = mixed(old_var, flat(var), new * count / max(count - 1, 1))
    return [y, new_mean, new_var, flat(mean), flat(rstd)]


def _batch_norm_gradient(g: GradientContext) -> Sequence[str | None]:
    dy = g.only_grad()
    x, gamma = g.inputs[:2]
    return [*g.emit.all("batch_norm_grad", dy, x, gamma, *g.outputs[3:]), None, None]


def _batch_norm_grad(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, ...]:
    over, rank = _over(x.ndim), x.ndim
    count = x.dtype.type(max(1, math.prod(x.shape[axis] for axis in over)))
    normal = (x - _spread(mean, rank)) * _spread(rstd, rank)
    dbeta, dgamma = dy.sum(axis=over), (dy * normal).sum(axis=over)
    inner = dy - _spread(dbeta / count, rank) - normal * _spread(dgamma / count, rank)
    return inner * _spread(gamma * rstd, rank), dgamma, dbeta


def _batch_norm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, mean, rstd = node.inputs
    spec = emit.spec(x)
    rank, over = spec.rank, _over(spec.rank)
    e = _follow_batch(emit, rank)
    rstd = _channels(emit, rstd, rank)
    normal = e("mul", e("sub", x, _channels(emit, mean, rank)), rstd)
    dbeta = e("reduce_sum", dy, axes=over, keepdims=True)
    dgamma = e("reduce_sum", e("mul", dy, normal), axes=over, keepdims=True)
    share = 1 / max(1, math.prod(spec.shape[axis] for axis in over))
    inner = e("sub", dy, e("affine", dbeta, scale=share))
    inner = e("sub", inner, e("mul", normal, e("affine", dgamma, scale=share)))
    dx = e("mul", inner, e("mul", rstd, _channels(emit, gamma, rank)))
    shape = (spec.shape[1],)
    return [dx, *(emit("reshape", v, shape=shape, rename={"f0": "c"}) for v in (dgamma, dbeta))]


def _inference(
    attributes: Attributes, x: Array, gamma: Array, beta: Array, mean: Array, var: Array
) -> Array:
    scale = gamma / np.sqrt(var + x.dtype.type(attributes["epsilon"]))
    rank = x.ndim
    return np.asarray((x - _spread(mean, rank)) * _spread(scale, rank) + _spread(beta, rank))


def _inference_gradient(g: GradientContext) -> Sequence[str | None]:
    x, gamma, _, mean, var = g.inputs
    dy, rank = g.grad(), g.spec(x).rank
    over = _over(rank)
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


def _layer_signature(
    inputs: Sequence[TensorSpec], pattern: Sequence[str], outputs: Sequence[str]
) -> Signature:
    """Return the signature of operands each written as `bc`, `b` or `c` (b: the leading dims)."""
    need_float(inputs, *range(len(inputs)))
    rank = inputs[0].rank
    if rank < 1:
        raise ShapeError("input 0 has rank 0; 1 or more needed (… c)")
    lead = tuple(f"b{axis}" for axis in range(rank - 1))
    names = {"bc": (*lead, "c"), "b": lead, "c": ("c",)}
    table = DimTable()
    operands = []
    for position, (spec, letters) in enumerate(zip(inputs, pattern)):
        need_rank(inputs, position, " ".join(names[letters]))
        where = f"input {position}"
        axes = (along(table, d, e, where) for d, e in zip(names[letters], spec.shape))
        operands.append(Operand(tuple(axes)))

    def operand(letters: str) -> Operand:
        axes: tuple[Axis, ...] = tuple(Affine(d, table.extent(d)) for d in names[letters])
        return Operand(axes)

    made = [operand(letters) for letters in outputs]
    kinds = {"c": Kind.LOWERED}
    return finish(table, operands, made, [inputs[0].dtype] * len(made), kinds)


def _layer_norm(attributes: Attributes, x: Array, gamma: Array, beta: Array) -> tuple[Array, ...]:
    count = x.dtype.type(max(1, x.shape[-1]))
    mean = x.sum(axis=-1) / count
    centred = x - mean[..., None]
    var = (centred * centred).sum(axis=-1) / count
    rstd = 1 / np.sqrt(var + x.dtype.type(attributes["epsilon"]))
    return centred * rstd[..., None] * gamma + beta, np.asarray(mean), np.asarray(rstd)


def _follow_layer(emit: Emitter, rank: int) -> Emitter:
    names = {f"d{axis}": f"b{axis}" for axis in range(rank - 1)} | {f"d{rank - 1}": "c"}
    return emit.renamed(names)


def _layer_norm_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, gamma, beta = node.inputs
    spec = emit.spec(x)
    last, lead = (spec.rank - 1,), spec.shape[:-1]
    e = _follow_layer(emit, spec.rank)
    mean = _mean(e, x, last)
    centred = e("sub", x, mean)
    var = _mean(e, e("mul", centred, centred), last)
    rstd = e("power", e("affine", var, shift=node.attributes["epsilon"]), exponent=-0.5)
    y = e("add", e("mul", e("mul", centred, rstd), gamma), beta)
    flat = [emit("reshape", value, shape=lead) for value in (mean, rstd)]
    return [y, *flat]


def _layer_norm_gradient(g: GradientContext) -> Sequence[str | None]:
    x, gamma, _ = g.inputs
    return list(g.emit.all("layer_norm_grad", g.only_grad(), x, gamma, *g.outputs[1:]))


def _layer_norm_grad(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, ...]:
    count = x.dtype.type(max(1, x.shape[-1]))
    normal = (x - mean[..., None]) * rstd[..., None]
    lead = tuple(range(x.ndim - 1))
    scaled = dy * gamma
    inner = scaled - scaled.sum(axis=-1, keepdims=True) / count
    inner = inner - normal * ((scaled * normal).sum(axis=-1, keepdims=True) / count)
    return inner * rstd[..., None], (dy * normal).sum(axis=lead), dy.sum(axis=lead)


def _layer_norm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, mean, rstd = node.inputs
    spec = emit.spec(x)
    last, lead = (spec.rank - 1,), tuple(range(spec.rank - 1))
    e = _follow_layer(emit, spec.rank)
    column = (*spec.shape[:-1], 1)
    mean, rstd = (emit("reshape", value, shape=column) for value in (mean, rstd))
    normal = e("mul", e("sub", x, mean), rstd)
    scaled = e("mul", dy, gamma)
    inner = e("sub", scaled, _mean(e, scaled, last))
    inner = e("sub", inner, e("mul", normal, _mean(e, e("mul", scaled, normal), last)))
    dx = e("mul", inner, rstd)
    dgamma = e("reduce_sum", e("mul", dy, normal), axes=lead, keepdims=False)
    return [dx, dgamma, e("reduce_sum", dy, axes=lead, keepdims=False)]


register(
    OpSpec(
        name="batch_norm",
        inputs=("x", "gamma", "beta", "running_mean", "running_var"),
        outputs=("y", "new_running_mean", "new_running_var", "mean", "rstd"),
        signature=lambda inputs, a: _batch_signature(inputs, 1, "xcccc", True),
        reference=_batch_norm,
        attributes=_EPSILON | {"momentum": Attribute("float", 0.1, minimum=0)},
        gradient=_batch_norm_gradient,
        lower=_batch_norm_lower,
        flops_per_point=7,
        updates=((1, 3), (2, 4)),
        onnx="BatchNormalization",
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
)
register(
    OpSpec(
        name="batch_norm_grad",
        inputs=("dy", "x", "gamma", "mean", "rstd"),
        outputs=("dx", "dgamma", "dbeta"),
        signature=lambda inputs, a: _batch_signature(inputs, 2, "xcc", True),
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
)
register(
    OpSpec(
        name="batch_norm_inference",
        inputs=("x", "gamma", "beta", "mean", "var"),
        signature=lambda inputs, a: _batch_signature(inputs, 1, "x", False),
        reference=_inference,
        attributes=_EPSILON,
        gradient=_inference_gradient,
        flops_per_point=4,
        onnx="BatchNormalization",
        cases=(
            Case(("2 3 4 3", "3", "3", "3", "3"), {"epsilon": 1e-3}, positive=True),
            Case(("4 3", "3", "3", "3", "3"), positive=True),
            Case(("1 1 1 1", "1", "1", "1", "1"), positive=True),
            Case(("0 2 3 3", "2", "2", "2", "2"), positive=True),
        ),
        doc="x normalised by given statistics: affine in each channel",
    )
)
register(
    OpSpec(
        name="layer_norm",
        inputs=("x", "gamma", "beta"),
        outputs=("y", "mean", "rstd"),
        signature=lambda inputs, a: _layer_signature(inputs, ("bc", "c", "c"), ("bc", "b", "b")),
        reference=_layer_norm,
        attributes=_EPSILON,
        gradient=_layer_norm_gradient,
        lower=_layer_norm_lower,
        flops_per_point=8,
        onnx="LayerNormalization",
        cases=(
            Case(("4 6", "6", "6")),
            Case(("2 3 5", "5", "5"), {"epsilon": 1e-3}),
            Case(("5", "5", "5")),
            Case(("2 1", "1", "1"), {}, ()),
            Case(("0 3", "3", "3")),
        ),
        doc="x normalised over its last dim by mean and biased variance, scaled and shifted",
    )
)
register(
    OpSpec(
        name="layer_norm_grad",
        inputs=("dy", "x", "gamma", "mean", "rstd"),
        outputs=("dx", "dgamma", "dbeta"),
        signature=lambda inputs, a: _layer_signature(
            inputs, ("bc", "bc", "c", "b", "b"), ("bc", "c", "c")
        ),
        reference=_layer_norm_grad,
        lower=_layer_norm_grad_lower,
        flops_per_point=12,
        cases=(
            Case(("4 6", "4 6", "6", "4", "4"), {}, (), positive=True),
            Case(("2 3 5", "2 3 5", "5", "2 3", "2 3"), {}, (), positive=True),
            Case(("5", "5", "5", "", ""), {}, (), positive=True),
            Case(("0 3", "0 3", "3", "0", "0"), {}, (), positive=True),
        ),
    )
)
