"""Losses of two equal shapes (mean squared error, binary cross-entropy), and counts.

Dims: d0, d1, …; of `correct`: n (samples) and c (classes).
"""

from __future__ import annotations

import math

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.operations import NUMPY
from soapstone.ir.ops.checks import need_float, need_integer, need_rank
from soapstone.ir.ops.signatures import aligned, einsum, finish
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

COUNT = {"count": Attribute("int", None, minimum=1)}
CLIP = 1e-7  # probabilities are kept this far from 0 and 1


def mean_of(rows: Array, count: int) -> Array:
    """Return the sum of all elements divided by count, as a scalar array."""
    return np.asarray(np.sum(rows) / rows.dtype.type(count))


def _pair_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0, 1)
    table, operands = aligned(inputs)
    if attributes["count"] is None and inputs[0].size == 0:
        raise ShapeError(f"the shape {inputs[0].shape} has 0 elements; 1 or more needed for a mean")
    return finish(table, operands, [Operand(())], [inputs[0].dtype])


def _pair_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, *range(len(inputs)))
    table, operands = aligned(inputs, scalars=(0,))
    return finish(table, operands, [operands[1]], [inputs[1].dtype])


def _elements(attributes: Attributes, x: Array) -> int:
    return int(attributes["count"] or max(x.size, 1))


def _localize_all(attributes: Attributes, tile: Tile, position: int) -> Attributes:
    if attributes["count"] is not None:
        return attributes
    return {**attributes, "count": math.prod(tile.input_shapes[position])}


def _pair_localize(attributes: Attributes, tile: Tile) -> Attributes:
    return _localize_all(attributes, tile, 0)


def _pair_grad_localize(attributes: Attributes, tile: Tile) -> Attributes:
    return _localize_all(attributes, tile, 1)


def _mse(attributes: Attributes, prediction: Array, target: Array) -> Array:
    return mean_of((prediction - target) ** 2, _elements(attributes, prediction))


def _mse_grad(attributes: Attributes, dloss: Array, prediction: Array, target: Array) -> Array:
    count = prediction.dtype.type(_elements(attributes, prediction))
    return np.asarray((prediction - target) * (2 * dloss / count))


def _mse_gradient(g: GradientContext) -> list[str | None]:
    dp = g.emit("mse_grad", g.grad(), *g.inputs, **g.attributes)
    return [dp, g.emit("neg", dp)]


def _clipped(p: Array) -> Array:
    return np.asarray(np.clip(p, p.dtype.type(CLIP), p.dtype.type(1 - CLIP)))


def _bce(attributes: Attributes, prediction: Array, target: Array) -> Array:
    if attributes["from_logits"]:
        x = prediction
        rows = np.maximum(x, 0) - x * target + np.log1p(np.exp(-np.abs(x)))
    else:
        p = _clipped(prediction)
        rows = -(target * np.log(p) + (1 - target) * np.log1p(-p))
    return mean_of(rows, _elements(attributes, prediction))


def _bce_grad(attributes: Attributes, dloss: Array, prediction: Array, target: Array) -> Array:
    scale = dloss / prediction.dtype.type(_elements(attributes, prediction))
    if attributes["from_logits"]:
        return np.asarray((NUMPY["sigmoid"](prediction) - target) * scale)
    p = _clipped(prediction)
    return np.asarray((p - target) / (p * (1 - p)) * scale)


def _bce_target_grad(attributes: Attributes, dloss: Array, prediction: Array) -> Array:
    scale = dloss / prediction.dtype.type(_elements(attributes, prediction))
    if attributes["from_logits"]:
        return np.asarray(-prediction * scale)
    p = _clipped(prediction)
    return np.asarray((np.log1p(-p) - np.log(p)) * scale)


def _bce_gradient(g: GradientContext) -> list[str | None]:
    prediction, target = g.inputs
    return [
        g.emit("bce_grad", g.grad(), prediction, target, **g.attributes),
        g.emit("bce_target_grad", g.grad(), prediction, **g.attributes),
    ]


