"""Normalisation without parameters: `lp_norm` along an axis, `mean_variance_norm` over axes.

Dims: d0, d1, …; those that are normalised over are split only after lowering.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import front_axis, need_float
from soapstone.ir.ops.normalization.statistics import emit_centred, emit_mean, mean
from soapstone.ir.ops.signatures import aligned, finish
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

_TINY = 1e-9  # ONNX adds it to the deviation


def _signature(inputs: Sequence[TensorSpec], axes: Sequence[int]) -> Signature:
    need_float(inputs, *range(len(inputs)))
    x = inputs[0]
    kinds = {f"d{front_axis(x, axis)}": Kind.LOWERED for axis in axes}
    table, operands = aligned(inputs)
    return finish(table, operands, [operands[0]], [x.dtype], kinds)


def _norm(attributes: Attributes, x: Array) -> Array:
    axis = attributes["axis"]
    if attributes["p"] == 1:
        return np.asarray(np.abs(x).sum(axis=axis, keepdims=True))
    return np.asarray(np.sqrt((x * x).sum(axis=axis, keepdims=True)))


def _lp_norm(attributes: Attributes, x: Array) -> Array:
    norm = _norm(attributes, x)
    return np.asarray(np.where(norm == 0, x.dtype.type(0), x / np.where(norm == 0, 1, norm)))


def _emit_norm(e: Emitter, x: str, attributes: Attributes) -> tuple[str, str]:
    """Emit the norm, and whether it is above zero, as one or zero."""
    axes = (attributes["axis"] % e.spec(x).rank,)
    if attributes["p"] == 1:
        norm = e("reduce_sum", e("abs", x), axes=axes, keepdims=True)
    else:
        norm = e("sqrt", e("reduce_sum", e("mul", x, x), axes=axes, keepdims=True))
    return norm, e("sign", norm)


def _lp_lower(emit: Emitter, node: Node) -> Sequence[str]:
    (x,) = node.inputs
    e = emit.renamed({})
    norm, present = _emit_norm(e, x, node.attributes)
    # Zeros are divided by one, and stay zeros.
    return [e("div", x, e("add", norm, e("affine", present, scale=-1.0, shift=1.0)))]


def _lp_gradient(g: GradientContext) -> Sequence[str | None]:
    (x,), (y,), dy = g.inputs, g.outputs, g.grad()
    e = g.emit.renamed({})
    axes = (g.attributes["axis"] % g.spec(x).rank,)
    norm, present = _emit_norm(e, x, g.attributes)
    inverse = e("div", present, e("add", norm, e("affine", present, scale=-1.0, shift=1.0)))
    along_y = e("reduce_sum", e("mul", dy, y), axes=axes, keepdims=True)
    slope = e("sign", x) if g.attributes["p"] == 1 else y
    return [e("mul", e("sub", dy, e("mul", along_y, slope)), inverse)]


def _axes(attributes: Attributes, rank: int) -> tuple[int, ...]:
    return tuple(sorted({axis % rank for axis in attributes["axes"]}))


def _mean_variance(attributes: Attributes, x: Array) -> Array:
    axes = _axes(attributes, x.ndim)
    centred = x - mean(x, axes)
    return np.asarray(centred / (np.sqrt(mean(centred * centred, axes)) + x.dtype.type(_TINY)))


def _emit_deviation(e: Emitter, x: str, axes: Sequence[int]) -> tuple[str, str]:
    """Emit x less its mean, and its deviation."""
    centred, _, variance = emit_centred(e, x, axes)
    return centred, e("affine", e("sqrt", variance), shift=_TINY)


def _mean_variance_lower(emit: Emitter, node: Node) -> Sequence[str]:
    (x,) = node.inputs
    e = emit.renamed({})
    return [e("div", *_emit_deviation(e, x, _axes(node.attributes, e.spec(x).rank)))]


def _mean_variance_gradient(g: GradientContext) -> Sequence[str | None]:
    (x,), (y,), dy = g.inputs, g.outputs, g.grad()
    e = g.emit.renamed({})
    axes = _axes(g.attributes, g.spec(x).rank)
    _, deviation = _emit_deviation(e, x, axes)
    inner = e("sub", dy, emit_mean(e, dy, axes))
    inner = e("sub", inner, e("mul", y, emit_mean(e, e("mul", dy, y), axes)))
    return [e("div", inner, deviation)]


define(
    name="lp_norm",
    inputs=("x",),
    signature=lambda inputs, a: _signature(inputs, (a["axis"],)),
    reference=_lp_norm,
    attributes={
        "axis": Attribute("axis", -1),
        "p": Attribute("int", 2, choices=(1, 2)),
    },
    gradient=_lp_gradient,
    lower=_lp_lower,
    flops_per_point=4,
    onnx="LpNormalization",
    cases=(
        Case(("3 4",)),
        Case(("2 3 4",), {"axis": 1, "p": 1}),
        Case(("5",), {"axis": 0}),
        Case(("2 1 3",), {"axis": -2}),
        Case(("0 3",), {"p": 1}),
    ),
    doc="x divided by its sum of magnitudes (p 1) or Euclidean length (p 2) along an axis",
)
define(
    name="mean_variance_norm",
    inputs=("x",),
    signature=lambda inputs, a: _signature(inputs, a["axes"]),
    reference=_mean_variance,
    attributes={"axes": Attribute("axes", (0, 2, 3))},
    gradient=_mean_variance_gradient,
    lower=_mean_variance_lower,
    flops_per_point=7,
    onnx="MeanVarianceNormalization",
    cases=(
        Case(("2 3 4 2",)),
        Case(("3 5",), {"axes": (-1,)}),
        Case(("4 2 3",), {"axes": (0, 1)}),
        Case(("0 2 3 3",)),
    ),
    doc="x less its mean, divided by its deviation, over axes\n"
    "x: any shape, which is also the result's",
)
