"""Extents as integer polynomials: what a shape is when the sizes of tensors are not given.

An atom is a named positive integer: the extent `dim(x,-1)` of a variable, a parameter such as `s`,
or an uninterpreted application such as `strided(dim(x,-1),s)`. A polynomial is kept in normal form,
so equal polynomials are equal values; a constant one is an `int`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from soapstone.ir.term import is_variable

Monomial: TypeAlias = "tuple[str, ...]"  # atoms in order, repeated for powers


class Applied(str):
    """An atom that is a function of extents and words; as a string, its text."""

    __slots__ = ("arguments", "function")
    function: str
    arguments: tuple[Dim | str, ...]

    def __new__(cls, function: str, arguments: tuple[Dim | str, ...]) -> Applied:
        """Return the application; equal texts are equal atoms."""
        atom = super().__new__(cls, f"{function}({','.join(map(str, arguments))})")
        atom.function = function
        atom.arguments = arguments
        return atom

    def __getnewargs__(self) -> tuple[str, tuple[Dim | str, ...]]:  # type: ignore[override]
        return self.function, self.arguments


@dataclass(frozen=True)
class Poly:
    """A polynomial that is no constant: (monomial, coefficient) pairs, leading one first."""

    terms: tuple[tuple[Monomial, int], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __add__(self, other: Dim) -> Dim:
        total = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return polynomial(total)

    __radd__ = __add__

    def __neg__(self) -> Poly:
        return Poly(tuple((monomial, -coefficient) for monomial, coefficient in self.terms))

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        total: dict[Monomial, int] = {}
        for left, first in self.terms:
            for right, second in _terms(other):
                monomial = tuple(sorted(left + right)) if left and right else left or right
                total[monomial] = total.get(monomial, 0) + first * second
        return polynomial(total)

    __rmul__ = __mul__

    @cached_property
    def _text(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in sorted(self.terms, key=lambda term: term[1] < 0):
            factors = "*".join(monomial)
            if not factors:
                factors = str(abs(coefficient))
            elif abs(coefficient) != 1:
                factors = f"{abs(coefficient)}*{factors}"
            sign = "-" if coefficient < 0 else "+"
            parts.append(f" {sign} {factors}" if parts else f"{'-' * (sign == '-')}{factors}")
        return "".join(parts)

    def __str__(self) -> str:
        return self._text


Dim: TypeAlias = "int | Poly"


def _terms(value: Dim) -> tuple[tuple[Monomial, int], ...]:
    return value.terms if isinstance(value, Poly) else (((), value),)


def polynomial(total: Mapping[Monomial, int]) -> Dim:
    """Return the sum of monomials with these coefficients, in normal form."""
    kept = [(monomial, coefficient) for monomial, coefficient in total.items() if coefficient]
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    kept.sort(key=lambda term: (-len(term[0]), term[0]))
    return Poly(tuple(kept))


def atom(name: str) -> Poly:
    """Return the polynomial that is one atom."""
    return Poly((((name,), 1),))


def applied(function: str, *arguments: Dim | str) -> Dim:
    """Return an application, computed where its arguments are known, else an atom."""
    rule = _RULES.get(function)
    value = None if rule is None else rule(*arguments)
    return atom(Applied(function, arguments)) if value is None else value


def strided(extent: Dim, stride: Dim) -> Dim:
    """Return how many positions a stride visits: `ceil(extent / stride)`."""
    return applied("strided", extent, stride)


def window(extent: Dim, size: Dim, stride: Dim, padding: str) -> Dim:
    """Return how many places a window of some size takes along an extent."""
    return applied("window", extent, size, stride, padding)


def _strided(extent: Dim | str, stride: Dim | str) -> Dim | None:
    if isinstance(extent, str) or isinstance(stride, str):
        return None
    if stride == 1:
        return extent
    if isinstance(extent, int) and isinstance(stride, int):
        return -(-extent // stride)
    inner = _only(extent)
    if inner is not None and inner.function == "strided":
        first, step = inner.arguments
        assert not isinstance(first, str) and not isinstance(step, str)
        return strided(first, step * stride)
    return None


def _window(
    extent: Dim | str, size: Dim | str, stride: Dim | str, padding: Dim | str
) -> Dim | None:
    if isinstance(extent, str) or isinstance(size, str) or isinstance(stride, str):
        return None
    if padding == "same" or (size == 1 and (padding == "valid" or is_variable(padding))):
        return strided(extent, stride)
    if padding == "valid":
        return strided(extent - size + 1, stride)
    inner = _only(extent)  # windows one after the other, in either order
    if inner is not None and inner.function == "window" and inner.arguments[2:] == (1, padding):
        first, other = inner.arguments[:2]
        if not isinstance(first, str) and not isinstance(other, str) and str(other) > str(size):
            word = str(padding)
            return window(window(first, size, 1, word), other, stride, word)
    return None


def _only(value: Dim) -> Applied | None:
    """Return the application that a value is, if it is one."""
    if isinstance(value, Poly) and len(value.terms) == 1 and len(value.terms[0][0]) == 1:
        (name,) = value.terms[0][0]
        if isinstance(name, Applied) and value.terms[0][1] == 1:
            return name
    return None


_RULES: dict[str, Callable[..., Dim | None]] = {"strided": _strided, "window": _window}


def substitute(value: Dim, given: Mapping[str, Dim], words: Mapping[str, str] | None = None) -> Dim:
    """Return the value with atoms, and words such as paddings, replaced, in applications too."""
    if isinstance(value, int):
        return value
    if not any(part in given or isinstance(part, Applied) for part, _ in atoms_of(value)):
        return value
    total: Dim = 0
    for monomial, coefficient in value.terms:
        product: Dim = coefficient
        for name in monomial:
            product = product * _replaced(name, given, words or {})
        total = total + product
    return total


def evaluate(value: Dim, given: Mapping[str, int]) -> int:
    """Return the value where every atom has a value.

    Raises:
        KeyError: one has none.
    """
    if isinstance(value, int):
        return value
    total = 0
    for monomial, product in value.terms:
        for name in monomial:
            number = given.get(name)
            if number is None:
                if not isinstance(name, Applied):
                    raise KeyError(name)
                again = applied(
                    name.function,
                    *(
                        argument if isinstance(argument, str) else evaluate(argument, given)
                        for argument in name.arguments
                    ),
                )
                if not isinstance(again, int):
                    raise KeyError(str(again))
                number = again
            product *= number
        total += product
    return total


def _replaced(name: str, given: Mapping[str, Dim], words: Mapping[str, str]) -> Dim:
    replacement = given.get(name)
    if replacement is not None:
        return replacement
    if not isinstance(name, Applied):
        return atom(name)
    arguments = tuple(
        words.get(argument, argument)
        if isinstance(argument, str)
        else substitute(argument, given, words)
        for argument in name.arguments
    )
    again = applied(name.function, *arguments)
    changed = _only(again)
    return again if changed is None else given.get(changed, again)


def atoms_of(value: Dim) -> Iterator[tuple[str, int]]:
    """Yield the atoms of the monomials, each with the degree of its monomial."""
    if isinstance(value, Poly):
        for monomial, _ in value.terms:
            for name in monomial:
                yield name, len(monomial)


def all_atoms(value: Dim | str) -> set[str]:
    """Return every atom of a value, those inside applications included."""
    atoms: set[str] = set()
    if isinstance(value, Poly):
        for name, _ in atoms_of(value):
            atoms.add(name)
            if isinstance(name, Applied):
                for argument in name.arguments:
                    atoms |= all_atoms(argument)
    return atoms


def primitive(value: Poly) -> Poly:
    """Return an equation's side without its content: the common factor, which is positive."""
    content = math.gcd(*(coefficient for _, coefficient in value.terms))
    if value.terms[0][1] < 0:
        content = -content
    common = list(value.terms[0][0])
    for monomial, _ in value.terms[1:]:
        common = _common(common, monomial)
    terms = tuple(
        (_without(monomial, common), coefficient // content)
        for monomial, coefficient in value.terms
    )
    return Poly(terms)


def _common(left: list[str], right: Monomial) -> list[str]:
    rest = list(right)
    kept = []
    for name in left:
        if name in rest:
            rest.remove(name)
            kept.append(name)
    return kept


def _without(monomial: Monomial, names: Sequence[str]) -> Monomial:
    rest = list(monomial)
    for name in names:
        rest.remove(name)
    return tuple(rest)


def reduced(value: Dim, divisor: Poly) -> tuple[Dim, Dim]:
    """Return quotient and remainder of a division by the divisor's leading term."""
    leading, coefficient = divisor.terms[0]
    quotient: Dim = 0
    remainder: Dim = 0
    while isinstance(value, Poly):
        monomial, found = value.terms[0]
        if found % coefficient == 0 and len(_common(list(leading), monomial)) == len(leading):
            factor = polynomial({_without(monomial, leading): found // coefficient})
            quotient = quotient + factor
            value = value - divisor * factor
        else:
            first = polynomial({monomial: found})
            remainder = remainder + first
            value = value - first
    return quotient, remainder + value


def quotient(value: Dim, divisor: Dim) -> Dim | None:
    """Return the value divided by the divisor where that is exact as a polynomial, else None."""
    if isinstance(divisor, Poly):
        result, remainder = reduced(value, divisor)
        return result if remainder == 0 else None
    if isinstance(value, Poly):
        if any(coefficient % divisor for _, coefficient in value.terms):
            return None
        return Poly(tuple((monomial, found // divisor) for monomial, found in value.terms))
    return value // divisor if value % divisor == 0 else None


def bounded_below(value: Dim) -> bool:
    """Return whether a value is at least 0 for all positive atoms, as its coefficients show."""
    shifted = substitute(value, {name: atom(name) + 1 for name, _ in atoms_of(value)})
    if isinstance(shifted, int):
        return shifted >= 0
    return all(coefficient >= 0 for _, coefficient in shifted.terms)
