"""Normalisation without parameters: `lp_norm` along an axis, `mean_variance_norm` over axes.

Dims: d0, d1, …; those that are normalised over are split only after lowering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from soapstone.ir.dims import DimTable, Kind, Operand, Signature, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.checks import need_float
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, register
from soapstone.ir.tensor import Array, TensorSpec

_TINY = 1e-9  # ONNX adds it to the deviation


def _signature(inputs: Sequence[TensorSpec], axes: Sequence[int]) -> Signature:
    need_float(inputs, *range(len(inputs)))
    x = inputs[0]
    for axis in axes:
        if not -x.rank <= axis < x.rank:
            raise ShapeError(f"input 0 has rank {x.rank} (shape {x.shape}), and so no axis {axis}")
    table = DimTable()
    operands = []
    for position, spec in enumerate(inputs):
        if spec.rank != x.rank:
            raise ShapeError(f"input {position} has rank {spec.rank}; {x.rank} needed")
        where = f"input {position}"
        named = (along(table, f"d{axis}", e, where) for axis, e in enumerate(spec.shape))
        operands.append(Operand(tuple(named)))
    kinds = {f"d{axis % x.rank}": Kind.LOWERED for axis in axes}
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
    count = x.dtype.type(max(1, math.prod(x.shape[axis] for axis in axes)))
    centred = x - x.sum(axis=axes, keepdims=True) / count
    variance = (centred * centred).sum(axis=axes, keepdims=True) / count
    return np.asarray(centred / (np.sqrt(variance) + x.dtype.type(_TINY)))


def _emit_mean(e: Emitter, value: str, axes: Sequence[int]) -> str:
    shape = e.spec(value).shape
    total = e("reduce_sum", value, axes=tuple(axes), keepdims=True)
    return e("affine", total, scale=1 / max(1, math.prod(shape[axis] for axis in axes)))


def _emit_centred(e: Emitter, x: str, axes: Sequence[int]) -> tuple[str, str]:
    """Emit x less its mean, and its deviation."""
    centred = e("sub", x, _emit_mean(e, x, axes))
    variance = _emit_mean(e, e("mul", centred, centred), axes)
    return centred, e("affine", e("sqrt", variance), shift=_TINY)


def _mean_variance_lower(emit: Emitter, node: Node) -> Sequence[str]:
    (x,) = node.inputs
    e = emit.renamed({})
    return [e("div", *_emit_centred(e, x, _axes(node.attributes, e.spec(x).rank)))]


def _mean_variance_gradient(g: GradientContext) -> Sequence[str | None]:
    (x,), (y,), dy = g.inputs, g.outputs, g.grad()
    e = g.emit.renamed({})
    axes = _axes(g.attributes, g.spec(x).rank)
    _, deviation = _emit_centred(e, x, axes)
    inner = e("sub", dy, _emit_mean(e, dy, axes))
    inner = e("sub", inner, e("mul", y, _emit_mean(e, e("mul", dy, y), axes)))
    return [e("div", inner, deviation)]


register(
    OpSpec(
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
)
register(
    OpSpec(
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
        doc="x less its mean, divided by its deviation, over axes",
    )
)
