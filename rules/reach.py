"""How far rules reach: other values of what their proofs leave fixed, and other ranks.

One value of each parameter is enumerated, all are meant (Jia et al., TASO, section 2.3.1,
configuration parameters). Lifting opens what a proof does not need; the rest is tried here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from soapstone.ir.term import SPLITS, Term, Value, is_variable, parse, subterms
from soapstone.rules.algebra.canonical import identity
from soapstone.rules.algebra.evaluate import compare
from soapstone.rules.candidates import counterexample
from soapstone.rules.merge import changed, replays
from soapstone.rules.workers import Workers
from soapstone.search.rules import language
from soapstone.search.rules.infer import at_parameters
from soapstone.search.rules.proof import Candidate
from soapstone.search.rules.rule import Rejected, Rule, StatedSpace, Terms
from soapstone.search.rules.sample import candidate_at, drawn
from soapstone.search.rules.shapes import Type

Progress = Callable[[str, int, "int | None"], None]
MOST_RANK = 4
_TESTED = 3  # shapes at which a variant is tested
_DRAWS = 8  # of shapes, of which the one with most distinct extents is used
Variant = tuple[Terms, Terms, Rule]
Slot = tuple[str, int, Value]  # a parameter of a symbol, and its value


def other_values(
    rules: Sequence[Rule], spaces: Sequence[StatedSpace], workers: Workers, say: Progress
) -> list[Candidate]:
    """Return the candidates that rules become with values that their spaces do not have."""
    have: dict[str, set[Slot]] = {}
    for space in spaces:
        uses = [parse(text.partition("(")[0]) for text, _ in space.operators]
        have[space.name] = {
            (symbol, position, value)
            for use in uses
            for symbol in (SPLITS if use.symbol == "split" else (use.symbol,))
            for position, value in enumerate(use.parameters)
        }
    tried: dict[str, Variant] = {}
    known = {rule.identity.partition("-")[0] for rule in rules}
    for rule in rules:
        enumerated = set().union(*(have[name] for name in rule.spaces))
        for source, target in variants(rule, enumerated):
            key = identity(source, target)
            if key not in known and key not in tried:
                tried[key] = (source, target, rule)
    tasks = list(tried.values())
    found = workers.each(_varied, tasks, stage="other values", progress=say)
    return [candidate for candidate in found if candidate is not None]


def variants(rule: Rule, enumerated: set[Slot]) -> Iterator[tuple[Terms, Terms]]:
    """Yield a rule's graphs with one fixed parameter changed, everywhere or in one operator.

    To a value that was not enumerated: those that were are rules of their own.
    """
    forms = language.forms()
    slots: dict[tuple[str, Value], list[tuple[Term, int]]] = {}
    for term in subterms(rule.source + rule.target):
        if term.symbol not in forms or not term.operands:
            continue
        for position, name in enumerate(forms[term.symbol].form.parameters):
            value = term.parameters[position]
            if not is_variable(value) and not (isinstance(value, str) and "+" in value):
                slots.setdefault((name, value), []).append((term, position))
    for (name, value), places in slots.items():
        declared = dict.fromkeys(
            other
            for term, position in places
            for other in forms[term.symbol].form.parameters[name]
            if (term.symbol, position, other) not in enumerated and other != value
        )
        groups = [{*places}] + ([{place} for place in places] if len(places) > 1 else [])
        for other in declared:
            for group in groups:
                yield (
                    tuple(_with_value(term, group, other) for term in rule.source),
                    tuple(_with_value(term, group, other) for term in rule.target),
                )


def _with_value(term: Term, places: set[tuple[Term, int]], value: Value) -> Term:
    parameters = tuple(
        value if (term, position) in places else old for position, old in enumerate(term.parameters)
    )
    operands = tuple(_with_value(operand, places, value) for operand in term.operands)
    return Term(term.symbol, parameters, operands)


def _varied(task: Variant) -> Candidate | None:
    """Return a variant of a rule, at some shapes.

    None where it does not hold, or fits only where extents are 1 that are not in the rule.
    """
    source, target, rule = task
    ranks = rule.ranks[0]
    tried: list[tuple[Mapping[str, Value], Mapping[Term, Type]]] = []
    for values, types in drawn(source, target, ranks, (), _DRAWS):
        sides = at_parameters(source, values), at_parameters(target, values)
        if len(tried) < _TESTED and compare(*sides, types):
            return None
        tried.append((values, types))
    if not tried:
        return None
    usual = [types for _, types in drawn(rule.source, rule.target, ranks, rule.guard, _DRAWS)]
    if _ones([types for _, types in tried]) - _ones(usual):
        return None
    best = max(tried, key=lambda each: _distinct(each[1]))
    return candidate_at(source, target, *best, rule.spaces[0])


def _ones(drawn: Sequence[Mapping[Term, Type]]) -> set[tuple[str, int]]:
    """Return the variables and axes whose extent is always 1."""
    found: list[set[tuple[str, int]]] = [
        {
            (str(term), axis)
            for term, type_ in types.items()
            for axis, extent in enumerate(type_.shape)
            if extent == 1 and term.is_variable
        }
        for types in drawn
    ]
    return set.intersection(*found) if found else set()


def _distinct(types: Mapping[Term, Type]) -> int:
    return len({extent for type_ in types.values() for extent in type_.shape} - {1})


# Other ranks


def settled(rule: Rule) -> Rule | Rejected:
    """Return a rule with every uniform change of ranks that its proof and tests allow.

    It is tested at the ranks that it has first, and rejected if it fails there.
    """
    for ranks in rule.ranks:
        found = counterexample(rule.source, rule.target, ranks, rule.guard)
        if found is not None:
            reason = f"refuted, although a proof replays: {found}"
            return Rejected(rule.source, rule.target, reason, rule.spaces)
    typings = list(rule.ranks)
    for start in rule.ranks:
        least = min((rank for rank in start.values() if rank), default=0)
        for by in range(1 - least, MOST_RANK):
            other = {name: rank + by if rank >= least else rank for name, rank in start.items()}
            if not by or max(other.values(), default=0) > MOST_RANK or other in typings:
                continue
            if replays(rule, other) and not counterexample(
                rule.source, rule.target, other, rule.guard
            ):
                typings.append(other)
    return changed(rule, typings, rule.spaces)