_BCE = COUNT | {"from_logits": Attribute("bool", False)}
define(
    name="mse",
    inputs=("prediction", "target"),
    outputs=("loss",),
    signature=_pair_signature,
    reference=_mse,
    attributes=COUNT,
    gradient=_mse_gradient,
    localize=_pair_localize,
    flops_per_point=3,
    cases=(
        Case(("4 3", "4 3")),
        Case(("2 3 2", "2 3 2"), {"count": 5}),
        Case(("", "")),
        Case(("0 2", "0 2"), {"count": 1}),
    ),
    layer=None,
    doc="sum of (prediction - target)^2 over count; count: the elements unless given",
)
define(
    name="mse_grad",
    inputs=("dloss", "prediction", "target"),
    outputs=("dp",),
    signature=_pair_grad_signature,
    reference=_mse_grad,
    attributes=COUNT,
    localize=_pair_grad_localize,
    flops_per_point=2,
    cases=(
        Case(("", "4 3", "4 3"), {}, ()),
        Case(("", "5", "5"), {"count": 3}, ()),
        Case(("", "0 2", "0 2"), {}, ()),
    ),
)
_BCE_CASES = (
    Case(("4 3", "4 3"), positive=True),
    Case(("4 3", "4 3"), {"from_logits": True}),
    Case(("2 1", "2 1"), {"from_logits": True, "count": 5}),
    Case(("0 2", "0 2"), {"count": 1}),
)
define(
    name="bce",
    inputs=("prediction", "target"),
    outputs=("loss",),
    signature=_pair_signature,
    reference=_bce,
    attributes=_BCE,
    gradient=_bce_gradient,
    localize=_pair_localize,
    flops_per_point=16,
    cases=_BCE_CASES,
    layer=None,
    doc="binary cross-entropy of probabilities (clipped to [1e-7, 1 - 1e-7]) or of logits",
)
for _name, _reference, _operands in (
    ("bce_grad", _bce_grad, ("dloss", "prediction", "target")),
    ("bce_target_grad", _bce_target_grad, ("dloss", "prediction")),
):
    define(
        name=_name,
        inputs=_operands,
        outputs=("dx",),
        signature=_pair_grad_signature,
        reference=_reference,
        attributes=_BCE,
        localize=_pair_grad_localize,
        flops_per_point=10,
        cases=tuple(
            Case(("", *case.inputs)[: len(_operands)], case.attributes, (), case.positive)
            for case in _BCE_CASES
        ),
    )


# Counts


def _correct_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_rank(inputs, 0, "n c")
    need_float(inputs, 0)
    need_integer(inputs, 1)
    if inputs[0].shape[1] == 0:
        raise ShapeError("dim c is 0 in input 0; 1 or more needed")
    return einsum("n c, n -> ()", inputs, dtypes=["float32"], kinds={"c": Kind.WHOLE})


def _correct(attributes: Attributes, logits: Array, labels: Array) -> Array:
    return np.asarray(np.sum(np.argmax(logits, axis=1) == labels), np.float32)


def _is_finite_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    table, operands = aligned(inputs)
    return finish(table, operands, [Operand(())], ["bool"], None, "min")


define(
    name="correct",
    inputs=("logits", "labels"),
    outputs=("count",),
    signature=_correct_signature,
    reference=_correct,
    cases=(
        Case(("6 3", "int64 6 <3")),
        Case(("4 2", "int32 4 <2")),
        Case(("1 1", "int64 1 <1")),
        Case(("0 3", "int64 0 <3")),
    ),
    doc="how many rows have their first largest value at the label, as float32",
)
define(
    name="is_finite",
    inputs=("x",),
    signature=_is_finite_signature,
    reference=lambda a, x: np.asarray(np.all(np.isfinite(x))),
    cases=(Case(("3 4",)), Case(("",)), Case(("2 1 3",)), Case(("0 2",))),
    doc="whether no element is NaN or infinite",
)
