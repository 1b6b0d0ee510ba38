"""Rules that follow from smaller ones, so that the optimiser may leave them out.

A rule is derivable if its target is reached from its source by applying smaller rules, each in a
direction in which the left side determines the right; and its source from its target, where that
direction can be used too. Unlike a proof this may start from one side only, since an optimiser has
no other. Marks lose no opportunity (TASO, section 2.5): what a marked rule does, others do in a few
steps. Parameter variables of the rule stay opaque words; they and the extents are given values for
typing, and a derivation is checked again at other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from soapstone.ir.term import Term, Value, instantiate, size
from soapstone.rules.proving.egraph import ILL_TYPED, EGraph
from soapstone.rules.proving.explain import Explainer, Move
from soapstone.rules.proving.matcher import HEADS, Rewrite
from soapstone.rules.proving.saturate import Budget, Problem, Saturation, System
from soapstone.rules.workers import spawned
from soapstone.search.rules.rule import Rule, Terms, usable
from soapstone.search.rules.sample import drawn
from soapstone.search.rules.shapes import Type

BUDGET = Budget(nodes=400, generations=4)
_BATCH = 32
_DRAWS = 5  # of shapes, of which the one with most distinct extents is used
_AGAIN = 2  # further ones at which a derivation is checked

Ranks: TypeAlias = "Mapping[str, int]"
Progress: TypeAlias = "Callable[[int, int], None]"


@dataclass(frozen=True)
class Use:
    """A step of a derivation: output `output` of a rule, applied at a path.

    `forward` says whether from the rule's source to its target. `tensors` and `values` bind its
    variables.
    """

    rule: str
    forward: bool
    output: int
    path: tuple[int, ...]
    tensors: Mapping[str, Term]
    values: Mapping[str, Value]


Derivation: TypeAlias = "tuple[tuple[Use, ...], ...]"  # for each output, from source to target


@dataclass(frozen=True)
class _Instance:
    """Values of parameters and types of leaves at which a rule fits."""

    values: Mapping[str, Value]
    types: Mapping[Term, Type]

    def graph(self) -> EGraph:
        graph = EGraph(self.values)
        for term, type_ in self.types.items():
            graph.leaf(term, type_)
        return graph

    @property
    def distinct(self) -> int:
        """How many extents differ from one another and from 1."""
        return len({extent for type_ in self.types.values() for extent in type_.shape} - {1})


class Smaller:
    """Rules to derive others from, in the directions in which they can be used."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.system = System()
        self._rewrites: dict[tuple[str, bool], int] = {}
        for rule in rules:
            self.include(rule)

    def include(self, rule: Rule) -> None:
        """Add a rule."""
        for source, target in _directions(rule):
            forward = source == rule.source
            self._rewrites[rule.identity, forward] = len(self.system.rewrites)
            self.system.include(
                Rewrite(rule.identity, forward, source, target, rule.ranks, tuple(rule.guard))
            )

    def derive(self, rule: Rule) -> tuple[Derivation, ...] | None:
        """Return how each usable direction of a rule follows, or None if one was not found to."""
        found = []
        for source, target in _directions(rule):
            derivation = self.reach(rule, source, target)
            if derivation is None:
                return None
            found.append(derivation)
        return tuple(found) or None

    def reach(
        self, rule: Rule, source: Terms, target: Terms, budget: Budget = BUDGET
    ) -> Derivation | None:
        """Return how one side of a rule leads to the other, at all of its ranks, or None."""
        derivation: Derivation | None = None
        for ranks in rule.ranks:
            first, *others = _instances(rule, ranks) or (None,)
            if first is None:
                return None
            if derivation is None:
                derivation = self._search(source, target, first, budget)
                if derivation is None:
                    return None
            elif not self.holds(source, target, derivation, first):
                return None
            if not all(self.holds(source, target, derivation, other) for other in others):
                return None
        return derivation

    def _search(
        self, source: Terms, target: Terms, instance: _Instance, budget: Budget
    ) -> Derivation | None:
        graph = instance.graph()
        starts = [graph.add(term) for term in source]
        if ILL_TYPED in starts:
            return None
        problem = Problem.of(graph)
        spoken = {part.symbol for term in target for part in term.subterms()}
        problem = Problem(problem.nodes, problem.symbols | spoken, problem.values)
        run = _Reaching(graph, self.system, (), problem, starts=starts, target=target)
        if not run.run(budget):
            return None
        chains = []
        explainer = Explainer(graph, directed=True)
        for start, term in zip(starts, target):
            end = graph.add(term)
            moves = explainer.explain(start, end) if end >= 0 else None
            if moves is None:
                return None
            chains.append(tuple(_use(move, graph) for move in moves))
        return tuple(chains)

    def holds(
        self, source: Terms, target: Terms, derivation: Derivation, instance: _Instance
    ) -> bool:
        """Return whether a derivation, replayed at an instance, leads from source to target."""
        graph = instance.graph()
        for term, end, uses in zip(source, target, derivation, strict=True):
            if graph.add(term) < 0:
                return False
            for use in uses:
                number = self._rewrites.get((use.rule, use.forward))
                if number is None:
                    return False
                rewrite = self.system.rewrites[number]
                bound = (
                    *(graph.add(use.tensors[name]) for name in rewrite.tensors),
                    *(use.values[name] for name in rewrite.values),
                )
                if ILL_TYPED in bound or not self.system.allowed(graph, number, bound):
                    return False
                before = _instantiated(rewrite.left[use.output], use)
                after = _instantiated(rewrite.right[use.output], use)
                if term.at(use.path) != before or not _cuts_alike(graph, term, use.path, after):
                    return False
                term = term.replaced(use.path, after)
                if graph.add(term) < 0:
                    return False
            if term != end:
                return False
        return True


