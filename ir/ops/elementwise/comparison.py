"""Comparisons, logic, and the choice between values by a condition. Dims: d0, d1, … by axis."""

from __future__ import annotations

import math

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.expression import equal, where
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.elementwise.pointwise import (
    binary,
    declare,
    need_type,
    nowhere,
    pointwise,
    result_type,
    unary,
    unbroadcast,
)
from soapstone.ir.spec import Case, GradientContext
from soapstone.ir.tensor import Array, TensorSpec


def _comparison(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    if inputs[0].dtype != inputs[1].dtype:
        raise ShapeError(
            f"input 1 has type {inputs[1].dtype}; {inputs[0].dtype} of input 0 needed: cast one"
            f" of them (shape {inputs[1].shape})"
        )
    return pointwise(inputs, "bool")


def _logic(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "b", "bool")
    return pointwise(inputs, "bool")


def _test(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "f", "a floating-point type")
    return pointwise(inputs, "bool")


def _choice(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_type(inputs, "b", "bool", 0)
    return pointwise(inputs, result_type(inputs[1:]))


def _choice_grad(g: GradientContext) -> list[str | None]:
    c, x, y = g.inputs
    if not g.spec(x).is_float:
        return [None, None, None]
    zero = g.emit("full", shape=(), value=0.0, dtype=g.spec(x).dtype)
    dx, dy = g.emit("where", c, g.grad(), zero), g.emit("where", c, zero, g.grad())
    return [None, unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


def _is_inf(attributes: Attributes, x: Array) -> Array:
    found = np.zeros(x.shape, np.bool_)
    if attributes["detect_positive"]:
        found = found | np.isposinf(x)
    if attributes["detect_negative"]:
        found = found | np.isneginf(x)
    return np.asarray(found)


for _name, _onnx, _sign in (
    ("equal", "Equal", "=="),
    ("less", "Less", "<"),
    ("less_equal", "LessOrEqual", "<="),
    ("greater", "Greater", ">"),
    ("greater_equal", "GreaterOrEqual", ">="),
):
    declare(
        _name,
        binary(_name),
        nowhere,
        onnx=Onnx(_onnx, casts={0: "int32", 1: "int32"}),  # ONNX orders numbers only
        doc=f"whether x {_sign} y",
        cases=(
            Case(("3 4", "3 4")),
            Case(("2 3 4", "")),
            Case(("2 1 4", "3 1")),
            Case(("int64 3 4 <3", "int64 4 <3")),
            Case(("int32 5 <3", "int32 <3")),
            Case(("bool 6", "bool 6")),
            Case(("0 2", "1 2")),
        ),
        signature=_comparison,
    )
for _name, _doc in (
    ("and", "both hold"),
    ("or", "one of them holds"),
    ("xor", "exactly one holds"),
):
    declare(
        f"logical_{_name}",
        binary(f"logical_{_name}"),
        nowhere,
        onnx=_name.capitalize(),
        doc=f"whether {_doc}",
        cases=(
            Case(("bool 3 4", "bool 3 4")),
            Case(("bool 2 3 4", "bool 4")),
            Case(("bool 2 1", "bool 3")),
            Case(("bool 3", "bool")),
            Case(("bool 0 2", "bool 1 2")),
        ),
        signature=_logic,
    )
declare(
    "logical_not",
    unary("logical_not"),
    nowhere,
    onnx="Not",
    doc="the negation of truth values",
    cases=(Case(("bool 3 4",)), Case(("bool 2 3 2",)), Case(("bool",)), Case(("bool 0 3",))),
    signature=_logic,
)
declare(
    "is_nan",
    unary("is_nan"),
    nowhere,
    onnx="IsNaN",
    doc="whether x is NaN",
    cases=(Case(("3 4",), {}, ()), Case(("",), {}, ()), Case(("0 3",), {}, ())),
    signature=_test,
)
declare(
    "is_inf",
    lambda x, detect_positive, detect_negative: where(
        equal(x, math.inf), detect_positive, where(equal(x, -math.inf), detect_negative, 0)
    ),
    nowhere,
    reference=_is_inf,
    attributes={
        "detect_positive": Attribute("bool", True),
        "detect_negative": Attribute("bool", True),
    },
    onnx="IsInf",
    doc="whether x is infinite, of a sign that is to be detected",
    cases=(
        Case(("3 4",), {}, ()),
        Case(("3 4",), {"detect_positive": False}, ()),
        Case(("5",), {"detect_negative": False}, ()),
        Case(("",), {}, ()),
        Case(("0 3",), {}, ()),
    ),
    signature=_test,
)
declare(
    "where",
    ("where", "condition", "x", "y"),
    _choice_grad,
    onnx="Where",
    cases=(
        Case(("bool 3 4", "3 4", "3 4")),
        Case(("bool 4", "2 3 4", "")),
        Case(("bool 3 1", "4", "3 4")),
        Case(("bool 3 4", "", "1 4")),
        Case(("bool", "3", "3")),
        Case(("bool 2 3", "int64 2 3", "int64 3")),
        Case(("bool 3", "bool 3", "bool 3")),
        Case(("bool 0 2", "0 2", "2")),
    ),
    doc="x where the condition holds, else y",
    signature=_choice,
)
