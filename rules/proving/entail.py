"""Entailment by Z3: whether the laws imply a rule, with tensors and operators uninterpreted.

As in TASO (section 2.4), a symbol with its parameters is a function of an uninterpreted sort, and
shapes are not modelled. `entailed` gives Z3 the equations that a derivation's steps say, and asks
whether the outputs are equal by congruence alone. So it shows that a derivation is complete: no
step is missing, and each does to a term what it is said to. It does not show that an equation is an
instance of its law, that the law is true, or that its conditions hold of the operands: that is for
`check.py`, for validation, and for evaluation at random shapes. `entailed_by_laws` gives it the
laws themselves, quantified, and a time limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import z3

from soapstone.ir.law import Law
from soapstone.ir.term import Term, Value, is_variable, subterms, variables
from soapstone.rules.proving.prove import replay
from soapstone.search.rules import language
from soapstone.search.rules.condition import IllTyped
from soapstone.search.rules.infer import Typing, axis_choices, with_parameters
from soapstone.search.rules.proof import Proof

Verdict: TypeAlias = "Literal['proved', 'unknown']"
Terms: TypeAlias = "tuple[Term, ...]"
_STEPS = 500_000  # of Z3, a second: somewhat more than it takes in one


class _Logic:
    """Expressions of terms, each made once, and a solver that is reused."""

    def __init__(self) -> None:
        self.context = z3.Context()
        self.tensor = z3.DeclareSort("Tensor", self.context)
        self.value = z3.DeclareSort("Value", self.context)
        self.functions: dict[tuple[str, int, int], Any] = {}
        self.values: dict[str, Any] = {}
        self.expressions: dict[Term, Any] = {}
        self.solver = z3.SolverFor("QF_UF", self.context)

    def function(self, symbol: str, parameters: int, operands: int) -> Any:
        """Return the function that a symbol is: of its parameters, then of its operands."""
        key = (symbol, parameters, operands)
        if key not in self.functions:
            sorts = [self.value] * parameters + [self.tensor] * operands + [self.tensor]
            self.functions[key] = z3.Function(f"{symbol}/{parameters}/{operands}", *sorts)
        return self.functions[key]

    def parameter(self, value: Value) -> Any:
        """Return the constant that a parameter's value is."""
        text = str(value)
        if text not in self.values:
            self.values[text] = z3.Const(f"value {text}", self.value)
        return self.values[text]

    def ground(self, term: Term) -> Any:
        """Return the expression of a term; its variables are constants."""
        found = self.expressions.get(term)
        if found is None:
            parts = [self.parameter(value) for value in term.parameters]
            parts += [self.ground(operand) for operand in term.operands]
            if parts:
                found = self.function(term.symbol, len(term.parameters), len(term.operands))(*parts)
            else:
                found = z3.Const(term.symbol, self.tensor)
            self.expressions[term] = found
        return found

    def general(self, term: Term, bound: dict[str, Any]) -> Any:
        """Return the expression of a law's side; its variables are quantified."""
        if term.is_variable:
            return bound.setdefault(term.symbol, z3.Const(f"any {term.symbol}", self.tensor))
        parts = [self._general_value(value, bound) for value in term.parameters]
        parts += [self.general(operand, bound) for operand in term.operands]
        if not parts:
            return self.ground(term)
        return self.function(term.symbol, len(term.parameters), len(term.operands))(*parts)

    def _general_value(self, value: Value, bound: dict[str, Any]) -> Any:
        if isinstance(value, str) and "+" in value:
            first, *rest = [self._general_value(word, bound) for word in value.split("+")]
            plus = z3.Function("plus", self.value, self.value, self.value)
            for word in rest:
                first = plus(first, word)
            return first
        if is_variable(value):
            return bound.setdefault(f"[{value}]", z3.Const(f"any [{value}]", self.value))
        return self.parameter(value)

    def differ(self, source: Terms, target: Terms) -> Any:
        """Return the negation of a rule: one of its outputs differs."""
        pairs = zip(source, target, strict=True)
        differing = [self.ground(one) != self.ground(other) for one, other in pairs]
        return differing[0] if len(differing) == 1 else z3.Or(differing)


