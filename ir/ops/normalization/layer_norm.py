"""Layer and root-mean-square normalisation over trailing axes, and their gradients.

Dims: the leading ones b0, b1, …; the normalised ones, from `axis` on, are c, or c0, c1, … where
there are several. Those are split only after lowering.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.normalization import laws_sequence
from soapstone.ir.ops.normalization.statistics import (
    emit_centred,
    emit_mean,
    emit_rstd,
    emit_slope,
    mean,
    normalised,
    slope,
)
from soapstone.ir.ops.signatures import lettered
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

_AXIS = {"axis": Attribute("axis", -1)}
_EPSILON = {"epsilon": Attribute("float", 1e-5, minimum=0)}


def leading(attributes: Attributes, rank: int) -> int:
    """Return how many axes come before the normalised ones."""
    axis = int(attributes.get("axis", -1))
    return axis if axis >= 0 else rank + axis


def _names(lead: int, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the leading and the normalised dims."""
    count = rank - lead
    last = ("c",) if count == 1 else tuple(f"c{axis}" for axis in range(count))
    return tuple(f"b{axis}" for axis in range(lead)), last


def _signature(
    inputs: Sequence[TensorSpec], attributes: Attributes, pattern: str, outputs: str
) -> Signature:
    """Return the signature of operands each written as x (… c), s (…) or c (c)."""
    rank = inputs[0].rank
    lead = leading(attributes, rank)
    if not 0 <= lead < rank:
        raise ShapeError(
            f"input 0 has rank {rank} (shape {inputs[0].shape}), and so no axis"
            f" {attributes.get('axis', -1)}"
        )
    first, last = _names(lead, rank)
    names = {"x": (*first, *last), "s": first, "c": last}
    return lettered(inputs, names, pattern, outputs, dict.fromkeys(last, Kind.LOWERED))


