"""Reductions over axes, their gradients, and `broadcast`, which is the transpose of a sum.

Dims are named by the input's axes (of `broadcast`: by the output's): d0, d1, …
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from soapstone.dtypes import integers, kind_of
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx, OnnxAttribute
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.elementwise.pointwise import unbroadcast
from soapstone.ir.ops.normalization import laws_sequence
from soapstone.ir.ops.signatures import DimTable, along, finish, numbered
from soapstone.ir.spec import (
    Case,
    Gradient,
    GradientContext,
    OpSpec,
    SignatureRule,
    Tile,
    box_shape,
    define,
    register,
)
from soapstone.ir.tensor import Array, TensorSpec

# axes: None is all of them, an empty list none (ONNX's noop_with_empty_axes).
AXES = {"axes": Attribute("axes", None, minimum=0), "keepdims": Attribute("bool", False)}
_COUNT = {"count": Attribute("int", None, minimum=1)}


def smallest(dtype: np.dtype[Any]) -> Any:
    """Return the identity of max: the least value of the type."""
    if kind_of(dtype) == "f":
        return dtype.type(-np.inf)
    return np.False_ if kind_of(dtype) == "b" else dtype.type(integers(dtype).min)


def largest(dtype: np.dtype[Any]) -> Any:
    """Return the identity of min: the greatest value of the type."""
    if kind_of(dtype) == "f":
        return dtype.type(np.inf)
    return np.True_ if kind_of(dtype) == "b" else dtype.type(integers(dtype).max)


def unit_rename(shape: Sequence[int], dims: Sequence[str]) -> dict[str, str]:
    """Return which dim each factor of a `reshape` means, when it only adds or drops unit axes.

    `dims` names the axes of `shape`; `reshape` numbers the axes above one f0, f1, …
    """
    kept = [name for name, extent in zip(dims, shape) if extent != 1]
    return {f"f{number}": name for number, name in enumerate(kept)}


def reduced_axes(attributes: Attributes, rank: int) -> tuple[int, ...]:
    """Return the axes that attribute `axes` names: all of them where it is None."""
    axes = attributes["axes"]
    return tuple(range(rank)) if axes is None else tuple(axes)


def _check_axes(spec: TensorSpec, axes: Sequence[int]) -> None:
    for axis in axes:
        if axis >= spec.rank:
            raise ShapeError(
                f"dim d{axis} of attribute axes does not exist; input 0 has rank {spec.rank}"
            )
    if len(set(axes)) != len(axes):
        raise ShapeError(
            f"attribute axes {tuple(axes)} names dim d{max(axes, key=axes.count)} twice"
        )


def kept_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape after a reduction that keeps the axes it reduces."""
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def _reduced_operand(shape: Sequence[int], attributes: Attributes) -> Operand:
    """Return the output of a reduction, indexed by the dims that stay."""
    axes: list[Axis] = []
    gone = reduced_axes(attributes, len(shape))
    for axis, extent in enumerate(shape):
        if axis not in gone:
            axes.append(Affine(f"d{axis}", extent))
        elif attributes["keepdims"]:
            axes.append(Whole(1))
    return Operand(tuple(axes))


def reduction_signature(
    inputs: tuple[TensorSpec, ...],
    attributes: Attributes,
    monoid: str,
    kind: Kind = Kind.REDUCED,
) -> Signature:
    """Return the signature of a reduction; `kind` is that of the dims it reduces.

    Raises:
        ShapeError: an axis that does not exist, or that is named twice.
    """
    x = inputs[0]
    axes = reduced_axes(attributes, x.rank)
    _check_axes(x, axes)
    table = DimTable()
    operand = numbered(table, x.shape, "input 0")
    output = _reduced_operand(x.shape, attributes)
    kinds = {f"d{axis}": kind for axis in axes} if kind is not Kind.REDUCED else None
    return finish(table, [operand], [output], [x.dtype], kinds, monoid)


def need_number(inputs: tuple[TensorSpec, ...]) -> None:
    """Check that input 0 is not of booleans.

    Raises:
        ShapeError: it is.
    """
    if inputs[0].dtype == "bool":
        raise ShapeError(f"input 0 is {inputs[0]}; a number type needed (shape and rank fit)")


def number_signature(
    inputs: tuple[TensorSpec, ...], attributes: Attributes, monoid: str = "sum"
) -> Signature:
    """Return the signature of a reduction of numbers."""
    need_number(inputs)
    return reduction_signature(inputs, attributes, monoid)


def _mean_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    signature = reduction_signature(inputs, attributes, "sum")
    for axis in reduced_axes(attributes, inputs[0].rank):
        if inputs[0].shape[axis] == 0 and attributes.get("count") is None:
            raise ShapeError(f"dim d{axis} is 0 in input 0; 1 or more needed for a mean")
    return signature


def _mean_count(attributes: Attributes, shape: Sequence[int]) -> int:
    if attributes["count"] is not None:
        return int(attributes["count"])
    return math.prod(shape[axis] for axis in reduced_axes(attributes, len(shape)))


