"""Activations and the error function, with their gradients. Dims: d0, d1, … by the output's axes.

A gradient operator takes dy and the activation's argument x, or its result y where that is enough.
"""

from __future__ import annotations

import math

from soapstone.ir.attributes import Attribute
from soapstone.ir.expression import (
    Expression,
    absolute,
    clip,
    exp,
    expm1_negative,
    minimum,
    normal_cdf,
    normal_density,
    power,
    sigmoid,
    softplus,
    square,
    tanh,
    where,
)
from soapstone.ir.ops.elementwise import laws_arithmetic, laws_pointwise
from soapstone.ir.ops.elementwise.pointwise import (
    aligned,
    broadcasting,
    chain,
    declare,
    flat,
    floating,
    formula,
    from_input,
    from_output,
    of_mask,
    unary,
    unbroadcast,
)
from soapstone.ir.spec import Case, GradientContext

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CASES = (Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))
_GRAD_CASES = (Case(("3 4", "3 4")), Case(("0 2", "0 2")))
_MASK_CASES = tuple(Case(case.inputs, {}, (0,)) for case in _GRAD_CASES)
_APPROXIMATE = {"approximate": Attribute("str", "none", choices=("none", "tanh"))}
_BOTH_CASES = (Case(("3 4",), {"approximate": "none"}), Case(("3 4",), {"approximate": "tanh"}))


def _gelu_tanh(x: Expression) -> Expression:
    return x * 0.5 * (tanh((x + power(x, 3.0) * 0.044715) * _ROOT_2_OVER_PI) + 1)


def _gelu_tanh_grad(dy: Expression, x: Expression) -> Expression:
    x = clip(x, -30, 30)  # beyond, the slope is 0 or 1; at infinities too
    t = tanh((x + power(x, 3.0) * 0.044715) * _ROOT_2_OVER_PI)
    slope = (square(x) * (3 * 0.044715) + 1) * _ROOT_2_OVER_PI
    return dy * ((t + 1) * 0.5 + x * 0.5 * (1 - square(t)) * slope)


def _gelu_grad(dy: Expression, x: Expression) -> Expression:
    return dy * (normal_cdf(x) + clip(x, -30, 30) * normal_density(x))  # 0, not inf times 0


def _silu_grad(dy: Expression, x: Expression, alpha: Expression) -> Expression:
    s = sigmoid(x * alpha)
    return dy * (s + clip(x * alpha, -700, 700) * s * (1 - s))


def _mish_grad(dy: Expression, x: Expression) -> Expression:
    t, near = tanh(softplus(x)), clip(x, -700, 700)  # beyond, the slope is 0 or 1
    return dy * (t + near * sigmoid(near) * (1 - t * t))


def _elu(x: Expression, alpha: Expression) -> Expression:
    return where(x > 0, x, alpha * expm1_negative(minimum(x, 0)))


def _elu_grad(dy: Expression, x: Expression, alpha: Expression) -> Expression:
    return dy * where(x > 0, 1, alpha * exp(minimum(x, 0)))


def _hard_sigmoid_grad(
    dy: Expression, x: Expression, alpha: Expression, beta: Expression
) -> Expression:
    line = x * alpha + beta
    return where((line > 0) & (line < 1), dy * alpha, 0)


def _prelu_grad(g: GradientContext) -> list[str | None]:
    x, slope = g.inputs
    below = g.emit("clip", x, high=0.0, rename=aligned(g, g.spec(x).shape))
    return [
        unbroadcast(g, g.emit("prelu_grad", g.grad(), x, slope), x),
        unbroadcast(g, g.emit("mul", g.grad(), below), slope),
    ]