def _axes(attributes: Attributes, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading axes and the normalised ones."""
    lead = leading(attributes, rank)
    return tuple(range(lead)), tuple(range(lead, rank))


def _layer_norm(attributes: Attributes, x: Array, gamma: Array, beta: Array) -> tuple[Array, ...]:
    lead, over = _axes(attributes, x.ndim)
    normal, middle, rstd = normalised(x, over, attributes["epsilon"])
    shape = x.shape[: len(lead)]
    return normal * gamma + beta, middle.reshape(shape), rstd.reshape(shape)


def _layer_norm_grad(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, middle: Array, rstd: Array
) -> tuple[Array, ...]:
    lead, over = _axes(attributes, x.ndim)
    middle, rstd = np.expand_dims(middle, over), np.expand_dims(rstd, over)
    normal = (x - middle) * rstd
    dx = slope(dy * gamma, normal, rstd, over)
    return dx, (dy * normal).sum(axis=lead), dy.sum(axis=lead)


def _rms_norm(attributes: Attributes, x: Array, gamma: Array) -> tuple[Array, ...]:
    lead, over = _axes(attributes, x.ndim)
    rstd = 1 / np.sqrt(mean(x * x, over) + x.dtype.type(attributes["epsilon"]))
    return x * rstd * gamma, rstd.reshape(x.shape[: len(lead)])


def _rms_norm_grad(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, rstd: Array
) -> tuple[Array, ...]:
    lead, over = _axes(attributes, x.ndim)
    rstd = np.expand_dims(rstd, over)
    normal = x * rstd
    dx = slope(dy * gamma, normal, rstd, over, centred=False)
    return dx, (dy * normal).sum(axis=lead)


class _Lowering:
    """Emits the primitives of one node, whose dims follow the node's."""

    def __init__(self, emit: Emitter, node: Node, x: str) -> None:
        self.emit, self.shape = emit, emit.spec(x).shape
        self.lead, self.over = _axes(node.attributes, len(self.shape))
        first, last = _names(len(self.lead), len(self.shape))
        self.e = emit.renamed({f"d{axis}": d for axis, d in enumerate((*first, *last))})

    def column(self, value: str) -> str:
        """Emit a statistic in a shape that broadcasts over x."""
        shape = (*self.emit.spec(value).shape, *(1,) * len(self.over))
        return self.emit("reshape", value, shape=shape)

    def flat(self, value: str) -> str:
        """Emit a kept mean without the axes of one."""
        return self.emit("reshape", value, shape=self.shape[: len(self.lead)])

    def total(self, value: str) -> str:
        """Emit the sum over the leading axes."""
        return self.e("reduce_sum", value, axes=self.lead, keepdims=False)


def _layer_norm_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, gamma, beta = node.inputs
    low = _Lowering(emit, node, x)
    e = low.e
    centred, middle, variance = emit_centred(e, x, low.over)
    rstd = emit_rstd(e, variance, node.attributes["epsilon"])
    y = e("add", e("mul", e("mul", centred, rstd), gamma), beta)
    return [y, low.flat(middle), low.flat(rstd)]


def _layer_norm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, middle, rstd = node.inputs
    low = _Lowering(emit, node, x)
    e = low.e
    middle, rstd = low.column(middle), low.column(rstd)
    normal = e("mul", e("sub", x, middle), rstd)
    dx = emit_slope(e, e("mul", dy, gamma), normal, rstd, low.over)
    return [dx, low.total(e("mul", dy, normal)), low.total(dy)]


def _rms_norm_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, gamma = node.inputs
    low = _Lowering(emit, node, x)
    square = emit_mean(low.e, low.e("mul", x, x), low.over)
    rstd = emit_rstd(low.e, square, node.attributes["epsilon"])
    return [low.e("mul", low.e("mul", x, rstd), gamma), low.flat(rstd)]


def _rms_norm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, rstd = node.inputs
    low = _Lowering(emit, node, x)
    e = low.e
    rstd = low.column(rstd)
    normal = e("mul", x, rstd)
    dx = emit_slope(e, e("mul", dy, gamma), normal, rstd, low.over, centred=False)
    return [dx, low.total(e("mul", dy, normal))]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    operands = (g.only_grad(), *g.inputs[:2], *g.outputs[1:])
    name = f"{g.node.operator}_grad"
    return list(g.emit.all(name, *operands, axis=g.attributes["axis"]))


define(
    name="layer_norm",
    inputs=("x", "gamma", "beta"),
    outputs=("y", "mean", "rstd"),
    signature=lambda inputs, a: _signature(inputs, a, "xcc", "xss"),
    reference=_layer_norm,
    attributes=_EPSILON | _AXIS,
    gradient=_gradient,
    lower=_layer_norm_lower,
    flops_per_point=8,
    forms=laws_sequence.LAYER_NORM_FORMS,
    laws=laws_sequence.LAYER_NORM_LAWS,
    onnx=Onnx("LayerNormalization", outputs=1),
    cases=(
        Case(("4 6", "6", "6")),
        Case(("2 3 5", "5", "5"), {"epsilon": 1e-3}),
        Case(("5", "5", "5")),
        Case(("2 1", "1", "1"), {}, ()),
        Case(("0 3", "3", "3")),
        Case(("2 3 2 4", "2 4", "2 4"), {"axis": -2}),
        Case(("3 2 2", "3 2 2", "3 2 2"), {"axis": 0}),
        Case(("2 3 4", "3 4", "3 4"), {"axis": 1}),
    ),
    doc="x normalised over its axes from `axis` on by mean and biased variance",
)
define(
    name="layer_norm_grad",
    inputs=("dy", "x", "gamma", "mean", "rstd"),
    outputs=("dx", "dgamma", "dbeta"),
    signature=lambda inputs, a: _signature(inputs, a, "xxcss", "xcc"),
    reference=_layer_norm_grad,
    attributes=_AXIS,
    lower=_layer_norm_grad_lower,
    flops_per_point=12,
    cases=(
        Case(("4 6", "4 6", "6", "4", "4"), {}, (), positive=True),
        Case(("2 3 5", "2 3 5", "5", "2 3", "2 3"), {}, (), positive=True),
        Case(("5", "5", "5", "", ""), {}, (), positive=True),
        Case(("0 3", "0 3", "3", "0", "0"), {}, (), positive=True),
        Case(("2 3 4", "2 3 4", "3 4", "2", "2"), {"axis": -2}, (), positive=True),
    ),
)
define(
    name="rms_norm",
    inputs=("x", "gamma"),
    outputs=("y", "rstd"),
    signature=lambda inputs, a: _signature(inputs, a, "xc", "xs"),
    reference=_rms_norm,
    attributes=_EPSILON | _AXIS,
    gradient=_gradient,
    lower=_rms_norm_lower,
    flops_per_point=5,
    onnx="RMSNormalization",
    cases=(
        Case(("4 6", "6")),
        Case(("2 3 5", "5"), {"epsilon": 1e-3}),
        Case(("5", "5")),
        Case(("0 3", "3")),
        Case(("2 3 2 2", "3 2 2"), {"axis": 1}),
    ),
    doc="x divided by the root of its mean square over its axes from `axis` on, scaled",
)
define(
    name="rms_norm_grad",
    inputs=("dy", "x", "gamma", "rstd"),
    outputs=("dx", "dgamma"),
    signature=lambda inputs, a: _signature(inputs, a, "xxcs", "xc"),
    reference=_rms_norm_grad,
    attributes=_AXIS,
    lower=_rms_norm_grad_lower,
    flops_per_point=9,
    cases=(
        Case(("4 6", "4 6", "6", "4"), {}, (), positive=True),
        Case(("5", "5", "5", ""), {}, (), positive=True),
        Case(("0 3", "0 3", "3", "0"), {}, (), positive=True),
        Case(("2 3 4", "2 3 4", "3 4", "2"), {"axis": -2}, (), positive=True),
    ),
)
