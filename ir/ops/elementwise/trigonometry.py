"""Circular and hyperbolic functions and their inverses. Dims: d0, d1, … by the output's axes."""

from __future__ import annotations

from soapstone.ir.ops.elementwise.pointwise import declare, floating, unary
from soapstone.ir.spec import Case

_CASES = (Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))
_INSIDE = tuple(Case(case.inputs, positive=True) for case in _CASES)
_ABOVE_ONE = (Case(("3 4",), {}, ()), Case(("0 3",)))
for _name, _doc, _cases in (
    ("sin", "sine", _CASES),
    ("cos", "cosine", _CASES),
    ("tan", "tangent", _INSIDE),
    ("asin", "inverse sine", _INSIDE),
    ("acos", "inverse cosine", _INSIDE),
    ("atan", "inverse tangent", _CASES),
    ("sinh", "hyperbolic sine", _CASES),
    ("cosh", "hyperbolic cosine", _CASES),
    ("asinh", "inverse hyperbolic sine", _CASES),
    ("acosh", "inverse hyperbolic cosine", _ABOVE_ONE),
    ("atanh", "inverse hyperbolic tangent", _INSIDE),
):
    declare(
        _name,
        unary(_name),
        flops=12,
        onnx=_name.capitalize(),
        doc=f"the {_doc}",
        cases=_cases,
        signature=floating,
    )