declare(
    "relu",
    unary("relu"),
    from_output("relu_grad"),
    onnx="Relu",
    doc="max(x, 0)",
    # oneDNN's relu is max(x, 0) with the operands so ordered that NaN becomes 0: a diverged step
    # would pass for a finite one. x * clip(2^127 * x, 0, 1), its hard swish, keeps NaN and costs
    # three instructions more. In epilogues alone minus infinity becomes NaN by it, and infinity by
    # oneDNN's gelu.
    onednn=("hard_swish", 2.0**127),
    forms=laws_arithmetic.RELU_FORMS,
    laws=laws_arithmetic.RELU_LAWS,
)
declare("relu_grad", lambda dy, y: where(y > 0, dy, 0), of_mask, layer=None, cases=_MASK_CASES)
declare(
    "leaky_relu",
    lambda x, alpha=0.01: where(x > 0, x, x * alpha),
    from_input("leaky_relu_grad"),
    onnx="LeakyRelu",
    doc="x where positive, alpha x elsewhere",
    onednn=("relu", "alpha"),
    signature=floating,
)
declare(
    "leaky_relu_grad",
    lambda dy, x, alpha=0.01: where(x > 0, dy, dy * alpha),
    of_mask,
    layer=None,
    cases=_MASK_CASES,
)
declare(
    "thresholded_relu",
    lambda x, alpha=1.0: where(x > alpha, x, 0),
    from_input("thresholded_relu_grad"),
    onnx="ThresholdedRelu",
    doc="x where it is above alpha, 0 elsewhere",
    cases=(Case(("3 4",)), Case(("3 4",), {"alpha": 0.2}), Case(("0 3",)), Case(("",))),
)
declare(
    "thresholded_relu_grad",
    lambda dy, x, alpha=1.0: where(x > alpha, dy, 0),
    of_mask,
    layer=None,
    cases=_MASK_CASES,
)
declare(
    "prelu",
    lambda x, slope: where(x > 0, x, x * slope),
    _prelu_grad,
    onnx="PRelu",
    cases=(
        Case(("3 4", "3 4")),
        Case(("2 3 4", "3 1")),
        Case(("2 3", "")),
        Case(("0 2", "1 2")),
    ),
    doc="x where it is positive, else x times slope",
)
declare(
    "prelu_grad",
    lambda dy, x, slope: where(x > 0, dy, dy * slope),
    None,
    cases=flat(
        (
            Case(("3 4", "3 4", "3 4")),
            Case(("2 3 4", "2 3 4", "3 1")),
            Case(("2 3", "2 3", "")),
            Case(("0 2", "0 2", "2")),
        )
    ),
)
declare(
    "gelu",
    {"none": lambda x: x * normal_cdf(x), "tanh": _gelu_tanh},
    from_input("gelu_grad"),
    attributes=_APPROXIMATE,
    choice="approximate",
    flops=12,
    forms=laws_pointwise.GELU_FORMS,
    laws=laws_pointwise.GELU_LAWS,
    onnx="Gelu",
    doc="x times the normal distribution function of x",
    onednn={"none": ("gelu_erf",), "tanh": ("gelu_tanh",)},
    cases=_BOTH_CASES,
    signature=floating,
)
declare(
    "gelu_grad",
    {"none": _gelu_grad, "tanh": _gelu_tanh_grad},
    None,
    attributes=_APPROXIMATE,
    choice="approximate",
    flops=16,
    cases=tuple(Case(("3 4", "3 4"), c.attributes, ()) for c in _BOTH_CASES),
    signature=floating,
)
declare(
    "erf",
    unary("erf"),
    flops=10,
    onnx="Erf",
    cases=_CASES,
    signature=floating,
    doc="the error function",
)
declare(
    "sigmoid",
    unary("sigmoid"),
    from_output("sigmoid_grad"),
    flops=6,
    forms=laws_pointwise.SIGMOID_FORMS,
    laws=laws_pointwise.SIGMOID_LAWS,
    onnx="Sigmoid",
    doc="1 / (1 + exp(-x))",
    onednn=("logistic",),
    signature=floating,
)
declare(
    "tanh",
    unary("tanh"),
    from_output("tanh_grad"),
    flops=8,
    forms=laws_pointwise.TANH_FORMS,
    laws=laws_pointwise.TANH_LAWS,
    onnx="Tanh",
    doc="the hyperbolic tangent",
    onednn=("tanh",),
    signature=floating,
)
for _name in ("sigmoid_grad", "tanh_grad"):
    declare(
        _name,
        (_name, "dy", "y"),
        None,
        flops=3,
        cases=flat(_GRAD_CASES),
        signature=floating,
    )