@lru_cache(maxsize=1)
def _logic() -> _Logic:
    return _Logic()


def entailed(source: Terms, target: Terms, proof: Proof, timeout_s: float) -> Verdict:
    """Return whether the equations of a derivation's steps entail that of each output.

    Raises:
        ValueError: a step of the derivation does not apply.
    """
    return follows(source, target, equations(source, proof), timeout_s)


def equations(source: Terms, proof: Proof) -> tuple[tuple[Term, Term], ...]:
    """Return what a derivation's steps say, each equation once.

    Raises:
        ValueError: a step of the derivation does not apply.
    """
    found = dict.fromkeys(
        (instance.before, instance.after)
        for term, chain in zip(source, proof, strict=True)
        for instance in replay(term, chain)
    )
    return tuple(found)


def follows(
    source: Terms, target: Terms, given: Sequence[tuple[Term, Term]], timeout_s: float = 10.0
) -> Verdict:
    """Return whether equations of terms entail that of each output, by congruence."""
    logic = _logic()
    if len(logic.expressions) > 200_000:
        logic.expressions.clear()
    solver = logic.solver
    solver.push()
    try:
        solver.set("timeout", int(timeout_s * 1000))
        for before, after in given:
            solver.add(logic.ground(before) == logic.ground(after))
        solver.add(logic.differ(source, target))
        return "proved" if solver.check() == z3.unsat else "unknown"
    finally:
        solver.pop()


def quantified(logic: _Logic, laws: Iterable[Law]) -> list[Any]:
    """Return laws as formulas for all tensors and parameters."""
    formulas = []
    for law in laws:
        bound: dict[str, Any] = {}
        left, right = (logic.general(side, bound) for side in law.sides)
        equation = left == right
        formulas.append(z3.ForAll(list(bound.values()), equation) if bound else equation)
    return formulas


def entailed_by_laws(
    source: Terms, target: Terms, timeout_s: float, *, laws: Sequence[Law] | None = None
) -> Verdict:
    """Return whether the laws entail each output's equation, as far as Z3 finds out in the time.

    Z3 counts its steps as well: some searches do not look at the clock for minutes. Given are the
    laws of the symbols of both sides. Those with conditions, and those that are `shape_bound`, are
    left out: without shapes they say too much.
    """
    logic = _logic()
    spoken = _symbols((*source, *target))
    given = language.laws() if laws is None else laws
    solver = z3.Solver(ctx=logic.context)
    solver.set("mbqi", False)
    solver.set("auto_config", False)
    solver.set("timeout", int(timeout_s * 1000))
    solver.set("rlimit", int(timeout_s * _STEPS))
    chosen = [law for law in given if _symbols(law.sides) <= spoken and not law.where]
    solver.add(*quantified(logic, (law for law in chosen if not shape_bound(law))))
    solver.add(logic.differ(source, target))
    return "proved" if solver.check() == z3.unsat else "unknown"


def _symbols(terms: Terms) -> set[str]:
    return {part.symbol for part in subterms(terms) if not part.is_variable}


@lru_cache(maxsize=1024)
def shape_bound(law: Law) -> bool:
    """Return whether a law holds only because both sides happen to have one type.

    `enlarge[k](x) = x` is one: it speaks of the size that x already has. So is a law that changes
    where a split cuts. The ranks tried are the largest for which the law is said.
    """
    left, right = law.sides
    ranks = max(
        language.said_ranks(law),
        key=lambda row: sum(row.values()),
        default=dict.fromkeys(variables((left, right)), 4),
    )
    for axes in axis_choices((left, right)):
        typing = Typing(ranks)
        try:
            one, other = (typing(with_parameters(side, axes)) for side in (left, right))
        except IllTyped:
            continue
        if one.trees != other.trees or one.rank != other.rank:
            return True
        if not all(typing.facts.equal(a, b) for a, b in zip(one.shape, other.shape)):
            return True
    return False
