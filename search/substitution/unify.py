"""Unification of terms with open variables and parameters, for generalising proofs (`lift.py`).

Every open variable and parameter remembers what it stood for in the proof that is generalised, so
that where parameters meet in a sum that has no one solution, they are closed as they were.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.ir.term import Term, Value, instantiate_value


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
