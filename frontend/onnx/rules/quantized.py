"""ONNX operators on quantised integers, computed in floating point that holds them exactly."""

from __future__ import annotations

import math

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.products import product
from soapstone.frontend.onnx.rules.windows import convolved
from soapstone.frontend.onnx.tensors import dtype_of
from soapstone.frontend.onnx.values import Value, rule

_LEVELS = 255 * 255  # the largest product of two bytes


def _spread(n: Call, part: Value, x: Value, axis: int, block: int) -> Value:
    """Return scales or zero points in a shape that broadcasts over x."""
    if part.spec.size == 1 and part.rank <= 1:
        return n.reshape(part, ())
    if part.rank == 1 and not block:
        axis = n.axis_of(axis, x.rank)
        return n.reshape(part, [part.spec.size if a == axis else 1 for a in range(x.rank)])
    if part.rank != x.rank or not block:
        raise OnnxError(f"scales {part.spec} do not fit {x.spec}")
    axis = n.axis_of(axis, x.rank)
    count = part.shape[axis]
    column = n.reshape(part, (*part.shape[: axis + 1], 1, *part.shape[axis + 1 :]))
    wide = n.broadcast(column, (*part.shape[: axis + 1], block, *part.shape[axis + 1 :]))
    whole = n.reshape(wide, (*part.shape[:axis], count * block, *part.shape[axis + 1 :]))
    if count * block == x.shape[axis]:
        return whole
    return n.part(whole, axis, 0, x.shape[axis])


def quantized(n: Call, x: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """Return x / scale rounded to even, plus zero, clipped to the type."""
    limits = np.iinfo(dtype)
    wide = "float64" if limits.bits > 16 else x.dtype
    y = n("round", n("div", n.cast(x, wide), n.cast(scale, wide)))
    if zero is not None:
        y = n("add", y, n.cast(zero, wide))
    return n.cast(n("clip", y, low=float(limits.min), high=float(limits.max)), dtype)


@rule("QuantizeLinear")
def quantize_linear(n: Call) -> Value:
    x, scale, zero = n.value(0), n.value(1), n.maybe(2)
    code = n.attribute("output_dtype", 0)
    dtype = zero.dtype if zero is not None else "uint8"
    if zero is None and code:
        dtype = dtype_of(code, "attribute 'output_dtype'")
    axis, block = n.attribute("axis", 1), n.attribute("block_size", 0)
    scale = _spread(n, scale, x, axis, block)
    zero = _spread(n, zero, x, axis, block) if zero is not None else None
    return quantized(n, n.cast(x, "float32"), n.cast(scale, "float32"), zero, dtype)


@rule("DequantizeLinear")
def dequantize_linear(n: Call) -> Value:
    x, scale, zero = n.value(0), n.value(1), n.maybe(2)
    axis, block = n.attribute("axis", 1), n.attribute("block_size", 0)
    dtype = scale.dtype
    if n.attribute("output_dtype", 0):
        dtype = dtype_of(n.attribute("output_dtype"), "attribute 'output_dtype'")
    scale = n.cast(_spread(n, scale, x, axis, block), "float32")
    y = n.cast(x, "float32")
    if zero is not None:
        y = n("sub", y, n.cast(_spread(n, zero, x, axis, block), "float32"))
    return n.cast(n("mul", y, scale), dtype)


def _centred(n: Call, x: Value, zero: Value | None, line: int | None, terms: int) -> Value:
    """Return x minus its zero point, in a type that holds sums of `terms` products exactly."""
    dtype = "float32" if terms * _LEVELS < 1 << 24 else "float64"
    y = n.cast(x, dtype)
    if zero is None:
        return y
    part = n.cast(zero, dtype)
    if part.spec.size > 1 and line is not None and part.rank == 1:
        part = n.reshape(part, [part.spec.size if a == line else 1 for a in range(x.rank)])
    elif part.spec.size == 1:
        part = n.reshape(part, ())
    return n("sub", y, part)


@rule("MatMulInteger")
def matmul_integer(n: Call) -> Value:
    return n.cast(_integer_product(n, n.value(0), n.value(1), n.maybe(2), n.maybe(3)), "int32")


def _integer_product(
    n: Call, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None
) -> Value:
    terms = a.shape[-1] if a.rank else 1
    left = _centred(n, a, a_zero, a.rank - 2, terms)
    return product(n, left, _centred(n, b, b_zero, b.rank - 1, terms))


@rule("ConvInteger")
def conv_integer(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    terms = math.prod(w.shape[1:])
    left = _centred(n, x, n.maybe(2), None, terms)
    return n.cast(convolved(n, left, _centred(n, w, n.maybe(3), 0, terms), None), "int32")


@rule("QLinearMatMul")
def qlinear_matmul(n: Call) -> Value:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = n.values()
    if any(part.spec.size != 1 for part in (a_scale, b_scale, y_scale)):
        raise UnsupportedError("scales by row or column are not supported")
    total = _integer_product(n, a, b, a_zero, b_zero)
    return _scaled(n, total, (a_scale, b_scale, y_scale), y_zero, None)


@rule("QLinearConv")
def qlinear_conv(n: Call) -> Value:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = n.values()[:8]
    terms = math.prod(w.shape[1:])
    left = _centred(n, x, x_zero, None, terms)
    bias = n.maybe(8)
    weights = _centred(n, w, w_zero, 0, terms)
    total = convolved(n, left, weights, n.cast(bias, left.dtype) if bias is not None else None)
    return _scaled(n, total, (x_scale, w_scale, y_scale), y_zero, x.rank - 2)


def _scaled(
    n: Call, total: Value, scales: tuple[Value, Value, Value], zero: Value, spatial: int | None
) -> Value:
    a, b, y = (n.cast(scale, total.dtype) for scale in scales)
    if b.spec.size > 1 and spatial is not None:
        b = n.reshape(b, (b.spec.size, *(1,) * spatial))
    made = n("mul", total, n("div", n("mul", a, b), y))
    return quantized(n, made, n.like(1, made), n.reshape(zero, ()), zero.dtype)
