"""Counterexamples of equations: exact polynomials without limits of size, and points that refute.

What the compiled comparison (`polynomial.py`) does not find equal is looked at again here, in
Python's own numbers. Different polynomials are different functions. Different forms with maxima may
still be one function: a point is searched at which the sides differ, then Z3 is asked.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from soapstone.ir.term import Term, Value, subterms
from soapstone.rules.algebra.evaluate import exact_constant, split_sizes
from soapstone.rules.algebra.structure import Structure, structure
from soapstone.search.rules.shapes import Type, concrete, extents, infer

Monomial: TypeAlias = "tuple[int, ...]"  # numbers of unknowns, ascending
Polynomial: TypeAlias = "dict[Monomial, Fraction]"
_TRIES = 60
_SECONDS = 20.0
_PROVED: set[str] = set()  # equations of elements that Z3 proved, by their renamed text


@dataclass(frozen=True)
class Counterexample:
    """Where the two sides of a law differ.

    `point` gives values of unknowns, 0 for those it leaves out, at which the sides differ; it is
    empty where the sides are different polynomials. `decided` is False where the forms differ, but
    neither a point nor a proof was found: the law may hold.
    """

    parameters: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    index: tuple[int, ...]
    left: str
    right: str
    point: Mapping[str, str]
    decided: bool = True

    def __str__(self) -> str:
        given = [f"{name} = {value}" for name, value in self.parameters.items()]
        given += [f"{name} of shape {shape}" for name, shape in self.shapes.items()]
        lines = [
            f"{'' if self.decided else 'not decided: '}with {', '.join(given)}",
            f"  element {list(self.index)} of the left side is {self.left}",
            f"  element {list(self.index)} of the right side is {self.right}",
        ]
        if self.point:
            values = ", ".join(f"{name} = {value}" for name, value in self.point.items())
            lines.append(f"  which differ at {values}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Untyped:
    """Sizes at which one side of a law is typed, and the other is not, or of another shape."""

    parameters: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    left: tuple[int, ...] | None
    right: tuple[int, ...] | None

    def __str__(self) -> str:
        given = [f"{name} = {value}" for name, value in self.parameters.items()]
        given += [f"{name} of shape {shape}" for name, shape in self.shapes.items()]
        sides = [
            f"the {name} side " + ("does not fit" if shape is None else f"has shape {shape}")
            for name, shape in (("left", self.left), ("right", self.right))
        ]
        return f"with {', '.join(given)}\n  {', '.join(sides)}; no sizes type both alike"


def structure_of(term: Term, operands: Sequence[Type]) -> Structure:
    """Return the structure of an operator on operands that it takes.

    Raises:
        ValueError: types and structures disagree about what it takes.
    """
    parts = split_sizes(term.symbol, term.parameters, operands[0])
    shapes = tuple(map(extents, operands))
    found = structure(term.symbol, term.parameters, shapes, parts and parts[0])
    wanted = concrete(term.symbol, term.parameters, tuple(operands))
    if found is None or wanted is None or found.shape != wanted.shape:
        raise ValueError(
            f"{term.symbol} on shapes {list(shapes)}: structure {found and found.shape},"
            f" type {wanted and wanted.shape}"
        )
    return found


def constant_structure(term: Term, types: Sequence[Type]) -> Structure:
    """Return the structure of a constant: a sum without operands.

    Raises:
        ValueError: there is none of that shape.
    """
    (type_,) = types
    values = exact_constant(term, extents(type_))
    if values is None:
        raise ValueError(f"constant {term} of shape {type_}: there is none")
    common = math.lcm(*(value.denominator for value in values))
    out = np.flatnonzero([value != 0 for value in values]).astype(np.int32)
    numerators = np.array([int(values[at] * common) for at in out], np.int64)
    none = np.full(len(out), -1, np.int32)
    return Structure(extents(type_), "sum", out, none, none, numerators, common)


def _evaluated(
    sides: tuple[Term, Term],
    types: Mapping[Term, Type],
    leaf: Callable[[Term], list[Any]],
    one: Any,
    add: Callable[[Any, Any, Any, Fraction], Any],
    zero: Callable[[], Any],
    maximum: Callable[[list[Any]], Any],
) -> tuple[list[Any], list[Any]]:
    """Return the elements of both sides in some arithmetic; `add(sum, x, y, c)` adds c x y."""
    values: dict[Term, list[Any]] = {}
    known = dict(types)
    for term in subterms(sides):
        if term.is_variable:
            values[term] = leaf(term)
            continue
        if term.operands:
            operands = [known[operand] for operand in term.operands]
            found = structure_of(term, operands)
            known[term] = concrete(term.symbol, term.parameters, tuple(operands)) or known[term]
        else:
            found = constant_structure(term, [types[term]])
        a = values[term.operands[0]] if term.operands else []
        b = values[term.operands[1]] if len(term.operands) > 1 else []
        sets: list[list[Any]] = [[] for _ in range(math.prod(found.shape))]
        sums = [zero() for _ in sets]
        for out, x, y, number in zip(*map(np.ndarray.tolist, _columns(found))):
            if found.kind in ("max", "relu"):
                sets[out].append(a[x])
            else:
                factor = Fraction(number, found.denominator)
                first, second = (a[x] if x >= 0 else one), (b[y] if y >= 0 else one)
                sums[out] = add(sums[out], first, second, factor)
        if found.kind == "sum":
            values[term] = sums
        elif found.kind == "max":
            values[term] = [maximum(each) for each in sets]
        else:
            each_one = sums if found.kind == "sum+relu" else [each[0] for each in sets]
            values[term] = [maximum([each, zero()]) for each in each_one]
    return values[sides[0]], values[sides[1]]


def _columns(structure: Structure) -> tuple[Any, ...]:
    return structure.out, structure.a, structure.b, structure.numerator


class Forms:
    """The normal forms of both sides, exactly, and how they print."""

    def __init__(self, sides: tuple[Term, Term], types: Mapping[Term, Type]) -> None:
        self.unknowns: list[str | frozenset[frozenset[tuple[Monomial, Fraction]]]] = []
        self._maxima: dict[frozenset[frozenset[tuple[Monomial, Fraction]]], int] = {}
        self.types = types
        self.left, self.right = _evaluated(
            sides, types, self._leaf, {(): Fraction(1)}, self._add, dict, self._maximum
        )

    def _leaf(self, term: Term) -> list[Polynomial]:
        found: list[Polynomial] = []
        for index in np.ndindex(*extents(self.types[term])):
            place = f"[{','.join(map(str, index))}]" if index else ""
            self.unknowns.append(f"{term}{place}")
            found.append({(len(self.unknowns) - 1,): Fraction(1)})
        return found

    @staticmethod
    def _add(total: Polynomial, x: Polynomial, y: Polynomial, factor: Fraction) -> Polynomial:
        for u, c in x.items():
            for v, d in y.items():
                key = tuple(sorted(u + v))
                total[key] = total.get(key, Fraction(0)) + c * d * factor
                if not total[key]:
                    del total[key]
        return total

    def _maximum(self, each: list[Polynomial]) -> Polynomial:
        members: set[frozenset[tuple[Monomial, Fraction]]] = set()
        for one in each:
            ((key, factor),) = one.items() if len(one) == 1 else (((), Fraction(0)),)
            inner = self.unknowns[key[0]] if len(key) == 1 and factor == 1 else ""
            members.update(inner if isinstance(inner, frozenset) else [frozenset(one.items())])
        constants = [member for member in members if all(not key for key, _ in member)]
        if constants:
            best = max(constants, key=lambda member: sum(value for _, value in member))
            members = {member for member in members if member not in constants} | {best}
        if len(members) == 1:
            return dict(members.pop())
        content = frozenset(members)
        if content not in self._maxima:
            self._maxima[content] = len(self.unknowns)
            self.unknowns.append(content)
        return {(self._maxima[content],): Fraction(1)}

    def text(self, polynomial: Polynomial, most: int = 12) -> str:
        """Return a polynomial as text, a long one shortened."""
        parts = []
        for key, factor in sorted(polynomial.items())[:most]:
            factors = [self._unknown(unknown) for unknown in key]
            if factor != 1 or not factors:
                factors.insert(0, str(factor))
            parts.append("*".join(factors))
        more = len(polynomial) - most
        return (" + ".join(parts) or "0") + (f" + {more} more" if more > 0 else "")

    def renamed(self, element: int) -> str:
        """Return an element's two forms as text, the unknowns named in order of occurrence."""
        both = (self.text(form[element], sys.maxsize) for form in (self.left, self.right))
        names: dict[str, str] = {}
        return re.sub(
            r"\b[a-z]\d*(\[[\d,]*\])?",
            lambda found: names.setdefault(found[0], f"u{len(names)}"),
            " = ".join(both),
        )

    def _unknown(self, number: int) -> str:
        name = self.unknowns[number]
        if isinstance(name, str):
            return name
        members = sorted(self.text(dict(member), sys.maxsize) for member in name)
        return f"max({', '.join(members)})"


