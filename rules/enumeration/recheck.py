"""Evaluation of terms that no space enumerates: those with a variable in place of a subterm.

Terms are evaluated once each, in float64; symbols with a structure (`structure.py`) by one compiled
loop, others by their operator's NumPy reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array
from soapstone.ir.term import Term, Value
from soapstone.rules.algebra.evaluate import apply, constant, split_sizes
from soapstone.rules.algebra.structure import structure
from soapstone.search.rules.shapes import Type, concrete, extents, tensor_type

Shape = tuple[int, ...]
_TOLERANCE = 1e-9  # of the largest magnitude
_MOST_ELEMENTS = 1 << 24  # that are kept
_SEEDS = 4  # two of both signs, negative, and positive: relu has all its cases, roots have values


class _Code(NamedTuple):
    """A structure as compiled code reads it; of kind 0 sum, 1 maximum, 2 relu, 3 sum and relu."""

    kind: int
    out: Array
    a: Array
    b: Array
    factor: Array


class Evaluated(NamedTuple):
    """A tensor: its type and its elements (seeds, elements)."""

    type: Type
    elements: Array


@njit(nogil=True)
def _run(code: _Code, left: Array, right: Array, result: Array) -> None:
    for seed in range(result.shape[0]):
        if code.kind == 1:
            result[seed] = -np.inf
        for entry in range(code.out.shape[0]):
            a, b, out = code.a[entry], code.b[entry], code.out[entry]
            value = code.factor[entry]
            if a >= 0:
                value *= left[seed, a]
            if b >= 0:
                value *= right[seed, b]
            if code.kind == 1:
                result[seed, out] = max(result[seed, out], value)
            else:
                result[seed, out] += value
        if code.kind >= 2:
            for out in range(result.shape[1]):
                result[seed, out] = max(result[seed, out], 0.0)


@lru_cache(maxsize=1 << 14)
def _code(
    symbol: str, parameters: tuple[Value, ...], shapes: tuple[Shape, ...], left: int | None
) -> _Code | None:
    found = structure(symbol, parameters, shapes, left)
    if found is None:
        return None
    kind = ("sum", "max", "relu", "sum+relu").index(found.kind)
    factor = found.numerator / found.denominator
    return _Code(kind, found.out, found.a, found.b, np.ascontiguousarray(factor, np.float64))


class Recheck:
    """Terms of given variables and constants, evaluated on random numbers.

    shapes: of each variable and constant.
    """

    def __init__(self, shapes: Mapping[Term, Shape], seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._leaves: dict[Term, Evaluated | None] = {}
        self._values: dict[Term, Evaluated | None] = {}
        self._elements = 0
        self.shapes: dict[Term, Shape] = {}
        for term, shape in shapes.items():
            self.add(term, shape)

    def add(self, term: Term, shape: Shape) -> None:
        """Add a variable or a constant."""
        if term in self.shapes:
            return
        self.shapes[term] = shape
        if term.is_variable:
            elements = self._rng.uniform(0.3, 1.7, (_SEEDS, math.prod(shape)))
            elements[:2] *= self._rng.choice([-1, 1], (2, math.prod(shape)))
            elements[2] *= -1
        else:
            found = constant(term, shape)
            if found is None:
                self._leaves[term] = None
                return
            elements = np.tile(np.asarray(found, np.float64).reshape(1, -1), (_SEEDS, 1))
        self._leaves[term] = Evaluated(tensor_type(shape), elements)

    def value(self, term: Term) -> Evaluated | None:
        """Return what a term is, None where it has operands that do not fit."""
        if not term.operands:
            return self._leaves.get(term)
        if term not in self._values:
            operands = []
            for operand in term.operands:
                found = self.value(operand)
                if found is None:
                    break
                operands.append(found)
            complete = len(operands) == len(term.operands)
            result = _applied(term, operands) if complete else None
            if self._elements > _MOST_ELEMENTS:
                self._values.clear()
                self._elements = 0
            self._values[term] = result
            self._elements += 0 if result is None else result.elements.size
        return self._values[term]

    def equal(self, left: Term, right: Term) -> bool:
        """Return whether two terms have one type and are equal, up to rounding."""
        if left == right:
            return self.value(left) is not None
        one, other = self.value(left), self.value(right)
        if one is None or other is None or one.type != other.type:
            return False
        a, b = one.elements, other.elements
        with np.errstate(invalid="ignore", over="ignore"):
            if np.abs(a - b).max(initial=0.0) <= _TOLERANCE * np.abs(a).max(initial=0.0) < np.inf:
                return True
            finite = np.isfinite(a)
            if finite.all() or not (finite == np.isfinite(b)).all():
                return False
            a, b = a[finite], b[finite]
            return bool(np.abs(a - b).max(initial=0.0) <= _TOLERANCE * np.abs(a).max(initial=0.0))


class _Plan(NamedTuple):
    """How a symbol is applied to operands of some types."""

    type: Type
    size: int
    code: _Code | None
    shapes: tuple[Shape, ...]
    sizes: tuple[int, int] | None


@lru_cache(maxsize=1 << 16)
def _plan(symbol: str, parameters: tuple[Value, ...], operands: tuple[Type, ...]) -> _Plan | None:
    type_ = concrete(symbol, parameters, operands)
    if type_ is None:
        return None
    sizes = split_sizes(symbol, parameters, operands[0])
    shapes = tuple(map(extents, operands))
    code = None
    if len(operands) <= 2:
        code = _code(symbol, parameters, shapes, None if sizes is None else sizes[0])
    return _Plan(type_, math.prod(extents(type_)), code, shapes, sizes)


def _applied(term: Term, operands: list[Evaluated]) -> Evaluated | None:
    plan = _plan(term.symbol, term.parameters, tuple(each.type for each in operands))
    if plan is None:
        return None
    if plan.code is not None:
        result = np.zeros((_SEEDS, plan.size))
        _run(plan.code, operands[0].elements, operands[-1].elements, result)
        return Evaluated(plan.type, result)
    result = np.empty((_SEEDS, plan.size))
    for seed in range(_SEEDS):
        arrays = [each.elements[seed].reshape(s) for each, s in zip(operands, plan.shapes)]
        found = apply(term.symbol, term.parameters, arrays, plan.sizes)
        if found is None or found.size != plan.size:
            return None
        result[seed] = found.ravel()
    return Evaluated(plan.type, result)