declare(
    "softplus",
    unary("softplus"),
    flops=12,
    onnx="Softplus",
    doc="log(1 + exp(x))",
    cases=_CASES,
    signature=floating,
)
declare(
    "softsign",
    lambda x: x / (absolute(x) + 1),
    chain(lambda dy, x: dy / square(absolute(x) + 1)),
    flops=3,
    onnx="Softsign",
    doc="x / (1 + abs(x))",
    cases=_CASES,
    signature=floating,
)

# Activations whose gradient is one operator of dy and x, with the same attributes.
for _name, _onnx, _forward, _backward, _flops, _onednn, _doc in (
    (
        "silu",
        "Swish",
        lambda x, alpha=1.0: x * sigmoid(x * alpha),
        _silu_grad,
        7,
        ("swish", "alpha"),
        "x * sigmoid(alpha * x)",
    ),
    (
        "mish",
        "Mish",
        lambda x: x * tanh(softplus(x)),
        _mish_grad,
        14,
        (),
        "x tanh(log(1 + exp(x)))",
    ),
    (
        "elu",
        "Elu",
        lambda x, alpha=1.0: _elu(x, alpha),
        _elu_grad,
        8,
        ("elu", "alpha"),
        "x where positive, alpha (exp(x) - 1) elsewhere",
    ),
    (
        "selu",
        "Selu",
        lambda x, alpha=1.6732631921768188, gamma=1.0507010221481323: gamma * _elu(x, alpha),
        lambda dy, x, alpha, gamma: gamma * _elu_grad(dy, x, alpha),
        9,
        (),
        "gamma * elu(x)",
    ),
    (
        "celu",
        "Celu",
        lambda x, alpha=1.0: where(x > 0, x, alpha * expm1_negative(minimum(x, 0) / alpha)),
        lambda dy, x, alpha: dy * where(x > 0, 1, exp(minimum(x, 0) / alpha)),
        8,
        (),
        "x where positive, alpha (exp(x / alpha) - 1) elsewhere",
    ),
    (
        "hard_sigmoid",
        "HardSigmoid",
        lambda x, alpha=0.2, beta=0.5: clip(x * alpha + beta, 0, 1),
        _hard_sigmoid_grad,
        3,
        ("hard_sigmoid", "alpha", "beta"),
        "alpha * x + beta, kept within 0 and 1",
    ),
    (
        "hard_swish",
        "HardSwish",
        lambda x: x * clip(x / 6 + 0.5, 0, 1),
        lambda dy, x: dy * where(x > 3, 1, where(x < -3, 0, x / 3 + 0.5)),
        4,
        ("hard_swish", 1 / 6, 0.5),
        "x * hard_sigmoid(x / 6)",
    ),
    (
        "shrink",
        "Shrink",
        lambda x, bias=0.0, lambd=0.5: where(x < -lambd, x + bias, where(x > lambd, x - bias, 0)),
        lambda dy, x, bias, lambd: where(absolute(x) > lambd, dy, 0),
        2,
        (),
        "x moved by bias toward zero where |x| > lambd, else 0",
    ),
):
    _attributes = formula(_forward).attributes
    _other = {name: one.default * 1.25 for name, one in _attributes.items()}
    declare(
        _name,
        _forward,
        from_input(f"{_name}_grad"),
        flops=_flops,
        onnx=_onnx,
        layer={"alpha": 1 / 6} if _name == "hard_sigmoid" else {},
        onednn=_onednn,
        cases=(*_CASES, Case(("4 3",), _other)),
        signature=broadcasting if _name == "shrink" else floating,
        doc=_doc,
    )
    declare(
        f"{_name}_grad",
        _backward,
        None,
        attributes=_attributes,
        flops=_flops + 3,
        cases=flat((*_GRAD_CASES, Case(("4 3", "4 3"), _other))),
        signature=floating,
    )
