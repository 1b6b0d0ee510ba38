"""Programs of the element-wise machine made shorter: what several instructions do, done by one.

Exported models spell activations out (x * 0.5 * (erf(x / 1.4142) + 1)); where the numbers are
known when the program is made, they become parameters, and the spelling one instruction. Products
and sums are merged with what follows them. Values change by rounding at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

# A value: the instruction that makes it, operands and parameters. Inputs come first in numbering.
Value = tuple[str, tuple[int, ...], float, float]

_ROOT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
_INPUT: Value = ("", (-1,), 0.0, 0.0)
_Polynomial = dict[int, float]


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)


class _Values:
    """The values made so far, and what they are in terms of one another."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.made: list[Value] = []

    def add(self, value: Value) -> int:
        self.made.append(value)
        return self.inputs + len(self.made) - 1

    def get(self, number: int) -> Value:
        return self.made[number - self.inputs] if number >= self.inputs else _INPUT

    def polynomial(self, number: int, x: int) -> _Polynomial | None:
        """Return the coefficients by degree, 3 at most, of a value that is a polynomial in x."""
        if number == x:
            return {1: 1.0}
        name, operands, p, q = self.get(number)
        if name not in ("affine", "square", "mul", "add"):
            return None
        parts = [self.polynomial(operand, x) for operand in operands]
        left, right = parts[0], parts[-1]
        if left is None or right is None:
            return None
        if name == "affine":
            scaled = {degree: c * p for degree, c in left.items()}
            return {**scaled, 0: scaled.get(0, 0.0) + q} if q else scaled
        if name == "add":
            return {d: left.get(d, 0.0) + right.get(d, 0.0) for d in {*left, *right}}
        product: _Polynomial = {}
        for i, a in left.items():
            for j, b in right.items():
                product[i + j] = product.get(i + j, 0.0) + a * b
        return product if max(product) <= 3 else None

    def factors(self, number: int) -> tuple[float, list[int]]:
        """Return the value as a number times two or fewer others."""
        name, operands, p, q = self.get(number)
        if name == "affine" and q == 0.0:
            scale, rest = self.factors(operands[0])
            return scale * p, rest
        if name == "mul":
            scales, others = zip(*(self._factor(operand) for operand in operands))
            return math.prod(scales), list(others)
        return 1.0, [number]

    def _factor(self, number: int) -> tuple[float, int]:
        name, operands, p, q = self.get(number)
        if name == "affine" and q == 0.0:
            return p, operands[0]
        return 1.0, number


def _of_polynomial(values: _Values, number: int, x: int, want: _Polynomial) -> bool:
    found = values.polynomial(number, x)
    return found is not None and all(
        _near(found.get(d, 0.0), want.get(d, 0.0)) for d in {*found, *want}
    )


def _gate(values: _Values, x: int, gate: int) -> tuple[Value, float] | None:
    """Return the instruction that makes x times the gate, and what to scale its result by."""
    name, operands, p, q = values.get(gate)
    if name == "sigmoid":
        slope = values.polynomial(operands[0], x)
        if slope is not None and set(slope) == {1}:
            return ("silu", (x,), slope[1], 0.0), 1.0
    if name == "tanh" and values.get(operands[0]) == ("softplus", (x,), 0.0, 0.0):
        return ("mish", (x,), 0.0, 0.0), 1.0
    if name == "hard_sigmoid" and operands == (x,) and _near(p, 1 / 6) and _near(q, 0.5):
        return ("hard_swish", (x,), 0.0, 0.0), 1.0
    # x * clip(q (x / 6 + 1 / 2), 0, q) is q times hard swish.
    line = {1: q / 6, 0: q / 2}
    if name == "clip" and p == 0.0 < q and _of_polynomial(values, operands[0], x, line):
        return ("hard_swish", (x,), 0.0, 0.0), q
    if name == "affine" and _near(p, q):
        inner, (z, *_), _, _ = values.get(operands[0])
        if inner == "erf" and _of_polynomial(values, z, x, {1: _ROOT_HALF}):
            return ("gelu", (x,), 0.0, 0.0), 2 * p
        cubic = {1: _TANH_SCALE, 3: _TANH_SCALE * _TANH_CUBE}
        if inner == "tanh" and _of_polynomial(values, z, x, cubic):
            return ("gelu_tanh", (x,), 0.0, 0.0), 2 * p
    return None


def _activation(values: _Values, number: int) -> int | None:
    """Return the number of a value made in one instruction, if this one spells an activation."""
    scale, rest = values.factors(number)
    if len(rest) != 2:
        return None
    for x, gate in (rest, rest[::-1]):
        found = _gate(values, x, gate)
        if found is not None:
            value, factor = found
            made = values.add(value)
            total = scale * factor
            if math.isclose(total, 1.0, rel_tol=1e-6):
                return made
            return values.add(("affine", (made,), total, 0.0))
    return None


