"""Activations and the error function, with their gradients. Dims: d0, d1, … by the output's axes.

A gradient operator takes dy and the activation's argument x, or its result y where that is enough.
"""

from __future__ import annotations

import math

import numpy as np

from soapstone.ir.ops.elementwise import laws_arithmetic, laws_pointwise
from soapstone.ir.ops.elementwise.pointwise import (
    aligned,
    broadcasting,
    declare,
    flat,
    floating,
    from_input,
    from_output,
    of_mask,
    unbroadcast,
)
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext
from soapstone.ir.tensor import Array

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CASES = (Case(("2 3 4",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))
_GRAD_CASES = (Case(("3 4", "3 4")), Case(("0 2", "0 2")))
_MASK_CASES = tuple(Case(case.inputs, {}, (0,)) for case in _GRAD_CASES)


def erf(x: Array) -> Array:
    """Return the error function, element by element, in the array's precision."""
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x.copy()


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow."""
    positive = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1 / (1 + positive), positive / (1 + positive))
    return result.astype(x.dtype)


def gelu(attributes: Attributes, x: Array) -> Array:
    """Return x Phi(x), exactly or by the tanh approximation (Hendrycks and Gimpel 2016)."""
    if attributes["approximate"] == "tanh":
        twice = 1 + np.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * x**3))
    else:
        twice = 1 + erf(x / math.sqrt(2))
    return np.asarray(0.5 * x * twice, x.dtype)


def _gelu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    x = np.clip(x, -30, 30)  # beyond, the slope is 0 or 1; at infinities too
    if attributes["approximate"] == "tanh":
        t = np.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * x**3))
        slope = _ROOT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
        return np.asarray(dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope), x.dtype)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return np.asarray(dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * density), x.dtype)


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(x.dtype.type(0), x), x.dtype)


def _silu(attributes: Attributes, x: Array) -> Array:
    return np.asarray(x * sigmoid(np.asarray(x * x.dtype.type(attributes["alpha"]))), x.dtype)


def _silu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    scaled = np.asarray(x * x.dtype.type(attributes["alpha"]))
    s = sigmoid(scaled)
    return np.asarray(dy * (s + np.clip(scaled, -700, 700) * s * (1 - s)), x.dtype)


def _mish_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    t = np.tanh(_softplus(x))
    x = np.clip(x, -700, 700)  # beyond, the slope is 0 or 1; at infinities too
    return np.asarray(dy * (t + x * sigmoid(x) * (1 - t * t)), x.dtype)


def _negative(x: Array) -> Array:
    return np.asarray(np.minimum(x, x.dtype.type(0)))


def _elu(attributes: Attributes, x: Array) -> Array:
    return np.asarray(np.where(x > 0, x, attributes["alpha"] * np.expm1(_negative(x))), x.dtype)


def _elu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    slope = np.where(x > 0, 1, attributes["alpha"] * np.exp(_negative(x)))
    return np.asarray(dy * slope, x.dtype)


def _selu(attributes: Attributes, x: Array) -> Array:
    return np.asarray(attributes["gamma"] * _elu(attributes, x), x.dtype)


def _selu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    return np.asarray(attributes["gamma"] * _elu_grad(attributes, dy, x), x.dtype)


def _celu(attributes: Attributes, x: Array) -> Array:
    alpha = attributes["alpha"]
    return np.asarray(np.where(x > 0, x, alpha * np.expm1(_negative(x) / alpha)), x.dtype)


def _celu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    slope = np.where(x > 0, 1, np.exp(_negative(x) / attributes["alpha"]))
    return np.asarray(dy * slope, x.dtype)


def _hard_sigmoid(attributes: Attributes, x: Array) -> Array:
    return np.asarray(np.clip(x * attributes["alpha"] + attributes["beta"], 0, 1), x.dtype)


def _hard_sigmoid_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    line = x * attributes["alpha"] + attributes["beta"]
    return np.asarray(np.where((line > 0) & (line < 1), dy * attributes["alpha"], 0), x.dtype)


def _hard_swish(attributes: Attributes, x: Array) -> Array:
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1), x.dtype)


def _hard_swish_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    slope = np.where(x > 3, 1, np.where(x < -3, 0, x / 3 + 0.5))
    return np.asarray(dy * slope, x.dtype)


def _shrink(attributes: Attributes, x: Array) -> Array:
    bias, edge = attributes["bias"], attributes["lambd"]
    return np.asarray(np.where(x < -edge, x + bias, np.where(x > edge, x - bias, 0)), x.dtype)


def _prelu_grad(g: GradientContext) -> list[str | None]:
    x, slope = g.inputs
    below = g.emit("clip", x, high=0.0, rename=aligned(g, x))
    return [
        unbroadcast(g, g.emit("prelu_grad", g.grad(), x, slope), x),
        unbroadcast(g, g.emit("mul", g.grad(), below), slope),
    ]


def _erf_grad(g: GradientContext) -> list[str | None]:
    square = g.emit("affine", g.emit("power", g.inputs[0], exponent=2.0), scale=-1.0)
    slope = g.emit("affine", g.emit("exp", square), scale=2 / math.sqrt(math.pi))
    return [g.emit("mul", g.grad(), slope)]


def _softsign_grad(g: GradientContext) -> list[str | None]:
    below = g.emit("affine", g.emit("abs", g.inputs[0]), shift=1.0)
    return [g.emit("div", g.grad(), g.emit("power", below, exponent=2.0))]


declare(
    "relu",
    lambda a, x: np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0))),
    from_output("relu_grad"),
    onnx="Relu",
    doc="max(x, 0)",
    forms=laws_arithmetic.RELU_FORMS,
    laws=laws_arithmetic.RELU_LAWS,
)
declare(
    "relu_grad",
    lambda a, dy, y: np.where(y > 0, dy, dy.dtype.type(0)),
    of_mask,
    layer=None,
    inputs=("dy", "y"),
    cases=_MASK_CASES,
)

_ALPHA = {"alpha": Attribute("float", 0.01)}
declare(
    "leaky_relu",
    lambda a, x: np.where(x > 0, x, x * x.dtype.type(a["alpha"])),
    from_input("leaky_relu_grad"),
    attributes=_ALPHA,
    onnx="LeakyRelu",
    doc="x where positive, alpha x elsewhere",
    signature=floating,
)
declare(
    "leaky_relu_grad",
    lambda a, dy, x: np.where(x > 0, dy, dy * dy.dtype.type(a["alpha"])),
    of_mask,
    layer=None,
    inputs=("dy", "x"),
    attributes=_ALPHA,
    cases=_MASK_CASES,
)

_EDGE = {"alpha": Attribute("float", 1.0)}
declare(
    "thresholded_relu",
    lambda a, x: np.where(x > a["alpha"], x, x.dtype.type(0)),
    from_input("thresholded_relu_grad"),
    attributes=_EDGE,
    onnx="ThresholdedRelu",
    doc="x where it is above alpha, 0 elsewhere",
    cases=(Case(("3 4",)), Case(("3 4",), {"alpha": 0.2}), Case(("0 3",)), Case(("",))),
)
declare(
    "thresholded_relu_grad",
    lambda a, dy, x: np.where(x > a["alpha"], dy, dy.dtype.type(0)),
    of_mask,
    layer=None,
    inputs=("dy", "x"),
    attributes=_EDGE,
    cases=_MASK_CASES,
)

declare(
    "prelu",
    lambda a, x, slope: np.where(x > 0, x, x * slope),
    _prelu_grad,
    inputs=("x", "slope"),
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
    lambda a, dy, x, slope: np.where(x > 0, dy, dy * slope),
    None,
    inputs=("dy", "x", "slope"),
    cases=flat(
        (
            Case(("3 4", "3 4", "3 4")),
            Case(("2 3 4", "2 3 4", "3 1")),
            Case(("2 3", "2 3", "")),
            Case(("0 2", "0 2", "2")),
        )
    ),
)

_APPROXIMATE = {"approximate": Attribute("str", "none", choices=("none", "tanh"))}
_BOTH_CASES = (Case(("3 4",), {"approximate": "none"}), Case(("3 4",), {"approximate": "tanh"}))
declare(
    "gelu",
    gelu,
    from_input("gelu_grad"),
    attributes=_APPROXIMATE,
    flops=12,
    forms=laws_pointwise.GELU_FORMS,
    laws=laws_pointwise.GELU_LAWS,
    onnx="Gelu",
    doc="x times the normal distribution function of x",
    cases=_BOTH_CASES,
    signature=floating,
)
declare(
    "gelu_grad",
    _gelu_grad,
    None,
    inputs=("dy", "x"),
    attributes=_APPROXIMATE,
    flops=16,
    cases=tuple(Case(("3 4", "3 4"), c.attributes, ()) for c in _BOTH_CASES),
    signature=floating,
)
declare(
    "erf",
    lambda a, x: erf(x),
    _erf_grad,
    flops=10,
    onnx="Erf",
    cases=_CASES,
    signature=floating,
    doc="the error function",
)

declare(
    "sigmoid",
    lambda a, x: sigmoid(x),
    from_output("sigmoid_grad"),
    flops=6,
    forms=laws_pointwise.SIGMOID_FORMS,
    laws=laws_pointwise.SIGMOID_LAWS,
    onnx="Sigmoid",
    doc="1 / (1 + exp(-x))",
    signature=floating,
)
declare(
    "sigmoid_grad",
    lambda a, dy, y: dy * y * (1 - y),
    None,
    inputs=("dy", "y"),
    flops=3,
    cases=flat(_GRAD_CASES),
    signature=floating,
)
declare(
    "tanh",
    lambda a, x: np.tanh(x),
    from_output("tanh_grad"),
    flops=8,
    forms=laws_pointwise.TANH_FORMS,
    laws=laws_pointwise.TANH_LAWS,
    onnx="Tanh",
    doc="the hyperbolic tangent",
    signature=floating,
)
declare(
    "tanh_grad",
    lambda a, dy, y: dy * (1 - y * y),
    None,
    inputs=("dy", "y"),
    flops=3,
    cases=flat(_GRAD_CASES),
    signature=floating,
)
declare(
    "softplus",
    lambda a, x: _softplus(x),
    lambda g: [g.emit("mul", g.grad(), g.emit("sigmoid", g.inputs[0]))],
    flops=12,
    onnx="Softplus",
    doc="log(1 + exp(x))",
    cases=_CASES,
    signature=floating,
)
declare(
    "softsign",
    lambda a, x: np.asarray(x / (1 + np.abs(x)), x.dtype),
    _softsign_grad,
    flops=3,
    onnx="Softsign",
    doc="x / (1 + abs(x))",
    cases=_CASES,
    signature=floating,
)

# Activations whose gradient is one operator of dy and x, with the same attributes.
for _name, _onnx, _forward, _backward, _attributes, _flops, _doc in (
    ("silu", "Swish", _silu, _silu_grad, {"alpha": 1.0}, 7, "x * sigmoid(alpha * x)"),
    (
        "mish",
        "Mish",
        lambda a, x: x * np.tanh(_softplus(x)),
        _mish_grad,
        {},
        14,
        "x tanh(log(1 + exp(x)))",
    ),
    (
        "elu",
        "Elu",
        _elu,
        _elu_grad,
        {"alpha": 1.0},
        8,
        "x where positive, alpha (exp(x) - 1) elsewhere",
    ),
    (
        "selu",
        "Selu",
        _selu,
        _selu_grad,
        {"alpha": 1.6732631921768188, "gamma": 1.0507010221481323},
        9,
        "gamma * elu(x)",
    ),
    (
        "celu",
        "Celu",
        _celu,
        _celu_grad,
        {"alpha": 1.0},
        8,
        "x where positive, alpha (exp(x / alpha) - 1) elsewhere",
    ),
    (
        "hard_sigmoid",
        "HardSigmoid",
        _hard_sigmoid,
        _hard_sigmoid_grad,
        {"alpha": 0.2, "beta": 0.5},
        3,
        "alpha * x + beta, kept within 0 and 1",
    ),
    ("hard_swish", "HardSwish", _hard_swish, _hard_swish_grad, {}, 4, "x * hard_sigmoid(x / 6)"),
    (
        "shrink",
        "Shrink",
        _shrink,
        lambda a, dy, x: np.where(np.abs(x) > a["lambd"], dy, dy.dtype.type(0)),
        {"bias": 0.0, "lambd": 0.5},
        2,
        "x moved by bias toward zero where |x| > lambd, else 0",
    ),
):
    _declared = {key: Attribute("float", default) for key, default in _attributes.items()}
    _other = {key: default * 1.25 for key, default in _attributes.items()}
    declare(
        _name,
        _forward,
        from_input(f"{_name}_grad"),
        attributes=_declared,
        flops=_flops,
        onnx=_onnx,
        layer={"alpha": 1 / 6} if _name == "hard_sigmoid" else {},
        cases=(*_CASES, Case(("4 3",), _other)),
        signature=broadcasting if _name == "shrink" else floating,
        doc=_doc,
    )
    declare(
        f"{_name}_grad",
        _backward,
        None,
        inputs=("dy", "x"),
        attributes=_declared,
        flops=_flops + 3,
        cases=flat((*_GRAD_CASES, Case(("4 3", "4 3"), _other))),
        signature=floating,
    )
