"""Element-wise ONNX operators: arithmetic, activations, comparisons, casts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.tensors import dtype_of
from soapstone.frontend.onnx.values import Value, rule

# ONNX operators of one operand that are operators here, with the same meaning and no attributes.
UNARY = {
    "Abs": "abs",
    "Acos": "acos",
    "Acosh": "acosh",
    "Asin": "asin",
    "Asinh": "asinh",
    "Atan": "atan",
    "Atanh": "atanh",
    "BitwiseNot": "bitwise_not",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Erf": "erf",
    "Exp": "exp",
    "Floor": "floor",
    "HardSwish": "hard_swish",
    "IsNaN": "is_nan",
    "Log": "log",
    "Mish": "mish",
    "Neg": "neg",
    "Not": "logical_not",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}
# The same with attributes: here, in ONNX, and ONNX's default.
PARAMETRIC: dict[str, tuple[str, tuple[tuple[str, str, float], ...]]] = {
    "Celu": ("celu", (("alpha", "alpha", 1.0),)),
    "Elu": ("elu", (("alpha", "alpha", 1.0),)),
    "HardSigmoid": ("hard_sigmoid", (("alpha", "alpha", 0.2), ("beta", "beta", 0.5))),
    "LeakyRelu": ("leaky_relu", (("alpha", "alpha", 0.01),)),
    "Selu": (
        "selu",
        (("alpha", "alpha", 1.6732631921768188), ("gamma", "gamma", 1.0507010221481323)),
    ),
    "Shrink": ("shrink", (("bias", "bias", 0.0), ("lambd", "lambd", 0.5))),
    "Swish": ("silu", (("alpha", "alpha", 1.0),)),
    "ThresholdedRelu": ("thresholded_relu", (("alpha", "alpha", 1.0),)),
}
BINARY = {
    "Add": "add",
    "And": "logical_and",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Div": "div",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Mul": "mul",
    "Or": "logical_or",
    "Sub": "sub",
    "Xor": "logical_xor",
}


@rule(*UNARY)
def unary(n: Call) -> Value:
    return n(UNARY[n.kind], n.value())


@rule(*PARAMETRIC)
def parametric(n: Call) -> Value:
    name, table = PARAMETRIC[n.kind]
    return n(name, n.value(), **{own: float(n.attribute(key, d)) for own, key, d in table})


def scalar_of(value: Value, rank: int) -> float | None:
    """Return a known scalar that broadcasts to any shape of a rank, or None."""
    if value.array is None or value.array.size != 1 or value.rank > rank:
        return None
    if not value.spec.is_float:
        return None
    number = float(value.array.reshape(()).item())
    return number if math.isfinite(number) else None


def aligned(n: Call, x: Value, y: Value) -> Value:
    """Return y as opsets before 7 broadcast it: its axes from attribute `axis` on."""
    if n.version >= 7 or not n.attribute("broadcast", 0) or y.rank == 0:
        return y
    axis = n.axis_of(n.attribute("axis", x.rank - y.rank), x.rank)
    return n.reshape(y, (*y.shape, *(1,) * max(0, x.rank - axis - y.rank)))


@rule(*BINARY)
def binary(n: Call) -> Value:
    x, y = n.value(0), n.value(1)
    y = aligned(n, x, y)
    if n.kind in ("Add", "Mul", "Sub"):
        short = _by_scalar(n, x, y)
        if short is not None:
            return short
    return n(BINARY[n.kind], x, y)


def _by_scalar(n: Call, x: Value, y: Value) -> Value | None:
    """Return x with a known scalar added or multiplied: exactly what the operator gives."""
    if x.array is not None:
        x, y, swapped = y, x, True
    else:
        swapped = False
    number = scalar_of(y, x.rank)
    if number is None or x.array is not None or (swapped and n.kind == "Sub"):
        return None
    if n.kind == "Mul":
        return n("affine", x, scale=number)
    return n("affine", x, shift=number if n.kind == "Add" else -number)


@rule("Pow")
def power(n: Call) -> Value:
    x, y = n.value(0), aligned(n, n.value(0), n.value(1))
    number = scalar_of(n.cast(y, x.dtype) if y.array is not None else y, x.rank)
    if number is not None and x.spec.is_float and x.array is None:
        return n("power", x, exponent=number)
    if y.spec.is_float and x.spec.is_float:
        y = n.cast(y, x.dtype)
    return n("pow", x, y)


@rule("Sum", "Max", "Min", "Mean")
def variadic(n: Call) -> Value:
    name = {"Max": "maximum", "Min": "minimum"}.get(n.kind, "add")
    result, *rest = n.values()
    for value in rest:
        result = n(name, result, value)
    if n.kind == "Mean":
        result = n("affine", result, scale=1 / len(n))
    return n.reshape(result, result.shape)


@rule("PRelu")
def prelu(n: Call) -> Value:
    x, slope = n.value(0), n.value(1)
    if n.version < 7 and slope.rank == 1 and x.rank > 1:
        slope = n.reshape(slope, (*slope.shape, *(1,) * (x.rank - 2)))
    return n("prelu", x, slope)


@rule("Clip")
def clip(n: Call) -> Value:
    x = n.value()
    low = high = None
    for position, name in ((1, "min"), (2, "max")):
        given = n.maybe(position)
        if given is not None and (given.array is None or not x.spec.is_float):
            # Not known, or of integers, which the attributes could not hold: two operators.
            result = x if not n.has(1) else n("maximum", x, n.value(1))
            return result if not n.has(2) else n("minimum", result, n.value(2))
        number = n.number(name, position)
        if position == 1:
            low = number
        else:
            high = number
    if low is None and high is None:
        return x
    return n("clip", x, low=low, high=high)


@rule("Gelu")
def gelu(n: Call) -> Value:
    return n("gelu", n.value(), approximate=n.text("approximate", "none", ("none", "tanh")))


@rule("IsInf")
def is_inf(n: Call) -> Value:
    positive, negative = (bool(n.attribute(f"detect_{k}", 1)) for k in ("positive", "negative"))
    return n("is_inf", n.value(), detect_positive=positive, detect_negative=negative)


@rule("BitShift")
def bit_shift(n: Call) -> Value:
    direction = n.text("direction", "", ("LEFT", "RIGHT")).lower()
    return n("bit_shift", n.value(0), n.value(1), direction=direction)


@rule("Mod")
def mod(n: Call) -> Value:
    x, fmod = n.value(), bool(n.attribute("fmod", 0))
    if x.spec.is_float and not fmod and n.version < 28:
        raise OnnxError("attribute 'fmod' is 0; 1 needed for floating-point operands")
    return n("mod", x, n.value(1), fmod=fmod)


@rule("Where")
def where(n: Call) -> Value:
    return n("where", n.value(0), n.value(1), n.value(2))


@rule("Identity")
def identity(n: Call) -> Any:
    return [n.inputs[0]]


@rule("Dropout")
def dropout(n: Call) -> Any:
    x = n.value()
    if n.has(2) and n.array(2).any() and (n.number("ratio", 1, 0.5) or 0) > 0:
        raise UnsupportedError("random numbers (training_mode is true) are not supported")
    if n.version < 7 and not n.attribute("is_test", 0):
        raise UnsupportedError("random numbers (is_test is 0) are not supported")
    mask = n("full", shape=x.shape, value=1.0, dtype="bool") if n.wants(1) else None
    return [x, mask]


@rule("Cast", "CastLike")
def cast(n: Call) -> Value:
    x = n.value()
    if n.kind == "CastLike":
        return n.cast(x, n.value(1).dtype)
    return n.cast(x, dtype_of(n.attribute("to"), "attribute 'to'"))


@rule("BitCast")
def bit_cast(n: Call) -> Value:
    x, dtype = n.value(), dtype_of(n.attribute("to"), "attribute 'to'")
    if x.dtype == dtype:
        return x
    array = n.array(0)
    if np.dtype(dtype).itemsize != array.dtype.itemsize:
        raise OnnxError(f"{x.dtype} found; a type as wide as {dtype} needed")
    return n.known(array.view(dtype))


@rule("Softmax", "LogSoftmax", "Hardmax")
def softmax(n: Call) -> Value:
    x = n.value()
    name = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Hardmax": "hardmax"}[n.kind]
    if n.version >= 13:
        return n(name, x, axis=n.axis(x.rank, -1))
    # Before opset 13 all axes from `axis` on were one.
    axis = n.axis(x.rank, 1, most=x.rank)
    rows = math.prod(x.shape[:axis])
    flat = n.reshape(x, (rows, math.prod(x.shape[axis:])))
    return n.reshape(n(name, flat, axis=1), x.shape)