def _with_number(value: Value, numbers: Mapping[int, float]) -> Value:
    """Return the value with an operand that is a known number as its parameter."""
    name, operands, _, _ = value
    if len(operands) != 2:
        return value
    x, y = operands
    if y in numbers:
        k = numbers[y]
        if name in ("add", "sub"):
            return "affine", (x,), 1.0, k if name == "add" else -k
        if name == "mul" or (name == "div" and math.isfinite(1 / k if k else math.inf)):
            return "affine", (x,), k if name == "mul" else 1 / k, 0.0
        if name in ("maximum", "minimum") and not math.isnan(k):
            low, high = (k, math.inf) if name == "maximum" else (-math.inf, k)
            return "clip", (x,), low, high
        if name == "prelu":
            return "leaky_relu", (x,), k, 0.0
        if name == "pow":
            special = {0.5: "sqrt", 1.0: "copy", 2.0: "square", -1.0: "reciprocal"}
            named = special.get(k)
            return (named, (x,), 0.0, 0.0) if named else ("power", (x,), k, 0.0)
    elif x in numbers:
        k = numbers[x]
        if name in ("add", "mul", "maximum", "minimum"):
            return _with_number((name, (y, x), 0.0, 0.0), numbers)
        if name == "sub":
            return "affine", (y,), -1.0, k
    return value


def _scaled(values: _Values, value: Value) -> int:
    """Add a value, of whose operand a scale is taken over; return its number."""
    name, operands, p, q = value
    if name == "affine":
        inner, (x, *_), scale, shift = values.get(operands[0])
        if inner == "affine" and shift == 0.0:
            if q == 0.0 and math.isclose(p * scale, 1.0, rel_tol=1e-6):
                return x
            return values.add(("affine", (x,), p * scale, q))
    return values.add(value)


def simplify(
    inputs: int,
    values: Sequence[Value],
    results: Sequence[int],
    numbers: Mapping[int, float],
) -> tuple[list[Value], list[int]]:
    """Return an equal program, and what its results are numbered.

    numbers: the inputs, by number, that are one known number each.
    """
    made = _Values(inputs)
    renamed = list(range(inputs))
    for name, operands, p, q in values:
        value = _with_number((name, tuple(renamed[i] for i in operands), p, q), numbers)
        number = _scaled(made, value)
        short = _activation(made, number) if made.get(number)[0] in ("mul", "affine") else None
        renamed.append(number if short is None else short)
    kept = [renamed[result] for result in results]
    return _renumber(inputs, _merge(inputs, made.made, kept), kept)


def _uses(inputs: int, values: Sequence[Value], results: Sequence[int]) -> Counter[int]:
    """Count the readers of each value among those that the results need."""
    uses: Counter[int] = Counter(results)
    for position in range(len(values) - 1, -1, -1):
        if uses[inputs + position]:
            uses.update(values[position][1])
    return uses


def _merge(inputs: int, values: Sequence[Value], results: Sequence[int]) -> list[Value]:
    """Return the values with products and sums, that only one other reads, merged into it."""
    uses = _uses(inputs, values, results)
    merged = list(values)

    def inner(number: int, name: str) -> tuple[int, ...] | None:
        if number < inputs or uses[number] != 1 or merged[number - inputs][0] != name:
            return None
        return merged[number - inputs][1]

    for position, (name, operands, _, _) in enumerate(merged):
        if name == "add":
            for x, y in (operands, operands[::-1]):
                product = inner(x, "mul")
                if product is not None and x != y:
                    merged[position] = ("mul_add", (*product, y), 0.0, 0.0)
                    break
        elif name == "relu":
            for known, after in (("add", "add_relu"), ("mul_add", "mul_add_relu")):
                terms = inner(operands[0], known)
                if terms is not None:
                    merged[position] = (after, terms, 0.0, 0.0)
    return merged


def _renumber(
    inputs: int, values: Sequence[Value], results: Sequence[int]
) -> tuple[list[Value], list[int]]:
    """Return the values that the results need, numbered anew."""
    needed: set[int] = set(results)
    for position in range(len(values) - 1, -1, -1):
        if inputs + position in needed:
            needed.update(values[position][1])
    numbers = {i: i for i in range(inputs)}
    kept: list[Value] = []
    for position, (name, operands, p, q) in enumerate(values):
        if inputs + position in needed:
            numbers[inputs + position] = inputs + len(kept)
            kept.append((name, tuple(numbers[i] for i in operands), p, q))
    return kept, [numbers[result] for result in results]
