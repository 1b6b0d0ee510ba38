"""ONNX operators on quantised integers.

Products of bytes by weights that are known are such here too. Others are computed in floating
point, exactly where the sums themselves are results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import BYTES, exact_sums, integers, kind_of
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.tensors import dtype_of
from soapstone.frontend.onnx.rules.products import product
from soapstone.frontend.onnx.rules.windows import convolved, windowed
from soapstone.frontend.onnx.values import ALIGNED, PLAIN, STRIDED, Value, rule


def spread(n: Call, part: Value, x: Value, axis: int, block: int) -> Value:
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
    shape = (*part.shape[: axis + 1], block, *part.shape[axis + 1 :])
    wide = n.kept("broadcast", column, shape=shape)  # by which products know blocks of weights
    whole = n.reshape(wide, (*part.shape[:axis], count * block, *part.shape[axis + 1 :]))
    if count * block == x.shape[axis]:
        return whole
    return n.part(whole, axis, 0, x.shape[axis])


def _zero(n: Call, zero: Value | None, dtype: str) -> Value:
    return n.known(np.zeros((), dtype)) if zero is None else zero


def quantized(
    n: Call, x: Value, scale: Value, zero: Value | None, dtype: str, saturate: bool = True
) -> Value:
    """Return x / scale rounded to even, plus zero, clipped to the type.

    saturate: whether floating-point types of 8 bits are clipped too.
    """
    if kind_of(dtype) == "f":
        y = n("div", x, scale)
        if zero is not None and not (zero.array is not None and (zero.array == 0).all()):
            y = n("add", y, n.cast(zero, x.dtype))
        return n("cast", y, to=dtype, saturate=saturate)
    limits = integers(dtype)
    if limits.bits == 8:
        return n("quantize", x, scale, _zero(n, zero, dtype), to=dtype)
    wide = "float64" if limits.bits > 16 else x.dtype
    y = n("round", n("div", n.cast(x, wide), n.cast(scale, wide)))
    if zero is not None:
        y = n("add", y, n.cast(zero, wide))
    return n.cast(n("clip", y, low=float(limits.min), high=float(limits.max)), dtype)


@rule("QuantizeLinear", even=ALIGNED)
def quantize_linear(n: Call) -> Value:
    x, scale, zero = n.value(0), n.value(1), n.maybe(2)
    code = n.attribute("output_dtype", 0)
    dtype = zero.dtype if zero is not None else "uint8"
    if zero is None and code:
        dtype = dtype_of(code, "attribute 'output_dtype'")
    axis, block = n.attribute("axis", 1), n.attribute("block_size", 0)
    scale = spread(n, scale, x, axis, block)
    zero = spread(n, zero, x, axis, block) if zero is not None else None
    saturate = bool(n.attribute("saturate", 1))
    return quantized(n, n.cast(x, "float32"), n.cast(scale, "float32"), zero, dtype, saturate)


@rule("DynamicQuantizeLinear", even=ALIGNED)
def dynamic_quantize_linear(n: Call) -> list[Value]:
    x = n.value()
    scale, zero = n.all("byte_scale", x)
    return [n("quantize", x, scale, zero, to="uint8"), scale, zero]


@rule("DequantizeLinear", even=ALIGNED)
def dequantize_linear(n: Call) -> Value:
    x, scale, zero = n.value(0), n.value(1), n.maybe(2)
    axis, block = n.attribute("axis", 1), n.attribute("block_size", 0)
    dtype = scale.dtype
    if n.attribute("output_dtype", 0):
        dtype = dtype_of(n.attribute("output_dtype"), "attribute 'output_dtype'")
    scale = n.cast(spread(n, scale, x, axis, block), "float32")
    zero = None if zero is None else spread(n, zero, x, axis, block)
    if x.dtype in BYTES:
        return n.cast(n.kept("dequantize", x, scale, _zero(n, zero, x.dtype)), dtype)
    y = n.cast(x, "float32")
    if zero is not None:
        y = n("sub", y, n.cast(zero, "float32"))
    return n.cast(n("mul", y, scale), dtype)


def _centred(n: Call, x: Value, zero: Value | None, line: int | None, terms: int) -> Value:
    """Return x minus its zero point, in a type that holds sums of `terms` products exactly.

    terms: 0 where sums are scaled and rounded, for which single precision does.
    """
    dtype = exact_sums(terms)
    y = n.cast(x, dtype)
    if zero is None:
        return y
    part = n.cast(zero, dtype)
    if part.spec.size > 1 and line is not None and part.rank == 1:
        part = n.reshape(part, [part.spec.size if a == line else 1 for a in range(x.rank)])
    elif part.spec.size == 1:
        part = n.reshape(part, ())
    return n("sub", y, part)


def _signed(
    n: Call, w: Value, zero: Value | None, axis: int, centred: bool
) -> tuple[Value, int] | None:
    """Return known weights as signed bytes and what these call 0, or None where they are no such.

    axis: along which zeros are, if there are several. centred: whether they must call 0 so.
    """
    if w.array is None or (zero is not None and zero.array is None):
        return None
    if zero is None or zero.array is None or not zero.array.any():
        if w.dtype == "int8":
            return w, 0
        zero = n.known(np.zeros((), w.dtype))
    shape = [-1 if each == axis % w.rank else 1 for each in range(w.rank)]
    shape = shape if zero.spec.size > 1 else []
    off = n.array(zero).astype(np.int16).reshape(shape)
    fits, left = w.array - off, 0
    if fits.size and not -128 <= fits.min() <= fits.max() < 128:
        if centred or off.size != 1:
            return None
        moved = 128 if w.dtype == "uint8" else 0
        off, left = np.full_like(off, moved), int(off.reshape(())) - moved
    whole = n.kept("sub", n.kept("cast", w, to="int16"), n.known(off))
    return n.kept("cast", whole, to="int8"), left


def bytes_product(
    n: Call,
    operands: tuple[Value, Value, Value | None, Value | None],
    window: dict[str, Any] | None,
    vectors: Sequence[Value] = (),
    transposed: bool = False,
) -> Value | None:
    """Return sums of products of bytes by known weights, or None where operands are others.

    operands: x, weights and their zeros. window: a convolution's attributes, None of a product.
    vectors: a scale of each channel, and perhaps a bias; without them the result is the sums.
    transposed: whether the weights of a product are.
    """
    x, w, x_zero, w_zero = operands
    rank = w.rank - 2
    if window is None and (w.rank != 2 or x.rank < 1 or x.shape[-1] != w.shape[transposed]):
        return None
    if x.dtype not in BYTES or (x_zero is not None and x_zero.spec.size != 1):
        return None
    if window is not None and min(window["padding"]) < 0:
        return None
    axis = 0 if window is not None or transposed else -1
    found = _signed(n, w, w_zero, axis, window is not None)
    if found is None:
        return None
    signed, left = found
    if transposed:
        signed = n.kept("transpose", signed, permutation=(1, 0))
    zero = n.reshape(_zero(n, x_zero, x.dtype), ())
    name = "quantized_linear" if window is None else f"quantized_conv{rank}d"
    own: dict[str, Any] = {"bias": len(vectors) == 2, "to": "float" if vectors else "int32"}
    if window is None:
        own["w_zero"] = left
    return n(name, x, signed, zero, *vectors, **own, **(window or {}))


@rule("MatMulInteger", even=PLAIN)
def matmul_integer(n: Call) -> Value:
    a, b, zeros = n.value(0), n.value(1), (n.maybe(2), n.maybe(3))
    made = bytes_product(n, (a, b, *zeros), None)
    return made or n.cast(_integer_product(n, a, b, *zeros), "int32")


def _integer_product(
    n: Call, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None, whole: bool = True
) -> Value:
    """Return a product of integers; whole: whether it must be exact."""
    terms = a.shape[-1] if a.rank and whole else 0
    left = _centred(n, a, a_zero, a.rank - 2, terms)
    return product(n, left, _centred(n, b, b_zero, b.rank - 1, terms))


@rule("ConvInteger", even=STRIDED)
def conv_integer(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    made = bytes_product(n, (x, w, n.maybe(2), n.maybe(3)), windowed(n, x, w))
    if made is not None:
        return made
    terms = math.prod(w.shape[1:])
    left = _centred(n, x, n.maybe(2), None, terms)
    return n.cast(convolved(n, left, _centred(n, w, n.maybe(3), 0, terms), None), "int32")


@rule("QLinearMatMul", even=PLAIN)
def qlinear_matmul(n: Call) -> Value:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = n.values()
    if b.rank == 2 and a_scale.spec.size == y_scale.spec.size == 1:
        scale = scale_vector(n, (a_scale, b_scale), b.shape[1])
        made = scale and bytes_product(n, (a, b, a_zero, b_zero), None, (scale,))
        if made:
            return requantized(n, made, y_scale, y_zero)
    if any(part.spec.size != 1 for part in (a_scale, b_scale, y_scale)):
        raise UnsupportedError("scales by row or column are not supported")
    total = _integer_product(n, a, b, a_zero, b_zero, whole=False)
    return _scaled(n, total, (a_scale, b_scale, y_scale), y_zero, None)


@rule("QLinearConv", even=STRIDED)
def qlinear_conv(n: Call) -> Value:
    return bytes_convolution(n, n.value(0))


def bytes_convolution(n: Call, x: Value) -> Value:
    """Return a convolution of bytes x, to bytes, by the node's other inputs and attributes."""
    x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (n.value(at) for at in range(1, 8))
    bias = n.maybe(8)
    scale = scale_vector(n, (x_scale, w_scale), w.shape[0])
    if scale is not None and y_scale.spec.size == 1:
        vectors = [scale] if bias is None else [scale, n("mul", n.cast(bias, scale.dtype), scale)]
        made = bytes_product(n, (x, w, x_zero, w_zero), windowed(n, x, w), vectors)
        if made is not None:
            return requantized(n, made, y_scale, y_zero)
    left = _centred(n, x, x_zero, None, 0)
    weights = _centred(n, w, w_zero, 0, 0)
    total = convolved(n, left, weights, n.cast(bias, left.dtype) if bias is not None else None)
    return _scaled(n, total, (x_scale, w_scale, y_scale), y_zero, x.rank - 2)


