"""Explanations: how one term of an e-graph is rewritten into an equal one, step by step.

Nodes of a class are joined by edges: applications of rewrites between exact terms, and congruences,
which are explained by their operands. An edge is explained only by older ones, so this ends. Among
the ways that there are, one of fewest steps is taken, with few conditions.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from soapstone.rules.proving.egraph import ILL_TYPED, Applied, EGraph
from soapstone.rules.proving.matcher import HEADS

_NEVER = float("inf")


@dataclass(frozen=True)
class Move:
    """A step of an explanation: at a path, the rewrite was used forward or backward."""

    path: tuple[int, ...]
    why: Applied
    backward: bool
    before: int
    after: int


class Explainer:
    """Explanations of a graph as it is.

    If `directed`, no rewrite is used backward whose left side its right does not determine.
    """

    def __init__(self, graph: EGraph, *, directed: bool = False) -> None:
        self.graph = graph
        self.directed = directed
        self._costs: dict[tuple[int, bool], float] = {}  # of congruences, each way

    def explain(self, first: int, second: int) -> list[Move] | None:
        """Return how to rewrite one node's term into another's, or None if there is no such way.

        The moves are replayed: every term on the way is typed, and splits cut where they did. If a
        shortest way fails at that, one that passes only terms of the same type below splits is
        tried.
        """
        for keep_types in (False, True):
            moves: list[Move] = []
            if not self._moves(first, second, (), len(self.graph.edges), keep_types, moves):
                continue
            current = first
            for move in moves:
                current = self._moved(current, move.path, move) if current >= 0 else ILL_TYPED
            if current == second:
                return moves
        return None

    def _moved(self, node: int, path: tuple[int, ...], move: Move) -> int:
        """Return the node with the part at a path replaced, or ILL_TYPED."""
        if not path:
            return move.after if node == move.before else ILL_TYPED
        operands = list(self.graph.children[node])
        old = operands[path[0]]
        new = operands[path[0]] = self._moved(old, path[1:], move)
        head = self.graph.heads[node]
        if new < 0 or (
            HEADS.split[head] and self.graph.cut(head, new) != self.graph.cut(head, old)
        ):
            return ILL_TYPED
        return self.graph.node(head, tuple(operands))

    def _moves(
        self,
        first: int,
        second: int,
        path: tuple[int, ...],
        before: int,
        keep_types: bool,
        moves: list[Move],
    ) -> bool:
        _, route = self._shortest(first, second, before, keep_types)
        if route is None:
            return False
        here = first
        for number in route:
            edge = self.graph.edges[number]
            there = edge.second if edge.first == here else edge.first
            if edge.why is not None:
                backward = here != edge.first
                moves.append(Move(path, edge.why, backward, here, there))
            else:
                split = HEADS.split[self.graph.heads[here]]
                pairs = zip(self.graph.children[here], self.graph.children[there])
                for position, (one, other) in enumerate(pairs):
                    inside = (*path, position)
                    kept = keep_types or split
                    if not self._moves(one, other, inside, number, kept, moves):
                        return False
            here = there
        return True

    def _shortest(
        self, first: int, second: int, before: int, keep_types: bool
    ) -> tuple[float, list[int] | None]:
        """Return the fewest steps between two nodes over edges older than one, and the edges."""
        if first == second:
            return 0.0, []
        types = {self.graph.types[first], self.graph.types[second]} if keep_types else None
        costs = {first: 0.0}
        came: dict[int, int] = {}
        queue = [(0.0, first)]
        while queue:
            cost, node = heapq.heappop(queue)
            if node == second:
                route = []
                while node != first:
                    route.append(came[node])
                    edge = self.graph.edges[came[node]]
                    node = edge.second if edge.first == node else edge.first
                return cost, route[::-1]
            if cost > costs[node]:
                continue
            for number in self.graph.edges_of[node]:
                if number >= before:
                    break
                edge = self.graph.edges[number]
                backward = edge.first != node
                there = edge.first if backward else edge.second
                if types is not None and self.graph.types[there] not in types:
                    continue
                total = cost + self._cost(number, backward)
                if total < costs.get(there, _NEVER):
                    costs[there] = total
                    came[there] = number
                    heapq.heappush(queue, (total, there))
        return _NEVER, None

    def _cost(self, number: int, backward: bool) -> float:
        """Return how many steps an edge stands for; those under conditions count for more."""
        edge = self.graph.edges[number]
        if edge.why is not None:
            usable = not (self.directed and backward) or edge.why.rewrite.reversible
            return 1.0 + 0.5 * bool(edge.why.rewrite.where) if usable else _NEVER
        backward = backward and self.directed
        found = self._costs.get((number, backward))
        if found is None:
            one, other = (edge.second, edge.first) if backward else (edge.first, edge.second)
            split = HEADS.split[self.graph.heads[one]]
            pairs = zip(self.graph.children[one], self.graph.children[other])
            found = sum(self._shortest(a, b, number, split)[0] for a, b in pairs)
            self._costs[number, backward] = found
        return found