def reduce_sum(attributes: Attributes, x: Array) -> Array:
    """Return the sum over axes, in the type of x."""
    axes, keepdims = attributes["axes"], attributes["keepdims"]
    return np.asarray(np.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype))


def _mean(attributes: Attributes, x: Array) -> Array:
    count = x.dtype.type(_mean_count(attributes, x.shape))
    return np.asarray(reduce_sum(attributes, x) / count)


def _extreme(
    fold: Callable[..., Any], identity: Callable[[np.dtype[Any]], Any]
) -> Callable[[Attributes, Array], Array]:
    def reference(attributes: Attributes, x: Array) -> Array:
        axes, keepdims = attributes["axes"], attributes["keepdims"]
        return np.asarray(fold(x, axis=axes, keepdims=keepdims, initial=identity(x.dtype)))

    return reference


def _mean_localize(attributes: Attributes, tile: Tile) -> Attributes:
    return {**attributes, "count": _mean_count(attributes, tile.input_shapes[0])}


def keep_axes(g: GradientContext, value: str) -> str:
    """Return a value of a reduction's output shape, with extent 1 along the reduced axes."""
    shape = g.spec(g.inputs[0]).shape
    kept = kept_shape(shape, reduced_axes(g.attributes, len(shape)))
    if g.spec(value).shape == kept:
        return value
    rename = unit_rename(kept, [f"d{axis}" for axis in range(len(kept))])
    return g.emit("reshape", value, shape=kept, rename=rename)


def _spread(g: GradientContext, dy: str) -> str:
    """Return a reduction's output gradient, repeated along the axes that were reduced."""
    shape = g.spec(g.inputs[0]).shape
    dy = keep_axes(g, dy)
    return dy if g.spec(dy).shape == shape else g.emit("broadcast", dy, shape=shape)


def _sum_grad(g: GradientContext) -> list[str | None]:
    return [_spread(g, g.grad())]


def _mean_grad(g: GradientContext) -> list[str | None]:
    shape = g.spec(g.inputs[0]).shape
    dims = [f"d{axis}" for axis in range(len(shape))]
    if not g.attributes["keepdims"]:
        gone = reduced_axes(g.attributes, len(shape))
        dims = [name for axis, name in enumerate(dims) if axis not in gone]
    # A unit axis that was kept is no tile of the dim it stands for.
    stays = [name for axis, name in enumerate(dims) if g.spec(g.grad()).shape[axis] != 1]
    rename = {f"d{axis}": name if name in stays else "" for axis, name in enumerate(dims)}
    scale = 1 / max(_mean_count(g.attributes, shape), 1)
    return [_spread(g, g.emit("affine", g.grad(), scale=scale, rename=rename))]


def _extreme_grad(g: GradientContext) -> list[str | None]:
    attributes = {name: g.attributes[name] for name in ("axes", "keepdims")}
    return [g.emit("reduce_max_grad", g.grad(), g.inputs[0], g.outputs[0], **attributes)]


def _max_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    dy, x, y = inputs
    need_float(inputs, 0, 1, 2)
    _check_axes(x, reduced_axes(attributes, x.rank))
    table = DimTable()
    operand = numbered(table, x.shape, "input 1")
    small = _reduced_operand(x.shape, attributes)
    for position, spec in ((0, dy), (2, y)):
        if spec.rank != len(small.axes):
            raise ShapeError(
                f"input {position} has rank {spec.rank} (shape {spec.shape});"
                f" {len(small.axes)} needed (shape {small.shape})"
            )
        for axis, extent in zip(small.axes, spec.shape):
            if extent != axis.extent:
                named = axis.dims[0] if axis.dims else "of extent 1 that was reduced"
                raise ShapeError(
                    f"dim {named} is {axis.extent} in input 1 but {extent} in input {position}"
                )
    # How many elements share the maximum is known only from the whole extent.
    kinds = {f"d{axis}": Kind.WHOLE for axis in reduced_axes(attributes, x.rank)}
    return finish(table, [small, operand, small], [operand], [x.dtype], kinds)


def _max_grad(attributes: Attributes, dy: Array, x: Array, y: Array) -> Array:
    axes = reduced_axes(attributes, x.ndim)
    if not attributes["keepdims"]:
        dy, y = np.expand_dims(dy, axes), np.expand_dims(y, axes)
    hit = x == y
    ties = np.maximum(np.sum(hit, axis=axes, keepdims=True), 1).astype(x.dtype)
    return np.asarray(np.where(hit, dy / ties, x.dtype.type(0)))


def reduction_cases(*, empty: bool) -> tuple[Case, ...]:
    """Return cases that every reduction of floats serves; `empty`: of no elements too."""
    cases = (
        Case(("3 4",), {"axes": (0,)}),
        Case(("3 4",), {"axes": (1,), "keepdims": True}),
        Case(("2 3 4",), {"axes": (0, 2)}),
        Case(("2 3 4",), {"axes": (2, 0), "keepdims": True}),
        Case(("3 4",), {"axes": (0, 1)}),
        Case(("2 1 3",), {"axes": (1,)}),
        Case(("3 2",), {"axes": ()}),
        Case(("3 2",), {"keepdims": True}),
        Case(("0 3",), {"axes": (1,)}),
    )
    return (*cases, Case(("2 0",), {"axes": (1,)})) if empty else cases