def refute(
    sides: tuple[Term, Term], types: Mapping[Term, Type], parameters: Mapping[str, Value]
) -> Counterexample | None:
    """Return where two sides differ at one size, None where they are equal everywhere."""
    forms = Forms(sides, types)
    differing = [at for at, (p, q) in enumerate(zip(forms.left, forms.right)) if p != q]
    if any(isinstance(unknown, frozenset) for unknown in forms.unknowns):
        differing = [at for at in differing if forms.renamed(at) not in _PROVED]
    if not differing:
        return None
    point: Mapping[str, str] = {}
    where, decided = differing[0], True
    if any(isinstance(unknown, frozenset) for unknown in forms.unknowns):
        found = _point(sides, types) or _ask_z3(forms, differing)
        if found is None:
            return None
        where, point = found
        decided = bool(point)
    type_ = infer(sides[0], types)
    shape = () if type_ is None else extents(type_)
    return Counterexample(
        dict(parameters),
        {str(leaf): extents(type_) for leaf, type_ in types.items()},
        tuple(map(int, np.unravel_index(where, shape))),
        forms.text(forms.left[where]),
        forms.text(forms.right[where]),
        point,
        decided,
    )


def _point(
    sides: tuple[Term, Term], types: Mapping[Term, Type]
) -> tuple[int, Mapping[str, str]] | None:
    """Return an element and values of the unknowns at which the sides differ."""
    for seed in range(_TRIES):
        draw = random.Random(seed)
        names: dict[str, int] = {}

        def leaf(
            term: Term, draw: random.Random = draw, names: dict[str, int] = names
        ) -> list[int]:
            values = []
            for index in np.ndindex(*extents(types[term])):
                place = f"[{','.join(map(str, index))}]" if index else ""
                values.append(draw.randint(-3, 3))
                names[f"{term}{place}"] = values[-1]
            return values

        left, right = _evaluated(
            sides, types, leaf, 1, lambda t, x, y, c: t + x * y * c, lambda: Fraction(0), max
        )
        for at, (p, q) in enumerate(zip(left, right)):
            if p != q:
                return at, {name: str(value) for name, value in names.items() if value}
    return None


