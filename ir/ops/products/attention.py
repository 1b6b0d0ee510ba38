"""Scaled dot-product attention, with a mask or causal or both, and its gradients.

Dims: b, samples; heads; tq and tk, positions of queries and of keys; d, elements of both; dv,
elements of values. Split over tk, d or dv the forward operator is lowered. The gradients take the
logarithm of each row's sum, `lse`, to make the weights again, so that they split over tk as well.

Several heads of queries may share one of keys and values, those beside each other: then `heads` are
those of keys, and `group` is how many of queries each has.

Source: Vaswani et al. 2017; the saved sums are those of Dao et al. 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Axis, Kind, Operand, Product, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.ops.products import attention_lower
from soapstone.ir.ops.products.attention_lower import (
    apart,
    leaves_zeros as leaves_zeros,
    shared as shared,
)
from soapstone.ir.ops.signatures import DimTable, along, finish, named
from soapstone.ir.spec import Case, GradientContext, Tile, define, of_extents
from soapstone.ir.tensor import Array, TensorSpec

_ATTRIBUTES = {"scale": Attribute("float", None), "causal": Attribute("bool", False)}
# What a row is of which every key is hidden: zeros, or as softmax makes it, not a number.
_EMPTY = {"empty": Attribute("str", "zeros", choices=("zeros", "nan"))}
# Of keys and values the axis of heads is `few`, as they may have fewer.
_Q, _K, _V = "b tq heads d", "b tk few d", "b tk few dv"
_Y, _LSE = "b tq heads dv", "b heads tq"
_SCORES = ("b", "heads", "tq", "tk")


def _axis(table: DimTable, name: str, extent: int, group: int, where: str) -> Axis:
    """Return an operand's axis, where `group` heads of queries share one of keys.

    Raises:
        ShapeError: it has another extent elsewhere; names the dim.
    """
    if name != "heads" or group == 1:
        return along(table, "heads" if name == "few" else name, extent, where)
    if extent % group:
        raise ShapeError(f"dim heads: {extent} in {where} found, a multiple of {group} needed")
    few = table.add("heads", extent // group, where)
    return Product((few, table.add("group", group, where)), (extent // group, group))


def _mask_axes(table: DimTable, spec: TensorSpec, group: int, where: str) -> Operand:
    """Return the axes of a mask, which broadcasts to (b, heads, tq, tk)."""
    if spec.rank > 4:
        raise ShapeError(f"{where} has rank {spec.rank} (shape {spec.shape}); at most 4 needed")
    axes: list[Axis] = []
    for name, extent in zip(_SCORES[4 - spec.rank :], spec.shape):
        whole = table.extent(name) * (group if name == "heads" else 1)
        if extent == 1 and whole != 1:
            axes.append(Whole(1))
        else:
            axes.append(_axis(table, name, extent, group, where))
    return Operand(tuple(axes))


def _bind(
    inputs: tuple[TensorSpec, ...],
    texts: Sequence[str],
    made: Sequence[str],
    kinds: Mapping[str, Kind],
) -> Signature:
    """Return the signature of inputs named by `texts`, then perhaps a mask, which `made` may name.

    Raises:
        ShapeError: the inputs do not fit.
    """
    if not len(texts) <= len(inputs) <= len(texts) + 1:
        raise ShapeError(f"{len(inputs)} inputs found, {len(texts)} or {len(texts) + 1} needed")
    need_float(inputs, *range(len(inputs)))
    table = DimTable()
    for position, text in enumerate(texts):
        need_rank(inputs, position, text.replace("few", "heads"))
    group = shared(inputs[0].shape[2], inputs[1].shape[2]) if texts[0] == _Q else 1
    operands = []
    known: dict[str, Axis] = {}
    for position, (text, spec) in enumerate(zip(texts, inputs)):
        axes = [
            _axis(table, name, extent, group, f"input {position}")
            for name, extent in zip(text.split(), spec.shape)
        ]
        known |= dict(zip(text.split(), axes))
        operands.append(Operand(tuple(axes)))
    if len(inputs) > len(texts):
        where = f"input {len(texts)}"
        operands.append(_mask_axes(table, inputs[-1], group, where))
    results = [
        operands[-1] if text == "mask" else Operand(tuple(known[name] for name in text.split()))
        for text in made
    ]
    return finish(table, operands, results, [inputs[0].dtype] * len(results), kinds)


def scale_of(attributes: Attributes, width: int) -> float:
    """Return the factor on the scores: the attribute, or one over the square root of d."""
    scale = attributes["scale"]
    return 1 / math.sqrt(max(width, 1)) if scale is None else float(scale)


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    ahead = tile.intervals["tq"][0] - tile.intervals["tk"][0]
    return {**attributes, "ahead": ahead}


def _repeated(x: Array, heads: int) -> Array:
    """Return keys or values with as many heads as queries have."""
    return np.repeat(x, shared(heads, x.shape[2]), axis=2)


def _scores(attributes: Attributes, q: Array, k: Array, mask: tuple[Array, ...]) -> Array:
    """Return the scores (b, heads, tq, tk), minus infinity where a key is hidden."""
    scale = q.dtype.type(scale_of(attributes, q.shape[-1]))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    for values in mask:
        scores = scores + values
    if attributes["causal"]:
        queries, keys = np.arange(q.shape[1]), np.arange(k.shape[1])
        hidden = keys[None, :] > queries[:, None] + attributes.get("ahead", 0)
        scores = np.where(hidden, q.dtype.type(-np.inf), scores)
    return np.asarray(scores)


def _attention(
    attributes: Attributes, q: Array, k: Array, v: Array, *mask: Array
) -> tuple[Array, Array]:
    k, v = (_repeated(each, q.shape[2]) for each in (k, v))
    scores = _scores(attributes, q, k, mask)
    top = np.maximum(scores.max(axis=-1, initial=-np.inf), np.finfo(scores.dtype).min)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    y = np.einsum("bhqk,bkhd->bqhd", weights, v)
    if leaves_zeros(attributes, k.shape[1]):
        divisor = np.where(total == 0, total.dtype.type(1), total)
    else:
        divisor = total
    with np.errstate(divide="ignore", invalid="ignore"):
        return y / divisor.swapaxes(1, 2)[..., None], np.log(total) + top


def _weights(
    attributes: Attributes, q: Array, k: Array, lse: Array, mask: tuple[Array, ...]
) -> Array:
    """Return the weights (b, heads, tq, tk), zero in rows of which every key is hidden."""
    sums = np.maximum(lse, np.finfo(lse.dtype).min)
    return np.asarray(np.exp(_scores(attributes, q, k, mask) - sums[..., None]))


def _score_grad(weights: Array, dy: Array, v: Array, y: Array) -> Array:
    """Return the gradient of the scores after scaling (b, heads, tq, tk)."""
    inner = np.einsum("bqhd,bkhd->bhqk", dy, v)
    rows = np.sum(dy * y, axis=-1).swapaxes(1, 2)
    return np.asarray(weights * (inner - rows[..., None]))


def _grad(
    attributes: Attributes,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    *mask: Array,
) -> tuple[Array, Array, Array]:
    weights = _weights(attributes, q, k, lse, mask)
    dscores = _score_grad(weights, dy, v, y) * q.dtype.type(scale_of(attributes, q.shape[-1]))
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, k)
    dk = np.einsum("bhqk,bqhd->bkhd", dscores, q)
    return dq, dk, np.einsum("bhqk,bqhd->bkhd", weights, dy)


def _mask_grad(
    attributes: Attributes,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    mask: Array,
) -> Array:
    made = _score_grad(_weights(attributes, q, k, lse, (mask,)), dy, v, y)
    made = made.sum(axis=tuple(range(4 - mask.ndim)))
    over = tuple(axis for axis, extent in enumerate(mask.shape) if extent != made.shape[axis])
    return np.asarray(made.sum(axis=over, keepdims=True))


def _gradient(g: GradientContext) -> Sequence[str | None]:
    dy = g.only_grad()
    q, k, v, *mask = g.inputs
    group = shared(g.spec(q).shape[2], g.spec(k).shape[2])
    emit = g.emit if group == 1 else g.emit.renamed({})
    if group > 1:
        k, v = apart(emit, k, group), apart(emit, v, group, "dv")
    operands = (dy, q, k, v, *g.outputs, *mask)
    attributes = {name: g.attributes[name] for name in _ATTRIBUTES}
    dq, dk, dv = emit.all("attention_grad", *operands, **attributes)
    if group > 1:
        dk, dv = (_summed(emit, each, group) for each in (dk, dv))
    made: list[str | None] = [dq, dk, dv]
    if mask:
        made.append(emit("attention_mask_grad", *operands, **attributes))
    return made


def _summed(emit: Emitter, x: str, group: int) -> str:
    """Emit the gradient of what `apart` repeats."""
    b, t, heads, d = emit.spec(x).shape
    wide = emit("reshape", x, shape=(b, t, heads // group, group, d))
    return emit("reduce_sum", wide, axes=(3,), keepdims=False)


def _flops(e: Mapping[str, int], products: int) -> float:
    """Return the operations of that many products over all scores, and of the weights."""
    heads = e["heads"] * e.get("group", 1)
    return e["b"] * heads * e["tq"] * e["tk"] * (products * (e["d"] + e["dv"]) + 10.0)


_GRAD_INPUTS = (_Y, _Q, _K, _V, _Y, _LSE)
_LOWERED = {"tk": Kind.LOWERED, "d": Kind.LOWERED, "dv": Kind.LOWERED}
_HEADS = ("2 3 2 4", "2 5 2 4", "2 5 2 3")
_SQUARE = ("1 4 2 3", "1 4 2 3", "1 4 2 3")
_GRAD_HEADS = ("2 3 2 3", *_HEADS, "2 3 2 3", "2 2 3")
_GRAD_SQUARE = ("1 4 2 3", *_SQUARE, "1 4 2 3", "1 2 4")
_CAUSAL = {"causal": True}

define(
    name="attention",
    half=True,
    strided=True,
    inputs=("q", "k", "v", "mask?"),
    outputs=("y", "lse"),
    signature=lambda inputs, a: _bind(inputs, (_Q, _K, _V), (_Y, _LSE), _LOWERED),
    reference=_attention,
    attributes=_ATTRIBUTES | _EMPTY,
    gradient=_gradient,
    localize=_localize,
    lower=attention_lower.forward,
    operations=of_extents(lambda e: _flops(e, 2)),
    onnx="Attention",
    layer=None,
    cases=(
        Case(_HEADS),
        Case(_SQUARE, _CAUSAL),
        Case((*_HEADS, "3 5")),
        Case((*_HEADS, "2 1 1 5"), {"scale": 0.3}),
        Case((*_SQUARE, "2 4 4"), {"causal": True, "scale": 1.0, "empty": "nan"}),
        Case(("1 1 1 1", "1 1 1 1", "1 1 1 1")),
        Case(("2 0 1 3", "2 4 1 3", "2 4 1 2")),
        Case(("2 3 1 4", "2 0 1 4", "2 0 1 2"), {"empty": "nan"}),
        Case(("2 21 3 18", "2 35 3 18", "2 35 3 17", "1 3 21 35"), _CAUSAL, ()),
        Case(("2 3 6 4", "2 5 2 4", "2 5 2 3", "2 6 3 5")),
        Case(("1 13 4 5", "1 13 2 5", "1 13 2 3", "1 1 1 13"), _CAUSAL, ()),
    ),
    doc="softmax(q k' scale + mask) v, and the logarithm of each row's sum (saved)",
)
define(
    name="attention_grad",
    strided=True,
    inputs=("dy", "q", "k", "v", "y", "lse", "mask?"),
    outputs=("dq", "dk", "dv"),
    signature=lambda inputs, a: _bind(
        inputs, _GRAD_INPUTS, (_Q, _K, _V), {"d": Kind.LOWERED, "dv": Kind.LOWERED}
    ),
    reference=_grad,
    attributes=_ATTRIBUTES,
    localize=_localize,
    lower=attention_lower.backward,
    operations=of_extents(lambda e: _flops(e, 5)),
    cases=(
        Case(_GRAD_HEADS, {}, ()),
        Case(_GRAD_SQUARE, _CAUSAL, ()),
        Case((*_GRAD_HEADS, "2 1 3 5"), {"scale": 0.3}, ()),
        Case((*_GRAD_SQUARE, "1 4"), _CAUSAL, ()),
        Case(("1 1 1 1", *("1 1 1 1",) * 4, "1 1 1"), {}, ()),
    ),
    doc="the gradients of queries, keys and values",
)
define(
    name="attention_mask_grad",
    inputs=("dy", "q", "k", "v", "y", "lse", "mask"),
    outputs=("dmask",),
    signature=lambda inputs, a: _bind(
        inputs, _GRAD_INPUTS, ("mask",), {"d": Kind.LOWERED, "dv": Kind.LOWERED}
    ),
    reference=_mask_grad,
    attributes=_ATTRIBUTES,
    localize=_localize,
    lower=attention_lower.mask,
    operations=of_extents(lambda e: _flops(e, 2)),
    cases=(
        Case((*_GRAD_HEADS, "3 5"), {}, ()),
        Case((*_GRAD_HEADS, "2 1 3 1"), {"scale": 0.3}, ()),
        Case((*_GRAD_SQUARE, "2 4 4"), _CAUSAL, ()),
    ),
    doc="the gradient of the mask, summed over the axes along which it is broadcast",
)


def _causal_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    need_rank(inputs, 0, "b heads tq tk")
    table = DimTable()
    operand = named(table, _SCORES, inputs[0].shape, "input 0")
    return finish(table, [operand], [operand], [inputs[0].dtype])


def _causal(attributes: Attributes, scores: Array) -> Array:
    queries, keys = np.arange(scores.shape[-2]), np.arange(scores.shape[-1])
    hidden = keys[None, :] > queries[:, None] + attributes.get("ahead", 0)
    return np.where(hidden, scores.dtype.type(-np.inf), scores)


define(
    name="hide_later",
    inputs=("scores",),
    signature=_causal_signature,
    reference=_causal,
    localize=_localize,
    cases=(
        Case(("1 2 3 3",), {}, ()),
        Case(("2 1 2 4",), {}, ()),
        Case(("1 1 3 1",), {}, ()),
    ),
    doc="scores (b, heads, tq, tk), minus infinity where the key stands after the query",
)
