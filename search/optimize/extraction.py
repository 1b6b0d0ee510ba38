"""Extraction of cheap graphs from an e-graph: one node for each class needed, without cycles.

The cost of a node depends on its neighbours, since lowering fuses what it can. Here it is the
amount that the node adds to the price of the operands with which it was first met: nothing for a
bias, a view, or a concatenation in place. The sum of these prices ranks graphs; every node counts
once however often it is read (TENSAT, section 5, uses an integer program for this; its greedy
choice by trees never shares). Starting from the given graph and from the greedy choice, the ranking
is improved by moves: one class changes its node, or all classes take what a rule and those before
it made of them, so a product of eight is tried even if products of two gain nothing. The best
graphs by this sum are then priced exactly, and improvement continues by exact prices, likely moves
first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from soapstone.search.optimize.backtracking import Budget, Price
from soapstone.search.optimize.egraph import EGraph, Union
from soapstone.search.optimize.pieces import Piece, copied
from soapstone.search.optimize.pool import Application, Leaf, Pool

Values = tuple[int, ...]
LocalPrice = Callable[[Values], float]
Choice = Mapping[int, int]  # a node for each class
_ROUNDING = 1e-9
NOTHING: Choice = MappingProxyType({})


class NodePrices:
    """The amounts that nodes add to the prices of their operands.

    price: returns the cost of values; only asked for operators on leaves of their own.
    """

    def __init__(self, pool: Pool, price: LocalPrice) -> None:
        self._pool = pool
        self._price = price
        self._known: dict[Values, float] = {}
        self._copies: dict[Values, float] = {}

    def __call__(self, value: int) -> float:
        """Return the price of the operator that makes a value; weights are computed in advance."""
        pool = self._pool
        maker = pool.makers[value]
        if isinstance(maker, Leaf) or pool.fixed[value]:
            return 0.0
        price = self._known.get(maker.outputs)
        if price is None:
            inner = tuple(dict.fromkeys(v for v in maker.inputs if self._is_made(v)))
            stop = tuple(v for v in maker.inputs if v not in inner)
            stop += tuple(v for i in inner for v in pool.operands(i))
            stop = tuple(dict.fromkeys(v for v in stop if not pool.fixed[v] and v not in inner))
            both = self._copied(maker.outputs, stop)
            price = max(0.0, both - self._copied(inner, stop)) if inner else both
            self._known[maker.outputs] = price
        return price

    def _is_made(self, value: int) -> bool:
        return isinstance(self._pool.makers[value], Application) and not self._pool.fixed[value]

    def _copied(self, outputs: Values, stop: Values) -> float:
        copy, _ = copied(self._pool, Piece(outputs, stop), {})
        if copy not in self._copies:
            self._copies[copy] = self._price(copy)
        return self._copies[copy]


class Extraction:
    """Extracts graphs from an e-graph that no longer grows."""

    def __init__(
        self, graph: EGraph, unions: Sequence[Union], outputs: Values, price: NodePrices
    ) -> None:
        pool = self._pool = graph.pool
        self._graph = graph
        self._wanted = tuple(map(graph.find, outputs))
        self._nodes: dict[int, list[int]] = {}
        self._operands: dict[int, Values] = {}  # of a node: classes that are not weights
        fixed = {group: [v for v in ms if pool.fixed[v]] for group, ms in graph.members.items()}
        weights = {group for group, found in fixed.items() if found}
        for group, members in graph.members.items():
            self._nodes[group] = fixed[group][:1] or members
            for node in self._nodes[group]:
                inputs = () if group in weights else map(graph.find, pool.operands(node))
                self._operands[node] = tuple(i for i in inputs if i not in weights)
        self._weights = {group: found[0] for group, found in fixed.items() if found}
        self._prices = {node: price(node) for node in self._operands}
        makers = ((node, pool.makers[node]) for node in self._operands)
        self._maker = {n: n if isinstance(m, Leaf) else m.outputs[0] for n, m in makers}
        oldest = reversed([v for v in pool.order(outputs) if graph.find(v) not in weights])
        self.given = {graph.find(v): graph.node(v) for v in oldest}
        self.cheapest = self._greedy()
        self.moves = self._made(unions)

    # -- choices ----------------------------------------------------------------------------------

    def _greedy(self) -> dict[int, int]:
        """Return the cheapest node of every class as a tree; such a choice has no cycles."""
        best: dict[int, float] = {}
        chosen: dict[int, int] = {}
        readers: dict[int, list[tuple[int, int]]] = {}
        queue = []
        for group, nodes in self._nodes.items():
            for node in nodes:
                for operand in set(self._operands[node]):
                    readers.setdefault(operand, []).append((group, node))
                if not self._operands[node]:
                    queue.append((self._prices[node], group, node))
        missing = {node: len(set(operands)) for node, operands in self._operands.items()}
        heapq.heapify(queue)
        while queue:
            cost, group, node = heapq.heappop(queue)
            if group in best:
                continue
            best[group], chosen[group] = cost, node
            for reader, above in readers.get(group, ()):
                missing[above] -= 1
                if not missing[above]:
                    total = self._prices[above] + sum(best[o] for o in self._operands[above])
                    heapq.heappush(queue, (total, reader, above))
        return chosen

    def order(self, choice: Choice, changed: Choice = NOTHING) -> list[int] | None:
        """Return the nodes of a choice, operands first; None if a class depends on itself."""
        operands, ordered = self._operands, []
        done: dict[int, bool] = {}  # whether a class is, or is being, ordered
        stack = [(group, False) for group in self._wanted]
        while stack:
            group, ready = stack.pop()
            node = changed[group] if group in changed else choice[group]
            if ready:
                done[group] = True
                ordered.append(node)
            elif group not in done:
                done[group] = False
                stack.append((group, True))
                for operand in operands[node]:
                    if operand not in done:
                        stack.append((operand, False))
                    elif not done[operand]:
                        return None
        return ordered

    def cost(self, choice: Choice, changed: Choice = NOTHING) -> float:
        """Return the sum of the prices of the nodes that a choice needs, each counted once."""
        order = self.order(choice, changed)
        if order is None:
            return math.inf
        makers = {self._maker[node]: self._prices[node] for node in order}
        return sum(makers.values())

    def values(self, choice: Choice) -> Values:
        """Return the graph of a choice, as values of the pool."""
        pool, find = self._pool, self._graph.find
        made = dict(self._weights)
        for node in self.order(choice) or ():
            maker, new = pool.makers[node], node
            if isinstance(maker, Application) and not pool.fixed[node]:
                inputs = tuple(i if pool.fixed[i] else made[find(i)] for i in maker.inputs)
                outputs = pool.apply_normal(maker.operator, maker.items, inputs, maker.name)
                new = outputs[maker.outputs.index(node)]
            made[find(node)] = new
        return tuple(made[group] for group in self._wanted)

    # -- moves ------------------------------------------------------------------------------------

    def _made(self, unions: Sequence[Union]) -> list[Choice]:
        """Return the moves: nodes that may be chosen together.

        A move is one node of a class; the outputs of a rule, on either side; or everything a rule
        has made, after what had to be made for it to match.
        """
        moves: dict[tuple[tuple[int, int], ...], None] = {}
        steps: list[Choice] = []
        before: list[int] = []  # the unions that one needs, and itself, as bits
        maker: dict[int, int] = {}  # of a node: the union that first made it
        for number, union in enumerate(unions):
            needed = self._nodes_of(union.left, union)
            made = self._nodes_of(union.right, union)
            bits = 1 << number
            for node in needed:
                if node in maker:
                    bits |= before[maker[node]]
            before.append(bits)
            for node in made:
                maker.setdefault(node, number)
            steps.append({self._graph.find(node): node for node in made})
            together: dict[int, int] = {}
            while bits:
                last = bits & -bits
                together.update(steps[last.bit_length() - 1])
                bits ^= last
            for side in (union.left, union.right):
                roots = {self._graph.find(v): self._graph.node(v) for v in side}
                moves[tuple(sorted(roots.items()))] = None
            moves[tuple(sorted(together.items()))] = None
        for group, nodes in self._nodes.items():
            moves.update(dict.fromkeys(((group, node),) for node in nodes if len(nodes) > 1))
        return [known for move in moves if (known := self._live(move))]

    def _live(self, move: Iterable[tuple[int, int]]) -> Choice:
        """Return a move without classes of weights, for which there is nothing to choose."""
        return {group: node for group, node in move if node in self._nodes[group]}

    def _nodes_of(self, side: Values, union: Union) -> list[int]:
        """Return the nodes of one side of a rule, without those bound to its variables."""
        stop = frozenset(union.values.values())
        order = self._pool.order(side, stop)
        return [self._graph.node(v) for v in order if v not in stop and not self._pool.fixed[v]]

    def improved(self, choice: Choice, budget: Budget) -> Choice:
        """Return a choice that no move makes cheaper."""
        cost = self.cost(choice)
        while not budget.over:
            better = choice
            for estimate, move in self._ranked(choice, budget, cost):
                if better is not choice:
                    estimate = self.cost(better, move)
                if estimate < cost * (1 - _ROUNDING):
                    better, cost = {**better, **move}, estimate
            if better is choice:
                break
            choice = better
        return choice

    def _ranked(self, choice: Choice, budget: Budget, most: float) -> list[tuple[float, Choice]]:
        """Return the moves after which a choice costs at most `most`, best first."""
        needed = {self._graph.find(node): node for node in self.order(choice) or ()}
        ranked = []
        for move in self.moves:
            if budget.over:
                break
            if any(needed.get(group, node) != node for group, node in move.items()):
                cost = self.cost(choice, move)
                if cost <= most:
                    ranked.append((cost, move))
        return sorted(ranked, key=lambda each: each[0])

    def climb(
        self, price: Price, met: list[tuple[float, Values]], alpha: float, budget: Budget
    ) -> bool:
        """Append ever cheaper graphs to `met`; return whether no move was left."""
        best: Choice = {**self.cheapest, **self.given}
        seen = {graph for _, graph in met}

        def better(choice: Choice) -> bool:
            graph = self.values(choice)
            if graph in seen:
                return False
            seen.add(graph)
            cost = price(graph)
            if cost >= met[-1][0] * budget.gain:
                return False
            met.append((cost, graph))
            return True

        for start in (best, self.cheapest):
            local = self.improved(start, budget)
            if better(local):
                best = local
        while True:
            before = best
            for _, move in self._ranked(best, budget, alpha * self.cost(best)):
                if budget.over or len(seen) >= budget.candidates:
                    return False
                if better({**best, **move}):
                    best = {**best, **move}
            if best is before:
                return not budget.over