def _ask_z3(forms: Forms, differing: list[int]) -> tuple[int, Mapping[str, str]] | None:
    """Return None if Z3 proves the elements equal, else the first it does not, perhaps a point."""
    import z3

    variables: dict[int, Any] = {}

    def unknown(number: int) -> Any:
        if number not in variables:
            name = forms.unknowns[number]
            if isinstance(name, str):
                variables[number] = z3.Real(name)
            else:
                best, *others = (value(dict(member)) for member in name)
                for other in others:
                    best = z3.If(other > best, other, best)
                variables[number] = best
        return variables[number]

    def value(polynomial: Polynomial) -> Any:
        total: Any = z3.RealVal(0)
        for key, factor in polynomial.items():
            product: Any = z3.RealVal(str(factor))
            for number in key:
                product = product * unknown(number)
            total = total + product
        return total

    for at in differing:
        if forms.renamed(at) in _PROVED:
            continue
        solver = z3.Solver()
        solver.set("timeout", int(_SECONDS * 1000))
        solver.add(value(forms.left[at]) != value(forms.right[at]))
        answer = solver.check()
        if answer == z3.unsat:
            _PROVED.add(forms.renamed(at))
            continue
        if answer == z3.sat:
            model = solver.model()
            return at, {str(name): str(model[name]) for name in _ordered(model)}
        return at, {}
    return None


def _ordered(model: Any) -> Iterator[Any]:
    return iter(sorted(model.decls(), key=str))
