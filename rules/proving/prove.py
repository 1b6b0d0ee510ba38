"""Derivations of candidates from the laws, found by equality saturation (TASO, section 2.4).

A candidate is proved where, for each output, the target's term comes to be in the source's class.
The explanation is a chain of law applications; it is replayed here term by term before it is
returned, on the types at which the candidate was found. What it means for other shapes is for
`lift.py` and `check.py` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from soapstone.ir.law import Law
from soapstone.ir.term import Term, Value, instantiate, match, parse
from soapstone.rules.proving.egraph import ILL_TYPED, EGraph
from soapstone.rules.proving.explain import Explainer, Move
from soapstone.rules.proving.matcher import Rewrite
from soapstone.rules.proving.saturate import Budget, Problem, Saturation, System
from soapstone.search.rules import language
from soapstone.search.rules.proof import Candidate, Chain, Proof, Step
from soapstone.search.rules.shapes import tensor_type

# Tried in turn: most candidates need only what they are made of.
ROUNDS = (
    Budget(nodes=300, generations=5),
    Budget(nodes=1500, generations=6, foreign=True),
    Budget(nodes=3000, generations=8, foreign=True, widely=True),
    Budget(nodes=3000, generations=8, widely=True, invent=True),
)


class Instance(NamedTuple):
    """A law application in a derivation: the equation between two subterms, at a path."""

    law: Law
    bindings: Mapping[str, Term | Value]
    before: Term
    after: Term
    path: tuple[int, ...]


def system_of(laws: Sequence[Law]) -> System:
    """Return the rewrites that laws allow: both directions of each.

    A side that is a variable is a pattern for anything: `saturate.py` applies it sparingly.
    """
    rewrites = []
    for law in laws:
        left, right = law.sides
        rows = language.said_ranks(law)
        rewrites.append(Rewrite(law.name, True, (left,), (right,), rows, law.where))
        rewrites.append(Rewrite(law.name, False, (right,), (left,), rows, law.where))
    return System(rewrites)


@lru_cache(maxsize=1)
def _standard() -> System:
    return system_of(language.laws())


@lru_cache(maxsize=1024)
def _leaf(text: str) -> Term:
    return parse(text)


def prove(
    candidate: Candidate, *, effort: int = len(ROUNDS), laws: Sequence[Law] | None = None
) -> Proof | None:
    """Return a derivation of each output's equation, or None if none was found.

    Args:
        candidate: the two graphs, with the shapes at which they are typed.
        effort: how many of the rounds to try.
        laws: those to derive it from, instead of all.
    """
    if laws is None:
        system, by_name = _standard(), language.laws_by_name()
    else:
        system, by_name = system_of(laws), {law.name: law for law in laws}
    for budget in ROUNDS[:effort]:
        graph = EGraph()
        for text, shape in candidate.types.items():
            graph.leaf(_leaf(text), tensor_type(shape))
        pairs = zip(candidate.source, candidate.target, strict=True)
        goals = [(graph.add(source), graph.add(target)) for source, target in pairs]
        if any(ILL_TYPED in goal for goal in goals):
            return None
        if Saturation(graph, system, goals, Problem.of(graph)).run(budget):
            proof = _explained(graph, candidate, goals, by_name)
            if proof is not None:
                return proof
    return None


def replay(term: Term, chain: Chain, laws: Mapping[str, Law] | None = None) -> Iterator[Instance]:
    """Yield the law applications of a chain, from a term on.

    Raises:
        ValueError: a step does not apply; says which.
    """
    laws = language.laws_by_name() if laws is None else laws
    for number, step in enumerate(chain):
        law = laws.get(step.law)
        if law is None:
            raise ValueError(f"step {number}: {step.law!r} is no law")
        left, right = law.sides if step.forward else law.sides[::-1]
        before = term.at(step.path)
        found = match(left, before, step.bindings)
        if found is None:
            raise ValueError(f"step {number}: {left} does not match {before}")
        after = instantiate(right, found)
        yield Instance(law, found, before, after, step.path)
        term = term.replaced(step.path, after)


def _explained(
    graph: EGraph, candidate: Candidate, goals: Sequence[tuple[int, int]], laws: Mapping[str, Law]
) -> Proof | None:
    """Return the chains that lead from source to target, replayed, or None if one does not."""
    chains = []
    explainer = Explainer(graph)
    for (first, second), source, target in zip(goals, candidate.source, candidate.target):
        moves = explainer.explain(first, second)
        if moves is None:
            return None
        chain = tuple(_step(move, graph) for move in moves)
        if end_of(source, chain, laws) != target:
            return None
        chains.append(chain)
    return tuple(chains)


def end_of(term: Term, chain: Chain, laws: Mapping[str, Law] | None = None) -> Term:
    """Return the term to which a chain leads.

    Raises:
        ValueError: a step does not apply; says which.
    """
    for instance in replay(term, chain, laws):
        term = term.replaced(instance.path, instance.after)
    return term


def _step(move: Move, graph: EGraph) -> Step:
    rewrite = move.why.rewrite
    given = rewrite.given[move.backward]
    bindings = rewrite.bindings(graph, move.why.bound)
    free = {name: value for name, value in bindings.items() if name not in given}
    return Step(rewrite.name, rewrite.forward != move.backward, move.path, free)
