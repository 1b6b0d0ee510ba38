"""Activations that exported models write out as arithmetic, recognised in any program of values.

x * 0.5 * (erf(x / 1.4142) + 1) is GELU. A program is told by what makes each value, be it a graph
(`engine/lower/weights.py`) or the instructions of `kernels/cpu/elementwise/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import field
from typing import Generic, TypeVar

from soapstone.records import dataclass

Name = TypeVar("Name", bound=Hashable)  # of a value in its program

# What makes a value: an operator, operands and up to two numbers: `affine` is p * x + q, `power`
# x to the p.
Made = tuple[str, tuple[Name, ...], float, float]

_ROOT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
_POWERS = (("power", 2.0), ("power", 3.0))
_Polynomial = dict[int, float]


def is_exact_factor(number: float) -> bool:
    """Return whether a product with a number is a quotient by its reciprocal: powers of two."""
    mantissa, exponent = math.frexp(number)
    return abs(mantissa) == 0.5 and abs(exponent) < 126


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)


@dataclass(frozen=True)
class Recogniser(Generic[Name]):
    """Sees activations in a program.

    Args:
        get: what makes a value.
    """

    get: Callable[[Name], Made[Name]]
    _polynomials: dict[tuple[Name, Name], _Polynomial | None] = field(default_factory=dict)

    def activation(self, value: Name) -> tuple[Made[Name], float] | None:
        """Return the one operator that makes a value, and a number to multiply its result by."""
        scale, factors = self._factors(value)
        for x, gate in (factors, factors[::-1]) if len(factors) == 2 else ():
            found = self._gated(x, gate)
            if found is not None:
                return found[0], scale * found[1]
        return None

    def _gated(self, x: Name, gate: Name) -> tuple[Made[Name], float] | None:
        """Return the operator that makes x times the gate, and what to scale its result by."""
        name, operands, p, q = self.get(gate)
        if name == "sigmoid":
            slope = self._polynomial(operands[0], x)
            if slope is not None and set(slope) == {1}:
                return ("silu", (x,), slope[1], 0.0), 1.0
        if name == "tanh" and self.get(operands[0]) == ("softplus", (x,), 0.0, 0.0):
            return ("mish", (x,), 0.0, 0.0), 1.0
        if name == "hard_sigmoid" and operands == (x,) and _near(p, 1 / 6) and _near(q, 0.5):
            return ("hard_swish", (x,), 0.0, 0.0), 1.0
        # x * clip(q (x / 6 + 1 / 2), 0, q) is q times hard swish.
        if name == "clip" and p == 0.0 < q and self._is(operands[0], x, {1: q / 6, 0: q / 2}):
            return ("hard_swish", (x,), 0.0, 0.0), q
        if name == "affine" and _near(p, q):
            inner, (z, *_), _, _ = self.get(operands[0])
            if inner == "erf" and self._is(z, x, {1: _ROOT_HALF}):
                return ("gelu", (x,), 0.0, 0.0), 2 * p
            if inner == "tanh" and self._is(z, x, {1: _TANH_SCALE, 3: _TANH_SCALE * _TANH_CUBE}):
                return ("gelu_tanh", (x,), 0.0, 0.0), 2 * p
        return None

    def _factors(self, value: Name) -> tuple[float, list[Name]]:
        """Return a value as a number times two or fewer others."""
        scale, value = self._scaled(value)
        name, operands, _, _ = self.get(value)
        if name != "mul":
            return scale, [value]
        scales, others = zip(*map(self._scaled, operands))
        return scale * math.prod(scales), list(others)

    def _scaled(self, value: Name) -> tuple[float, Name]:
        """Return a value as a number times another."""
        scale = 1.0
        name, operands, p, q = self.get(value)
        while name == "affine" and q == 0.0:
            scale, value = scale * p, operands[0]
            name, operands, p, q = self.get(value)
        return scale, value

    def _is(self, value: Name, x: Name, wanted: _Polynomial) -> bool:
        found = self._polynomial(value, x)
        return found is not None and all(
            _near(found.get(d, 0.0), wanted.get(d, 0.0)) for d in {*found, *wanted}
        )

    def _polynomial(self, value: Name, x: Name) -> _Polynomial | None:
        """Return the coefficients by degree, 3 at most, of a value that is a polynomial in x."""
        if (value, x) not in self._polynomials:
            self._polynomials[value, x] = self._expanded(value, x)
        return self._polynomials[value, x]

    def _expanded(self, value: Name, x: Name) -> _Polynomial | None:
        if value == x:
            return {1: 1.0}
        name, operands, p, q = self.get(value)
        if name not in ("affine", "square", "mul", "add") and (name, p) not in _POWERS:
            return None
        parts = [self._polynomial(operand, x) for operand in operands]
        left, right = parts[0], parts[-1]
        if left is None or right is None:
            return None
        if name == "affine":
            scaled = {degree: c * p for degree, c in left.items()}
            return {**scaled, 0: scaled.get(0, 0.0) + q} if q else scaled
        if name == "add":
            return {d: left.get(d, 0.0) + right.get(d, 0.0) for d in {*left, *right}}
        product = _times(left, right)
        if (name, p) == _POWERS[1]:
            product = _times(product, left)
        return product if max(product) <= 3 else None


def _times(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    product: _Polynomial = {}
    for i, a in left.items():
        for j, b in right.items():
            product[i + j] = product.get(i + j, 0.0) + a * b
    return product
