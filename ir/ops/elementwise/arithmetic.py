"""Arithmetic element by element: sums, products, powers, roundings, extrema; their gradients.

Dims are named by the output's axes: d0, d1, … Integers follow NumPy, but for `div`, which
truncates toward zero as ONNX's does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.dims import Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.elementwise import laws_arithmetic, laws_pointwise
from soapstone.ir.ops.elementwise.activation import erf, gelu, sigmoid
from soapstone.ir.ops.elementwise.pointwise import (
    aligned,
    broadcasting,
    declare,
    flat,
    floating,
    from_input,
    nowhere,
    numeric,
    of_mask,
    pointwise,
    same_shapes,
    unbroadcast,
)
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext
from soapstone.ir.tensor import Array, TensorSpec

__all__ = ["declare", "erf", "gelu", "pointwise", "sigmoid", "unbroadcast"]

_XY = ("x", "y")
_POSITIVE_CASES = (Case(("2 3 4",), positive=True), Case(("0 3",)))


def _accumulate(attributes: Attributes, *parts: Array) -> Array:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _divide(attributes: Attributes, x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.asarray(x / y)
    with np.errstate(divide="ignore", over="ignore"):
        down, left = np.floor_divide(x, y), np.remainder(x, y)
    # The floor of a negative quotient is one below its truncation, unless it is exact.
    return np.asarray(down + ((left != 0) & ((x < 0) != (y < 0))).astype(x.dtype), x.dtype)


def _mod(attributes: Attributes, x: Array, y: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((np.fmod if attributes["fmod"] else np.mod)(x, y), x.dtype)


def _pow_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pointwise(inputs, inputs[0].dtype)


def _with_numbers(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of x beside numbers, each of which the type of x must hold."""
    dtype = inputs[0].dtype
    if not inputs[0].is_float:
        limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        for name, number in attributes.items():
            least = 0 if name == "exponent" else limits[0]
            if number != int(number) or not least <= number <= limits[1]:
                raise ShapeError(
                    f"attribute {name}: {number} found; a whole number of {dtype} needed, the type"
                    f" of input 0 (shape {inputs[0].shape})"
                )
    return broadcasting(inputs, attributes)


def _pow(attributes: Attributes, x: Array, y: Array) -> Array:
    common = np.result_type(x, y)
    if common.kind in "iu" and np.any(np.asarray(y) < 0):
        common = np.dtype(np.float64)  # NumPy has no negative powers of integers
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.power(x.astype(common), y.astype(common))).astype(x.dtype)


