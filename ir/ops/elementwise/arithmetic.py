"""Arithmetic element by element: sums, products, powers, roundings, extrema; their gradients.

Dims are named by the output's axes: d0, d1, … Integers follow NumPy, but for `div`, which
truncates toward zero as ONNX's does.
"""

from __future__ import annotations

from soapstone.dtypes import integers
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.expression import Expression, equal, log, make, where
from soapstone.ir.ops.elementwise import laws_arithmetic, laws_pointwise
from soapstone.ir.ops.elementwise.pointwise import (
    aligned,
    binary,
    broadcasting,
    declare,
    flat,
    floating,
    from_input,
    nowhere,
    numeric,
    of_mask,
    pointwise,
    same_shapes,
    unary,
    unbroadcast,
)
from soapstone.ir.spec import Case, GradientContext
from soapstone.ir.tensor import Array, TensorSpec

_POSITIVE_CASES = (Case(("2 3 4",), positive=True), Case(("0 3",)))


def _accumulate(attributes: Attributes, *parts: Array) -> Array:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _pow_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pointwise(inputs, inputs[0].dtype)


def _with_numbers(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of x beside numbers, each of which the type of x must hold."""
    dtype = inputs[0].dtype
    if not inputs[0].is_float:
        limits = (0, 1) if dtype == "bool" else (integers(dtype).min, integers(dtype).max)
        for name, number in attributes.items():
            least = 0 if name == "exponent" else limits[0]
            if number != int(number) or not least <= number <= limits[1]:
                raise ShapeError(
                    f"attribute {name}: {number} found; a whole number of {dtype} needed, the type"
                    f" of input 0 (shape {inputs[0].shape})"
                )
    return broadcasting(inputs, attributes)


def _pow_rule(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    real = g.spec(y).is_float
    wide = y if real else g.emit("cast", y, to=g.spec(x).dtype, rename=aligned(g, g.spec(y).shape))
    dx = unbroadcast(g, g.emit("pow_grad", g.grad(), x, wide, operand="x"), x)
    if not real:
        return [dx, None]
    return [dx, unbroadcast(g, g.emit("pow_grad", g.grad(), x, y, operand="y"), y)]


def _pow_grad_x(dy: Expression, x: Expression, y: Expression) -> Expression:
    return dy * where(equal(y, 0), 0, y * make("pow", x, y - 1))


def _pow_grad_y(dy: Expression, x: Expression, y: Expression) -> Expression:
    return dy * where(equal(x, 0), 0, make("pow", x, y) * log(x))


declare("neg", unary("neg"), onnx="Neg", onednn=("linear", -1.0), signature=numeric, doc="-x")
declare("abs", unary("abs"), onnx="Abs", onednn=("abs",), doc="the magnitude")
declare(
    "exp",
    unary("exp"),
    flops=6,
    forms=laws_pointwise.EXP_FORMS,
    laws=laws_pointwise.EXP_LAWS,
    onnx="Exp",
    doc="e to the power x",
    onednn=("exp",),
    signature=floating,
)
declare(
    "log",
    unary("log"),
    flops=6,
    onnx="Log",
    doc="the natural logarithm",
    cases=_POSITIVE_CASES,
    signature=floating,
)
declare(
    "sqrt",
    unary("sqrt"),
    forms=laws_pointwise.SQRT_FORMS,
    laws=laws_pointwise.SQRT_LAWS,
    onnx="Sqrt",
    doc="the square root",
    onednn=("sqrt",),
    cases=_POSITIVE_CASES,
    signature=floating,
)
declare("reciprocal", unary("reciprocal"), onnx="Reciprocal", doc="1 / x", cases=_POSITIVE_CASES)
declare(
    "affine",
    ("affine", "x", "scale", "shift"),
    attributes={"scale": Attribute("float", 1.0), "shift": Attribute("float", 0.0)},
    onednn=("linear", "scale", "shift"),
    cases=(
        Case(("3 4",), {"scale": -1.5, "shift": 0.25}),
        Case(("int32 3",), {"scale": -2.0, "shift": 1.0}),
    ),
    doc="x * scale + shift for two numbers",
    signature=_with_numbers,
)
declare(
    "power",
    ("power", "x", "exponent"),
    attributes={"exponent": Attribute("float")},
    flops=10,
    forms=laws_pointwise.RSQRT_FORMS,
    laws=laws_pointwise.RSQRT_LAWS,
    onnx="Pow",
    onednn=("pow", 1.0, "exponent"),
    cases=(
        Case(("3 4",), {"exponent": 2.0}),
        Case(("3 4",), {"exponent": -0.5}, positive=True),
        Case(("3 4",), {"exponent": 3.0}),
    ),
    doc="x to a constant power; of an operand, pow",
    signature=_with_numbers,
)
for _name, _doc in (
    ("floor", "the integer at or below"),
    ("ceil", "the integer at or above"),
    ("round", "the nearest integer, halves to even"),
    ("sign", "-1, 0 or 1"),
):
    declare(
        _name,
        unary(_name),
        nowhere,
        onnx=_name.capitalize(),
        doc=_doc,
        signature=numeric,
        cases=flat((Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))),
    )
declare(
    "add",
    binary("add"),
    onnx="Add",
    doc="x + y, broadcasting as NumPy does",
    onednn=("binary_add",),
    forms=laws_arithmetic.ADD_FORMS,
    laws=laws_arithmetic.ADD_LAWS + laws_pointwise.ADD_BROADCAST_LAWS,
)
declare(
    "sub",
    binary("sub"),
    onednn=("binary_sub",),
    forms=laws_pointwise.SUB_FORMS,
    laws=laws_pointwise.SUB_LAWS,
    onnx="Sub",
    doc="x - y, broadcasting as NumPy does",
    signature=numeric,
)
declare(
    "mul",
    binary("mul"),
    onednn=("binary_mul",),
    onnx="Mul",
    doc="x * y, broadcasting as NumPy does",
    forms=laws_arithmetic.MUL_FORMS,
    constants=(laws_arithmetic.ONES,),
    laws=laws_arithmetic.MUL_LAWS + laws_pointwise.MUL_BROADCAST_LAWS,
)
declare(
    "div",
    binary("div"),
    onednn=("binary_div",),
    forms=laws_pointwise.DIV_FORMS,
    laws=laws_pointwise.DIV_LAWS,
    onnx="Div",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("2 3 4", "4"), positive=True),
        Case(("3 2", ""), positive=True),
        Case(("int64 3 4 >=-9 <9", "int64 4 >=1 <5")),
        Case(("int32 3 >=-9 <9", "int32 3 >=-4 <0")),
    ),
    doc="x / y, broadcasting as NumPy does; of integers, truncated toward zero",
    signature=numeric,
)
declare(
    "mod",
    {False: binary("mod"), True: binary("fmod")},
    attributes={"fmod": Attribute("bool", False)},
    choice="fmod",
    flops=8,
    onnx="Mod",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("3 4", ""), {"fmod": True}, positive=True),
        Case(("3 4", "4"), {"fmod": True}),
        Case(("2 3", "2 3")),
        Case(("int64 3 4 >=-9 <9", "int64 4 >=1 <5")),
    ),
    doc="the remainder: with the sign of y, or (fmod) of x",
)
declare(
    "pow",
    binary("pow"),
    _pow_rule,
    flops=10,
    onnx="Pow",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("2 3 4", "4"), positive=True),
        Case(("3 4", "int64 4 >=-2 <4"), positive=True),
        Case(("2 1 3", ""), positive=True),
        Case(("int32 3 >=1", "int32 3 <4")),
        Case(("0 2", "1 2")),
    ),
    doc="x to the power y, in the type of x",
    signature=_pow_signature,
)
declare(
    "pow_grad",
    {"x": _pow_grad_x, "y": _pow_grad_y},
    None,
    attributes={"operand": Attribute("str", "x", choices=("x", "y"))},
    choice="operand",
    flops=14,
    cases=(
        Case(("3 4", "3 4", "3 4"), {"operand": "x"}, (), positive=True),
        Case(("3 4", "3 4", "4"), {"operand": "y"}, (), positive=True),
        Case(("3 1", "3 1", ""), {"operand": "x"}, (), positive=True),
        Case(("0 3", "0 3", "3"), {"operand": "y"}, ()),
    ),
    doc="dy times the derivative of x to the power y with respect to one operand",
    signature=floating,
)
for _name, _onnx, _doc in (("maximum", "Max", "larger"), ("minimum", "Min", "smaller")):
    declare(
        _name,
        binary(_name),
        onnx=_onnx,
        onednn=(f"binary_{_onnx.lower()}",),
        doc=f"the {_doc} of x and y",
    )
    declare(
        f"{_name}_grad",
        (f"{_name}_grad", "dy", "x", "y"),
        None,
        cases=flat(
            (
                Case(("3 4", "3 4", "3 4")),
                Case(("3 4", "4", "3 1")),
                Case(("3 4", "3 4", "")),
                Case(("0 3", "0 3", "1 3")),
            )
        ),
        doc="dy where x is the chosen operand, half of it where both are equal",
    )
_CLIP = {"low": Attribute("float", None), "high": Attribute("float", None)}
declare(
    "clip",
    ("clip", "x", "low", "high"),
    from_input("clip_grad"),
    attributes=_CLIP,
    onnx="Clip",
    onednn=("clip", "low", "high"),
    cases=(
        Case(("3 4",), {"low": -0.5, "high": 0.75}),
        Case(("3 4",), {"low": 0.1}),
        Case(("5",), {"high": 0.1}),
        Case(("",), {}),
        Case(("int64 4 >=-9",), {"low": -3.0, "high": 3.0}),
        Case(("0 3",), {"low": 0.0}),
    ),
    doc="x cut to low..high; None is no bound",
)
declare(
    "clip_grad",
    ("clip_grad", "dy", "x", "low", "high"),
    of_mask,
    layer=None,
    attributes=_CLIP,
    cases=(
        Case(("3 4", "3 4"), {"low": -0.5, "high": 0.75}, (0,)),
        Case(("3 4", "3 4"), {"low": 0.1}, (0,)),
        Case(("0 2", "0 2"), {}, (0,)),
    ),
)
declare(
    "accumulate",
    None,
    lambda g: [g.grad()] * len(g.inputs),
    reference=_accumulate,
    inputs=("x*",),
    cases=(Case(("3 4", "3 4", "3 4")), Case(("2", "2")), Case(("0 3",))),
    signature=same_shapes,
    onnx="Sum",
    layer=None,
    doc="the sum of equal-shaped values, left to right: where gradients meet",
)
