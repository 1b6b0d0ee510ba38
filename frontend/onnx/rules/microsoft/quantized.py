"""Operators on quantised integers of ONNX Runtime's own domain, which its tools write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.elementwise import softmax_from
from soapstone.frontend.onnx.rules.microsoft.fused import channels_first, channels_last
from soapstone.frontend.onnx.rules.products import product
from soapstone.frontend.onnx.rules.quantized import (
    bytes_convolution,
    bytes_product,
    dequantize_linear,
    dequantized,
    quantize_linear,
    quantized,
    requantized,
    scale_vector,
)
from soapstone.frontend.onnx.rules.recurrent import layer
from soapstone.frontend.onnx.rules.windows import averaged
from soapstone.frontend.onnx.values import MICROSOFT, Rule, Value, rule

rule("QuantizeLinear", domain=MICROSOFT)(quantize_linear)
rule("DequantizeLinear", domain=MICROSOFT)(dequantize_linear)


def _of_one(name: str, meaning: Callable[[Call, Value], Value]) -> None:
    """Register an operator of bytes by its meaning on real numbers."""

    def translate(n: Call) -> Value:
        last = bool(n.attribute("channels_last", 0))
        x = channels_first(n, n.value(0)) if last else n.value(0)
        made = meaning(n, dequantized(n, x, n.value(1), n.maybe(2)))
        y = requantized(n, made, n.value(3), n.maybe(4))
        return channels_last(n, y) if last else y

    rule(name, domain=MICROSOFT)(translate)


def _softmax(n: Call, x: Value) -> Value:
    return softmax_from(n, x, n.axis(x.rank, -1), n.attribute("opset", 13) < 13)


def _mean(n: Call, x: Value) -> Value:
    axes = n.axes_of(n.ints("axes") or range(x.rank), x.rank)
    return n("reduce_mean", x, axes=axes, keepdims=bool(n.attribute("keepdims", 1)))


_of_one("QLinearSigmoid", lambda n, x: n("sigmoid", x))
_of_one("QLinearLeakyRelu", lambda n, x: n("leaky_relu", x, alpha=n.attribute("alpha", 0.01)))
_of_one("QLinearSoftmax", _softmax)
_of_one("QLinearReduceMean", _mean)
_of_one("QLinearAveragePool", averaged)
_of_one(
    "QLinearGlobalAveragePool",
    lambda n, x: n("reduce_mean", x, axes=range(2, x.rank), keepdims=True),
)


def _of_two(name: str) -> Rule:
    def translate(n: Call) -> Value:
        sides = [
            dequantized(n, n.value(first), n.value(first + 1), n.maybe(first + 2))
            for first in (0, 3)
        ]
        return requantized(n, n(name, *sides), n.value(6), n.maybe(7))

    return translate


@rule("QLinearConv", domain=MICROSOFT)
def qlinear_conv(n: Call) -> Value:
    last = bool(n.attribute("channels_last", 0))
    y = bytes_convolution(n, channels_first(n, n.value(0)) if last else n.value(0))
    return channels_last(n, y) if last else y


@rule("QLinearWhere", domain=MICROSOFT)
def qlinear_where(n: Call) -> Value:
    sides = [dequantized(n, *(n.value(at + i) for i in range(3))) for at in (1, 4)]
    return requantized(n, n("where", n.value(0), *sides), n.value(7), n.maybe(8))


rule("QLinearAdd", domain=MICROSOFT)(_of_two("add"))
rule("QLinearMul", domain=MICROSOFT)(_of_two("mul"))


@rule("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(n: Call) -> Value:
    scale, zero = n.value(0), n.value(1)
    parts = [
        requantized(n, dequantized(n, *(n.value(i) for i in range(at, at + 3))), scale, zero)
        for at in range(2, len(n), 3)
    ]
    return n("concat", *parts, axis=n.axis(parts[0].rank))


@rule("QGemm", domain=MICROSOFT)
def qgemm(n: Call) -> Value:
    a, b, bias = n.value(0), n.value(3), n.maybe(6)
    zeros = n.maybe(2), n.maybe(5)
    alpha, transposed = n.attribute("alpha", 1.0), bool(n.attribute("transB", 0))
    channels = b.shape[0 if transposed else -1]
    scale = scale_vector(n, (n.value(1), n.value(4)), channels)
    if scale is None or n.attribute("transA", 0):
        raise UnsupportedError("a scale a row, or a transposed input 0, is not supported")
    if alpha != 1.0:
        scale = n("affine", scale, scale=alpha)
    vectors = [scale]
    if bias is not None and bias.spec.size == channels:
        vectors.append(n("mul", n.reshape(n.cast(bias, "float32"), (channels,)), scale))
        bias = None
    y = _product(n, (a, b, *zeros), vectors, transposed)
    if bias is not None:
        y = n("add", y, n("mul", n.cast(bias, "float32"), scale))
    return y if not n.has(7) else requantized(n, y, n.value(7), n.maybe(8))


def _product(
    n: Call,
    operands: tuple[Value, Value, Value | None, Value | None],
    vectors: Sequence[Value],
    transposed: bool = False,
) -> Value:
    """Return a product of bytes times a scale a column, plus a bias if there is one."""
    made = bytes_product(n, operands, None, vectors, transposed)
    if made is not None:
        return made
    x, w, x_zero, w_zero = operands
    one = n.like(1, vectors[0])
    left = dequantized(n, x, one, x_zero)
    if w_zero is not None and w_zero.spec.size > 1:
        raise UnsupportedError("zeros by column of weights that do not fit signed bytes")
    right = dequantized(n, w, one, w_zero)
    if transposed:
        right = n("transpose", right, permutation=(1, 0))
    y = n("mul", product(n, left, right), vectors[0])
    return n("add", y, vectors[1]) if len(vectors) == 2 else y


@rule("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(n: Call) -> Value:
    a, b, bias = n.value(0), n.value(1), n.maybe(6)
    return real_product(n, (a, b, n.maybe(4), n.maybe(5)), (n.value(2), n.value(3)), bias)


@rule("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(n: Call) -> Value:
    x, b = n.value(0), n.value(1)
    scale, whole = n.all("byte_scale", x)
    a = quantized(n, x, scale, whole, "uint8")
    return real_product(n, (a, b, whole, n.maybe(3)), (scale, n.value(2)), n.maybe(4))


def real_product(
    n: Call,
    operands: tuple[Value, Value, Value | None, Value | None],
    scales: tuple[Value, Value],
    bias: Value | None,
) -> Value:
    """Return a product of bytes (x, w, their zeros) times their scales, plus a bias, as numbers."""
    channels = operands[1].shape[-1]
    scale = scale_vector(n, scales, channels)
    if scale is None:
        raise UnsupportedError("a scale a row is not supported")
    if operands[1].rank != 2:
        raise UnsupportedError(f"weights of rank {operands[1].rank} found; 2 are supported")
    vectors = [scale] if bias is None else [scale, n.reshape(bias, (channels,))]
    return _product(n, operands, vectors)


@rule("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(n: Call) -> list[Value]:
    """Return an LSTM of the weights that the bytes stand for; nothing else is rounded."""
    w, r = (_by_direction(n, weight, scale) for weight, scale in ((1, 8), (2, 10)))
    return layer(n, "LSTM", w, r)


def _by_direction(n: Call, weight: int, scale: int) -> Value:
    """Return weights of bytes (directions, features, 4 * hidden) as ONNX's LSTM has them.

    weight, scale: which inputs they and their scales are; zero points come after the scales.
    """
    w = n.value(weight)
    if w.rank != 3:
        raise OnnxError(f"weights {w.spec} found; rank 3 needed")
    parts = []
    for part in (n.value(scale), n.value(scale + 1)):
        if part.shape not in (w.shape[:1], (w.shape[0], w.shape[2])):
            raise OnnxError(f"{part.spec} of weights {w.spec} found; one a direction or row needed")
        # One number a direction has a last axis of 1.
        parts.append(n.reshape(part, (w.shape[0], 1, part.spec.size // w.shape[0])))
    return n.transpose(n("dequantize", w, *parts), (0, 2, 1))
