"""Lower bounds of weighted sums of costs by message passing, which finds good strategies as well.

With one weight for each coordinate, costs become numbers. The least sum over all strategies is then
bounded from below by sequential reweighted message passing (Kolmogorov, A new look at reweighted
message passing, 2015): costs are moved between operators and edges, which changes no strategy's
sum, until the minima of all tables add up to as much as possible. On a chain the bound is exact.
There is a bound for each class of an operator's configurations, of all strategies that contain it;
`pruning.py` leaves out the classes whose strategies the known points cover.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.eliminate import Table
from soapstone.search.parallel.frontier.leaves import Leaves
from soapstone.search.parallel.problem.compiling import compiled, entry
from soapstone.search.parallel.problem.packing import call, packed

NEVER = 1e30  # of classes that cannot be together
FAR = 1e28  # of what is passed on at most, up or down
SWEEPS = 4  # forward and back


@packed
class Network(NamedTuple):
    """Operators and edges as flat arrays.

    Attributes:
        operators: (operators + 1,), where each operator's classes begin.
        ends: (edges, 2), the writer and the reader of each edge.
        shapes: (edges, 2), the shape of each edge's table.
        tables: (edges,), where each edge's table begins among all tables' numbers.
        maps: (edges, 2), where the rows (columns) of the writer's (reader's) classes begin in
            `places`.
        places: the rows and columns that `maps` points to.
        messages: (edges, 2), where the messages to both ends of an edge begin.
        around: (operators + 1,), where each operator's edges begin in `of`.
        of: (ends of edges, 2), an edge and which side of it the operator is.
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
    """Write to `made`, (cells,), the least weighted sum of each cell's frontier of a table."""
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
    """Move to one end of an edge the least that the edge costs with each of its classes."""
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
    """Write the costs of an operator's classes with all messages to it; return the least."""
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
    """Distribute what an operator's classes cost among its edges of one side."""
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
    """Pass messages; write the bounds of all classes and good choices; return the lower bound.

    Args:
        own: (classes,), the weighted costs of all operators' classes.
        tables: the weighted costs of all edges, in a row.
        messages: room for messages, zeros at first.
        sweeps: how often messages are passed forward and back.
        bounds: (classes,), written.
        chosen: (sweeps, operators), written: a class for each operator.
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
    """Choose the cheapest class, given earlier operators' classes and later ones' messages."""
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
    """Computes lower bounds of a problem's strategies.

    Args:
        leaves: the tables of the problem.
        block: (operators,), the block of each; an edge is in its reader's.
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
        """Return lower bounds of the weighted sum of costs, and good choices of classes.

        Args:
            weights: (blocks, coordinates), the weights of the costs in each block.
            sweeps: how often messages are passed forward and back.

        Returns:
            The bound of all strategies; (classes,), those of the strategies with each class,
            operator after operator; (sweeps, operators), a class for each operator.
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
        """Return the cheapest point of each table for a choice of classes; None: infeasible.

        The tables of operators come first, then those of edges.
        """
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
