"""Equality saturation: all rewrites of a graph at once, and the best graph among them.

Backtracking takes a rewrite or leaves it; an e-graph takes all and keeps what was there, so no
order of rewrites needs to be guessed (TENSAT, Yang et al., MLSys 2021). Rules are applied until
nothing new is found or a limit is reached, the cheapest graphs are extracted (`extraction.py`), and
a sequence of substitutions is derived that leads to the best one (`derivation.py`) or as near to it
as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice

from soapstone.ir.term import Term
from soapstone.search.optimize.backtracking import ENDS, Budget, Cheapest, Price, Values
from soapstone.search.optimize.derivation import Derivation
from soapstone.search.optimize.egraph import ClassMatcher, EGraph, Union
from soapstone.search.optimize.extraction import Extraction, NodePrices
from soapstone.search.optimize.match import Match, Places, Seen, depth
from soapstone.search.optimize.pool import Pool
from soapstone.search.rules.rulebook import Directed, Rulebook

_DEEP = 8  # operators above one another in a rule: no rule has more
_RULES = 16  # of which each may take so much of the nodes in one iteration


@dataclass(frozen=True)
class Limits:
    """The limits on the growth of an e-graph.

    Attributes:
        nodes: the number of nodes after which no more rules are applied.
        iterations: the largest number of rounds of matching all rules.
        seconds: the time after which no more rules are applied.
    """

    nodes: int = 1000
    iterations: int = 30
    seconds: float = 30.0


@dataclass(frozen=True)
class Saturated:
    """An e-graph, the unions that merged its classes, oldest first, and whether it is saturated."""

    graph: EGraph
    unions: tuple[Union, ...]
    complete: bool


def saturate(
    pool: Pool,
    outputs: Values,
    book: Rulebook,
    price: Price,
    nodes: NodePrices,
    *,
    alpha: float = 1.05,
    budget: Budget | None = None,
    limits: Limits | None = None,
) -> Cheapest:
    """Return the cheapest graph found in the saturated e-graph of a graph.

    Args:
        price: returns the cost of a graph.
        nodes: the costs of single nodes, by which graphs are ranked.
        alpha: graphs whose rank exceeds this times the best are not priced.
    """
    budget, limits = budget or Budget(), limits or Limits()
    met: list[tuple[float, Values]] = []
    asked = count()

    def priced(values: Values) -> float:
        next(asked)
        return price(values)

    met.append((priced(outputs), outputs))
    found = Cheapest(outputs, met[0][0], (), 1, False)
    try:
        exploring = budget.deadline.part(1 / 2).within(limits.seconds)
        done = explored(pool, outputs, book, limits, lambda: exploring.over)
        derivation = Derivation(pool, book, done.graph, done.unions)
        extraction = Extraction(done.graph, done.unions, outputs, nodes)
        try:
            complete = extraction.climb(priced, met, alpha, budget) and done.complete
            found = replace(found, complete=complete)
        finally:  # what was met before an interrupt counts
            found = _led(derivation, found, met, price, budget.gain)
    except ENDS:
        budget.deadline.stop()
    history = tuple(cost for cost, _ in met)
    return replace(found, candidates=next(asked), history=history)


def _led(
    derivation: Derivation,
    found: Cheapest,
    met: list[tuple[float, Values]],
    price: Price,
    gain: float,
) -> Cheapest:
    """Return the cheapest graph on the derivations that lead to the graphs met."""
    outputs = found.outputs
    for cost, graph in reversed(met[1:]):
        if cost >= found.cost:
            break
        reached, steps = derivation.toward(outputs, graph)
        cost = cost if reached == graph else price(reached)
        if cost < found.cost * gain:
            found = replace(found, outputs=reached, cost=cost, steps=steps)
    return found


def explored(
    pool: Pool, outputs: Values, book: Rulebook, limits: Limits, over: Callable[[], bool]
) -> Saturated:
    """Return the e-graph of a graph after applying rules until nothing is new, or to a limit."""
    graph = EGraph(pool, outputs)
    first, unions = len(graph), list[Union]()
    agenda = _Agenda(graph, book, max(1, limits.nodes // _RULES))
    for _ in range(limits.iterations):
        matches = agenda.matches(over)
        if not matches:
            return Saturated(graph, tuple(unions), not over())
        for match in matches:
            if len(graph) - first >= limits.nodes or over():
                return Saturated(graph, tuple(unions), False)
            union = graph.union(match)
            if union is not None and union.right != union.left:
                unions.append(union)
    return Saturated(graph, tuple(unions), False)


class _Agenda:
    """The matches to apply in each iteration, limited for each rule so that none fills the e-graph.

    Rules with several outputs match every pair of siblings, and pairs of pairs. So such a rule is
    applied at matches without common outputs, newest outputs first, and starts over only when none
    is left: 8 siblings are one after three iterations, and then other pairs follow. Other rules are
    only matched above classes that changed.
    """

    def __init__(self, graph: EGraph, book: Rulebook, share: int) -> None:
        self._graph = graph
        self._book = book
        self._share = share
        self._seen: dict[str, Seen] = {}
        self._born: dict[int, int] = {}  # in which iteration a class came up
        self._members: dict[int, Values] = {}  # of each class, when rules were last looked for
        self._begun: set[str] = set()  # rules of which no match was left
        self._merged: dict[str, set[int]] = {}  # by rule: outputs of matches in this round
        self._iteration = 0

    def matches(self, over: Callable[[], bool]) -> list[Match]:
        """Return the matches to apply next; empty when the e-graph is saturated."""
        self._iteration += 1
        members = {group: tuple(nodes) for group, nodes in self._graph.members.items()}
        for group in members:
            self._born.setdefault(group, self._iteration)
        changed = [group for group in members if self._members.get(group) != members[group]]
        self._members = members
        matcher = ClassMatcher(self._graph, self._born)
        (every,) = matcher.above(members, 1)
        near = matcher.above(changed, _DEEP + 1)
        found: list[Match] = []
        for rule in self._book.rules:
            if rule.symbols <= every.symbols and not over():
                where = near[_height(rule)] if rule.name in self._begun else every
                some = list(islice(self._of(rule, matcher, where), self._share))
                full = len(some) == self._share or len(rule.left) > 1
                (self._begun.discard if full else self._begun.add)(rule.name)
                found += some
        return found

    def _of(self, rule: Directed, matcher: ClassMatcher, where: Places) -> Iterator[Match]:
        """Yield new matches of a rule."""
        seen = self._seen.setdefault(rule.name, set())
        matcher.taken = set()
        if len(rule.left) == 1:
            yield from matcher.matches(rule, where, seen)
            return
        find = self._graph.find
        for taken in (self._merged.get(rule.name, ()), ()):
            matcher.taken = self._merged[rule.name] = set(map(find, taken))
            for match in matcher.matches(rule, matcher.newest, seen):
                matcher.taken.update(map(find, match.roots))
                yield match
            if len(matcher.taken) > len(taken):
                break


@lru_cache(maxsize=1 << 14)
def _height(rule: Directed) -> int:
    """Return how far above a changed class a new match of a rule may be."""
    (term,) = rule.left
    leaves = Counter(leaf for part in _walk(term) if not (leaf := part).operands)
    return min(_DEEP, depth(term) - (leaves.total() == len(leaves)))


def _walk(term: Term) -> Iterator[Term]:
    yield term
    for operand in term.operands:
        yield from _walk(operand)
