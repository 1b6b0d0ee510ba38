"""Exhaustive search: the cheapest of all graphs that rules make of a graph (MetaFlow, section 6.4).

These graphs are the product of the states of the graph's regions (`regions.py`); MetaFlow's
substitutions make 10^12 of ResNet-18. The cost of a state is that of the whole graph with the other
regions unchanged. Lowering may fuse across two adjacent regions, so each pair of states is also
priced in the whole graph. From these sums the cheapest choice follows exactly, by eliminating one
region after another (`elimination.py`). That choice is then priced as a whole graph: if the cost
differs from the sum, lowering reached further, and nothing is certified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx
import numpy as np

from soapstone.search.elimination import Numbers, cheapest
from soapstone.search.optimize.backtracking import ENDS, Budget, Cheapest, Price, Values, steps_to
from soapstone.search.optimize.pieces import moved
from soapstone.search.optimize.pool import Application, Pool
from soapstone.search.optimize.regions import Region, Regions
from soapstone.search.rules.rulebook import Rulebook

Choice = tuple[int, ...]  # a state of each region
Table = tuple[tuple[int, ...], Numbers]  # regions, and a cost for each choice of their states
_ROUNDING = 1e-9  # share of a cost


@dataclass(frozen=True)
class Exhausted:
    """The cheapest of all graphs that rules make of a graph.

    Attributes:
        graphs: the number of such graphs.
        priced: the number that was priced as a whole.
        parts: the result for each region that changed, with its steps.
        complete: whether no other reachable graph is cheaper.
    """

    outputs: Values
    cost: float
    graphs: int
    priced: int
    parts: tuple[Cheapest, ...]
    complete: bool


def exhaust(
    pool: Pool,
    outputs: Values,
    book: Rulebook,
    price: Price,
    *,
    separable: bool = True,
    budget: Budget | None = None,
) -> Exhausted:
    """Return the cheapest of all graphs that rules make of a graph.

    Args:
        price: returns the cost of a graph.
        separable: whether a cost is a sum over launches; otherwise every graph is priced.
        budget: the deadline, and the largest number of states of a region; if either is exceeded,
            the best so far is returned.
    """
    search = _Search(pool, outputs, Regions(pool, book, budget or Budget(50_000)), price)
    return search.exhausted(separable)


class _Search:
    """A search: the regions of a graph, and the prices known so far."""

    def __init__(self, pool: Pool, outputs: Values, regions: Regions, price: Price) -> None:
        self.pool = pool
        self.outputs = outputs
        self.budget = regions.budget
        self.price = price
        self.regions = regions.of(outputs)
        self.sizes = [len(region.states) for region in self.regions]
        self.known: dict[Choice, float] = {}
        self.prices: dict[Values, float] = {}

    def exhausted(self, separable: bool) -> Exhausted:
        """Return the cheapest graph; an interrupt ends the search early."""
        complete = False
        self.cost({})
        try:
            chosen = self.separate() if separable else self.together()
            complete = chosen and all(region.complete for region in self.regions)
        except ENDS:
            self.budget.deadline.stop()
        best = min(self.known, key=self.known.__getitem__)
        return Exhausted(
            self.composed(best),
            self.known[best],
            math.prod(self.sizes),
            len(self.prices),
            tuple(self.parts(best)),
            complete and not self.budget.over,
        )

    def together(self) -> bool:
        """Price every graph."""
        for choice in itertools.product(*map(range, self.sizes)):
            if self.budget.over:
                break
            self.cost(dict(enumerate(choice)))
        return True

    def separate(self) -> bool:
        """Price states, pairs, then the best choice; return whether its price is as predicted."""
        base = self.cost({})
        alone = [
            np.array([self.cost({n: state}) - base for state in range(size)])
            for n, size in enumerate(self.sizes)
        ]
        tables: list[Table] = [((n,), costs) for n, costs in enumerate(alone)]
        for one, other in self.adjacent():
            more = np.zeros((self.sizes[one], self.sizes[other]))
            for s, t in itertools.product(range(1, len(more)), range(1, more.shape[1])):
                both = self.cost({one: s, other: t})
                more[s, t] = both - base - alone[one][s] - alone[other][t]
            tables.append(((one, other), more))
        if self.budget.over:
            return False
        picked, _ = cheapest(range(len(self.sizes)), tables)
        chosen = tuple(picked[n] for n in range(len(self.sizes)))
        told = base + sum(float(costs[tuple(chosen[n] for n in of)]) for of, costs in tables)
        found = self.cost(dict(enumerate(chosen)))
        least = min(self.known.values())
        return all(math.isclose(found, cost, rel_tol=_ROUNDING) for cost in (told, least))

    def cost(self, states: Mapping[int, int]) -> float:
        """Return the cost of the graph with some regions in other states."""
        choice = tuple(states.get(n, 0) for n in range(len(self.sizes)))
        if choice not in self.known:
            if self.budget.over and self.known:
                return math.nan  # it is not looked at any more
            self.known[choice] = self.priced(self.composed(choice))
        return self.known[choice]

    def priced(self, outputs: Values) -> float:
        """Return the cost of a graph; equal graphs are priced once."""
        if outputs not in self.prices:
            self.prices[outputs] = self.price(outputs)
        return self.prices[outputs]

    def composed(self, choice: Choice) -> Values:
        """Return the graph with each region in a given state."""
        pool = self.pool
        renewed: dict[int, int] = {}
        for region, state in zip(self.regions, choice):
            if state:
                stands = moved(pool, tuple(region.stands.values()), renewed)
                where = dict(zip(region.stands, stands))
                made = moved(pool, region.states[state], where)
                renewed.update(zip(region.piece.outputs, made))
        return moved(pool, self.outputs, renewed)

    def adjacent(self) -> list[tuple[int, int]]:
        """Return the pairs of regions with no other between them."""
        pool = self.pool
        inside = [_inside(pool, region) for region in self.regions]
        taken = set().union(*inside)
        graph = nx.Graph()
        for value in pool.order(self.outputs):
            maker = pool.makers[value]
            graph.add_node(value)
            if isinstance(maker, Application) and value not in taken and not pool.fixed[value]:
                rest = (v for v in (*maker.outputs, *maker.inputs) if not pool.fixed[v])
                graph.add_edges_from((value, other) for other in rest)
        part = {v: n for n, group in enumerate(nx.connected_components(graph)) for v in group}
        touched = [
            {part[v] for v in (*region.piece.inputs, *region.piece.outputs)}
            for region in self.regions
        ]
        pairs = itertools.combinations(range(len(touched)), 2)
        return [(one, other) for one, other in pairs if touched[one] & touched[other]]

    def parts(self, choice: Choice) -> list[Cheapest]:
        """Return the result for each region, with the cost of the whole before and after it."""
        found = []
        after = self.priced(self.outputs)
        for number, region in enumerate(self.regions):
            if choice[number]:
                done = tuple(state if n <= number else 0 for n, state in enumerate(choice))
                before, after = after, self.priced(self.composed(done))
                made = region.states[choice[number]]
                steps = steps_to(region.reached.came, made)
                costs = before, after
                found.append(Cheapest(made, after, steps, len(region.states), True, costs))
        return found


def _inside(pool: Pool, region: Region) -> set[int]:
    inputs = frozenset(region.piece.inputs)
    return set(pool.order(region.piece.outputs, inputs)) - inputs
