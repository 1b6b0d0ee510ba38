"""Softmax and its logarithm over one axis, and their gradients: composites of primitives.

Dims: d0, d1, … by axis; the axis itself is split only after lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import front_axis, need_float
from soapstone.ir.ops.normalization import laws_sequence
from soapstone.ir.ops.signatures import aligned, finish
from soapstone.ir.spec import Case, GradientContext, define, register
from soapstone.ir.tensor import Array, TensorSpec

_AXIS = {"axis": Attribute("axis", -1)}
_CASES = (
    Case(("3 5",)),
    Case(("2 3 4",), {"axis": 1}),
    Case(("3 2 2",), {"axis": 0}),
    Case(("4",)),
    Case(("3 1",)),
    Case(("0 3",)),
    Case(("2 0",)),
)


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, *range(len(inputs)))
    over = f"d{front_axis(inputs[0], attributes['axis'])}"
    table, operands = aligned(inputs)
    return finish(table, operands, operands[:1], [inputs[0].dtype], {over: Kind.LOWERED})


def _shifted(attributes: Attributes, x: Array) -> Array:
    return np.asarray(x - x.max(axis=attributes["axis"], keepdims=True, initial=-np.inf))


def _softmax(attributes: Attributes, x: Array) -> Array:
    powers = np.exp(_shifted(attributes, x))
    return np.asarray(powers / powers.sum(axis=attributes["axis"], keepdims=True))


def _log_softmax(attributes: Attributes, x: Array) -> Array:
    shifted = _shifted(attributes, x)
    total = np.exp(shifted).sum(axis=attributes["axis"], keepdims=True)
    with np.errstate(divide="ignore"):  # the sum over an axis without elements is zero
        return np.asarray(shifted - np.log(total))


def _softmax_grad(attributes: Attributes, dy: Array, y: Array) -> Array:
    return np.asarray(y * (dy - (dy * y).sum(axis=attributes["axis"], keepdims=True)))


def _log_softmax_grad(attributes: Attributes, dy: Array, y: Array) -> Array:
    return np.asarray(dy - np.exp(y) * dy.sum(axis=attributes["axis"], keepdims=True))


def _reduce(emit: Emitter, node: Node, kind: str, x: str) -> str:
    axis = node.attributes["axis"] % emit.spec(x).rank
    return emit(kind, x, axes=(axis,), keepdims=True)


def _lower(emit: Emitter, node: Node) -> Sequence[str]:
    x = node.inputs[0]
    powers = emit("exp", emit("sub", x, _reduce(emit, node, "reduce_max", x)))
    return [emit("div", powers, _reduce(emit, node, "reduce_sum", powers))]


def _log_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x = node.inputs[0]
    shifted = emit("sub", x, _reduce(emit, node, "reduce_max", x))
    total = _reduce(emit, node, "reduce_sum", emit("exp", shifted))
    return [emit("sub", shifted, emit("log", total))]


def _grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, y = node.inputs
    total = _reduce(emit, node, "reduce_sum", emit("mul", dy, y))
    return [emit("mul", y, emit("sub", dy, total))]


def _log_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, y = node.inputs
    total = _reduce(emit, node, "reduce_sum", dy)
    return [emit("sub", dy, emit("mul", emit("exp", y), total))]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    return [g.emit(f"{g.node.operator}_grad", g.grad(), g.outputs[0], axis=g.attributes["axis"])]


_SOFTMAX = define(
    name="softmax",
    inputs=("x",),
    signature=_signature,
    reference=_softmax,
    attributes=_AXIS,
    gradient=_gradient,
    lower=_lower,
    flops_per_point=9,
    forms=laws_sequence.SOFTMAX_FORMS,
    laws=laws_sequence.SOFTMAX_LAWS,
    onnx="Softmax",
    cases=_CASES,
    doc="exp(x) over its sum along the axis\nx: any shape, which is also the result's",
)
register(
    replace(
        _SOFTMAX,
        name="log_softmax",
        reference=_log_softmax,
        lower=_log_lower,
        forms=(),
        laws=(),
        onnx="LogSoftmax",
        doc="x minus the logarithm of the sum of exp(x) along the axis\n"
        "x: any shape, which is also the result's",
    )
)
_SOFTMAX_GRAD = define(
    name="softmax_grad",
    inputs=("dy", "y"),
    outputs=("dx",),
    signature=_signature,
    reference=_softmax_grad,
    attributes=_AXIS,
    lower=_grad_lower,
    flops_per_point=4,
    cases=tuple(Case(case.inputs * 2, case.attributes, ()) for case in _CASES),
)
register(
    replace(
        _SOFTMAX_GRAD,
        name="log_softmax_grad",
        reference=_log_softmax_grad,
        lower=_log_grad_lower,
        flops_per_point=9,
    )
)
