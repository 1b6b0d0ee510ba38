"""Expressions as statements of a kernel: what each operation means on one element.

Constants are written in the type of what they meet: a bare Python float would widen everything to
double precision, at a thirty-second of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.dtypes import HALVES
from soapstone.ir.expression import Expression, evaluate, parameter, variable
from soapstone.ir.operations import NUMPY
from soapstone.ir.spec import OpSpec, operator
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.entry import Declined

Number = int | float


class Value(NamedTuple):
    """A name in the text, and its type's."""

    name: str
    type: str


class Text:
    """Statements under construction; each operation on values adds one and returns its result.

    halves: whether results are rounded to halves; then the text may name `APPROXIMATIONS`.
    """

    def __init__(self, prefix: str = "v", halves: bool = False) -> None:
        self.lines: list[str] = []
        self.halves = halves
        self._prefix = prefix
        self._made: dict[tuple[str, str], Value] = {}

    def set(self, expression: str, kind: str) -> Value:
        """Add the statement that names an expression's value; equal ones are one."""
        known = self._made.get((expression, kind))
        if known is None:
            known = Value(f"{self._prefix}{len(self._made)}", kind)
            self._made[expression, kind] = known
            self.lines.append(f"{known.name} = {expression}")
        return known

    def do(self, statement: str) -> None:
        """Add a statement that names nothing."""
        self.lines.append(statement)

    def cast(self, value: Value, kind: str) -> Value:
        """Return a value in another type; truth of numbers is their being other than zero."""
        if value.type == kind:
            return value
        if kind == "bool":
            return self.set(f"{value.name} != {literal(0, value.type)}", kind)
        if value.type == "bool":
            return self.set(f"({literal(1, kind)} if {value.name} else {literal(0, kind)})", kind)
        return self.set(f"{kind}({value.name})", kind)


def literal(value: Number, kind: str) -> str:
    """Return a number as it is written in a type."""
    if kind == "bool":
        return str(bool(value))
    if kind.startswith("float"):
        return f"{kind}({float(value)!r})"
    return f"{kind}({int(value)})"


def wide(kind: str) -> str:
    """Return the type in which elements of a type are computed."""
    return "float32" if kind in HALVES else kind


def _where_max(a: str, b: str) -> str:
    return f"({a} if ({a} > {b} or {a} != {a}) else {b})"


def _where_min(a: str, b: str) -> str:
    return f"({a} if ({a} < {b} or {a} != {a}) else {b})"


def _power(text: Text, x: Value, exponent: float) -> Value:
    kind = x.type
    if exponent == 0.5 and kind.startswith("float"):
        return text.set(f"sqrt({x.name})", kind)
    if exponent == -0.5:
        return text.set(f"{literal(1, kind)} / sqrt({x.name})", kind)
    if not (float(exponent).is_integer() and abs(exponent) <= 8):
        return text.set(f"power({x.name}, {literal(exponent, kind)})", kind)
    made, square, rest = None, x, int(abs(exponent))
    while rest:
        if rest & 1:
            made = square if made is None else text.set(f"{made.name} * {square.name}", kind)
        rest >>= 1
        if rest:
            square = text.set(f"{square.name} * {square.name}", kind)
    if made is None:
        return text.set(literal(1, kind), kind)
    return text.set(f"{literal(1, kind)} / {made.name}", kind) if exponent < 0 else made


