"""Reductions that do something to each element or to the total: products, norms, logarithms.

`reduce_l2`, `reduce_log_sum` and `reduce_log_sum_exp` are composites: where a dim that they reduce
is split, they run as the primitives that `lower` emits. Dims: d0, d1, … by the input's axes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.reduction.folds import (
    AXES,
    declare,
    keep_axes,
    kept_shape,
    number_signature,
    reduce_sum,
    reduced_axes,
    reduction_cases,
    reduction_signature,
    unit_rename,
)
from soapstone.ir.ops.signatures import DimTable, finish, numbered
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec


def _composite_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    return reduction_signature(inputs, attributes, "sum", Kind.LOWERED)


def _product(attributes: Attributes, x: Array) -> Array:
    axes, keepdims = attributes["axes"], attributes["keepdims"]
    return np.asarray(np.prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype))


def _log_sum(attributes: Attributes, x: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(reduce_sum(attributes, x)))


def _log_sum_exp(attributes: Attributes, x: Array) -> Array:
    axes, keepdims = attributes["axes"], attributes["keepdims"]
    limit = np.finfo(x.dtype).max
    with np.errstate(all="ignore"):
        top = np.max(x, axis=axes, keepdims=True, initial=-np.inf)
        # Of infinities, or of nothing at all, x - top would be no number.
        top = np.clip(top, -limit, limit)
        total = np.log(np.sum(np.exp(x - top), axis=axes, keepdims=True)) + top
    return np.asarray(total if keepdims else np.squeeze(total, axis=axes))


# Gradients. A value of the output's shape is used with its reduced axes kept, and broadcasts.


def _product_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("reduce_prod_grad", keep_axes(g, g.grad()), g.inputs[0], axes=_axes_of(g))]


def _axes_of(g: GradientContext) -> tuple[int, ...]:
    return reduced_axes(g.attributes, g.spec(g.inputs[0]).rank)


def _l1_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("mul", g.emit("sign", g.inputs[0]), keep_axes(g, g.grad()))]


def _l2_grad(g: GradientContext) -> list[str | None]:
    dy, y = keep_axes(g, g.grad()), keep_axes(g, g.outputs[0])
    return [g.emit("reduce_l2_grad", dy, g.inputs[0], y, axes=_axes_of(g))]


def _sum_square_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("affine", g.emit("mul", g.inputs[0], keep_axes(g, g.grad())), scale=2.0)]


def _log_sum_grad(g: GradientContext) -> list[str | None]:
    dy, y = keep_axes(g, g.grad()), keep_axes(g, g.outputs[0])
    shape = g.spec(g.inputs[0]).shape
    # The unit axes that were kept are no tiles of the dims they stand for.
    gone = _axes_of(g)
    rename = {f"d{axis}": "" if axis in gone else f"d{axis}" for axis in range(len(shape))}
    inverse = g.emit("exp", g.emit("neg", y, rename=rename), rename=rename)
    dy = g.emit("mul", dy, inverse, rename=rename)
    return [dy if g.spec(dy).shape == shape else g.emit("broadcast", dy, shape=shape)]


def _log_sum_exp_grad(g: GradientContext) -> list[str | None]:
    dy, y = keep_axes(g, g.grad()), keep_axes(g, g.outputs[0])
    return [g.emit("mul", g.emit("exp", g.emit("sub", g.inputs[0], y)), dy)]


def _kept_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Of dy, x and perhaps y: those of the output have extent 1 along the reduced axes."""
    need_float(inputs, 0, 1)
    axes = reduced_axes(attributes, inputs[1].rank)
    x = inputs[1]
    small = reduction_signature((x,), {"axes": axes, "keepdims": True}, "sum").outputs[0]
    table = DimTable()
    large = numbered(table, x.shape, "input 1")
    operands = []
    for position, spec in enumerate(inputs):
        wanted = large if position == 1 else small
        if spec.shape != wanted.shape:
            raise ShapeError(f"input {position} has shape {spec.shape}; {wanted.shape} needed")
        operands.append(wanted)
    kinds = {f"d{axis}": Kind.WHOLE for axis in axes} if len(inputs) == 2 else {}
    return finish(table, operands, [large], [x.dtype], kinds)


def _prod_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    # The product of the others, from both sides: right where x is zero, too.
    axes = reduced_axes(attributes, x.ndim)
    moved = np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    shape = moved.shape
    flat = moved.reshape(*shape[: x.ndim - len(axes)], int(np.prod(shape[x.ndim - len(axes) :])))
    ones = np.ones((*flat.shape[:-1], 1), x.dtype)
    left = np.concatenate([ones, np.cumprod(flat, -1)], -1)[..., :-1]
    right = np.concatenate([ones, np.cumprod(flat[..., ::-1], -1)], -1)[..., :-1][..., ::-1]
    others = np.moveaxis((left * right).reshape(shape), range(x.ndim - len(axes), x.ndim), axes)
    return np.asarray(dy * others)


def _norm_grad(attributes: Attributes, dy: Array, x: Array, y: Array) -> Array:
    zero = y == 0
    return np.asarray(x * np.where(zero, 0, dy / np.where(zero, 1, y)).astype(x.dtype))


# Lowerings


