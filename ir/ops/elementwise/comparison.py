"""Comparisons, logic, and the choice between values by a condition. Dims: d0, d1, … by axis."""

from __future__ import annotations

import numpy as np

from soapstone.ir.dims import Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.elementwise.pointwise import (
    declare,
    need_type,
    nowhere,
    pointwise,
    result_type,
    unbroadcast,
)
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext
from soapstone.ir.tensor import Array, TensorSpec

_XY = ("x", "y")


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


_Table = tuple[tuple[str, str, np.ufunc, str], ...]
_COMPARISONS: _Table = (
    ("equal", "Equal", np.equal, "whether x == y"),
    ("less", "Less", np.less, "whether x < y"),
    ("less_equal", "LessOrEqual", np.less_equal, "whether x <= y"),
    ("greater", "Greater", np.greater, "whether x > y"),
    ("greater_equal", "GreaterOrEqual", np.greater_equal, "whether x >= y"),
)
_LOGIC: _Table = (
    ("logical_and", "And", np.logical_and, "whether both hold"),
    ("logical_or", "Or", np.logical_or, "whether one of them holds"),
    ("logical_xor", "Xor", np.logical_xor, "whether exactly one of them holds"),
)
for _name, _onnx, _function, _doc in _COMPARISONS:
    declare(
        _name,
        lambda a, x, y, f=_function: f(x, y),
        nowhere,
        inputs=_XY,
        onnx=Onnx(_onnx, casts={0: "int32", 1: "int32"}),  # ONNX orders numbers only
        doc=_doc,
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
for _name, _onnx, _function, _doc in _LOGIC:
    declare(
        _name,
        lambda a, x, y, f=_function: f(x, y),
        nowhere,
        inputs=_XY,
        onnx=_onnx,
        doc=_doc,
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
    lambda a, x: np.logical_not(x),
    nowhere,
    onnx="Not",
    doc="the negation of truth values",
    cases=(Case(("bool 3 4",)), Case(("bool 2 3 2",)), Case(("bool",)), Case(("bool 0 3",))),
    signature=_logic,
)
declare(
    "is_nan",
    lambda a, x: np.isnan(x),
    nowhere,
    onnx="IsNaN",
    doc="whether x is NaN",
    cases=(Case(("3 4",), {}, ()), Case(("",), {}, ()), Case(("0 3",), {}, ())),
    signature=_test,
)
declare(
    "is_inf",
    _is_inf,
    nowhere,
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
    lambda a, c, x, y: np.where(c, x, y),
    _choice_grad,
    inputs=("condition", "x", "y"),
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
