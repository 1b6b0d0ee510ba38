"""`quantize` and `dequantize`, real numbers as integers of few bits and back; `byte_scale`.

An integer q stands for (q - zero) * scale. Dims: d0, d1, … by axis; scale and zero broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.expression import Expression, make
from soapstone.ir.ops.elementwise.pointwise import declare, need_type, pointwise
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

_WHOLE = (*BYTES, "int32")


def _need(inputs: tuple[TensorSpec, ...], position: int, *dtypes: str) -> None:
    found = inputs[position]
    if found.dtype not in dtypes:
        raise ShapeError(
            f"input {position} has type {found.dtype}; {' or '.join(dtypes)} needed"
            f" (shape {found.shape})"
        )


def _quantize_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "f", "a floating-point type", 0, 1)
    _need(inputs, 2, attributes["to"])
    return pointwise(inputs, attributes["to"])


def _dequantize_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    _need(inputs, 0, *_WHOLE)
    need_type(inputs, "f", "a floating-point type", 1)
    _need(inputs, 2, inputs[0].dtype)
    return pointwise(inputs, inputs[1].dtype)


def _rounded(dtype: str) -> Any:
    limits = np.iinfo(dtype)

    def function(x: Expression, scale: Expression, zero: Expression) -> Expression:
        whole = make("round", x / scale) + zero
        return make("clip", whole, float(limits.min), float(limits.max))

    return function


def _quantize(attributes: Attributes, x: Array, scale: Array, zero: Array) -> Array:
    limits = np.iinfo(attributes["to"])
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.rint(x / scale) + zero.astype(x.dtype)
        return np.asarray(np.clip(whole, limits.min, limits.max)).astype(attributes["to"])


def _dequantize(attributes: Attributes, x: Array, scale: Array, zero: Array) -> Array:
    return np.asarray((x.astype(scale.dtype) - zero.astype(scale.dtype)) * scale)


declare(
    "quantize",
    {dtype: _rounded(dtype) for dtype in BYTES},
    None,
    reference=_quantize,
    attributes={"to": Attribute("str", choices=BYTES)},
    choice="to",
    flops=3,
    signature=_quantize_signature,
    cases=(
        Case(("3 4", "", "uint8"), {"to": "uint8"}, positive=True),
        Case(("2 3 4", "3 1", "int8 3 1 >=-5 <5"), {"to": "int8"}, positive=True),
        Case(("5", "1", "int8 1"), {"to": "int8"}, positive=True),
        Case(("0 3", "", "uint8"), {"to": "uint8"}, positive=True),
    ),
    doc="x / scale, rounded to even, plus zero, clipped to the type",
)
declare(
    "dequantize",
    lambda x, scale, zero: (x - zero) * scale,
    None,
    reference=_dequantize,
    flops=2,
    signature=_dequantize_signature,
    cases=(
        Case(("uint8 3 4 <256", "", "uint8 <256")),
        Case(("int8 2 3 4 >=-128 <128", "3 1", "int8 3 1 >=-128 <128")),
        Case(("int32 5 >=-9000 <9000", "5", "int32 5")),
        Case(("int8 0 3", "3", "int8 3")),
    ),
    doc="(x - zero) * scale",
)


def _scale_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "f", "a floating-point type")
    table = DimTable()
    axes = [along(table, f"d{i}", n, "input 0") for i, n in enumerate(inputs[0].shape)]
    kinds = dict.fromkeys((name for name, *_ in table.dims()), Kind.WHOLE)
    results = [Operand(()), Operand(())]
    return finish(table, [Operand(tuple(axes))], results, [inputs[0].dtype, "uint8"], kinds)


def _scale(attributes: Attributes, x: Array) -> tuple[Array, Array]:
    real = x.dtype.type
    low, high = x.min(initial=0), x.max(initial=0)
    scale = (high - low) / real(255) if high > low else real(1)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return np.asarray(scale, x.dtype), np.asarray(zero, np.uint8)


define(
    name="byte_scale",
    inputs=("x",),
    outputs=("scale", "zero"),
    signature=_scale_signature,
    reference=_scale,
    flops_per_point=2,
    cases=(
        Case(("3 4",)),
        Case(("2 3 5 4",)),
        Case(("6",), {}, (), positive=True),
        Case(("",)),
        Case(("0 3",)),
    ),
    doc="the scale and zero by which unsigned bytes reach from x's least to its greatest value",
)
