"""A proof with open parameters: which its laws close, by unification, and which stay open.

Every open variable and parameter remembers what it stood for in the proof that is generalised, so
that where parameters meet in a sum that has no one solution, they are closed as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TypeAlias

from soapstone.ir.term import Term, Value, instantiate, instantiate_value, match, variables
from soapstone.rules.proving.check import CheckError, Laws
from soapstone.search.rules.infer import Terms, parameter_kinds
from soapstone.search.rules.language import LETTERS
from soapstone.search.rules.proof import Proof, Step

Renaming: TypeAlias = "dict[str, Term | Value]"
# Kinds of parameters, in the order in which they are closed where a proof is not general.
_KINDS = tuple(LETTERS)


class Unlike(Exception):
    """Terms that have no common instance; says which."""


class Unifier:
    """Open variables, what they stood for, and what they are bound to so far."""

    def __init__(self) -> None:
        self.origin: dict[str, Term | Value] = {}
        self._bound: dict[str, Term | Value] = {}

    def tensor(self, origin: Term) -> Term:
        """Return a new open variable that stands for a tensor."""
        name = f"t{len(self.origin)}"
        self.origin[name] = origin
        return Term(name)

    def value(self, origin: Value) -> str:
        """Return a new open parameter."""
        name = f"p{len(self.origin)}"
        self.origin[name] = origin
        return name

    def opened(self, term: Term, shared: dict[Term, Term], named: dict[Term, Term] | None) -> Term:
        """Return a term with open parameters and variables.

        Equal operators become equal if `shared`; equal variables if `named`, else each is its own.
        """
        if term.is_variable:
            if named is None:
                return self.tensor(term)
            if term not in named:
                named[term] = self.tensor(term)
            return named[term]
        if term not in shared:
            shared[term] = Term(
                term.symbol,
                tuple(self.value(value) for value in term.parameters),
                tuple(self.opened(operand, shared, named) for operand in term.operands),
            )
        return shared[term]

    def law(self, bindings: Mapping[str, Term | Value]) -> dict[str, Term | Value]:
        """Return new open variables for those of a law that is used with these bindings."""
        return {
            name: self.tensor(found) if isinstance(found, Term) else self.value(found)
            for name, found in bindings.items()
        }

    def resolved(self, term: Term) -> Term:
        """Return a term as it is bound by now."""
        if term.is_variable:
            found = self._bound.get(term.symbol)
            return self.resolved(found) if isinstance(found, Term) else term
        return Term(
            term.symbol,
            tuple(self.resolved_value(value) for value in term.parameters),
            tuple(self.resolved(operand) for operand in term.operands),
        )

    def resolved_value(self, value: Value) -> Value:
        """Return a parameter as it is bound by now."""
        while isinstance(value, str):
            found = instantiate_value(value, self._bound)
            if found is None:
                raise Unlike(f"{value!r} is no number")
            if found == value:
                break
            value = found
        return value

    def unify(self, left: Term, right: Term) -> None:
        """Bind open variables and parameters so that two terms are equal.

        Raises:
            Unlike: they cannot be.
        """
        left, right = self.resolved(left), self.resolved(right)
        if left == right:
            return
        if left.is_variable or right.is_variable:
            variable, other = (left, right) if left.is_variable else (right, left)
            self._bound[variable.symbol] = other
            return
        if (left.symbol, len(left.parameters), len(left.operands)) != (
            right.symbol,
            len(right.parameters),
            len(right.operands),
        ):
            raise Unlike(f"{left} is not {right}")
        for one, other_value in zip(left.parameters, right.parameters):
            self.unify_values(one, other_value)
        for part, other_part in zip(left.operands, right.operands):
            self.unify(part, other_part)

    def unify_values(self, left: Value, right: Value) -> None:
        """Bind open parameters so that two values are equal.

        Raises:
            Unlike: they cannot be.
        """
        left, right = self.resolved_value(left), self.resolved_value(right)
        if left == right:
            return
        for open_, other in ((left, right), (right, left)):
            if isinstance(open_, str) and open_ in self.origin:
                mixed = isinstance(other, str) and any(part.isdigit() for part in other.split("+"))
                if not mixed:
                    self._bound[open_] = other
                    return
        for value in (left, right):
            for word in value.split("+") if isinstance(value, str) else ():
                if word in self.origin:
                    origin = self.origin[word]
                    assert not isinstance(origin, Term)
                    self._bound[word] = origin
        left, right = self.resolved_value(left), self.resolved_value(right)
        if left != right:
            raise Unlike(f"parameter {left} is not {right}")


class General:
    """A derivation over open terms: what its laws leave open, and what that stood for.

    Variables of one name are one variable unless they are `apart`.

    Raises:
        Unlike: the ends do not meet.
        CheckError: a step is no instance of its law.
    """

    def __init__(self, source: Terms, target: Terms, proof: Proof, laws: Laws, apart: bool) -> None:
        self.special = (*source, *target)
        self.sides = (source, target)
        self.unifier = Unifier()
        named: dict[Term, Term] | None = None if apart else {}
        first, last = (self._opened(terms, named) for terms in (source, target))
        self.steps: list[list[tuple[Step, Renaming, Renaming]]] = []  # given and all bindings
        for output, chain in enumerate(proof):
            general, special = first[output], source[output]
            steps: list[tuple[Step, Renaming, Renaming]] = []
            for count, step in enumerate(chain):
                try:
                    general, special, fresh = self._step(general, special, step, laws)
                except (Unlike, IndexError) as error:
                    raise CheckError(f"output {output}, step {count}, {step}: {error}") from None
                steps.append((step, {name: fresh[name] for name in step.bindings}, fresh))
            self.steps.append(steps)
            self.unifier.unify(general, last[output])
        self.source, self.target = (
            tuple(self.unifier.resolved(term) for term in terms) for terms in (first, last)
        )
        self.kinds = {
            name: kind
            for name, kind in parameter_kinds((*self.source, *self.target)).items()
            if name in self.unifier.origin
        }

    def _opened(self, terms: Terms, named: dict[Term, Term] | None) -> Terms:
        shared: dict[Term, Term] = {}
        return tuple(self.unifier.opened(term, shared, named) for term in terms)

    def _step(
        self, general: Term, special: Term, step: Step, laws: Laws
    ) -> tuple[Term, Term, Renaming]:
        """Return both terms after a step, and its law's variables."""
        law = laws.get(step.law)
        if law is None:
            raise Unlike("there is no such law")
        matched, made = law.sides if step.forward else law.sides[::-1]
        bindings = match(matched, special.at(step.path), step.bindings)
        if bindings is None:
            raise Unlike(f"{special.at(step.path)} is no instance of {matched}")
        unifier = self.unifier
        fresh = unifier.law(bindings)
        for name, value in step.bindings.items():
            wanted = fresh[name]
            if isinstance(value, Term) and isinstance(wanted, Term):
                unifier.unify(wanted, unifier.opened(value, {}, None))
        unifier.unify(unifier.resolved(general).at(step.path), instantiate(matched, fresh))
        general = unifier.resolved(general).replaced(step.path, instantiate(made, fresh))
        special = special.replaced(step.path, instantiate(made, bindings))
        return general, special, fresh

    def as_usable(self) -> bool:
        """Return whether one side determines the variables of the other wherever it did."""

        def within(inner: Terms, outer: Terms) -> bool:
            return set(variables(inner)) <= set(variables(outer))

        now, before = (self.source, self.target), self.sides
        return within(now[1], now[0]) >= within(before[1], before[0]) and within(
            now[0], now[1]
        ) >= within(before[0], before[1])

    def choices(self) -> Iterator[frozenset[str]]:
        """Yield which open parameters to close as they were: none, each, each two, all."""
        names = sorted(
            self.kinds,
            key=lambda name: _KINDS.index(self.kinds[name]) if self.kinds[name] in _KINDS else 9,
        )
        for count in sorted({0, min(1, len(names)), min(2, len(names)), len(names)}):
            for fixed in combinations(names, count):
                yield frozenset(fixed)
