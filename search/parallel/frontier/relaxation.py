"""Lower bounds of weighted sums of costs, by passing messages; upper points come with them.

For one weight a coordinate, costs are numbers, and the least sum is bounded from below by
sequential reweighted message passing (Kolmogorov, A new look at reweighted message passing, 2015):
costs are moved between operators and edges, which changes no sum, until what is least of each
alone adds up to much. On a chain the bound is the least sum. It is had for each class of an
operator's configurations; those with which only points are reached that known ones cover can go.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.eliminate import Leaves, Table
from soapstone.search.parallel.problem.compiling import compiled, entry
from soapstone.search.parallel.problem.packing import call, packed

NEVER = 1e30  # of classes that cannot be together
FAR = 1e28  # of what is passed on at most, up or down
SWEEPS = 4  # forward and back


@packed
class Network(NamedTuple):
    """Operators and edges in arrays.

    Attributes:
        operators: (operators + 1,) where classes begin. ends: (edges, 2), writer and reader.
        shapes: (edges, 2). tables: (edges,) where the numbers of an edge are.
        maps: (edges, 2) where the axis' places of classes begin in `places`.
        messages: (edges, 2) where those to both ends begin.
        around: (operators + 1,) where ends begin in `of`, (ends, 2): edge and side.
    """

    operators: Array
    ends: Array
    shapes: Array
    tables: Array
    maps: Array
    places: Array
    messages: Array
    around: Array
    of: Array


@entry
def weighted(start: Array, costs: Array, weights: Array, made: Array) -> None:
    """Write the least weighted sum of each frontier of a table."""
    for cell in range(made.shape[0]):
        least = NEVER
        for point in range(start[cell], start[cell + 1]):
            total = 0.0
            for at in range(weights.shape[0]):
                total += weights[at] * costs[point, at]
            least = min(least, total)
        made[cell] = least


@compiled
def _pull(n: Network, tables: Array, messages: Array, edge: int, side: int) -> None:
    """Move to an end of an edge all that it costs at least, whatever the other end is."""
    rows, columns = n.shapes[edge, 0], n.shapes[edge, 1]
    at, mine, others = n.tables[edge], n.messages[edge, side], n.messages[edge, 1 - side]
    if side == 1:
        for j in range(columns):
            messages[mine + j] = FAR
        for i in range(rows):
            moved = messages[others + i]
            for j in range(columns):
                cost = tables[at + i * columns + j] - moved
                messages[mine + j] = cost if cost < messages[mine + j] else messages[mine + j]
    else:
        for i in range(rows):
            least = FAR
            for j in range(columns):
                cost = tables[at + i * columns + j] - messages[others + j]
                least = cost if cost < least else least
            messages[mine + i] = least


@compiled
def _collect(n: Network, own: Array, messages: Array, op: int, cost: Array) -> float:
    """Write what classes of an operator cost with what was moved to it; return the least."""
    begin, end = n.operators[op], n.operators[op + 1]
    for c in range(end - begin):
        cost[c] = own[begin + c]
    for k in range(n.around[op], n.around[op + 1]):
        edge, side = n.of[k, 0], n.of[k, 1]
        places, mine = n.maps[edge, side], n.messages[edge, side]
        for c in range(end - begin):
            cost[c] += messages[mine + n.places[places + c]]
    least = NEVER
    for c in range(end - begin):
        least = min(least, cost[c])
    return least


@compiled
def _push(
    n: Network, messages: Array, lows: Array, cost: Array, room: Array, op: int, side: int
) -> None:
    """Move what an operator costs to its edges of one side, in parts."""
    count = n.operators[op + 1] - n.operators[op]
    many, others = 0, 0
    for k in range(n.around[op], n.around[op + 1]):
        if n.of[k, 1] == side:
            many += 1
        else:
            others += 1
    if many == 0:
        return
    share = 1.0 / max(many, others)
    for k in range(n.around[op], n.around[op + 1]):
        edge = n.of[k, 0]
        if n.of[k, 1] != side:
            continue
        places, mine, extent = n.maps[edge, side], n.messages[edge, side], n.shapes[edge, side]
        for i in range(extent):
            room[i] = FAR
        for c in range(count):
            place = n.places[places + c]
            room[place] = min(room[place], share * cost[c])
        low = FAR
        for i in range(extent):
            if messages[mine + i] < FAR / 2:
                low = min(low, room[i])
            messages[mine + i] -= room[i]
        lows[edge] = low


@entry
def passed(
    n: Network,
    own: Array,
    tables: Array,
    messages: Array,
    sweeps: int,
    bounds: Array,
    chosen: Array,
) -> float:
    """Pass messages; write bounds of all classes and a choice that is good; return the bound.

    Args:
        own: weighted costs of classes. tables: of edges. messages: room, of zeros.
        bounds: (classes,). chosen: (sweeps, operators).
    """
    count = n.operators.shape[0] - 1
    most = 1
    for op in range(count):
        most = max(most, n.operators[op + 1] - n.operators[op])
    for edge in range(n.shapes.shape[0]):
        most = max(most, n.shapes[edge, 0], n.shapes[edge, 1])
    cost, room = np.empty(most), np.empty(most)
    lows, least = np.zeros(n.ends.shape[0]), np.zeros(count)
    total = 0.0
    for sweep in range(sweeps):
        for direction in range(2):
            for step in range(count):
                op = step if direction == 0 else count - 1 - step
                if direction == 0:  # forward: later ones are as they were moved back
                    _choose(n, own, tables, messages, op, chosen[sweep], cost)
                for k in range(n.around[op], n.around[op + 1]):
                    _pull(n, tables, messages, n.of[k, 0], n.of[k, 1])
                    lows[n.of[k, 0]] = 0.0
                low = _collect(n, own, messages, op, cost)
                least[op] = low
                total = 0.0
                for i in range(count):
                    total += least[i]
                for i in range(lows.shape[0]):
                    total += lows[i]
                if sweep == sweeps - 1:
                    for c in range(n.operators[op + 1] - n.operators[op]):
                        bound = total - low + cost[c]
                        at = n.operators[op] + c
                        bounds[at] = bound if direction == 0 else max(bounds[at], bound)
                _push(n, messages, lows, cost, room, op, direction)
                least[op] = _collect(n, own, messages, op, cost)
    return total


@compiled
def _choose(
    n: Network, own: Array, tables: Array, messages: Array, op: int, chosen: Array, cost: Array
) -> None:
    """Choose the class that is least with those chosen before and what was moved from later."""
    begin, end = n.operators[op], n.operators[op + 1]
    for c in range(end - begin):
        cost[c] = own[begin + c]
    for k in range(n.around[op], n.around[op + 1]):
        edge, side = n.of[k, 0], n.of[k, 1]
        places = n.maps[edge, side]
        row, columns = 0, n.shapes[edge, 1]
        if side == 1:
            other = n.ends[edge, 0]
            row = n.places[n.maps[edge, 0] + chosen[other]]
        for c in range(end - begin):
            place = n.places[places + c]
            if side == 1:
                cost[c] += tables[n.tables[edge] + row * columns + place]
            else:
                cost[c] += messages[n.messages[edge, 0] + place]
    best = 0
    for c in range(1, end - begin):
        if cost[c] < cost[best]:
            best = c
    chosen[op] = best


class Relaxation:
    """Bounds of a problem's tables.

    Args:
        block: that of each operator; an edge is in its reader's.
    """

    def __init__(self, leaves: Leaves, block: Array) -> None:
        self.leaves, self.block = leaves, block
        operators, edges = leaves.operators, leaves.edges
        sizes = [table.shape[0] for table in operators]
        ends = np.array([table.scope for table in edges], np.int64).reshape(-1, 2)
        shapes = np.array([table.shape for table in edges], np.int64).reshape(-1, 2)
        places = [each for table in edges for each in table.maps]
        lengths = np.cumsum([0, *(len(each) for each in places)])
        messages = np.cumsum([0, *shapes.reshape(-1).tolist()])
        around = [[] for _ in operators]  # type: list[list[tuple[int, int]]]
        for number, pair in enumerate(ends.tolist()):
            for side, op in enumerate(pair):
                around[op].append((number, side))
        flat = [each for of in around for each in of]
        self.network = Network(
            operators=np.cumsum([0, *sizes]),
            ends=ends,
            shapes=shapes,
            tables=np.zeros(len(edges), np.int64),
            maps=lengths[:-1].reshape(-1, 2),
            places=np.concatenate([np.zeros(0, np.int64), *places]),
            messages=messages[:-1].reshape(-1, 2),
            around=np.cumsum([0, *(len(of) for of in around)]),
            of=np.array(flat, np.int64).reshape(-1, 2),
        )

    def bound(self, weights: Array, sweeps: int = SWEEPS) -> tuple[float, Array, Array]:
        """Return a bound of the weighted sum, bounds with each class, and choices of classes.

        Args:
            weights: (blocks, coordinates), of what is in each block.

        Returns:
            The bound; (classes,) operator after operator; (sweeps, operators).
        """
        n = self.network
        own = np.empty(int(n.operators[-1]))
        for op, table in enumerate(self.leaves.operators):
            made = own[n.operators[op] : n.operators[op + 1]]
            weighted(table.start, table.costs, weights[self.block[op]], made)
        _, alike = np.unique(weights, axis=0, return_inverse=True)
        places, pieces, at = dict[tuple[int, int], int](), [np.zeros(0)], 0
        tables = np.zeros_like(n.tables)
        for number, table in enumerate(self.leaves.edges):
            block = self.block[table.scope[-1]]
            key = id(table.start), int(alike.reshape(-1)[block])
            if key not in places:
                places[key] = at
                pieces.append(np.empty(len(table.start) - 1))
                weighted(table.start, table.costs, weights[block], pieces[-1])
                at += len(pieces[-1])
            tables[number] = places[key]
        chosen = np.zeros((sweeps, len(self.leaves.operators)), np.int64)
        bounds = np.zeros(len(own))
        messages = np.zeros(int(n.shapes.sum()))
        n, every = n._replace(tables=tables), np.concatenate(pieces)
        least = call(passed, n, own, every, messages, np.int64(sweeps), bounds, chosen)
        return least, bounds, chosen

    def points(self, chosen: Array, weights: Array) -> list[Any] | None:
        """Return the least point of each table, operators, then edges; None: infeasible."""
        found = []
        for op, table in enumerate(self.leaves.operators):
            found.append(_least(table, int(chosen[op]), weights[self.block[op]]))
        for table in self.leaves.edges:
            row, column = (int(places[chosen[op]]) for places, op in zip(table.maps, table.scope))
            mine = weights[self.block[table.scope[-1]]]
            found.append(_least(table, row * table.shape[1] + column, mine))
        return None if any(each is None for each in found) else found


def _least(table: Table, cell: int, weights: Array) -> Any:
    begin, end = table.start[cell : cell + 2]
    if begin == end:
        return None
    return int(begin + np.argmin(table.costs[begin:end] @ weights))
