"""The choice of data layouts together with substitutions (TASO, sections 2.7 and 2.9.5).

TASO enumerates the layouts of the values that a substitution makes. Here each graph that the search
meets is priced under the best axis orders found for it: these start from the orders of the best
graph so far, and only values that a substitution made, or whose readers changed, are reconsidered.

Values between operators that pass an order on form a region, which has one of two orders. The
difference between two assignments falls into connected parts of the graph; where costs are sums
over operators, the gains of the parts are independent. So flipping one connected set of regions
after another reaches the optimum, if sets up to the size of the graph are tried; the number is
limited.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from networkx.utils import UnionFind

from soapstone.engine.lower.layouts import CHANNELS_LAST, Order, images, passing, stored
from soapstone.engine.lower.readers import takes_strides
from soapstone.ir.graph import Graph
from soapstone.search.optimize.normal import Written
from soapstone.search.optimize.pool import Pool

Orders = Mapping[int, Order]  # by value of a pool
# Graphs that cost more than this times the best so far are left in the orders given: other orders
# alone gain less.
_REACH = 1.5
NO_ORDERS: Orders = MappingProxyType({})
Price = Callable[[Written, Orders], float]
Rule = Callable[[Graph, Mapping[str, Order]], Mapping[str, Order]]


@dataclass(frozen=True)
class Region:
    """Values that share one order: C order, or `order`, in which their operators then run too."""

    values: tuple[str, ...]
    order: Order
    context: frozenset[str]  # its operators' results


def regions(graph: Graph, constants: frozenset[str] = frozenset()) -> list[Region]:
    """Return the regions of a graph whose order is free, in order.

    Images may be channels-last, operands of products column-major. Stored values have a fixed
    order, and constants have that of their kernels.
    """
    held = stored(graph) | constants
    sets = UnionFind(graph.tensors)
    last: set[str] = set()
    turned: set[str] = set()
    around: dict[str, set[str]] = {}
    for node in graph.nodes:
        sets.union(*(passing(graph, node) or node.outputs[:1]))
        last.update(images(graph, node))
        if takes_strides(node):
            turned.update((*node.inputs, *node.outputs))
        for name in (*node.inputs, *node.outputs):
            around.setdefault(name, set()).update(node.outputs)
    found = []
    for group in sets.to_sets():
        names = tuple(name for name in graph.tensors if name in group and name not in held)
        order = _other(graph, names, not last.isdisjoint(group), not turned.isdisjoint(group))
        if order is not None:
            context = frozenset().union(*(around[name] for name in names))
            found.append(Region(names, order, context))
    place = {name: number for number, name in enumerate(graph.tensors)}
    return sorted(found, key=lambda region: place[region.values[0]])


def _other(graph: Graph, names: Sequence[str], image: bool, product: bool) -> Order | None:
    """Return the order that values may have besides C order; None if it is the same memory."""
    shape = graph.tensors[names[0]].shape if names else ()
    rank = len(shape)
    if image and rank in CHANNELS_LAST:
        order: Order = CHANNELS_LAST[rank]
    elif product and rank >= 2 and all(graph.tensors[name].rank == rank for name in names):
        order = (*range(rank - 2), rank - 1, rank - 2)
    else:
        return None
    moved = [axis for axis in order if shape[axis] > 1]
    return order if moved != sorted(moved) else None


def connected(adjacent: Sequence[Iterable[int]]) -> Iterator[frozenset[int]]:
    """Yield the connected sets of a graph's vertices, smallest first."""
    waiting = deque(frozenset((vertex,)) for vertex in range(len(adjacent)))
    seen = set(waiting)
    while waiting:
        members = waiting.popleft()
        yield members
        for vertex in sorted({other for member in members for other in adjacent[member]} - members):
            larger = members | {vertex}
            if larger not in seen:
                seen.add(larger)
                waiting.append(larger)


class Chooser:
    """Prices graphs, each under the best orders found for its values.

    Args:
        pool: the values.
        price: returns the cost of a graph under some orders; the rest are decided by the rule.
        rule: decides the orders for which nothing was chosen.
        kept: orders to begin with.
        over: returns whether it is time to stop.
        most: the number of sets of several regions tried for one graph, besides single ones.
        gain: orders change only for a cost below this times the old one; the rest is noise.
    """

    def __init__(
        self,
        pool: Pool,
        price: Price,
        rule: Rule,
        *,
        kept: Orders = NO_ORDERS,
        over: Callable[[], bool] = lambda: False,
        most: int = 100,
        gain: float = 0.995,
    ) -> None:
        self.orders: dict[tuple[int, ...], Orders] = {}  # by outputs: what was chosen
        self._pool, self._price, self._rule = pool, price, rule
        self._most, self._gain = most, gain
        self._best, self._kept, self._over = math.inf, kept, over
        self._tried: set[tuple[tuple[int, ...], frozenset[int]]] = set()

    def least(self, outputs: tuple[int, ...], written: Written, border: Orders) -> float:
        """Return the least cost found for a graph; `orders` has the orders that it is for."""
        here = set(written.values.values())
        orders: Orders = {}
        cost = self._price(written, border)
        kept = {value: order for value, order in self._kept.items() if value in here}
        if kept and (inherited := self._price(written, {**border, **kept})) < cost:
            orders, cost = kept, inherited
        if cost <= _REACH * self._best:
            orders, cost = self._descended(written, border, orders, cost)
        self.orders[outputs] = orders
        if cost < self._best:
            self._best, self._kept = cost, dict(orders)
        return cost

    def _descended(
        self, written: Written, border: Orders, orders: Orders, cost: float
    ) -> tuple[Orders, float]:
        """Return orders at which no set of regions is worth flipping, and their cost."""
        number = written.values
        fixed = frozenset(name for name, value in number.items() if self._pool.fixed[value])
        found = regions(written.graph, fixed)
        keys = [_key(region, number) for region in found]
        fresh = {i for i, key in enumerate(keys) if key not in self._tried}
        self._tried.update(keys)
        sets = (s for s in connected(_adjacent(found)) if not fresh.isdisjoint(s))
        tries = list(islice(sets, len(fresh) + self._most)) if fresh else []
        changed = True
        while changed:
            changed = False
            for members in tries:
                if self._over():
                    return orders, cost
                new = self._turned(written, border, orders, [found[i] for i in members])
                new_cost = self._price(written, {**border, **new})
                if new_cost < cost * self._gain:
                    orders, cost, changed = new, new_cost, True
        return orders, cost

    def _turned(
        self, written: Written, border: Orders, orders: Orders, some: Sequence[Region]
    ) -> Orders:
        """Return the orders with some regions flipped."""
        number = written.values
        given = {**border, **orders}
        named = {name: given[value] for name, value in number.items() if value in given}
        now = self._rule(written.graph, named)
        new = dict(orders)
        for region in some:
            plain = tuple(range(len(region.order)))
            order = region.order if now.get(region.values[0], plain) == plain else plain
            new.update((number[name], order) for name in region.values)
        return new


def _key(region: Region, number: Mapping[str, int]) -> tuple[tuple[int, ...], frozenset[int]]:
    values = tuple(number[name] for name in region.values)
    return values, frozenset(number[name] for name in region.context if name in number)


def _adjacent(regions: Sequence[Region]) -> list[set[int]]:
    """Return for each region those that share an operator with it."""
    users: dict[str, set[int]] = {}
    for index, region in enumerate(regions):
        for name in region.context:
            users.setdefault(name, set()).add(index)
    return [
        set().union(*(users[name] for name in region.context)) - {index}
        for index, region in enumerate(regions)
    ]
