"""The instructions of the element-wise machine, as formulas on lanes of float32.

Truth is the number 1, falsehood 0. A formula is given operands a, b and c, as many as it has, and
two parameters p and q. Gradients take dy as a, and the forward operator's argument or result as b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from soapstone.kernels.cpu.elementwise.trigonometry import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    cos,
    cosh,
    sin,
    sinh,
    size,
    tan,
)
from soapstone.kernels.cpu.substrate.lanes import LANES, Lanes, maximum, minimum, where
from soapstone.kernels.cpu.substrate.mathematics import (
    erf,
    exp,
    expm1_negative,
    log,
    log1p,
    normal_cdf,
    power,
    sigmoid,
    tanh,
)

WIDE = 4 * LANES
_INVERSE_SQRT_2PI = 0.3989422804014327
_TANH_SCALE, _TANH_CUBE = 0.7978845608028654, 0.044715
_INFINITY = float("inf")

Formula = Callable[[Lanes, Lanes, Lanes, Lanes, Lanes], Lanes]


class Instruction(NamedTuple):
    """A formula `f(a, b, c, p, q)` of which the first `arity` operands are read.

    `cost`: about how many streamed floats a lane is worth; `wide`: lanes done at a time, fewer
    where intermediate values would not fit in the registers.
    """

    name: str
    arity: int
    formula: Formula
    cost: int = 1
    wide: int = WIDE


def _doubled(a: Lanes) -> Lanes:
    return (a * a * a * _TANH_CUBE + a) * (2.0 * _TANH_SCALE)


def _gelu_slope(a: Lanes) -> Lanes:
    # For large |x| the product x * pdf must be 0, not infinity times 0: exp clamps its argument.
    density = exp(a * a * -0.5) * _INVERSE_SQRT_2PI
    return normal_cdf(a) + _clamp(a, -30.0, 30.0) * density


def _gelu_tanh_slope(a: Lanes) -> Lanes:
    # With s = (1 + tanh u) / 2 = 1 / (1 + e), e = exp(-2u): 1 - tanh^2 is 4 e s^2, which does not
    # cancel where the tangent is near 1.
    x = _clamp(a, -10.0, 10.0)
    e = exp(-_doubled(x))
    s = 1.0 / (e + 1.0)
    inner = (x * x * (3.0 * _TANH_CUBE) + 1.0) * (2.0 * _TANH_SCALE)
    return where(a < -10.0, 0.0, s + x * s * (e * s) * inner)


def _below(a: Lanes) -> Lanes:
    return where(a > 0.0, 0.0, a)


def _elu(a: Lanes, p: Lanes, q: Lanes) -> Lanes:
    return where(a > 0.0, a, expm1_negative(_below(a) * q) * p)


def _elu_grad(a: Lanes, b: Lanes, p: Lanes, q: Lanes) -> Lanes:
    return where(b > 0.0, a, a * (exp(_below(b) * q) * p))


def _softplus(a: Lanes) -> Lanes:
    return _positive(a) + log1p(exp(-size(a)))


def _silu_slope(b: Lanes, p: Lanes) -> Lanes:
    s = sigmoid(b * p)
    return s + _clamp(b * p, -100.0, 100.0) * s * (1.0 - s)


def _mish_parts(a: Lanes) -> tuple[Lanes, Lanes, Lanes]:
    # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2), e = exp(x); over 20 it is 1.
    e = exp(where(a > 20.0, 20.0, a))
    n = e * (e + 2.0)
    return e, n, n / (n + 2.0)


def _mish_slope(a: Lanes) -> Lanes:
    e, n, t = _mish_parts(a)
    rest = 1.0 / (n + 2.0)
    return t + _clamp(a, -100.0, 100.0) * (e / (e + 1.0)) * ((n + 1.0) * rest * rest * 4.0)


def _clamp(a: Lanes, p: object, q: object) -> Lanes:
    a = where(a < p, a.like(p), a)
    return where(a > q, a.like(q), a)


def _hard_swish_slope(b: Lanes) -> Lanes:
    inside = b * (1.0 / 3.0) + 0.5
    return where(b > 3.0, 1.0, where(b < -3.0, 0.0, inside))


def _shrink(a: Lanes, p: Lanes, q: Lanes) -> Lanes:
    edge = a.like(q)
    return where(a < -edge, a + p, where(a > edge, a - p, 0.0))


def _truth(mask: Lanes, of: Lanes) -> Lanes:
    return where(mask, of.like(1.0), 0.0)


def _positive(a: Lanes) -> Lanes:
    return where(a < 0.0, 0.0, a)


def _sign(a: Lanes) -> Lanes:
    return where(a > 0.0, 1.0, where(a < 0.0, -1.0, a))


def _remainder(a: Lanes, b: Lanes) -> Lanes:
    return Lanes(a.builder, a.builder.frem(a.value, b.value))


def _modulo(a: Lanes, b: Lanes) -> Lanes:
    r = _remainder(a, b)
    astray = (r.compare("!=", 0.0) & ((r < 0.0) ^ (b < 0.0))) & r.compare("==", r)
    return where(astray, r + b, r)


def _is_infinite(a: Lanes, p: Lanes, q: Lanes) -> Lanes:
    zero = a.like(0.0)
    below = where(a.compare("==", -_INFINITY), zero.like(q), zero)
    return where(a.compare("==", _INFINITY), zero.like(p), below)


def _pow_slope_x(x: Lanes, y: Lanes) -> Lanes:
    return where(y.compare("==", 0.0), 0.0, y * power(x, y - 1.0))


def _pow_slope_y(x: Lanes, y: Lanes) -> Lanes:
    return where(x.compare("==", 0.0), 0.0, power(x, y) * log(x))


def _winner(a: Lanes, ahead: Lanes, tie: Lanes) -> Lanes:
    return where(ahead, a, where(tie, a * 0.5, 0.0))


_UNARY: tuple[tuple[str, Formula], ...] = (
    ("copy", lambda a, b, c, p, q: a),
    ("relu", lambda a, b, c, p, q: _positive(a)),
    ("leaky_relu", lambda a, b, c, p, q: where(a > 0.0, a, a * p)),
    ("thresholded_relu", lambda a, b, c, p, q: where(a > p, a, 0.0)),
    ("sqrt", lambda a, b, c, p, q: a.call("llvm.sqrt")),
    ("neg", lambda a, b, c, p, q: -a),
    ("abs", lambda a, b, c, p, q: size(a)),
    ("sign", lambda a, b, c, p, q: _sign(a)),
    ("floor", lambda a, b, c, p, q: a.call("llvm.floor")),
    ("ceil", lambda a, b, c, p, q: a.call("llvm.ceil")),
    ("round", lambda a, b, c, p, q: a.call("llvm.rint")),
    ("affine", lambda a, b, c, p, q: a * p + q),
    ("reciprocal", lambda a, b, c, p, q: 1.0 / a),
    ("square", lambda a, b, c, p, q: a * a),
    ("clip", lambda a, b, c, p, q: _clamp(a, p, q)),
    ("hard_sigmoid", lambda a, b, c, p, q: _clamp(a * p + q, 0.0, 1.0)),
    ("hard_swish", lambda a, b, c, p, q: a * _clamp(a * (1.0 / 6.0) + 0.5, 0.0, 1.0)),
    ("shrink", lambda a, b, c, p, q: _shrink(a, p, q)),
    ("softsign", lambda a, b, c, p, q: a / (size(a) + 1.0)),
    ("truth", lambda a, b, c, p, q: _truth(a.compare("!=", 0.0), a)),
    ("logical_not", lambda a, b, c, p, q: 1.0 - a),
    ("is_nan", lambda a, b, c, p, q: _truth(a.compare("!=", a), a)),
    ("is_inf", lambda a, b, c, p, q: _is_infinite(a, p, q)),
)
_HEAVY_UNARY: tuple[tuple[str, Formula], ...] = (
    ("gelu", lambda a, b, c, p, q: a * normal_cdf(a)),
    ("gelu_tanh", lambda a, b, c, p, q: a * sigmoid(_doubled(a))),
    ("erf", lambda a, b, c, p, q: erf(a)),
    ("sigmoid", lambda a, b, c, p, q: sigmoid(a)),
    ("silu", lambda a, b, c, p, q: a * sigmoid(a * p)),
    ("mish", lambda a, b, c, p, q: a * _mish_parts(a)[2]),
    ("softplus", lambda a, b, c, p, q: _softplus(a)),
    ("elu", lambda a, b, c, p, q: _elu(a, p, q)),
    ("tanh", lambda a, b, c, p, q: tanh(a)),
    ("exp", lambda a, b, c, p, q: exp(a)),
    ("log", lambda a, b, c, p, q: log(a)),
    ("asin", lambda a, b, c, p, q: asin(a)),
    ("acos", lambda a, b, c, p, q: acos(a)),
    ("atan", lambda a, b, c, p, q: atan(a)),
    ("sinh", lambda a, b, c, p, q: sinh(a)),
    ("cosh", lambda a, b, c, p, q: cosh(a)),
    ("asinh", lambda a, b, c, p, q: asinh(a)),
    ("acosh", lambda a, b, c, p, q: acosh(a)),
    ("atanh", lambda a, b, c, p, q: atanh(a)),
)
_BINARY: tuple[tuple[str, Formula], ...] = (
    ("add", lambda a, b, c, p, q: a + b),
    ("add_relu", lambda a, b, c, p, q: _positive(a + b)),
    ("sub", lambda a, b, c, p, q: a - b),
    ("mul", lambda a, b, c, p, q: a * b),
    ("div", lambda a, b, c, p, q: a / b),
    ("maximum", lambda a, b, c, p, q: maximum(a, b)),
    ("minimum", lambda a, b, c, p, q: minimum(a, b)),
    ("prelu", lambda a, b, c, p, q: where(a > 0.0, a, a * b)),
    ("equal", lambda a, b, c, p, q: _truth(a.compare("==", b), a)),
    ("less", lambda a, b, c, p, q: _truth(a < b, a)),
    ("less_equal", lambda a, b, c, p, q: _truth(a <= b, a)),
    ("greater", lambda a, b, c, p, q: _truth(a > b, a)),
    ("greater_equal", lambda a, b, c, p, q: _truth(a >= b, a)),
    ("logical_and", lambda a, b, c, p, q: a * b),
    ("logical_or", lambda a, b, c, p, q: maximum(a, b)),
    ("logical_xor", lambda a, b, c, p, q: _truth(a.compare("!=", b), a)),
    ("relu_grad", lambda a, b, c, p, q: where(b > 0.0, a, 0.0)),
    ("leaky_relu_grad", lambda a, b, c, p, q: where(b > 0.0, a, a * p)),
    ("thresholded_relu_grad", lambda a, b, c, p, q: where(b > p, a, 0.0)),
    ("sigmoid_grad", lambda a, b, c, p, q: a * (b * (1.0 - b))),
    ("tanh_grad", lambda a, b, c, p, q: a * (1.0 - b * b)),
    ("clip_grad", lambda a, b, c, p, q: where((b >= p) & (b <= q), a, 0.0)),
    ("hard_swish_grad", lambda a, b, c, p, q: a * _hard_swish_slope(b)),
    ("shrink_grad", lambda a, b, c, p, q: where(size(b) > q, a, 0.0)),
)
_HEAVY_BINARY: tuple[tuple[str, Formula], ...] = (
    ("gelu_grad", lambda a, b, c, p, q: a * _gelu_slope(b)),
    ("gelu_tanh_grad", lambda a, b, c, p, q: a * _gelu_tanh_slope(b)),
    ("silu_grad", lambda a, b, c, p, q: a * _silu_slope(b, p)),
    ("mish_grad", lambda a, b, c, p, q: a * _mish_slope(b)),
    ("elu_grad", lambda a, b, c, p, q: _elu_grad(a, b, p, q)),
)
_TERNARY: tuple[tuple[str, Formula], ...] = (
    ("mul_add", lambda a, b, c, p, q: a * b + c),
    ("mul_add_relu", lambda a, b, c, p, q: _positive(a * b + c)),
    ("where", lambda a, b, c, p, q: where(a.compare("!=", 0.0), b, c)),
    ("prelu_grad", lambda a, b, c, p, q: where(b > 0.0, a, a * c)),
    ("maximum_grad", lambda a, b, c, p, q: _winner(a, b > c, b.compare("==", c))),
    ("minimum_grad", lambda a, b, c, p, q: _winner(a, b < c, b.compare("==", c))),
)


def _hard_sigmoid_grad(a: Lanes, b: Lanes, c: Lanes, p: Lanes, q: Lanes) -> Lanes:
    line = b * p + q
    return where((line > 0.0) & (line < 1.0), a * p, 0.0)


INSTRUCTIONS = (
    *(Instruction(name, 1, formula) for name, formula in _UNARY),
    *(Instruction(name, 1, formula, 8) for name, formula in _HEAVY_UNARY),
    *(Instruction(name, 2, formula) for name, formula in _BINARY),
    *(Instruction(name, 2, formula, 8) for name, formula in _HEAVY_BINARY),
    *(Instruction(name, 3, formula) for name, formula in _TERNARY),
    Instruction("hard_sigmoid_grad", 2, _hard_sigmoid_grad),
    # Formulas in float64 would not fit in the registers any wider.
    Instruction("power", 1, lambda a, b, c, p, q: power(a, a.like(p)), 16, LANES),
    Instruction("pow", 2, lambda a, b, c, p, q: power(a, b), 16, LANES),
    Instruction("pow_grad_x", 3, lambda a, b, c, p, q: a * _pow_slope_x(b, c), 16, LANES),
    Instruction("pow_grad_y", 3, lambda a, b, c, p, q: a * _pow_slope_y(b, c), 16, LANES),
    Instruction("sin", 1, lambda a, b, c, p, q: sin(a), 8, LANES),
    Instruction("cos", 1, lambda a, b, c, p, q: cos(a), 8, LANES),
    Instruction("tan", 1, lambda a, b, c, p, q: tan(a), 8, LANES),
    # Lane by lane, by the C library: exact for any quotient.
    Instruction("mod", 2, lambda a, b, c, p, q: _modulo(a, b), 32, LANES),
    Instruction("fmod", 2, lambda a, b, c, p, q: _remainder(a, b), 32, LANES),
)
CODES = {instruction.name: code for code, instruction in enumerate(INSTRUCTIONS)}