# Operations of floats as text; `t` writes a number in their type.
_Rule = Callable[..., str]
_FLOATS: Mapping[str, _Rule] = {
    "expm1_negative": lambda t, a: f"expm1({a})",
    "reciprocal": lambda t, a: f"{t(1)} / {a}",
    "softplus": lambda t, a: f"({a} if {a} > {t(0)} else {t(0)}) + log1p(exp(-abs({a})))",
    "normal_cdf": lambda t, a: f"{t(0.5)} * erfc({a} * {t(-math.sqrt(0.5))})",
    "normal_density": lambda t, a: f"exp({t(-0.5)} * {a} * {a}) * {t(1 / math.sqrt(2 * math.pi))}",
    "sigmoid_grad": lambda t, d, y: f"{d} * {y} * ({t(1)} - {y})",
    "tanh_grad": lambda t, d, y: f"{d} * ({t(1)} - {y} * {y})",
    "lerp": lambda t, a, b, w: f"{a} + {w} * ({b} - {a})",
    "div": lambda t, a, b: f"{a} / {b}",
    "pow": lambda t, a, b: f"power({a}, {b})",
    "fmod": lambda t, a, b: f"fmod({a}, {b})",
    **{
        name: lambda t, a, name=name: f"{name}({a})"
        for name in (
            *("exp", "log", "sqrt", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh"),
            *("cosh", "asinh", "acosh", "atanh", "erf"),
        )
    },
}
# Of those whose results are rounded to halves.
_OF_HALVES = frozenset({"normal_cdf", "normal_density"})
# Operations of any numbers.
_NUMBERS: Mapping[str, _Rule] = {
    "neg": lambda t, a: f"-{a}",
    "abs": lambda t, a: f"abs({a})",
    "sign": lambda t, a: f"({t(1)} if {a} > {t(0)} else ({t(-1)} if {a} < {t(0)} else {a}))",
    "add": lambda t, a, b: f"{a} + {b}",
    "sub": lambda t, a, b: f"{a} - {b}",
    "mul": lambda t, a, b: f"{a} * {b}",
    "maximum": lambda t, a, b: _where_max(a, b),
    "minimum": lambda t, a, b: _where_min(a, b),
    "relu": lambda t, a: f"({t(0)} if {a} <= {t(0)} else {a})",
    "relu_grad": lambda t, d, y: f"({d} if {y} > {t(0)} else {t(0)})",
    "maximum_grad": lambda t, d, a, b: (
        f"({d} if {a} > {b} else ({d} * {t(0.5)} if {a} == {b} else {t(0)}))"
    ),
    "minimum_grad": lambda t, d, a, b: (
        f"({d} if {a} < {b} else ({d} * {t(0.5)} if {a} == {b} else {t(0)}))"
    ),
}
_COMPARISONS = {
    "equal": "==",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_LOGIC = {"logical_and": "and", "logical_or": "or", "logical_xor": "!="}


class _Meaning(dict[str, Callable[..., Any]]):
    """The functions that write an operation's statements, by its name (`expression.evaluate`)."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.text = text

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda *operands: self.write(name, operands)

    def write(self, name: str, operands: Sequence[Any]) -> Any:
        """Add one operation; operands are values, or numbers, which take the type they meet.

        Of numbers alone it is a number.
        """
        text = self.text
        values = [one for one in operands if isinstance(one, Value)]
        if not values:
            return float(NUMPY[name](*map(np.float64, operands)))
        if name == "where":
            condition = text.cast(operands[0], "bool")
            kind = next((v.type for v in operands[1:] if isinstance(v, Value)), "float32")
            yes, no = (self._as(one, kind) for one in operands[1:])
            return text.set(f"({yes} if {condition.name} else {no})", kind)
        numbers = [v.type for v in values if v.type != "bool"]
        kind = numbers[0] if numbers else "bool"
        if name in _COMPARISONS:
            if "uint64" in numbers and len(set(numbers)) > 1:
                raise Declined
            a, b = (self._as(one, kind) for one in operands)
            return text.set(f"{a} {_COMPARISONS[name]} {b}", "bool")
        if name in _LOGIC:
            a, b = (self._as(one, "bool") for one in operands)
            return text.set(f"{a} {_LOGIC[name]} {b}", "bool")
        if name == "logical_not":
            return text.set(f"not {self._as(operands[0], 'bool')}", "bool")
        if name == "is_nan":
            return text.set(f"{values[0].name} != {values[0].name}", "bool")
        if kind == "bool":
            if name in ("add", "maximum", "mul", "minimum"):
                a, b = (self._as(one, kind) for one in operands)
                return text.set(f"{a} {'or' if name in ('add', 'maximum') else 'and'} {b}", kind)
            raise Declined
        return self._number(name, operands, kind)

    def _as(self, one: Any, kind: str) -> str:
        return self.text.cast(one, kind).name if isinstance(one, Value) else literal(one, kind)

    def _number(self, name: str, operands: Sequence[Any], kind: str) -> Value:
        text = self.text
        real = kind.startswith("float")

        def t(value: Number) -> str:
            return literal(value, kind)

        if name == "power":
            return _power(text, text.cast(operands[0], kind), operands[1])
        if name in ("clip", "clip_grad"):
            return self._clip(name, operands, kind)
        names = [self._as(one, kind) for one in operands]
        a = names[0]
        if name == "affine":
            scale, shift = operands[1:]
            if scale == -1:
                return text.set(f"{t(shift)} - {a}", kind)
            made = Value(a, kind) if scale == 1 else text.set(f"{a} * {names[1]}", kind)
            return made if shift == 0 else text.set(f"{made.name} + {names[2]}", kind)
        if name == "sigmoid" and real:
            e = text.set(f"exp(-abs({a}))", kind).name
            return text.set(f"({t(1)} if {a} >= {t(0)} else {e}) / ({t(1)} + {e})", kind)
        if name == "mod" and real:
            r = text.set(f"fmod({a}, {names[1]})", kind).name
            astray = f"{r} != {t(0)} and ({r} < {t(0)}) != ({names[1]} < {t(0)})"
            return text.set(f"({r} + {names[1]} if {astray} else {r})", kind)
        if not real and name in ("div", "mod", "fmod", "pow"):
            return text.set(
                f"{name}_{'unsigned' if kind[0] == 'u' else 'signed'}({', '.join(names)})", kind
            )
        if name in ("floor", "ceil", "round"):
            rounded = f"{name.replace('round', 'rint')}_{kind}({a})"
            return text.set(rounded, kind) if real else Value(a, kind)
        if kind == "float32" and text.halves and name in _OF_HALVES:
            return text.set(f"{name}_of_halves({a})", kind)
        rule = (_FLOATS.get(name) if real else None) or _NUMBERS.get(name)
        if rule is None:
            raise Declined
        return text.set(rule(t, *names), kind)

    def _clip(self, name: str, operands: Sequence[Any], kind: str) -> Value:
        text, (*values, low, high) = self.text, operands
        x = text.cast(values[-1], kind).name
        if name == "clip_grad":
            tests = [
                *([f"{x} >= {literal(low, kind)}"] if low is not None else []),
                *([f"{x} <= {literal(high, kind)}"] if high is not None else []),
            ]
            d = text.cast(values[0], kind)
            if not tests:
                return d
            return text.set(f"({d.name} if {' and '.join(tests)} else {literal(0, kind)})", kind)
        made = Value(x, kind)
        if low is not None:
            least = literal(low, kind)
            made = text.set(f"({least} if {made.name} < {least} else {made.name})", kind)
        if high is not None:
            most = literal(high, kind)
            made = text.set(f"({most} if {made.name} > {most} else {made.name})", kind)
        return made


def write(
    text: Text, expression: Expression, values: Mapping[str, Value], numbers: Mapping[str, Any]
) -> Value:
    """Add an expression of variables and parameters, and return its value."""
    known: dict[Expression, Any] = {variable(name): value for name, value in values.items()}
    known |= {parameter(name): value for name, value in numbers.items()}
    made = evaluate(expression, known, _Meaning(text))
    return made if isinstance(made, Value) else text.set(literal(made, "float32"), "float32")


_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}


def step(text: Text, name: str, operands: Sequence[Value], attributes: Mapping[str, Any]) -> Value:
    """Add one element-wise operator on values, and return its result in the type it computes in.

    Raises:
        Declined: it has no formula that could be written.
    """
    spec = operator(name)
    kind = result_type(spec, [value.type for value in operands], attributes)
    if name == "cast":
        if attributes["to"] in HALVES:  # rounded where the chain says so
            return text.cast(text.cast(operands[0], attributes["to"]), "float32")
        return text.cast(operands[0], attributes["to"])
    if name == "accumulate":
        total = operands[0]
        for value in operands[1:]:
            total = text.set(f"{total.name} + {text.cast(value, kind).name}", kind)
        return total
    if name in _BITS:
        a, b = operands
        return text.set(f"{a.name} {_BITS[name]} {text.cast(b, a.type).name}", kind)
    if name == "bitwise_not":
        only = operands[0].name
        return text.set(f"not {only}" if kind == "bool" else f"~{only}", kind)
    if name == "bit_shift":
        sign = "<<" if attributes["direction"] == "left" else ">>"
        a, b = operands
        return text.set(f"{kind}({a.name} {sign} {text.cast(b, a.type).name})", kind)
    if spec.formula is None:
        raise Declined
    if kind.startswith("float") and "int" in operands[0].type:  # integers that become real
        operands = [text.cast(value, kind) for value in operands]
    expression = spec.formula.expressions[spec.formula.value(attributes)]
    values = dict(zip(spec.formula.operands, operands))
    return text.cast(write(text, expression, values, attributes), kind)


def result_type(spec: OpSpec, types: Sequence[str], attributes: Mapping[str, Any]) -> str:
    """Return the type in which an operator's result on scalars of types is computed."""
    given = tuple(TensorSpec((), kind) for kind in types)
    return wide(spec.bind(given, attributes).dtypes[0])
