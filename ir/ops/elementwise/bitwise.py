"""Bits of integers: and, or, xor, not, shifts. Dims: d0, d1, … by the output's axes."""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.ops.elementwise.pointwise import (
    declare,
    need_type,
    nowhere,
    pointwise,
    result_type,
)
from soapstone.ir.spec import Case
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "iub", "an integer type")
    return pointwise(inputs, result_type(inputs))


def _shift(attributes: Attributes, x: Array, y: Array) -> Array:
    shift = np.left_shift if attributes["direction"] == "left" else np.right_shift
    return np.asarray(shift(x, y), x.dtype)


_CASES = (
    Case(("int32 3 4", "int32 3 4")),
    Case(("int64 2 3 4 >=-9", "int64 4 >=-9")),
    Case(("uint8 2 1 3", "uint8 2 1")),
    Case(("int16 3", "int16")),
    Case(("int32 0 2", "int32 1 2")),
)
for _name, _function, _doc in (
    ("and", np.bitwise_and, "the bits that both have"),
    ("or", np.bitwise_or, "the bits that one of them has"),
    ("xor", np.bitwise_xor, "the bits that exactly one of them has"),
):
    declare(
        f"bitwise_{_name}",
        None,
        nowhere,
        reference=lambda a, x, y, f=_function: f(x, y),
        inputs=("x", "y"),
        onnx=f"Bitwise{_name.capitalize()}",
        doc=f"{_doc}\n"
        "x, y: integers whose shapes broadcast as NumPy's do; the result has that shape",
        cases=_CASES,
        signature=_signature,
    )
declare(
    "bitwise_not",
    None,
    nowhere,
    reference=lambda a, x: np.bitwise_not(x),
    onnx="BitwiseNot",
    doc="the bits that x does not have\nx: integers of any shape, which is also the result's",
    cases=(Case(("int32 3 4 >=-9",)), Case(("uint8 5",)), Case(("int64",)), Case(("int32 0 2",))),
    signature=_signature,
)
declare(
    "bit_shift",
    None,
    nowhere,
    reference=_shift,
    inputs=("x", "y"),
    attributes={"direction": Attribute("str", choices=("left", "right"))},
    onnx="BitShift",
    cases=(
        Case(("uint8 3 4", "uint8 3 4 <4"), {"direction": "left"}),
        Case(("uint32 3 4", "uint32 4 <4"), {"direction": "right"}),
        Case(("int64 3", "int64 <4"), {"direction": "right"}),
        Case(("uint16 0 2", "uint16 1 2"), {"direction": "left"}),
    ),
    doc="x with its bits moved by y places\n"
    "x, y: unsigned integers whose shapes broadcast as NumPy's do; the result has that shape",
    signature=_signature,
)
