"""What operators on bytes are in ONNX: its roundings to bytes, and products of integers."""

from __future__ import annotations

import numpy as np

from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.export.rules import Given, export
from soapstone.frontend.onnx.file.tensors import ONNX_OF
from soapstone.ir.builder import Emitter
from soapstone.ir.ops.windows.convolution import CONVOLUTIONS


def _axis(g: Given) -> int | None:
    """Return the one axis that scale and zero vary along; None where they vary along others."""
    shape = g.made[0].shape
    if g.specs[0].shape != shape:
        return None
    axes = set()
    for spec in g.specs[1:]:
        lead = len(shape) - spec.rank
        axes |= {lead + axis for axis, extent in enumerate(spec.shape) if extent != 1}
    return next(iter(axes), 0) if len(axes) < 2 else None


def _by_axis(g: Given, kind: str, axis: int) -> None:
    """Write a rounding or its inverse, whose scale and zero are numbers or vectors there."""
    count = max(spec.size for spec in g.specs[1:])
    parts = []
    for name, spec in zip(g.inputs[1:], g.specs[1:]):
        shape = (count,) if count > 1 else ()
        if spec.size != count:
            name = g("Expand", g("Reshape", name, g.ints((1,))), g.ints(shape))
        elif spec.shape != shape:
            name = g("Reshape", name, g.ints(shape))
        parts.append(name)
    at = {"axis": axis} if count > 1 else {}
    g.last(kind, g.inputs[0], *parts, **at)


@export("quantize")
def _quantize(g: Given) -> None:
    axis = _axis(g)
    if axis is not None:
        _by_axis(g, "QuantizeLinear", axis)
        return
    real, limits = g.specs[0].dtype, np.iinfo(g["to"])

    def steps(emit: Emitter) -> list[str]:
        x, scale, zero = g.node.inputs
        whole = emit("add", emit("round", emit("div", x, scale)), emit("cast", zero, to=real))
        inside = emit("clip", whole, low=float(limits.min), high=float(limits.max))
        return [emit("cast", inside, to=g["to"])]

    g.write_instead(steps)


@export("dequantize")
def _dequantize(g: Given) -> None:
    axis = _axis(g)
    if axis is not None:
        _by_axis(g, "DequantizeLinear", axis)
        return
    real = g.made[0].dtype

    def steps(emit: Emitter) -> list[str]:
        x, scale, zero = g.node.inputs
        return [emit("mul", emit("sub", *(emit("cast", n, to=real) for n in (x, zero))), scale)]

    g.write_instead(steps)


def _sums(g: Given, total: str, shape: tuple[int, ...]) -> None:
    """Write what is made of sums of products; shape: of a vector over channels."""
    if g["to"] == "int32":
        g.last("Identity", total)
        return
    vectors = [g("Reshape", name, g.ints(shape)) for name in g.inputs[3:]]
    real = g("Cast", total, to_=ONNX_OF[g.made[0].dtype])
    scaled = g("Mul", real, vectors[0], to=None if vectors[1:] else g.outputs[0])
    if vectors[1:]:
        g.last("Add", scaled, vectors[1])


def _operands(g: Given) -> tuple[str, ...]:
    off = g.inputs[2]
    if g.specs[2].dtype != g.specs[0].dtype:
        off = g("Cast", off, to_=ONNX_OF[g.specs[0].dtype])
    operands = (*g.inputs[:2], off)
    zero = g.node.attributes.get("w_zero", 0)
    if not zero:
        return operands
    if not -128 <= zero < 128:
        raise UnsupportedError(
            f"{g.node.label}: attribute w_zero: {zero} found, a signed byte needed"
        )
    return (*operands, g.writer.constant(np.asarray(zero, np.int8)))


@export("byte_scale")
def _byte_scale(g: Given) -> None:
    g("DynamicQuantizeLinear", g.inputs[0], to=(g.writer.new("bytes"), *g.outputs))


@export("quantized_linear")
def _linear(g: Given) -> None:
    _sums(g, g("MatMulInteger", *_operands(g)), (-1,))


@export(*(f"quantized_{name}" for name in CONVOLUTIONS))
def _conv(g: Given) -> None:
    window = {"strides": g["stride"], "pads": g["padding"], "dilations": g["dilation"]}
    total = g("ConvInteger", *_operands(g), **window, group=g["groups"])
    _sums(g, total, (-1, *(1,) * (g.specs[0].rank - 2)))
