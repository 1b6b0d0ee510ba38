"""Functions of numbers, each written once: what references, graphs and kernels make of them.

An expression is a number, a variable, or an operation on expressions. Equal ones are one object.
`evaluate` gives it a meaning by a table of functions, one an operation: NumPy's, which are in
`ir/operations.py` beside gradients, a graph's, which emit operators, or a kernel's, which write
instructions.

>>> x = variable("x")
>>> text(x * sigmoid(x))
'%0 = x; %1 = sigmoid(%0); %2 = mul(%0, %1)'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Number = int | float


class Expression:
    """A number or a variable (`value`), or an operation on expressions; see `make`."""

    __slots__ = ("operands", "operation", "value")

    operation: str
    operands: tuple[Expression, ...]
    value: Any  # a number, a name, or None

    def __repr__(self) -> str:
        return f"Expression({text(self)!r})"

    def __neg__(self) -> Expression:
        return number(-self.value) if isinstance(self.value, float) else make("neg", self)

    def __add__(self, other: Expression | Number) -> Expression:
        other = number(other)
        if self.operation == other.operation == "number":
            return number(self.value + other.value)
        if not _constant(other):
            return make("add", self, other) if not _constant(self) else other + self
        if self.operation == "affine" and self.operands[2] is number(0):
            return make("affine", *self.operands[:2], other)
        return make("affine", self, number(1), other)

    __radd__ = __add__

    def __sub__(self, other: Expression | Number) -> Expression:
        other = number(other)
        return self + -other if isinstance(other.value, float) else make("sub", self, other)

    def __rsub__(self, other: Number) -> Expression:
        return make("affine", self, number(-1), number(other))

    def __mul__(self, other: Expression | Number) -> Expression:
        other = number(other)
        if self.operation == other.operation == "number":
            return number(self.value * other.value)
        if not _constant(other):
            return make("mul", self, other) if not _constant(self) else other * self
        return self if other is number(1) else make("affine", self, other, number(0))

    __rmul__ = __mul__

    def __truediv__(self, other: Expression | Number) -> Expression:
        return make("div", self, number(other))

    def __rtruediv__(self, other: Number) -> Expression:
        inverse = make("reciprocal", self)
        return inverse if other == 1 else inverse * other

    def __gt__(self, other: Expression | Number) -> Expression:
        return make("greater", self, number(other))

    def __lt__(self, other: Expression | Number) -> Expression:
        return make("less", self, number(other))

    def __ge__(self, other: Expression | Number) -> Expression:
        return make("greater_equal", self, number(other))

    def __le__(self, other: Expression | Number) -> Expression:
        return make("less_equal", self, number(other))

    def __and__(self, other: Expression) -> Expression:
        return make("logical_and", self, other)


_MADE: dict[tuple[Any, ...], Expression] = {}
PARAMETER = "parameter"  # a variable that is one number for all elements: an operator's attribute


def _interned(operation: str, operands: tuple[Expression, ...], value: Any) -> Expression:
    key = operation, operands, repr(value)
    made = _MADE.get(key)
    if made is None:
        made = _MADE[key] = Expression()
        made.operation, made.operands, made.value = operation, operands, value
    return made


def number(value: Expression | Number) -> Expression:
    """Return the number as an expression; an expression as it is."""
    return value if isinstance(value, Expression) else _interned("number", (), float(value))


def variable(name: str) -> Expression:
    """Return the variable of a name."""
    return _interned("variable", (), name)


def parameter(name: str) -> Expression:
    """Return the variable that is one number for all elements."""
    return _interned(PARAMETER, (), name)


def _constant(x: Expression) -> bool:
    return x.operation in ("number", PARAMETER)


def make(operation: str, *operands: Expression | Number) -> Expression:
    """Return an operation on operands."""
    return _interned(operation, tuple(map(number, operands)), None)


def operation(name: str) -> Callable[..., Expression]:
    """Return the function that makes expressions of an operation."""
    return lambda *operands: make(name, *operands)


absolute, exp, expm1_negative, log, sqrt, tanh = map(
    operation, ("abs", "exp", "expm1_negative", "log", "sqrt", "tanh")
)
sigmoid, softplus, relu, sign, sin, cos = map(
    operation, ("sigmoid", "softplus", "relu", "sign", "sin", "cos")
)
minimum, equal, where, clip, power, lerp = map(
    operation, ("minimum", "equal", "where", "clip", "power", "lerp")
)
normal_cdf, normal_density = map(operation, ("normal_cdf", "normal_density"))


def square(x: Expression) -> Expression:
    """Return x to the power 2."""
    return power(x, 2.0)


def order(expressions: Iterable[Expression]) -> list[Expression]:
    """Return all that the expressions are made of, operands before what is made of them."""
    ordered: dict[Expression, None] = {}

    def visit(expression: Expression) -> None:
        if expression not in ordered:
            for operand in expression.operands:
                visit(operand)
            ordered[expression] = None

    for expression in expressions:
        visit(expression)
    return list(ordered)


def evaluate(
    expression: Expression,
    values: dict[Expression, Any],
    functions: Mapping[str, Callable[..., Any]],
) -> Any:
    """Return the value of an expression, by one function an operation.

    values: of variables, and of whatever else is known; what is computed is added. Numbers are
    Python's, which take the type of what they meet.
    """
    if expression not in values:
        if expression.operation == "number":
            return expression.value
        operands = [evaluate(operand, values, functions) for operand in expression.operands]
        values[expression] = functions[expression.operation](*operands)
    return values[expression]


def bound(expression: Expression, numbers: Mapping[str, float]) -> Expression:
    """Return the expression with numbers for its parameters of these names."""
    known: dict[Expression, Any] = {
        parameter(name): number(value) for name, value in numbers.items()
    }
    for part in order([expression]):
        if not part.operands:
            known.setdefault(part, part)
        elif part not in known:
            known[part] = _REBUILT.get(part.operation, operation(part.operation))(
                *(known[operand] for operand in part.operands)
            )
    made: Expression = known[expression]
    return made


_REBUILT: dict[str, Callable[..., Expression]] = {
    "neg": lambda a: -a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def text(*expressions: Expression) -> str:
    """Return the expressions as the lines of a program, by which they may be told apart."""
    numbers: dict[Expression, str] = {}
    lines: list[str] = []
    for part in order(expressions):
        if part.operation == "number":
            numbers[part] = repr(part.value)
            continue
        operands = ", ".join(numbers[operand] for operand in part.operands)
        numbers[part] = f"%{len(lines)}"
        made = f"{part.operation}({operands})" if part.operands else part.value
        lines.append(f"{numbers[part]} = {made}")
    return "; ".join(lines)
