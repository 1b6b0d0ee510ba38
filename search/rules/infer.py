"""Symbolic types of terms: those of variables whose ranks are known and whose extents are not.

The parameters of a rule may be variables too. Axes are not typed as such: each choice of them is a
case of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from soapstone.ir.term import Term, Value, instantiate_value, is_variable, subterms
from soapstone.search.rules import language
from soapstone.search.rules.condition import Condition, IllTyped, read
from soapstone.search.rules.extents import Dim, atom
from soapstone.search.rules.facts import Facts
from soapstone.search.rules.shapes import Type, constant, result, tensor_type

Ranks: TypeAlias = "Mapping[str, int]"
Terms: TypeAlias = "tuple[Term, ...]"
AXES = (-1, -2, -3, -4)


def with_parameters(term: Term, values: Mapping[str, Term | Value]) -> Term:
    """Return a term whose parameters have these values."""
    if not values:
        return term
    return Term(
        term.symbol,
        tuple(chosen(value, values) for value in term.parameters),
        tuple(with_parameters(operand, values) for operand in term.operands),
    )


def at_parameters(terms: Terms, values: Mapping[str, Term | Value]) -> Terms:
    """Return terms whose parameters have these values."""
    return tuple(with_parameters(term, values) for term in terms)


def chosen(value: Value, values: Mapping[str, Term | Value]) -> Value:
    """Return a parameter with the variables in it replaced."""
    found = instantiate_value(value, values)
    if found is None:
        raise IllTyped(f"{value!r} is no number")
    return found


def parameter_kinds(terms: Iterable[Term]) -> dict[str, str]:
    """Return what each variable among the parameters is: axis, group, stride, padding, ..."""
    found: dict[str, str] = {}
    for term in subterms(terms):
        if not term.parameters:
            continue
        for value, kind in zip(term.parameters, language.kinds(term.symbol)):
            if isinstance(value, str):
                found.update((word, kind) for word in value.split("+") if is_variable(word))
    return found


def axis_choices(terms: Iterable[Term]) -> Iterator[dict[str, Value]]:
    """Yield every choice of axes for the parameters that are variable axes."""
    names = sorted(name for name, kind in parameter_kinds(terms).items() if kind == "axis")
    for axes in product(AXES, repeat=len(names)):
        yield dict(zip(names, axes))


class Typing:
    """The symbolic types of terms, of variables of given ranks, under a set of facts."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.facts = Facts()
        self._types: dict[Term, Type] = {}

    def __call__(self, term: Term) -> Type:
        """Return the type of a term.

        Raises:
            IllTyped: it has none, or the facts refuse a condition that it needs.
        """
        found = self._types.get(term)
        if found is None:
            found = self._leaf(term) if not term.operands else self._made(term)
            self._types[term] = found
        return found

    def _made(self, term: Term) -> Type:
        return result(term.symbol, term.parameters, tuple(map(self, term.operands)), self.facts)

    def _leaf(self, term: Term) -> Type:
        rank = self.ranks.get(str(term))
        if rank is None and term.is_variable:
            raise IllTyped(f"{term} has no rank")
        known = rank is not None
        if not term.is_variable:
            constant_ = language.constants().get(term.symbol)
            if constant_ is None:
                raise IllTyped(f"{term.symbol!r} is no constant; see `soapstone ops`")
            if rank is None:
                usual = max(self.ranks.values(), default=2)
                rank = usual if constant_.rank is None else constant_.rank
        assert rank is not None
        names = [f"dim({term},{axis})" for axis in range(-rank, 0)]
        type_ = tensor_type([atom(name) for name in names])
        if not known:  # a constant that only the proof has: its extents are what it needs
            self.facts.free.update(names)
        if not term.is_variable:
            constant(term, type_, self.facts)
        return type_

    def conditions(self, text: str, given: Mapping[str, Term | Value]) -> tuple[Condition, ...]:
        """Return what a condition's text says where its variables are these."""

        def extent(term: Term, axis: int) -> Dim:
            shape = self(_replaced(term, given)).shape
            if not -len(shape) <= axis < 0:
                raise IllTyped(f"{text}: {term} of rank {len(shape)} has no axis {axis}")
            return shape[axis]

        def parameter(name: str) -> Value:
            found = given.get(name, name)
            return name if isinstance(found, Term) else found

        return read(text, extent, parameter)


def _replaced(term: Term, given: Mapping[str, Term | Value]) -> Term:
    if term.is_variable:
        found = given.get(term.symbol)
        return found if isinstance(found, Term) else term
    return Term(
        term.symbol,
        tuple(chosen(value, given) for value in term.parameters),
        tuple(_replaced(operand, given) for operand in term.operands),
    )


def typed(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str] = (),
    given: Mapping[str, Value] | None = None,
) -> Typing:
    """Return the types of both sides, with what the guard and their typing state as facts.

    Raises:
        IllTyped: they fit no operands of these ranks, or are never of the same shapes.
    """
    typing = Typing(ranks)
    for text in guard:
        for condition in typing.conditions(text, given or {}):
            typing.facts.require(condition)
    for term in (*source, *target):
        typing(term)
    for one, other in zip(source, target):
        first, second = typing(one), typing(other)
        if first.rank != second.rank:
            raise IllTyped(f"{one} has rank {first.rank}, {other} has rank {second.rank}")
        for left, right in zip(first.shape, second.shape):
            typing.facts.check(Condition("equal", (left, right)))
    return typing
