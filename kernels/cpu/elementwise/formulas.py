"""The instructions of the element-wise machine, as formulas on lanes of float32.

An operator's instruction is its formula (`OpSpec.formula`) with the functions on lanes below. A few
instructions are written here: those that only programs use, operators on truth values, and
activations for which there is a shorter way, or one that does not cancel. Truth is the number 1,
falsehood 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

from soapstone.dtypes import BYTES
from soapstone.ir.errors import GraphError
from soapstone.ir.expression import Expression, evaluate, order, parameter, text, variable
from soapstone.ir.operations import COMPARISONS
from soapstone.ir.spec import OpSpec, operator
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
from soapstone.native.lanes import (
    F16,
    F32,
    I8,
    I32,
    LANES,
    Lanes,
    maximum,
    minimum,
    of_bfloat16,
    to_bfloat16,
    where,
)

WIDE = 4 * LANES
_INVERSE_SQRT_2PI = 0.3989422804014327
_TANH_SCALE, _TANH_CUBE = 0.7978845608028654, 0.044715

Formula = Callable[..., Lanes]


class Instruction(NamedTuple):
    """A formula of the first `arity` of operands a, b and c, and of parameters p and q (float64).

    `cost`: about how many streamed floats a lane is worth; `wide`: lanes done at a time, fewer
    where intermediate values would not fit in the registers; `code`: a number that no other
    formula has, since compiled code is kept by it.
    """

    name: str
    arity: int
    formula: Callable[[Sequence[Lanes], Sequence[Lanes]], Lanes]
    cost: int
    wide: int
    code: int


def _doubled(a: Lanes) -> Lanes:
    return (a * a * a * _TANH_CUBE + a) * (2.0 * _TANH_SCALE)


def _gelu_tanh_grad(dy: Lanes, a: Lanes) -> Lanes:
    # With s = (1 + tanh u) / 2 = 1 / (1 + e), e = exp(-2u): 1 - tanh^2 is 4 e s^2, which does not
    # cancel where the tangent is near 1.
    x = _clamp(a, -10.0, 10.0)
    e = exp(-_doubled(x))
    s = 1.0 / (e + 1.0)
    inner = (x * x * (3.0 * _TANH_CUBE) + 1.0) * (2.0 * _TANH_SCALE)
    return dy * where(a < -10.0, 0.0, s + x * s * (e * s) * inner)


def _mish_parts(a: Lanes) -> tuple[Lanes, Lanes, Lanes]:
    # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2), e = exp(x); over 20 it is 1.
    e = exp(where(a > 20.0, 20.0, a))
    n = e * (e + 2.0)
    return e, n, n / (n + 2.0)


def _mish_grad(dy: Lanes, a: Lanes) -> Lanes:
    e, n, t = _mish_parts(a)
    rest = 1.0 / (n + 2.0)
    slope = t + _clamp(a, -100.0, 100.0) * (e / (e + 1.0)) * ((n + 1.0) * rest * rest * 4.0)
    return dy * slope


def _clamp(a: Lanes, p: object, q: object) -> Lanes:
    a = where(a < p, a.like(p), a)
    return where(a > q, a.like(q), a)


def _truth(mask: Lanes, of: Lanes) -> Lanes:
    return where(mask, of.like(1.0), 0.0)


def _positive(a: Lanes) -> Lanes:
    return where(a < 0.0, 0.0, a)


def _remainder(a: Lanes, b: Lanes) -> Lanes:
    return Lanes(a.builder, a.builder.frem(a.value, b.value))


def _modulo(a: Lanes, b: Lanes) -> Lanes:
    r = _remainder(a, b)
    astray = (r.compare("!=", 0.0) & ((r < 0.0) ^ (b < 0.0))) & r.compare("==", r)
    return where(astray, r + b, r)


def _affine(a: Lanes, scale: Any, shift: Any) -> Lanes:
    if scale == -1.0:
        return a.like(shift) - a
    scaled: Lanes = a if scale == 1.0 else a * scale
    return scaled if shift == 0.0 else scaled + shift


def _quotient(a: Lanes, b: Any) -> Lanes:
    return a * (1.0 / b) if isinstance(b, float) else a / b


def _where(mask: Lanes, yes: Any, no: Any) -> Lanes:
    lanes = Lanes(mask.builder, F32(0.0)).splat(mask.kind.count)
    return where(mask, lanes.like(yes), lanes.like(no))


def _winner(a: Lanes, ahead: Lanes, tie: Lanes) -> Lanes:
    return where(ahead, a, where(tie, a * 0.5, 0.0))


# The operations of expressions on lanes; comparisons make masks.
LIGHT: dict[str, Formula] = {
    "affine": _affine,
    "neg": lambda a: -a,
    "abs": size,
    "sign": lambda a: where(a > 0.0, 1.0, where(a < 0.0, -1.0, a)),
    "sqrt": lambda a: a.call("llvm.sqrt"),
    "floor": lambda a: a.call("llvm.floor"),
    "ceil": lambda a: a.call("llvm.ceil"),
    "round": lambda a: a.call("llvm.rint"),
    "reciprocal": lambda a: 1.0 / a,
    "relu": _positive,
    "relu_grad": lambda d, y: where(y > 0.0, d, 0.0),
    "sigmoid_grad": lambda d, y: d * (y * (1.0 - y)),
    "tanh_grad": lambda d, y: d * (1.0 - y * y),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _quotient,
    "lerp": lambda a, b, t: a + t * (b - a),
    "maximum": maximum,
    "minimum": minimum,
    "maximum_grad": lambda d, a, b: _winner(d, a > b, a.compare("==", b)),
    "minimum_grad": lambda d, a, b: _winner(d, a < b, a.compare("==", b)),
    "clip": _clamp,
    "clip_grad": lambda d, a, p, q: where((a >= p) & (a <= q), d, 0.0),
    "where": _where,
    "equal": lambda a, b: a.compare("==", b),
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "logical_and": lambda a, b: a & b,
}
HEAVY: dict[str, Formula] = {
    "exp": exp,
    "expm1_negative": expm1_negative,
    "log": log,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "softplus": lambda a: _positive(a) + log1p(exp(-size(a))),
    "erf": erf,
    "normal_cdf": normal_cdf,
    "normal_density": lambda a: exp(a * a * -0.5) * _INVERSE_SQRT_2PI,
    "asin": asin,
    "acos": acos,
    "atan": atan,
    "sinh": sinh,
    "cosh": cosh,
    "asinh": asinh,
    "acosh": acosh,
    "atanh": atanh,
}
# Formulas in float64 would not fit in the registers any wider.
NARROW: dict[str, tuple[Formula, int]] = {
    "sin": (sin, 8),
    "cos": (cos, 8),
    "tan": (tan, 8),
    "power": (lambda a, e: power(a, a.like(e)), 16),
    "pow": (power, 16),
    # Lane by lane, by the C library: exact for any quotient.
    "mod": (_modulo, 32),
    "fmod": (_remainder, 32),
}
FUNCTIONS: Mapping[str, Formula] = {**LIGHT, **HEAVY, **{n: f for n, (f, _) in NARROW.items()}}


def _byte(a: Lanes) -> Lanes:
    """Return the number that a byte without a sign holds of a, which is cut to its whole part."""
    return a.cast(I32).cast(I8).cast(F32)


def _signed(a: Lanes) -> Lanes:
    """Return the number of a byte with a sign, given that of the same one without."""
    return where(a < 128.0, a, a - 256.0)


# Instructions by name: arity, formula, cost.
_OWN: dict[str, tuple[int, Formula, int]] = {
    "copy": (1, lambda a: a, 1),
    "square": (1, lambda a: a * a, 1),
    "truth": (1, lambda a: _truth(a.compare("!=", 0.0), a), 1),
    "half": (1, lambda a: a.cast(F16).cast(F32), 2),
    "uint8": (1, _byte, 2),
    "int8": (1, lambda a: _signed(_byte(a)), 3),
    "bfloat16": (1, lambda a: of_bfloat16(to_bfloat16(a)), 4),
    "add_relu": (2, lambda a, b: _positive(a + b), 1),
    "mul_add": (3, lambda a, b, c: a * b + c, 1),
    "mul_add_relu": (3, lambda a, b, c: _positive(a * b + c), 1),
    "where": (3, lambda a, b, c: where(a.compare("!=", 0.0), b, c), 1),
    "logical_not": (1, lambda a: 1.0 - a, 1),
    "logical_and": (2, lambda a, b: a * b, 1),
    "logical_or": (2, maximum, 1),
    "logical_xor": (2, lambda a, b: _truth(a.compare("!=", b), a), 1),
    "is_nan": (1, lambda a: _truth(a.compare("!=", a), a), 1),
    # An activation that is an expression of its own too, without what cancels in it.
    "gelu_tanh": (1, lambda a: a * sigmoid(_doubled(a)), 8),
    "gelu_grad_tanh": (2, _gelu_tanh_grad, 8),
    "mish": (1, lambda a: a * _mish_parts(a)[2], 8),
    "mish_grad": (2, _mish_grad, 8),
}
_OWN |= {name: (2, lambda a, b, f=LIGHT[name]: _truth(f(a, b), a), 1) for name in COMPARISONS}


STEPS = frozenset(
    {"copy", "square", "truth", "half", "bfloat16", *BYTES, "add_relu", "mul_add", "mul_add_relu"}
)
_Named = tuple[Expression, tuple[str, ...], tuple[str, ...]]
_NAMED: dict[str, _Named] = {}  # an instruction's expression, operands and parameters, by its name
_BY_CODE: dict[int, Instruction] = {}


@cache
def names(operator_name: str) -> Mapping[Any, str]:
    """Return an operator's instructions by the value of the attribute that chooses among them.

    One that is just an operation has its name.
    """
    spec = operator(operator_name)
    made = spec.formula
    if made is None:
        return {}
    parameters = parameters_of(spec)
    arguments = [*map(variable, made.operands), *map(parameter, parameters)]
    found = {}
    for number, (value, expression) in enumerate(made.expressions.items()):
        name = f"{spec.name}_{value}" if number else spec.name
        if expression.operands == tuple(arguments):
            name = expression.operation
        elif name in STEPS or name in FUNCTIONS:
            name = f"operator_{name}"
        _NAMED[name] = expression, made.operands, parameters
        found[value] = name
    return found


def parameters_of(spec: OpSpec) -> tuple[str, ...]:
    """Return the attributes that are an instruction's parameters p and q, in this order."""
    choice = spec.formula.choice if spec.formula is not None else ""
    return tuple(name for name in spec.attributes if name != choice)