def _lower_last(total: str, last: str, emit: Emitter, node: Node) -> list[str]:
    """Emit a reduction, and what is done to its total."""
    given = {name: node.attributes[name] for name in ("axes", "keepdims")}
    rename = _output_dims(node, emit.spec(node.inputs[0]).rank)
    return [emit(last, emit(total, node.inputs[0], **given), rename=rename)]


def _output_dims(node: Node, rank: int) -> dict[str, str]:
    """Return what the dims of an element-wise operator on the output are called in this one."""
    gone = reduced_axes(node.attributes, rank)
    if node.attributes["keepdims"]:
        return {f"d{axis}": "" if axis in gone else f"d{axis}" for axis in range(rank)}
    kept = [axis for axis in range(rank) if axis not in gone]
    names = {f"d{place}": f"d{axis}" for place, axis in enumerate(kept)}
    return names | {f"d{axis}": "" for axis in range(len(kept), rank)}


def _lower_log_sum_exp(emit: Emitter, node: Node) -> list[str]:
    x = emit.spec(node.inputs[0])
    axes = reduced_axes(node.attributes, x.rank)
    limit = float(np.finfo(x.dtype).max)
    kept = _output_dims(replace(node, items=(("axes", axes), ("keepdims", True))), x.rank)
    top = emit("reduce_max", node.inputs[0], axes=axes, keepdims=True)
    top = emit("clip", top, low=-limit, high=limit, rename=kept)
    powers = emit("exp", emit("sub", node.inputs[0], top))
    total = emit("log", emit("reduce_sum", powers, axes=axes, keepdims=True), rename=kept)
    y = emit("add", total, top, rename=kept)
    if not node.attributes["keepdims"]:
        shape = kept_shape(x.shape, axes)
        left = [extent for axis, extent in enumerate(shape) if axis not in axes]
        rename = unit_rename(shape, [f"d{axis}" for axis in range(x.rank)])
        y = emit("reshape", y, shape=left, rename=rename)
    return [y]


_INTEGERS = Case(("int64 3 4 >=1 <4",), {"axes": (0,), "keepdims": True}, ())
_LOGARITHMS = tuple(replace(case, positive=True) for case in reduction_cases(empty=False))
_NOTHING = Case(("2 0",), {"axes": (1,)}, ())

_OF_NUMBERS = (*reduction_cases(empty=True), _INTEGERS)
declare(
    "reduce_prod",
    partial(number_signature, monoid="prod"),
    _product,
    _product_grad,
    _OF_NUMBERS,
    "the product over axes; over no elements 1",
)
declare(
    "reduce_l1",
    number_signature,
    lambda a, x: reduce_sum(a, np.abs(x)),
    _l1_grad,
    _OF_NUMBERS,
    "the sum of absolute values over axes",
    flops_per_point=2,
)
declare(
    "reduce_sum_square",
    number_signature,
    lambda a, x: reduce_sum(a, x * x),
    _sum_square_grad,
    _OF_NUMBERS,
    "the sum of squares over axes",
    flops_per_point=2,
)
declare(
    "reduce_l2",
    _composite_signature,
    lambda a, x: np.sqrt(reduce_sum(a, x * x)),
    _l2_grad,
    reduction_cases(empty=True),
    "the square root of the sum of squares over axes",
    lower=partial(_lower_last, "reduce_sum_square", "sqrt"),
    flops_per_point=2,
)
declare(
    "reduce_log_sum",
    _composite_signature,
    _log_sum,
    _log_sum_grad,
    (*_LOGARITHMS, _NOTHING),
    "the logarithm of the sum over axes",
    lower=partial(_lower_last, "reduce_sum", "log"),
)
declare(
    "reduce_log_sum_exp",
    _composite_signature,
    _log_sum_exp,
    _log_sum_exp_grad,
    (*reduction_cases(empty=False), _NOTHING),
    "the logarithm of the sum of exponentials over axes, which does not overflow",
    lower=_lower_log_sum_exp,
    flops_per_point=4,
)
_KEPT = {"axes": AXES["axes"]}
define(
    name="reduce_prod_grad",
    inputs=("dy", "x"),
    outputs=("dx",),
    signature=_kept_grad_signature,
    reference=_prod_grad,
    attributes=_KEPT,
    flops_per_point=4,
    cases=(
        Case(("1 4", "3 4"), {"axes": (0,)}, ()),
        Case(("3 1 1", "3 4 2"), {"axes": (2, 1)}, ()),
        Case(("1 1", "2 3"), {}, ()),
        Case(("2 3", "2 3"), {"axes": ()}, ()),
        Case(("0 1", "0 3"), {"axes": (1,)}, ()),
        Case(("2 1", "2 0"), {"axes": (1,)}, ()),
    ),
    doc="dy, whose reduced axes are kept, times the product of the other elements of x",
)
define(
    name="reduce_l2_grad",
    inputs=("dy", "x", "y"),
    outputs=("dx",),
    signature=_kept_grad_signature,
    reference=_norm_grad,
    attributes=_KEPT,
    flops_per_point=2,
    cases=(
        Case(("1 4", "3 4", "1 4"), {"axes": (0,)}, ()),
        Case(("3 1 1", "3 4 2", "3 1 1"), {"axes": (2, 1)}, ()),
        Case(("1 1", "2 3", "1 1"), {}, ()),
        Case(("0 1", "0 3", "0 1"), {"axes": (1,)}, ()),
    ),
    doc="x dy / y, and 0 where the norm y is 0; dy and y keep their reduced axes",
)
