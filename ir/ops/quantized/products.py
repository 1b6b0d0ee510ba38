"""`quantized_conv1d` … `quantized_conv3d` and `quantized_linear`: sums of products of bytes.

x stands for (x - zero) * s and w, a column or filter, for w * t; `scale` is s * t of each, so the
result is real. It is the sum of integer products, which is exact, times the scale, plus a bias. A
window's padding is of zeros, which x calls `zero`. Dims are those of `conv2d` and `linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_count, need_float, need_rank
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.ops.windows.convolution import GROUPS, ChannelAxes, convolve, localize, windowed
from soapstone.ir.ops.windows.window import case_shape, case_window, spatial_dims, window_attributes
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

# Sums of products of two bytes are exact in this type: 2 ** 38 terms are.
_EXACT = np.float64
_OWN = {
    "bias": Attribute("bool", False),
    "to": Attribute("str", "float", choices=("float", "int32")),
}


def _checked(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> str:
    """Return the type of the result of operands that fit.

    Raises:
        ShapeError: they do not.
    """
    whole = attributes["to"] == "int32"
    if whole and attributes["bias"]:
        raise ShapeError("bias is True, to is int32; sums of integers have no bias")
    need_count(inputs, 3 if whole else 4 + attributes["bias"])
    for position, dtypes in enumerate((BYTES, ("int8",), ("int32", inputs[0].dtype))):
        found = inputs[position]
        if found.dtype not in dtypes:
            raise ShapeError(
                f"input {position} has type {found.dtype}; {' or '.join(dtypes)} needed"
                f" (shape {found.shape})"
            )
    need_rank(inputs, 2, "")
    if whole:
        return "int32"
    need_float(inputs, *range(3, len(inputs)))
    return inputs[3].dtype


def _conv_signature(rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    dtype = _checked(inputs, attributes)
    axes = ChannelAxes(rank, inputs, attributes, real=False)
    made = windowed(axes, inputs, range(3, len(inputs)), dtype, {"ci": Kind.WHOLE})
    x, w, *vectors = made.inputs
    return replace(made, inputs=(x, w, Operand(()), *vectors))


def _linear_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    dtype = _checked(inputs, attributes)
    vectors = ", n" * (len(inputs) - 3)
    found = (*inputs[:2], *inputs[3:])
    made = einsum(f"... k, k n{vectors} -> ... n", found, dtypes=[dtype], kinds={"k": Kind.WHOLE})
    x, w, *rest = made.inputs
    return replace(made, inputs=(x, w, Operand(()), *rest))


def _real(attributes: Attributes, total: Array, axis: int, vectors: tuple[Array, ...]) -> Array:
    """Return sums of integers as the result: times a scale a channel, along the axis, plus bias."""
    if attributes["to"] == "int32":
        return total.astype(np.int32)
    shape = [-1 if each == axis % total.ndim else 1 for each in range(total.ndim)]
    scale, *bias = (vector.reshape(shape) for vector in vectors)
    y = total.astype(scale.dtype) * scale
    return np.asarray(y + bias[0] if bias else y)


def _conv(attributes: Attributes, x: Array, w: Array, zero: Array, *vectors: Array) -> Array:
    plain = {**attributes, "bias": False, "activation": None}
    total = convolve(plain, x.astype(_EXACT) - zero, w.astype(_EXACT))
    return _real(attributes, total, 1, vectors)


def _linear(attributes: Attributes, x: Array, w: Array, zero: Array, *vectors: Array) -> Array:
    total = np.matmul(x.astype(_EXACT) - zero, w.astype(_EXACT) - attributes["w_zero"])
    return _real(attributes, np.asarray(total), -1, vectors)


def _case(x: str, w: str, channels: str, at: Mapping[str, object], kind: str = "uint8") -> Case:
    vectors = () if at.get("to") == "int32" else (channels,) * (1 + bool(at.get("bias")))
    limits = "<256" if kind == "uint8" else ">=-128 <128"
    given = (f"{kind} {x} {limits}", f"int8 {w} >=-128 <128", "int32 >=1 <9", *vectors)
    return Case(given, at, positive=True)


def _declare_conv(rank: int) -> None:
    window = window_attributes(rank) | GROUPS
    cases = []
    for shape, filters, given, more, kind in (
        ((2, 3, 6, 5), (4, 3, 3, 3), {"padding": (1, 1, 1, 1)}, {"bias": True}, "uint8"),
        (
            *((2, 4, 7, 6), (4, 2, 3, 2), {"groups": 2, "stride": (2, 1), "padding": (0, 1, 2, 0)}),
            *({}, "int8"),
        ),
        ((2, 3, 5, 5), (3, 1, 3, 3), {"groups": 3, "padding": (1, 1, 1, 1)}, {}, "uint8"),
        ((1, 2, 5, 7), (3, 2, 1, 1), {"stride": (2, 3)}, {"to": "int32"}, "uint8"),
        ((0, 2, 4, 4), (2, 2, 3, 3), {"padding": (1, 1, 0, 0)}, {}, "uint8"),
    ):
        x, w = case_shape(shape, rank, 3), case_shape(filters, rank, 2)
        at = {**case_window(given, rank, high=1), **more}
        cases.append(_case(x, w, str(filters[0]), at, kind))
    axes = ", ".join(f"k{dim}" for dim in spatial_dims(rank))
    define(
        name=f"quantized_conv{rank}d",
        epilogue=True,
        inputs=("x", "w", "zero", "scale?", "b?"),
        signature=partial(_conv_signature, rank),
        reference=_conv,
        attributes=window | _OWN,
        localize=partial(localize, rank),
        flops_per_point=2,
        cases=tuple(cases),
        doc=f"cross-correlation of x - zero with w: (o, c/groups, {axes}), times scale, plus b",
    )


for _rank in (1, 2, 3):
    _declare_conv(_rank)

define(
    name="quantized_linear",
    epilogue=True,
    inputs=("x", "w", "zero", "scale?", "b?"),
    signature=_linear_signature,
    reference=_linear,
    attributes=_OWN | {"w_zero": Attribute("int", 0)},
    flops_per_point=2,
    cases=(
        _case("4 5", "5 3", "3", {"bias": True}),
        _case("3 6", "6 4", "4", {"w_zero": -51}, "int8"),
        _case("3 6", "6 4", "4", {"w_zero": 90, "to": "int32"}),
        _case("2 3 5", "5 4", "4", {}, "int8"),
        _case("4 5", "5 3", "3", {"to": "int32"}),
        _case("1 1", "1 1", "1", {}),
        _case("0 3", "3 2", "2", {}),
    ),
    doc="x - zero times w - w_zero, times scale, plus b; w: (k, n)",
)
