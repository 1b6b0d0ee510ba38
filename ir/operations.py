"""The operations of expressions: their meaning in NumPy, and their gradients.

A formula is an operator's expression (`OpSpec.formula`): its reference is the meaning of that in
NumPy. Kernels have tables of their own, of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.ir.expression import (
    PARAMETER,
    Expression,
    Number,
    cos,
    equal,
    evaluate,
    exp,
    make,
    normal_density,
    number,
    order,
    parameter,
    power,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    variable,
    where,
)
from soapstone.records import dataclass

Array = Any  # of NumPy, or a scalar of one


def _like(value: Array, *others: Array) -> Array:
    """Return a Python number in the type of the first array among the others."""
    if isinstance(value, float):
        for other in others:
            if hasattr(other, "dtype"):
                return other.dtype.type(value)
    return value


def _where(mask: Array, x: Array, y: Array) -> Array:
    return np.where(mask, _like(x, y), _like(y, x))


def _affine(x: Array, scale: Array, shift: Array) -> Array:
    return affine(x, _like(scale, x), _like(shift, x))


def affine(x: Any, scale: Any, shift: Any) -> Any:
    """Return x * scale + shift, without the steps that numbers spare; for any values with `*+-`."""
    if isinstance(scale, Number | np.generic) and scale == 1:
        return x + shift
    if isinstance(scale, Number | np.generic) and scale == -1:
        return shift - x
    return x * scale if isinstance(shift, Number | np.generic) and shift == 0 else x * scale + shift


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if np.size(x) else np.array(x)


def _sigmoid(x: Array) -> Array:
    positive = np.exp(-np.abs(x))
    result = np.where(x >= 0, 1 / (1 + positive), positive / (1 + positive))
    return result.astype(x.dtype)


def _relu(x: Array) -> Array:
    return np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return x / y
    with np.errstate(divide="ignore", over="ignore"):
        down, left = np.floor_divide(x, y), np.remainder(x, y)
    # The floor of a negative quotient is one below its truncation, unless it is exact.
    return np.asarray(down + ((left != 0) & ((x < 0) != (y < 0))).astype(x.dtype), x.dtype)


def _pow(x: Array, y: Array) -> Array:
    common = np.result_type(x, y)
    if common.kind in "iu" and np.any(np.asarray(y) < 0):
        common = np.dtype(np.float64)  # NumPy has no negative powers of integers
    return np.asarray(np.power(x.astype(common), np.asarray(y).astype(common))).astype(x.dtype)


def _limits(low: float | None, high: float | None, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind not in "iu":
        return dtype.type(-np.inf if low is None else low), dtype.type(
            np.inf if high is None else high
        )
    info = np.iinfo(dtype)
    least = info.min if low is None or low <= info.min else min(int(low), info.max)
    most = info.max if high is None or high >= info.max else max(int(high), info.min)
    return dtype.type(least), dtype.type(most)


def _clip(x: Array, low: float | None, high: float | None) -> Array:
    least, most = _limits(low, high, x.dtype)
    return np.minimum(np.maximum(x, least), most)


def _clip_grad(dy: Array, x: Array, low: float | None, high: float | None) -> Array:
    least, most = _limits(low, high, x.dtype)
    return np.where((x >= least) & (x <= most), dy, dy.dtype.type(0))


def _unwarned(function: Callable[..., Array]) -> Callable[..., Array]:
    def quiet(*operands: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return function(*operands)

    return quiet


# ------------------------------------------------------------------------------------ operations

Slope = Callable[..., Sequence["Expression | None"]]


@dataclass(frozen=True)
class Operation:
    """What an operation means in NumPy, and how its gradient comes to its operands.

    slope: from the arriving gradient, the result and the operands to each operand's gradient, None
    where there is none; without it none of them has any.
    """

    numpy: Callable[..., Array]
    slope: Slope | None = None


def _quotient(d: Expression, y: Expression, a: Expression, b: Expression) -> Sequence[Expression]:
    part = d / b
    return part, -(part * y)


def _rooted(scale: float, shift: float) -> Callable[[Expression, Expression], Expression]:
    """Return d / sqrt(scale * a ** 2 + shift)."""
    return lambda d, a: d / sqrt(square(a) * scale + shift)


_ASIN, _ASINH, _ACOSH = _rooted(-1, 1), _rooted(1, 1), _rooted(1, -1)

COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
LOGIC = ("logical_and", "logical_or", "logical_xor", "logical_not")
OPERATIONS: dict[str, Operation] = {
    "neg": Operation(lambda a: -a, lambda d, y, a: (-d,)),
    "abs": Operation(np.abs, lambda d, y, a: (d * sign(a),)),
    "exp": Operation(np.exp, lambda d, y, a: (d * y,)),
    # e^x - 1 of x at most 0, which kernels have without another exponential for those above.
    "expm1_negative": Operation(np.expm1, lambda d, y, a: (d * exp(a),)),
    "log": Operation(np.log, lambda d, y, a: (d / a,)),
    "sqrt": Operation(np.sqrt, lambda d, y, a: (d * 0.5 / y,)),
    "reciprocal": Operation(
        lambda a: np.asarray(a.dtype.type(1) / a, a.dtype), lambda d, y, a: (-(d * square(y)),)
    ),
    "affine": Operation(_affine, lambda d, y, a, s, t: (d * s, None, None)),
    "power": Operation(
        lambda a, e: np.power(a, _like(e, a)),
        lambda d, y, a, e: (d * (power(a, e - 1) * e), None),
    ),
    "add": Operation(lambda a, b: a + b, lambda d, y, a, b: (d, d)),
    "sub": Operation(lambda a, b: a - b, lambda d, y, a, b: (d, -d)),
    "mul": Operation(lambda a, b: a * b, lambda d, y, a, b: (d * b, d * a)),
    "div": Operation(_divide, _quotient),
    "mod": Operation(
        _unwarned(lambda a, b: np.asarray(np.mod(a, b), a.dtype)),
        # The second: the whole number of times that b was taken away.
        lambda d, y, a, b: (d, d * ((y - a) / b)),
    ),
    "fmod": Operation(
        _unwarned(lambda a, b: np.asarray(np.fmod(a, b), a.dtype)),
        lambda d, y, a, b: (d, d * ((y - a) / b)),
    ),
    "pow": Operation(_unwarned(_pow)),
    "maximum": Operation(
        np.maximum,
        lambda d, y, a, b: (make("maximum_grad", d, a, b), make("maximum_grad", d, b, a)),
    ),
    "minimum": Operation(
        np.minimum,
        lambda d, y, a, b: (make("minimum_grad", d, a, b), make("minimum_grad", d, b, a)),
    ),
    "clip": Operation(
        _clip, lambda d, y, a, low, high: (make("clip_grad", d, a, low, high), None, None)
    ),
    "clip_grad": Operation(_clip_grad),
    "where": Operation(
        _where, lambda d, y, c, a, b: (None, where(c, d, number(0)), where(c, number(0), d))
    ),
    # a + t (b - a): of two values the first where t is 0, the second where it is 1.
    "lerp": Operation(
        lambda a, b, t: a + t * (b - a),
        lambda d, y, a, b, t: (d * (1 - t), d * t, d * (b - a)),
    ),
    "tanh": Operation(np.tanh, lambda d, y, a: (make("tanh_grad", d, y),)),
    "tanh_grad": Operation(lambda d, y: d * (1 - y * y)),
    "sigmoid": Operation(_sigmoid, lambda d, y, a: (make("sigmoid_grad", d, y),)),
    "sigmoid_grad": Operation(lambda d, y: d * y * (1 - y)),
    "relu": Operation(_relu, lambda d, y, a: (make("relu_grad", d, y),)),
    "relu_grad": Operation(lambda d, y: np.where(y > 0, d, d.dtype.type(0))),
    "softplus": Operation(
        lambda a: np.asarray(np.logaddexp(a.dtype.type(0), a), a.dtype),
        lambda d, y, a: (d * sigmoid(a),),
    ),
    "erf": Operation(_erf, lambda d, y, a: (d * (exp(square(a) * -1) * (2 / math.sqrt(math.pi))),)),
    "normal_cdf": Operation(
        lambda a: 0.5 * (1 + _erf(a / math.sqrt(2))), lambda d, y, a: (d * normal_density(a),)
    ),
    "normal_density": Operation(lambda a: np.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)),
    "sin": Operation(_unwarned(np.sin), lambda d, y, a: (d * cos(a),)),
    "cos": Operation(_unwarned(np.cos), lambda d, y, a: (-(d * sin(a)),)),
    "tan": Operation(_unwarned(np.tan), lambda d, y, a: (d * (square(y) + 1),)),
    "asin": Operation(_unwarned(np.arcsin), lambda d, y, a: (_ASIN(d, a),)),
    "acos": Operation(_unwarned(np.arccos), lambda d, y, a: (-_ASIN(d, a),)),
    "atan": Operation(_unwarned(np.arctan), lambda d, y, a: (d / (square(a) + 1),)),
    "sinh": Operation(_unwarned(np.sinh), lambda d, y, a: (d * make("cosh", a),)),
    "cosh": Operation(_unwarned(np.cosh), lambda d, y, a: (d * make("sinh", a),)),
    "asinh": Operation(_unwarned(np.arcsinh), lambda d, y, a: (_ASINH(d, a),)),
    "acosh": Operation(_unwarned(np.arccosh), lambda d, y, a: (_ACOSH(d, a),)),
    "atanh": Operation(_unwarned(np.arctanh), lambda d, y, a: (d / (1 - square(a)),)),
}
OPERATIONS |= {
    name: Operation(lambda a, f=function: np.asarray(f(a), a.dtype))
    for name, function in (("floor", np.floor), ("ceil", np.ceil), ("sign", np.sign))
}
OPERATIONS["round"] = Operation(lambda a: np.asarray(np.rint(a), a.dtype))  # halves to even
OPERATIONS |= {name: Operation(getattr(np, name)) for name in (*COMPARISONS, *LOGIC)}
OPERATIONS["is_nan"] = Operation(np.isnan)


def _extremum_grad(comparison: str) -> Callable[..., Array]:
    """Return dy where x is the chosen operand, half of it where both are equal."""
    d, x, y = map(variable, "dxy")
    whole = where(make(comparison, x, y), d, where(equal(x, y), d * 0.5, number(0)))
    return lambda *operands: evaluate(whole, dict(zip((d, x, y), operands)), NUMPY)


OPERATIONS["maximum_grad"] = Operation(_extremum_grad("greater"))
OPERATIONS["minimum_grad"] = Operation(_extremum_grad("less"))
NUMPY: Mapping[str, Callable[..., Any]] = {name: made.numpy for name, made in OPERATIONS.items()}


# ---------------------------------------------------------------------------- what is made of them


def adjoints(
    arriving: Mapping[Expression, Expression], wanted: Sequence[Expression]
) -> list[Expression | None]:
    """Return the gradients of what is wanted, given those that arrive at results.

    None where nothing depends on it. What a slope is written in is not looked into again: known
    results may stand in for parts of it when it is evaluated.
    """
    parts: dict[Expression, list[Expression]] = {made: [d] for made, d in arriving.items()}
    leaves = set(wanted)
    for part in reversed(order(arriving)):
        if part in leaves or part not in parts:
            continue
        slope = OPERATIONS[part.operation].slope if part.operands else None
        if slope is not None:
            given = slope(_total(parts[part]), part, *part.operands)
            for operand, gradient in zip(part.operands, given, strict=True):
                if gradient is not None:
                    parts.setdefault(operand, []).append(gradient)
    return [_total(parts[one]) if one in parts else None for one in wanted]


def _total(parts: Sequence[Expression]) -> Expression:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(frozen=True)
class Formula:
    """What an operator makes of numbers.

    operands: the variables, in order; its attributes are parameters.
    expressions: by value of the attribute `choice`; of one that has no such, under None.
    onednn: what oneDNN calls it, then its parameters: numbers, or names of attributes; by choice.
    """

    operands: tuple[str, ...]
    expressions: Mapping[Any, Expression]
    choice: str = ""
    onednn: Mapping[Any, tuple[str | float, ...]] = field(default_factory=dict)

    def value(self, attributes: Mapping[str, Any]) -> Any:
        """Return the value of the attribute that chooses, None where there is none."""
        return attributes[self.choice] if self.choice else None

    def __call__(self, attributes: Mapping[str, Any], *arrays: Array) -> Array:
        """Return the meaning in NumPy: the reference of an operator; of integers, an integer."""
        value = self.value(attributes)
        if value in self._alone:
            function, names = self._alone[value]
            return function(*arrays, *[attributes[name] for name in names])
        values: dict[Expression, Any] = {parameter(name): v for name, v in attributes.items()}
        values |= dict(zip(map(variable, self.operands), arrays, strict=True))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            made = np.asarray(evaluate(self.expressions[value], values, NUMPY))
        integers = made.dtype.kind == "f" and all(array.dtype.kind in "iub" for array in arrays)
        return made.astype(arrays[0].dtype) if integers else made

    def reference(self) -> Callable[..., Array]:
        """Return the shortest way to call it: of one operation without attributes, that itself."""
        function, names = self._alone.get(None, (None, ()))
        if function is None or names:
            return self
        alone = function
        return lambda attributes, *arrays: alone(*arrays)

    @cached_property
    def _alone(self) -> dict[Any, tuple[Callable[..., Array], tuple[str, ...]]]:
        """The functions of single operations on the operands, and attributes they take after."""
        operands = tuple(map(variable, self.operands))
        functions = {}
        for value, expression in self.expressions.items():
            rest = expression.operands[len(operands) :]
            alone = expression.operands[: len(operands)] == operands
            if alone and all(one.operation == PARAMETER for one in rest):
                names = tuple(one.value for one in rest)
                functions[value] = NUMPY[expression.operation], names
        return functions