@cache
def instruction_of(name: str) -> Instruction | None:
    """Return the instruction of a name, None where there is none."""
    if name in _OWN:
        arity, formula, cost = _OWN[name]
        return _kept(Instruction(name, arity, lambda a, p: formula(*a), cost, WIDE, 0), "")
    if name not in _NAMED:
        try:
            names(name)
        except GraphError:
            return None
    if name not in _NAMED:
        return None
    expression, operands, parameters = _NAMED[name]
    parts = {part.operation for part in order([expression]) if part.operands}
    if len(operands) > 3 or len(parameters) > 2 or not parts <= FUNCTIONS.keys():
        return None

    def made(lanes: Sequence[Lanes], numbers: Sequence[Lanes]) -> Lanes:
        values: dict[Expression, Any] = dict(zip(map(variable, operands), lanes))
        narrow = [one.cast(F32) for one in numbers]
        values |= dict(zip(map(parameter, parameters), narrow))

        def quotient(a: Lanes, b: Any) -> Lanes:
            """Divide by a parameter as by a number: times its reciprocal, rounded once."""
            exact = next((wide for one, wide in zip(narrow, numbers) if one is b), None)
            return _quotient(a, b) if exact is None else a * (1.0 / exact).cast(F32)

        value: Lanes = evaluate(expression, values, {**FUNCTIONS, "div": quotient})
        return value

    cost = max([8 * (part in HEAVY) or NARROW.get(part, (None, 1))[1] for part in parts])
    wide = LANES if parts & NARROW.keys() else WIDE
    return _kept(Instruction(name, len(operands), made, cost, wide, 0), text(expression))


def _kept(made: Instruction, meaning: str) -> Instruction:
    made = made._replace(code=crc32(f"{made.name}: {meaning}".encode()))
    _BY_CODE[made.code] = made
    return made


def of_code(code: int) -> Instruction:
    """Return the instruction of a code."""
    return _BY_CODE[code]