def declare(
    name: str,
    signature: SignatureRule,
    reference: Callable[[Attributes, Array], Array],
    gradient: Gradient,
    cases: tuple[Case, ...],
    doc: str,
    attributes: Mapping[str, Attribute] = AXES,
    **more: Any,
) -> None:
    """Register a reduction, whose ONNX name is its name here without underscores: ReduceSum."""
    onnx = name.title().replace("_", "")
    doc += "\nx: any shape; the result lacks the axes, or has them of extent 1 with keepdims"
    given = (name, ("x",), signature, reference)
    more = {"attributes": attributes, "gradient": gradient, "cases": cases, "doc": doc, **more}
    register(OpSpec(*given, onnx=onnx, **more))


declare(
    "reduce_sum",
    number_signature,
    reduce_sum,
    _sum_grad,
    (*reduction_cases(empty=True), Case(("int32 3 4 <9",), {"axes": (0,)}, ())),
    "the sum over axes; of integers in their own type, wrapping",
    forms=laws_sequence.REDUCE_SUM_FORMS,
    laws=laws_sequence.REDUCE_SUM_LAWS,
)
declare(
    "reduce_mean",
    _mean_signature,
    _mean,
    _mean_grad,
    (*reduction_cases(empty=False), Case(("3 4",), {"axes": (0,), "count": 5})),
    "the mean over axes: their sum divided by count, the reduced extent unless given",
    AXES | _COUNT,
    localize=_mean_localize,
    forms=laws_sequence.REDUCE_MEAN_FORMS,
    laws=laws_sequence.REDUCE_MEAN_LAWS,
)
_OTHERS = (
    Case(("2 0",), {"axes": (1,)}, ()),
    Case(("bool 3 4",), {"axes": (1,)}, ()),
    Case(("int64 3 4 <9",), {"axes": (0,), "keepdims": True}, ()),
)
for _name, _function, _of_none, _doc in (
    ("max", np.max, smallest, "the maximum over axes; over no elements the least"),
    ("min", np.min, largest, "the minimum over axes; over no elements the greatest"),
):
    declare(
        f"reduce_{_name}",
        partial(reduction_signature, monoid=_name),
        _extreme(_function, _of_none),
        _extreme_grad,
        (*reduction_cases(empty=False), *_OTHERS),
        f"{_doc} value of the type",
    )
define(
    name="reduce_max_grad",
    inputs=("dy", "x", "y"),
    signature=_max_grad_signature,
    reference=_max_grad,
    attributes=AXES,
    flops_per_point=3,
    cases=(
        Case(("4", "3 4", "4"), {"axes": (0,)}, ()),
        Case(("3 1", "3 4", "3 1"), {"axes": (1,), "keepdims": True}, ()),
        Case(("", "2 3", ""), {"axes": (0, 1)}, ()),
        Case(("0", "0 3", "0"), {"axes": (1,)}, ()),
    ),
    doc="dy where x equals y, the maximum or minimum, split evenly among ties",
)


def _broadcast_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    x, shape = inputs[0], attributes["shape"]
    if x.rank > len(shape):
        raise ShapeError(
            f"input 0 has rank {x.rank} (shape {x.shape}); at most {len(shape)} needed"
            f" for shape {shape}"
        )
    table = DimTable()
    output = numbered(table, shape, "attribute shape")
    axes: list[Axis] = []
    for axis, extent in enumerate(x.shape, len(shape) - x.rank):
        if extent == 1 and shape[axis] != 1:
            axes.append(Whole(1))
        else:
            axes.append(along(table, f"d{axis}", extent, "input 0"))
    return finish(table, [Operand(tuple(axes))], [output], [x.dtype])


define(
    name="broadcast",
    strided=True,
    inputs=("x",),
    signature=_broadcast_signature,
    reference=lambda a, x: np.broadcast_to(x, a["shape"]).copy(),
    attributes={"shape": Attribute("ints", minimum=0, extents=True)},
    gradient=lambda g: [unbroadcast(g, g.grad(), g.inputs[0])],
    localize=lambda a, tile: {"shape": box_shape(tile.outputs[0])},
    flops_per_point=0,
    onnx=Onnx("Expand", attributes={"shape": OnnxAttribute(input=1)}),
    layer=None,
    cases=(
        Case(("3 1",), {"shape": (3, 4)}),
        Case(("4",), {"shape": (2, 3, 4)}),
        Case(("",), {"shape": (2, 3)}),
        Case(("2 1 3",), {"shape": (2, 4, 3)}),
        Case(("3",), {"shape": (3,)}),
        Case(("1 3",), {"shape": (0, 3)}),
        Case(("int32 3 1 <9",), {"shape": (3, 2)}, ()),
    ),
)