def one_number(n: Call, x: Value) -> Value:
    """Return a value of one element without axes, in single precision if it is a real number."""
    return n.reshape(n.cast(x, "float32") if x.spec.is_float else x, ())


def scale_vector(n: Call, scales: tuple[Value, Value], channels: int) -> Value | None:
    """Return the product of a number and of one a channel, or of one number, as a vector.

    None where the numbers are others.
    """
    first, second = (n.cast(scale, "float32") for scale in scales)
    if first.spec.size != 1 or second.spec.size not in (1, channels):
        return None
    if second.spec.size == 1:
        second = n.broadcast(one_number(n, second), (channels,))
    return n("mul", one_number(n, first), n.reshape(second, (channels,)))


def dequantized(n: Call, x: Value, scale: Value, zero: Value | None) -> Value:
    """Return (x - zero) * scale for bytes x and one scale."""
    zero = _zero(n, zero, x.dtype)
    return n.kept("dequantize", x, one_number(n, scale), n.reshape(zero, ()))


def requantized(n: Call, y: Value, scale: Value, zero: Value | None) -> Value:
    """Return a real value as bytes of one scale, of the type of their zero, unsigned without."""
    dtype = "uint8" if zero is None else zero.dtype
    zero = None if zero is None else n.reshape(zero, ())
    return quantized(n, y, one_number(n, scale), zero, dtype)


def _scaled(
    n: Call, total: Value, scales: tuple[Value, Value, Value], zero: Value, spatial: int | None
) -> Value:
    a, b, y = (n.cast(scale, total.dtype) for scale in scales)
    if b.spec.size > 1 and spatial is not None:
        b = n.reshape(b, (b.spec.size, *(1,) * spatial))
    made = n("mul", total, n("div", n("mul", a, b), y))
    return quantized(n, made, n.like(1, made), n.reshape(zero, ()), zero.dtype)