def mark_derivable(
    rules: Sequence[Rule], progress: Progress | None = None, *, processes: int = 1
) -> set[str]:
    """Return the identities of the rules that smaller rules make unnecessary.

    Rules are taken in order of size, in batches; each is derived from those of earlier batches that
    were not derived themselves. The batches, so the marks, do not depend on how many processes
    share them.
    """
    marked: set[str] = set()
    kept = Smaller()
    done = 0
    with ExitStack() as ends:
        helpers = [ends.enter_context(spawned(1)) for _ in range(processes if processes > 1 else 0)]
        for batch in _batches(rules):
            if helpers:
                parts = [batch[start :: len(helpers)] for start in range(len(helpers))]
                answers = [one.submit(_derived, part) for one, part in zip(helpers, parts)]
                found = set().union(*(answer.result() for answer in answers))
            else:
                found = {rule.identity for rule in batch if kept.derive(rule) is not None}
            marked |= found
            left = [rule for rule in batch if rule.identity not in found]
            for rule in () if helpers else left:
                kept.include(rule)
            for helper in helpers:
                helper.submit(_include, left)
            done += len(batch)
            if progress is not None:
                progress(done, len(rules))
    return marked


def _batches(rules: Iterable[Rule]) -> Iterator[list[Rule]]:
    """Yield rules by size, in batches; rules that look alike come in different ones."""
    for _, group in groupby(sorted(rules, key=_order), key=lambda rule: _order(rule)[:2]):
        level = list(group)
        count = -(-len(level) // _BATCH)
        for start in range(count):
            yield level[start::count]


def derivable(rule: Rule, smaller: Iterable[Rule]) -> tuple[Derivation, ...] | None:
    """Return how a rule follows from others, for each usable direction, or None."""
    return Smaller(smaller).derive(rule)


_KEPT = Smaller()  # in a helper process: what is kept so far


def _include(rules: Sequence[Rule]) -> None:
    for rule in rules:
        _KEPT.include(rule)


def _derived(rules: Sequence[Rule]) -> set[str]:
    return {rule.identity for rule in rules if _KEPT.derive(rule) is not None}


def _directions(rule: Rule) -> Iterator[tuple[Terms, Terms]]:
    """Yield the directions in which a rule can be used, but not that which applies to anything."""
    for source, target in usable(rule.source, rule.target):
        if not any(term.is_variable for term in source):
            yield source, target


def _order(rule: Rule) -> tuple[int, int, str]:
    sizes = size(rule.source), size(rule.target)
    return max(sizes), sum(sizes), f"{rule.equation} {rule.identity}"


def _use(move: Move, graph: EGraph) -> Use:
    rewrite, bound, output = move.why
    count = len(rewrite.tensors)
    tensors = {name: graph.term(node) for name, node in zip(rewrite.tensors, bound[:count])}
    values = dict(zip(rewrite.values, bound[count:]))
    forward = rewrite.forward != move.backward
    return Use(rewrite.name, forward, output, move.path, tensors, values)


def _instances(rule: Rule, ranks: Ranks) -> list[_Instance]:
    """Return instances of a rule, one with many distinct extents first."""
    every = drawn(rule.source, rule.target, ranks, rule.guard, _DRAWS)
    found = [_Instance(values, types) for values, types in every]
    found.sort(key=lambda instance: -instance.distinct)
    return found[: 1 + _AGAIN]


def _instantiated(pattern: Term, use: Use) -> Term:
    """Return a side of a rule with its variables replaced; tensors and values are apart."""
    if pattern.is_variable:
        return use.tensors[pattern.symbol]
    values = instantiate(Term(pattern.symbol, pattern.parameters), dict(use.values)).parameters
    operands = tuple(_instantiated(operand, use) for operand in pattern.operands)
    return Term(pattern.symbol, values, operands)


def _cuts_alike(graph: EGraph, term: Term, path: tuple[int, ...], after: Term) -> bool:
    """Return whether the splits above a path still cut where they did."""
    for length in range(len(path)):
        whole = term.at(path[:length])
        head = HEADS.number(whole.symbol, whole.parameters)
        if HEADS.split[head]:
            old, new = whole.operands[0], whole.replaced(path[length:], after).operands[0]
            nodes = graph.add(old), graph.add(new)
            if ILL_TYPED in nodes or graph.cut(head, nodes[0]) != graph.cut(head, nodes[1]):
                return False
    return True


@dataclass
class _Reaching(Saturation):
    """Saturation until a graph's terms, which are not in it, are equal to given nodes."""

    starts: Sequence[int] = field(default=(), kw_only=True)
    target: Terms = field(default=(), kw_only=True)

    def reached(self) -> bool:
        graph = self.graph
        for start, term in zip(self.starts, self.target):
            found = graph.find(term)
            if found < 0 or graph.root[found] != graph.root[start]:
                return False
        return True
