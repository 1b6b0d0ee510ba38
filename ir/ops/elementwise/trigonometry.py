"""Circular and hyperbolic functions and their inverses. Dims: d0, d1, … by the output's axes.

The gradients are chains of element-wise operators, which run as one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.ops.elementwise.pointwise import GradientRule, declare, floating
from soapstone.ir.spec import Attributes, Case, GradientContext
from soapstone.ir.tensor import Array

_Function = Callable[..., Any]
_CASES = (Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))
_INSIDE = tuple(Case(case.inputs, positive=True) for case in _CASES)


def _square(g: GradientContext, value: str, scale: float, shift: float) -> str:
    """Return scale * value ** 2 + shift."""
    return g.emit("affine", g.emit("power", value, exponent=2.0), scale=scale, shift=shift)


def _slope(name: str, sign: float = 1.0) -> GradientRule:
    """Return the rule dy * sign * name(x)."""

    def rule(g: GradientContext) -> list[str | None]:
        made = g.emit("mul", g.grad(), g.emit(name, g.inputs[0]))
        return [made if sign > 0 else g.emit("neg", made)]

    return rule


def _root(scale: float, shift: float, sign: float = 1.0) -> GradientRule:
    """Return the rule dy * sign / sqrt(scale * x ** 2 + shift)."""

    def rule(g: GradientContext) -> list[str | None]:
        made = g.emit("div", g.grad(), g.emit("sqrt", _square(g, g.inputs[0], scale, shift)))
        return [made if sign > 0 else g.emit("neg", made)]

    return rule


def _quotient(scale: float, shift: float) -> GradientRule:
    """Return the rule dy / (scale * x ** 2 + shift)."""
    return lambda g: [g.emit("div", g.grad(), _square(g, g.inputs[0], scale, shift))]


def _tan_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("mul", g.grad(), _square(g, g.outputs[0], 1.0, 1.0))]


def _quiet(attributes: Attributes, x: Array, function: _Function) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(function(x))


_ABOVE_ONE = (Case(("3 4",), {}, ()), Case(("0 3",)))
_FAMILY: tuple[tuple[str, str, _Function, GradientRule, tuple[Case, ...]], ...] = (
    ("sin", "sine", np.sin, _slope("cos"), _CASES),
    ("cos", "cosine", np.cos, _slope("sin", -1.0), _CASES),
    ("tan", "tangent", np.tan, _tan_grad, _INSIDE),
    ("asin", "inverse sine", np.arcsin, _root(-1.0, 1.0), _INSIDE),
    ("acos", "inverse cosine", np.arccos, _root(-1.0, 1.0, -1.0), _INSIDE),
    ("atan", "inverse tangent", np.arctan, _quotient(1.0, 1.0), _CASES),
    ("sinh", "hyperbolic sine", np.sinh, _slope("cosh"), _CASES),
    ("cosh", "hyperbolic cosine", np.cosh, _slope("sinh"), _CASES),
    ("asinh", "inverse hyperbolic sine", np.arcsinh, _root(1.0, 1.0), _CASES),
    ("acosh", "inverse hyperbolic cosine", np.arccosh, _root(1.0, -1.0), _ABOVE_ONE),
    ("atanh", "inverse hyperbolic tangent", np.arctanh, _quotient(-1.0, 1.0), _INSIDE),
)
for _name, _doc, _function, _gradient, _cases in _FAMILY:
    declare(
        _name,
        partial(_quiet, function=_function),
        _gradient,
        flops=12,
        onnx=_name.capitalize(),
        doc=f"the {_doc}",
        cases=_cases,
        signature=floating,
    )