def _pow_grad(attributes: Attributes, dy: Array, x: Array, y: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if attributes["operand"] == "x":
            slope = np.where(y == 0, 0, y * np.power(x, y - 1))
        else:
            slope = np.where(x == 0, 0, np.power(x, y) * np.log(x))
        return np.asarray(dy * slope, dy.dtype)


def _extremum_grad(sign: int) -> Any:
    def reference(attributes: Attributes, dy: Array, x: Array, y: Array) -> Array:
        ahead = x > y if sign > 0 else x < y
        half = np.where(x == y, dy * dy.dtype.type(0.5), dy.dtype.type(0))
        return np.asarray(np.where(ahead, dy, half), dy.dtype)

    return reference


def _limits(attributes: Attributes, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    low, high = attributes["low"], attributes["high"]
    if dtype.kind not in "iu":
        return dtype.type(-np.inf if low is None else low), dtype.type(
            np.inf if high is None else high
        )
    info = np.iinfo(dtype)
    least = info.min if low is None or low <= info.min else min(int(low), info.max)
    most = info.max if high is None or high >= info.max else max(int(high), info.min)
    return dtype.type(least), dtype.type(most)


def _clip(attributes: Attributes, x: Array) -> Array:
    low, high = _limits(attributes, x.dtype)
    return np.asarray(np.minimum(np.maximum(x, low), high), x.dtype)


def _clip_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    low, high = _limits(attributes, x.dtype)
    return np.where((x >= low) & (x <= high), dy, dy.dtype.type(0))


def _add_grad(g: GradientContext) -> list[str | None]:
    return [unbroadcast(g, g.grad(), value) for value in g.inputs]


def _sub_grad(g: GradientContext) -> list[str | None]:
    negative = g.emit("neg", g.grad())
    return [unbroadcast(g, g.grad(), g.inputs[0]), unbroadcast(g, negative, g.inputs[1])]


def _mul_grad(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    dx, dy = g.emit("mul", g.grad(), y), g.emit("mul", g.grad(), x)
    return [unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


def _div_grad(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    dx = g.emit("div", g.grad(), y)
    dy = g.emit("neg", g.emit("mul", dx, g.outputs[0]))
    return [unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


def _mod_grad(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    # The whole number of times that y was taken away.
    times = g.emit("div", g.emit("sub", g.outputs[0], x), y)
    return [unbroadcast(g, g.grad(), x), unbroadcast(g, g.emit("mul", g.grad(), times), y)]


def _power_grad(g: GradientContext) -> list[str | None]:
    exponent = g.attributes["exponent"]
    slope = g.emit("power", g.inputs[0], exponent=exponent - 1)
    return [g.emit("mul", g.grad(), g.emit("affine", slope, scale=exponent))]


def _pow_rule(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    real = g.spec(y).is_float
    wide = y if real else g.emit("cast", y, to=g.spec(x).dtype, rename=aligned(g, y))
    dx = unbroadcast(g, g.emit("pow_grad", g.grad(), x, wide, operand="x"), x)
    if not real:
        return [dx, None]
    return [dx, unbroadcast(g, g.emit("pow_grad", g.grad(), x, y, operand="y"), y)]


def _sqrt_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("div", g.emit("affine", g.grad(), scale=0.5), g.outputs[0])]


def _reciprocal_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("neg", g.emit("mul", g.grad(), g.emit("power", g.outputs[0], exponent=2.0)))]


def _extremum_rule(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    name = f"{g.node.operator}_grad"
    dx, dy = g.emit(name, g.grad(), x, y), g.emit(name, g.grad(), y, x)
    return [unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


declare(
    "neg",
    lambda a, x: -x,
    lambda g: [g.emit("neg", g.grad())],
    onnx="Neg",
    signature=numeric,
    doc="-x",
)
declare(
    "abs",
    lambda a, x: np.abs(x),
    lambda g: [g.emit("mul", g.grad(), g.emit("sign", g.inputs[0]))],
    onnx="Abs",
    doc="the magnitude",
)
declare(
    "exp",
    lambda a, x: np.exp(x),
    lambda g: [g.emit("mul", g.grad(), g.outputs[0])],
    flops=6,
    forms=laws_pointwise.EXP_FORMS,
    laws=laws_pointwise.EXP_LAWS,
    onnx="Exp",
    doc="e to the power x",
    signature=floating,
)
declare(
    "log",
    lambda a, x: np.log(x),
    lambda g: [g.emit("div", g.grad(), g.inputs[0])],
    flops=6,
    onnx="Log",
    doc="the natural logarithm",
    cases=_POSITIVE_CASES,
    signature=floating,
)
declare(
    "sqrt",
    lambda a, x: np.sqrt(x),
    _sqrt_grad,
    forms=laws_pointwise.SQRT_FORMS,
    laws=laws_pointwise.SQRT_LAWS,
    onnx="Sqrt",
    doc="the square root",
    cases=_POSITIVE_CASES,
    signature=floating,
)
declare(
    "reciprocal",
    lambda a, x: np.asarray(x.dtype.type(1) / x, x.dtype),
    _reciprocal_grad,
    onnx="Reciprocal",
    doc="1 / x",
    cases=_POSITIVE_CASES,
)
declare(
    "affine",
    lambda a, x: x * x.dtype.type(a["scale"]) + x.dtype.type(a["shift"]),
    lambda g: [g.emit("affine", g.grad(), scale=g.attributes["scale"])],
    attributes={"scale": Attribute("float", 1.0), "shift": Attribute("float", 0.0)},
    cases=(
        Case(("3 4",), {"scale": -1.5, "shift": 0.25}),
        Case(("int32 3",), {"scale": -2.0, "shift": 1.0}),
    ),
    doc="x * scale + shift for two numbers",
    signature=_with_numbers,
)
declare(
    "power",
    lambda a, x: np.power(x, x.dtype.type(a["exponent"])),
    _power_grad,
    attributes={"exponent": Attribute("float")},
    flops=10,
    forms=laws_pointwise.RSQRT_FORMS,
    laws=laws_pointwise.RSQRT_LAWS,
    onnx="Pow",
    cases=(
        Case(("3 4",), {"exponent": 2.0}),
        Case(("3 4",), {"exponent": -0.5}, positive=True),
        Case(("3 4",), {"exponent": 3.0}),
    ),
    doc="x to a constant power; of an operand, pow",
    signature=_with_numbers,
)
for _name, _function, _doc in (
    ("floor", np.floor, "the integer at or below"),
    ("ceil", np.ceil, "the integer at or above"),
    ("round", np.rint, "the nearest integer, halves to even"),
    ("sign", np.sign, "-1, 0 or 1"),
):
    declare(
        _name,
        lambda a, x, f=_function: np.asarray(f(x), x.dtype),
        nowhere,
        onnx=_name.capitalize(),
        doc=_doc,
        signature=numeric,
        cases=flat((Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))),
    )
declare(
    "add",
    lambda a, x, y: x + y,
    _add_grad,
    inputs=_XY,
    onnx="Add",
    doc="x + y, broadcasting as NumPy does",
    forms=laws_arithmetic.ADD_FORMS,
    laws=laws_arithmetic.ADD_LAWS + laws_pointwise.ADD_BROADCAST_LAWS,
)
declare(
    "sub",
    lambda a, x, y: x - y,
    _sub_grad,
    inputs=_XY,
    forms=laws_pointwise.SUB_FORMS,
    laws=laws_pointwise.SUB_LAWS,
    onnx="Sub",
    doc="x - y, broadcasting as NumPy does",
    signature=numeric,
)
declare(
    "mul",
    lambda a, x, y: x * y,
    _mul_grad,
    inputs=_XY,
    onnx="Mul",
    doc="x * y, broadcasting as NumPy does",
    forms=laws_arithmetic.MUL_FORMS,
    constants=(laws_arithmetic.ONES,),
    laws=laws_arithmetic.MUL_LAWS + laws_pointwise.MUL_BROADCAST_LAWS,
)
declare(
    "div",
    _divide,
    _div_grad,
    inputs=_XY,
    forms=laws_pointwise.DIV_FORMS,
    laws=laws_pointwise.DIV_LAWS,
    onnx="Div",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("2 3 4", "4"), positive=True),
        Case(("3 2", ""), positive=True),
        Case(("int64 3 4 >=-9 <9", "int64 4 >=1 <5")),
        Case(("int32 3 >=-9 <9", "int32 3 >=-4 <0")),
    ),
    doc="x / y, broadcasting as NumPy does; of integers, truncated toward zero",
    signature=numeric,
)
declare(
    "mod",
    _mod,
    _mod_grad,
    inputs=_XY,
    attributes={"fmod": Attribute("bool", False)},
    flops=8,
    onnx="Mod",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("3 4", ""), {"fmod": True}, positive=True),
        Case(("3 4", "4"), {"fmod": True}),
        Case(("2 3", "2 3")),
        Case(("int64 3 4 >=-9 <9", "int64 4 >=1 <5")),
    ),
    doc="the remainder: with the sign of y, or (fmod) of x",
)
declare(
    "pow",
    _pow,
    _pow_rule,
    inputs=_XY,
    flops=10,
    onnx="Pow",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("2 3 4", "4"), positive=True),
        Case(("3 4", "int64 4 >=-2 <4"), positive=True),
        Case(("2 1 3", ""), positive=True),
        Case(("int32 3 >=1", "int32 3 <4")),
        Case(("0 2", "1 2")),
    ),
    doc="x to the power y, in the type of x",
    signature=_pow_signature,
)
declare(
    "pow_grad",
    _pow_grad,
    None,
    inputs=("dy", "x", "y"),
    attributes={"operand": Attribute("str", "x", choices=("x", "y"))},
    flops=14,
    cases=(
        Case(("3 4", "3 4", "3 4"), {"operand": "x"}, (), positive=True),
        Case(("3 4", "3 4", "4"), {"operand": "y"}, (), positive=True),
        Case(("3 1", "3 1", ""), {"operand": "x"}, (), positive=True),
        Case(("0 3", "0 3", "3"), {"operand": "y"}, ()),
    ),
    doc="dy times the derivative of x to the power y with respect to one operand",
    signature=floating,
)
declare(
    "maximum",
    lambda a, x, y: np.maximum(x, y),
    _extremum_rule,
    inputs=_XY,
    onnx="Max",
    doc="the larger of x and y",
)
declare(
    "minimum",
    lambda a, x, y: np.minimum(x, y),
    _extremum_rule,
    inputs=_XY,
    onnx="Min",
    doc="the smaller of x and y",
)
for _name, _sign in (("maximum_grad", 1), ("minimum_grad", -1)):
    declare(
        _name,
        _extremum_grad(_sign),
        None,
        inputs=("dy", "x", "y"),
        cases=flat(
            (
                Case(("3 4", "3 4", "3 4")),
                Case(("3 4", "4", "3 1")),
                Case(("3 4", "3 4", "")),
                Case(("0 3", "0 3", "1 3")),
            )
        ),
        doc="dy where x is the chosen operand, half of it where both are equal",
    )
_CLIP = {"low": Attribute("float", None), "high": Attribute("float", None)}
declare(
    "clip",
    _clip,
    from_input("clip_grad"),
    attributes=_CLIP,
    onnx="Clip",
    cases=(
        Case(("3 4",), {"low": -0.5, "high": 0.75}),
        Case(("3 4",), {"low": 0.1}),
        Case(("5",), {"high": 0.1}),
        Case(("",), {}),
        Case(("int64 4 >=-9",), {"low": -3.0, "high": 3.0}),
        Case(("0 3",), {"low": 0.0}),
    ),
    doc="x cut to low..high; None is no bound",
)
declare(
    "clip_grad",
    _clip_grad,
    of_mask,
    layer=None,
    inputs=("dy", "x"),
    attributes=_CLIP,
    cases=(
        Case(("3 4", "3 4"), {"low": -0.5, "high": 0.75}, (0,)),
        Case(("3 4", "3 4"), {"low": 0.1}, (0,)),
        Case(("0 2", "0 2"), {}, (0,)),
    ),
)
declare(
    "accumulate",
    _accumulate,
    lambda g: [g.grad()] * len(g.inputs),
    inputs=("x*",),
    cases=(Case(("3 4", "3 4", "3 4")), Case(("2", "2")), Case(("0 3",))),
    signature=same_shapes,
    onnx="Sum",
    layer=None,
    doc="the sum of equal-shaped values, left to right: where gradients meet",
)
