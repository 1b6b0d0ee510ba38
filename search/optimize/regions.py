"""Regions of a graph across which no rule ever matches, so that each can be searched alone.

Operators in one match belong together. So do operators that could be in one match after others were
rewritten, which is decided by symbols alone: if some state of one region has an operator next to
one of another region, and the left side of a rule has such neighbours, the regions are joined. What
remains separate always is: the graphs reachable from the whole are the products of those reachable
from its regions. Equal regions are explored once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise, product

import networkx as nx

from soapstone.ir.term import Term, subterms
from soapstone.search.optimize.backtracking import Budget, Came, Step
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pieces import Piece, copied, piece_of
from soapstone.search.optimize.pool import Application, Pool
from soapstone.search.optimize.rewrite import applied
from soapstone.search.rules.rulebook import Directed, Rulebook

Values = tuple[int, ...]
Operator = Values  # of the graph: known by its outputs


@dataclass(frozen=True)
class Reached:
    """Every graph reachable from one, with the step that led to it."""

    came: Came
    complete: bool


@dataclass(frozen=True)
class Region:
    """A region of a graph.

    Attributes:
        piece: its place in the graph.
        stands: for each leaf of the states, the value of the graph that it stands for.
        reached: every graph that rules make of it, on leaves of its own.
    """

    piece: Piece
    stands: Mapping[int, int]
    reached: Reached

    @cached_property
    def states(self) -> tuple[Values, ...]:
        """The graphs of the region; the first is the original one."""
        return tuple(self.reached.came)

    @property
    def complete(self) -> bool:
        """Whether all states are known."""
        return self.reached.complete


class Regions:
    """Finds the regions of graphs under a set of rules."""

    def __init__(self, pool: Pool, book: Rulebook, budget: Budget) -> None:
        self.budget = budget
        self._pool = pool
        self._book = book
        self._matcher = Matcher(pool)
        self._near = neighbours(book)
        self._reached: dict[Values, Reached] = {}

    def of(self, outputs: Values) -> list[Region]:
        """Return the regions of a graph that have more than one state, in order."""
        groups = self._matched(outputs)
        while True:
            groups = self._convex(outputs, groups)
            regions = [self._region(outputs, group) for group in groups]
            joined = self._joined(groups, regions)
            if len(joined) == len(groups):
                return [region for region in regions if len(region.states) > 1]
            groups = joined

    def reached(self, outputs: Values) -> Reached:
        """Return every graph that rules make of one, breadth first."""
        if outputs not in self._reached:
            came: Came = {outputs: None}
            waiting = deque([outputs])
            while waiting and len(came) <= self.budget.candidates and not self.budget.over:
                graph = waiting.popleft()
                for new, step in self._rewritten(graph):
                    if new not in came:
                        came[new] = graph, step
                        waiting.append(new)
            self._reached[outputs] = Reached(came, not waiting)
        return self._reached[outputs]

    def _rewritten(self, graph: Values) -> Iterator[tuple[Values, Step]]:
        for rule, found in self._matcher.every(self._book, places(self._pool, graph)):
            for number, match in enumerate(found):
                new = applied(self._pool, graph, [match])
                if new is not None:
                    yield new, Step(rule.name, number)

    def _operators(self, outputs: Values) -> list[Operator]:
        """Return the operators of a graph that depend on its inputs, in order."""
        pool = self._pool
        return list(
            dict.fromkeys(
                maker.outputs
                for value in pool.order(outputs)
                if isinstance(maker := pool.makers[value], Application) and not pool.fixed[value]
            )
        )

    def _matched(self, outputs: Values) -> list[list[Operator]]:
        """Return the operators of a graph, grouped by common matches."""
        pool = self._pool
        graph = nx.Graph()
        graph.add_nodes_from(self._operators(outputs))
        for _, found in self._matcher.every(self._book, places(pool, outputs)):
            for match in found:
                stop = frozenset(match.values.values()).difference(match.roots)
                inside = [v for v in pool.order(match.roots, stop) if v not in stop]
                makers = [pool.makers[v] for v in inside if not pool.fixed[v]]
                names = [maker.outputs for maker in makers if isinstance(maker, Application)]
                graph.add_edges_from(pairwise(names))
        return [list(group) for group in nx.connected_components(graph)]

    def _convex(
        self, outputs: Values, groups: Sequence[Sequence[Operator]]
    ) -> list[list[Operator]]:
        """Return groups such that no path leaves one and returns to it, in order."""
        pool = self._pool
        number = {operator: n for n, group in enumerate(groups) for operator in group}
        flow = nx.DiGraph()
        flow.add_nodes_from(range(len(groups)))
        for operator, n in number.items():
            for value in pool.operands(operator[0]):
                maker = pool.makers[value]
                if isinstance(maker, Application) and maker.outputs in number:
                    flow.add_edge(number[maker.outputs], n)
        place = {operator: at for at, operator in enumerate(self._operators(outputs))}
        merged = nx.condensation(flow)
        members = nx.get_node_attributes(merged, "members")
        return [
            sorted((o for n in members[node] for o in groups[n]), key=place.__getitem__)
            for node in nx.topological_sort(merged)
        ]

    def _region(self, outputs: Values, group: Sequence[Operator]) -> Region:
        pool = self._pool
        inside = [value for operator in group for value in operator]
        readers = {operator[0] for operator in self._operators(outputs)}
        piece = piece_of(pool, inside, outputs, readers)
        copy, stands = copied(pool, piece, {})
        return Region(piece, stands, self.reached(copy))

    def _joined(
        self, groups: Sequence[list[Operator]], regions: Sequence[Region]
    ) -> list[list[Operator]]:
        """Return groups, joined where some rule could match across them in some state."""
        around: dict[object, list[tuple[int, Surface]]] = defaultdict(list)
        for number, region in enumerate(regions):
            for value, surface in self._surfaces(region).items():
                maker = self._pool.makers[value]
                whole = maker.outputs if isinstance(maker, Application) else value
                around[whole].append((number, surface))
        graph = nx.Graph()
        graph.add_nodes_from(range(len(groups)))
        for those in around.values():
            for (one, first), (other, second) in combinations(those, 2):
                if one != other and self._near.meet(first, second):
                    graph.add_edge(one, other)
        return [
            [operator for number in sorted(part) for operator in groups[number]]
            for part in nx.connected_components(graph)
        ]

    def _surfaces(self, region: Region) -> Mapping[int, Surface]:
        """Return, for each value at the border, the symbols that make and read it in any state."""
        pool = self._pool
        found: dict[int, Surface] = defaultdict(Surface)
        for state in region.states:
            readers = places(pool, state).readers
            for value, made in zip(region.piece.outputs, state):
                found[value].makes.update(_said(pool, made))
            border = (*region.stands.items(), *zip(state, region.piece.outputs))
            for inside, value in border:
                for reader in readers.get(inside, ()):
                    found[value].reads.update(_said(pool, reader))
        return found


def _said(pool: Pool, value: int) -> set[str]:
    return {reading.symbol for reading in pool.readings(value)}


@dataclass
class Surface:
    """The symbols that make a value, and those that read it, in one region."""

    makes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Neighbours:
    """The symbols that are next to each other in the left side of some rule.

    Attributes:
        above: (reader, operand) pairs.
        beside: pairs that may read one value in two outputs of a rule.
    """

    above: frozenset[tuple[str, str]]
    beside: frozenset[tuple[str, str]]

    def meet(self, one: Surface, other: Surface) -> bool:
        """Return whether a rule could match across a value that two regions make or read."""
        return not (
            self.above.isdisjoint(product(one.reads, other.makes))
            and self.above.isdisjoint(product(other.reads, one.makes))
            and self.beside.isdisjoint(product(one.reads, other.reads))
        )


def neighbours(book: Rulebook) -> Neighbours:
    """Return the symbols that are next to each other in the left sides of rules."""
    above: set[tuple[str, str]] = set()
    beside: set[tuple[str, str]] = set()
    for rule in book.rules:
        for term in subterms(rule.left):
            above.update((term.symbol, o.symbol) for o in term.operands if not o.is_variable)
        beside.update(_beside(rule))
    return Neighbours(frozenset(above), frozenset(beside))


def _beside(rule: Directed) -> Iterator[tuple[str, str]]:
    """Yield symbols that may read one value: in two outputs, or where a size is proposed."""
    readers = [{t.symbol for t in subterms([term]) if _at_leaf(t)} for term in rule.left]
    if rule.open:
        readers += [set(rule.symbols)] * 2
    for one, other in combinations(readers, 2):
        for pair in ((a, b) for a in one for b in other):
            yield pair
            yield pair[::-1]


def _at_leaf(term: Term) -> bool:
    return any(not operand.operands for operand in term.operands)
