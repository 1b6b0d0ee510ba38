"""Programs of the element-wise machine made shorter: what several instructions do, done by one.

Numbers that are known when the program is made become parameters, and activations that are written
out as arithmetic one instruction (`ir/analysis/activations.py`). Products and sums are merged with
what follows them. Values change by rounding at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from soapstone.ir.analysis.activations import Made, Recogniser, is_exact_factor

# A value: the instruction that makes it, operands and parameters. Inputs come first in numbering.
Value = Made[int]

_INPUT: Value = ("", (-1,), 0.0, 0.0)


class _Values:
    """The values made so far, and what they are in terms of one another."""

    def __init__(self, inputs: int, numbers: Mapping[int, float]) -> None:
        self.inputs = inputs
        self._numbers = numbers
        self.made: list[Value] = []
        self._recogniser = Recogniser(lambda number: self.line(self.get(number)))

    def add(self, value: Value) -> int:
        self.made.append(value)
        return self.inputs + len(self.made) - 1

    def get(self, number: int) -> Value:
        return self.made[number - self.inputs] if number >= self.inputs else _INPUT

    def line(self, value: Value) -> Value:
        """Return a quotient by a number as the scaling that it is but for rounding."""
        name, operands, _, _ = value
        divisor = self._numbers.get(operands[-1]) if name == "div" else None
        return ("affine", operands[:1], 1 / divisor, 0.0) if divisor else value

    def activation(self, number: int) -> int | None:
        """Return the number of a value made in one instruction, if this one is an activation."""
        found = self._recogniser.activation(number)
        if found is None:
            return None
        value, scale = found
        made = self.add(value)
        if math.isclose(scale, 1.0, rel_tol=1e-6):
            return made
        return self.add(("affine", (made,), scale, 0.0))


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
        if name == "mul" or (name == "div" and is_exact_factor(k)):
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
    name, operands, p, q = values.line(value)
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
    made = _Values(inputs, numbers)
    renamed = list(range(inputs))
    for name, operands, p, q in values:
        value = _with_number((name, tuple(renamed[i] for i in operands), p, q), numbers)
        number = _scaled(made, value)
        short = made.activation(number) if made.get(number)[0] in ("mul", "div", "affine") else None
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
