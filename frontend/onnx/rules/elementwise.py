"""Element-wise ONNX operators: arithmetic, activations, comparisons, casts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.frontend.onnx import extent_cuts as cuts
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.file.tensors import dtype_of
from soapstone.frontend.onnx.rules.text import cast_text
from soapstone.frontend.onnx.texts import TEXT
from soapstone.frontend.onnx.values import ALIGNED, Even, Value, rule


def scalar_of(value: Value, rank: int) -> float | None:
    """Return a known scalar that broadcasts to any shape of a rank, or None."""
    array = value.lasting
    if array is None or value.trained or array.size != 1 or value.rank > rank:
        return None
    if not value.spec.is_float:
        return None
    number = float(array.reshape(()).item())
    return number if math.isfinite(number) else None


def aligned(n: Call, x: Value, y: Value) -> Value:
    """Return y as opsets before 7 broadcast it: its axes from attribute `axis` on."""
    if n.version >= 7 or not n.attribute("broadcast", 0) or y.rank == 0:
        return y
    axis = n.axis_of(n.attribute("axis", x.rank - y.rank), x.rank)
    return n.reshape(y, (*y.shape, *(1,) * max(0, x.rank - axis - y.rank)))


@rule("Add", "Sub", even=Even(linear="all", aligned=True))
@rule("Mul", even=Even(linear="all", multiplied=True, aligned=True))
def by_scalar(n: Call) -> Any:
    x, y = n.value(0), n.value(1)
    y = aligned(n, x, y)
    return _by_scalar(n, x, y) or n.declared(x, y)


@rule("Div", even=Even(linear="first", divided=cuts.rests, aligned=True))
@rule("And", "Equal", "Greater", "Less", "Or", "Xor", even=ALIGNED)
def binary(n: Call) -> Any:
    return n.declared(n.value(0), aligned(n, n.value(0), n.value(1)))


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


@rule("Pow", even=ALIGNED)
def power(n: Call) -> Value:
    x, y = n.value(0), aligned(n, n.value(0), n.value(1))
    number = scalar_of(n.cast(y, x.dtype) if y.array is not None else y, x.rank)
    if number is not None and x.spec.is_float and x.array is None:
        return n("power", x, exponent=number)
    if y.spec.is_float and x.spec.is_float:
        y = n.cast(y, x.dtype)
    return n("pow", x, y)


@rule("Sum", "Max", "Min", "Mean", even=ALIGNED)
def variadic(n: Call) -> Value:
    name = {"Max": "maximum", "Min": "minimum"}.get(n.kind, "add")
    result, *rest = n.values()
    for value in rest:
        result = n(name, result, value)
    if n.kind == "Mean":
        result = n("affine", result, scale=1 / len(n))
    return n.reshape(result, result.shape)


@rule("PRelu", even=ALIGNED)
def prelu(n: Call) -> Value:
    x, slope = n.value(0), n.value(1)
    if n.version < 7 and slope.rank == 1 and x.rank > 1:
        slope = n.reshape(slope, (*slope.shape, *(1,) * (x.rank - 2)))
    return n("prelu", x, slope)


@rule("Clip", even=ALIGNED)
def clip(n: Call) -> Value:
    x = n.value()
    low = high = None
    for position, name in ((1, "min"), (2, "max")):
        given = n.maybe(position)
        if given is not None and (given.lasting is None or not x.spec.is_float):
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


@rule("BitShift")
def bit_shift(n: Call) -> Value:
    direction = n.text("direction", "", ("LEFT", "RIGHT")).lower()
    return n("bit_shift", n.value(0), n.value(1), direction=direction)


@rule("Mod", even=ALIGNED)
def mod(n: Call) -> Any:
    if n.value().spec.is_float and not n.attribute("fmod", 0) and n.version < 28:
        raise OnnxError("attribute 'fmod' is 0; 1 needed for floating-point operands")
    return n.declared()


@rule("Identity", even=Even(linear="first", aligned=True))
def identity(n: Call) -> Any:
    return [n.inputs[0]]


@rule("Cast", even=Even(linear="first", aligned=True))
@rule("CastLike", even=ALIGNED)
def cast(n: Call) -> Value:
    x = n.value()
    like = n.kind == "CastLike"
    dtype = n.value(1).dtype if like else dtype_of(n.attribute("to"), "attribute 'to'")
    if x.is_text != (dtype == TEXT):
        return cast_text(n, x, dtype)
    if x.dtype == dtype or not dtype.startswith("float8"):
        return n.cast(x, dtype)
    saturate = bool(n.attribute("saturate", 1))
    mode = n.text("round_mode", "up", ("up", "down", "nearest"))
    return n("cast", x, to=dtype, saturate=saturate, round_mode=mode)


@rule("BitCast")
def bit_cast(n: Call) -> Value:
    x, dtype = n.value(), dtype_of(n.attribute("to"), "attribute 'to'")
    if x.dtype == dtype:
        return x
    array = n.array(0, apart=True)
    if np.dtype(dtype).itemsize != array.dtype.itemsize:
        raise OnnxError(f"{x.dtype} found; a type as wide as {dtype} needed")
    return n.known(array.view(dtype))


@rule("Softmax", "LogSoftmax", "Hardmax", even=ALIGNED)
def softmax(n: Call) -> Any:
    if n.version >= 13:
        return n.declared()
    x = n.value()
    return softmax_from(n, x, n.axis(x.rank, 1, most=x.rank), True, n.spec.name)


def softmax_from(n: Call, x: Value, axis: int, whole: bool, name: str = "softmax") -> Value:
    """Return the softmax of x, or another of its family, along an axis.

    whole: whether all axes from that one on are one, as before opset 13.
    """
    if not whole:
        return n(name, x, axis=axis)
    flat = n.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return n.reshape(n(name, flat, axis=1), x.shape)
