"""Derivation of the substitutions that lead from a graph to one extracted from its e-graph.

In an e-graph a value may be many nodes at once, in a graph only one. So the unions that merged
classes must be put in sequence. From the outputs down, wherever the graph and the wanted one have
different nodes of a class, the next union on the shortest path between the two is applied, after
whatever it needs in order to match. A union may be undone if its rule is known in the other
direction. If two unions need the same value to be different nodes, no sequence exists and the
derivation stops there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soapstone.search.optimize.backtracking import Step, Values
from soapstone.search.optimize.egraph import EGraph, Union
from soapstone.search.optimize.match import Match, Matcher, Places, places
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.rewrite import applied
from soapstone.search.rules.rulebook import Directed, Rulebook

_MOST = 8  # times the values of both graphs: steps after which a sequence is given up


@dataclass(frozen=True)
class _Way:
    """A union as a step from one node to another; `rule` performs it, from `left`."""

    rule: Directed
    union: Union
    left: Values
    node: int


class Derivation:
    """Finds sequences of substitutions in an e-graph that no longer grows."""

    def __init__(self, pool: Pool, book: Rulebook, graph: EGraph, unions: Sequence[Union]) -> None:
        self._pool = pool
        self._graph = graph
        self._matcher = Matcher(pool)
        self._ways: dict[int, list[_Way]] = {}
        for union in unions:
            sides = [(union.rule, union.left, union.right)]
            name = union.rule.name
            back = book.by_name.get(name[:-1] if name.endswith("'") else name + "'")
            if back is not None:
                sides.append((back, union.right, union.left))
            for rule, left, right in sides:
                for one, other in zip(left, right):
                    way = _Way(rule, union, left, graph.node(other))
                    self._ways.setdefault(graph.node(one), []).append(way)

    def toward(self, outputs: Values, wanted: Values) -> tuple[Values, tuple[Step, ...]]:
        """Return the graph nearest to `wanted` that a sequence of steps reaches, and the steps."""
        steps: list[Step] = []
        seen = {outputs}
        most = _MOST * len(self._pool.order((*outputs, *wanted)))
        while outputs != wanted and len(steps) < most:
            moves = self._next(outputs, wanted)
            move = next((move for move in moves if move[0] not in seen), None)
            if move is None:
                break
            outputs = move[0]
            seen.add(outputs)
            steps.append(move[1])
        return outputs, tuple(steps)

    def _next(self, outputs: Values, wanted: Values) -> Iterator[tuple[Values, Step]]:
        """Yield graphs one step nearer to the wanted one, changes at outputs first."""
        have = self._versions(outputs)
        for group, nodes in reversed(self._versions(wanted).items()):
            (node, *_) = nodes
            for old in have.get(group, ()):
                if old != node:
                    yield from self._toward(outputs, have, old, node, {group})

    def _versions(self, outputs: Values) -> dict[int, list[int]]:
        """Return the nodes that a graph has of each class, without weights."""
        found: dict[int, list[int]] = {}
        for value in self._pool.order(outputs):
            if not self._pool.fixed[value]:
                self._graph.add(value)
                nodes = found.setdefault(self._graph.find(value), [])
                node = self._graph.node(value)
                if node not in nodes:
                    nodes.append(node)
        return found

    def _toward(
        self, outputs: Values, have: dict[int, list[int]], old: int, node: int, tried: set[int]
    ) -> Iterator[tuple[Values, Step]]:
        """Yield graphs after the first step on the path from one node of a class to another.

        If that does not match yet, it is the first step towards what it needs.
        """
        way = self._way(old, node)
        if way is None:
            return
        matched = False
        for new, step in self._applied(outputs, way):
            matched = True
            yield new, step
        if matched:
            return
        stop = frozenset(way.union.values.values())
        for value in reversed(self._pool.order(way.left, stop)):
            if value in stop or self._pool.fixed[value]:
                continue
            group, needed = self._graph.find(value), self._graph.node(value)
            versions = have.get(group, [])
            if group not in tried and needed not in versions:
                for other in versions:
                    yield from self._toward(outputs, have, other, needed, tried | {group})

    def _way(self, old: int, node: int) -> _Way | None:
        """Return the first step on a shortest path between nodes of a class."""
        first: dict[int, _Way | None] = {old: None}
        queue = deque([old])
        while queue:
            one = queue.popleft()
            if one == node:
                return first[one]
            for way in self._ways.get(one, ()):
                if way.node not in first:
                    first[way.node] = first[one] or way
                    queue.append(way.node)
        return None

    def _applied(self, outputs: Values, way: _Way) -> Iterator[tuple[Values, Step]]:
        """Yield the graphs that a step makes where its rule matches the same classes."""
        find = self._graph.find
        roots = tuple(map(find, way.left))
        where = places(self._pool, outputs)
        near = {
            symbol: [value for value in values if find(value) in roots]
            for symbol, values in where.values.items()
        }
        for match in self._matcher.matches(way.rule, Places(near, where.readers)):
            if tuple(map(find, match.roots)) == roots and self._is_same(match, way.union):
                new = applied(self._pool, outputs, [match])
                if new is not None:
                    yield new, Step(way.rule.name, self._number(match, where))

    def _is_same(self, match: Match, union: Union) -> bool:
        find = self._graph.find
        names = match.values.keys() & union.values.keys()
        return all(find(match.values[name]) == find(union.values[name]) for name in names)

    def _number(self, match: Match, where: Places) -> int:
        """Return the number of a match among all matches of its rule."""
        every = self._matcher.matches(match.rule, where)
        return next(number for number, each in enumerate(every) if each == match)
