"""OptCNN: the best strategy for a graph that is linear or becomes so, by dynamic programming.

Jia, Lin, Qi and Aiken, Exploring hidden dimensions in parallelizing convolutional neural networks
(2018), the exact method of Jia's section 3.2. The cost of a strategy is the sum of what its
operators cost by themselves (tasks, reductions, updates) and of what moves between them; nothing
overlaps. Operators with one neighbour before and one behind them are eliminated, and edges side by
side are added, until two operators are left or nothing can be eliminated.

Configurations cut dims of the results in equal parts, on neighbours in order. As costs do not
overlap, the strategy is the best by their sum; `search` tells what it takes when simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from soapstone.ir.configuration import Configuration
from soapstone.search.parallel.bounds.own import own_costs
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.configurations import degrees_of, rows
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.problem.tables import Choices, Pair, edges_of, relation

LEFT, MOST = 3, 1 << 24  # operators that cannot be eliminated, and combinations of theirs


@dataclass(frozen=True)
class Linear:
    """The result: configurations by operator, and their cost, which adds everything up, in us."""

    configurations: dict[str, Configuration]
    cost_us: float


def optcnn(model: Model) -> Linear:
    """Return the cheapest strategy of an (almost) linear graph.

    Raises:
        ParallelError: too much of the graph cannot be eliminated.
    """
    cost, tables, choices = costs_of(model)
    picked, total = solve(cost, tables)
    settled = Settled(model)
    for op, row in picked.items():
        settled.choice.operators[op] = choices[op].degrees[row]
        settled.choice.placed[op] = choices[op].placed[row]
    settled.settle()
    return Linear(settled.configurations(), total / 1e3)


Costs = dict[int, Array]
Tables = dict[tuple[int, int], Array]


def costs_of(model: Model) -> tuple[Costs, Tables, dict[int, Choices]]:
    """Return the costs of operators and of what moves between two, in ns, and configurations.

    Raises:
        ParallelError: too much of the graph cannot be eliminated.
    """
    p, devices = model.problem, len(model.problem.devices)
    free = p.free
    edges = edges_of(model)
    _check(model, free, edges)
    choices: dict[int, Choices] = {}
    own: dict[int, Array] = {}
    kind = {op: int(p.operators[op]["class_"]) for op in free}
    points = {n for n in range(1, devices + 1) if devices % n == 0}
    for op in free:
        if kind[op] not in choices:
            found = [
                (degrees, tuple(range(int(np.prod(degrees)))))
                for degrees in degrees_of(p, op, points, reduced=False, equal=True)
            ]
            choices[kind[op]] = Choices(*rows(found, devices))
            own[kind[op]] = own_costs(model, [op], [choices[kind[op]]])[1].alone
    pairs: dict[tuple[object, ...], Array] = {}
    tables: Tables = {}
    for ends in edges:
        key = relation(model, ends)
        if key not in pairs:
            mine, others = (choices[kind[op]] for op in ends)
            pairs[key] = Pair(model, ends).moving(mine, others)
        tables[ends] = pairs[key]
    return {op: own[kind[op]] for op in free}, tables, {op: choices[kind[op]] for op in free}


def _check(model: Model, free: Iterable[int], edges: list[tuple[int, int]]) -> None:
    """Raise ParallelError unless the graph becomes small when it is eliminated."""
    none = {edge: np.zeros((1, 1), np.int64) for edge in edges}
    left, _, _ = _reduce({op: np.zeros(1, np.int64) for op in free}, none)
    if len(left) > LEFT:
        names = ", ".join(model.operators[op].name for op in list(left)[:4])
        raise ParallelError(
            f"graph {model.graph.name!r}: {len(left)} operators ({names}, ...) are left when nodes"
            " and edges are eliminated; a linear graph needed by optcnn, use mcmc"
        )


def _reduce(
    cost: Costs, tables: Tables
) -> tuple[Costs, Tables, list[tuple[int, list[int], Array]]]:
    """Eliminate nodes of one or two neighbours.

    Returns what is left, and for each node eliminated its neighbours and the best row for each
    choice of theirs, in the order of elimination.
    """
    cost = dict(cost)
    undirected: dict[tuple[int, int], Array] = {}

    def join(a: int, b: int, table: Array) -> None:
        key, oriented = ((a, b), table) if a < b else ((b, a), table.T)
        undirected[key] = undirected[key] + oriented if key in undirected else oriented

    def seen_from(a: int, b: int) -> Array:
        return undirected[a, b] if a < b else undirected[b, a].T

    for (a, b), table in tables.items():
        join(a, b, table)
    steps: list[tuple[int, list[int], Array]] = []
    while len(cost) > 1:
        beside: dict[int, list[int]] = {op: [] for op in cost}
        for a, b in undirected:
            beside[a].append(b)
            beside[b].append(a)
        node = next((op for op in cost if len(beside[op]) <= 2), None)
        if node is None:
            break
        around = beside[node]
        if not around:
            steps.append((node, [], np.array(cost[node].argmin())))
        elif len(around) == 1:
            total = seen_from(around[0], node) + cost[node][None, :]
            steps.append((node, around, total.argmin(axis=1)))
            cost[around[0]] = cost[around[0]] + total.min(axis=1)
        else:
            first, last = (
                seen_from(around[0], node) + cost[node][None, :],
                seen_from(node, around[1]),
            )
            best = np.empty((len(first), last.shape[1]), np.int64)
            table = np.empty((len(first), last.shape[1]), first.dtype)
            for i, line in enumerate(first):
                total = line[:, None] + last
                best[i], table[i] = total.argmin(axis=0), total.min(axis=0)
            steps.append((node, around, best))
        for other in around:
            undirected.pop((min(node, other), max(node, other)))
        del cost[node]
        if len(around) == 2:
            join(around[0], around[1], table)
    return cost, undirected, steps


def solve(cost: Costs, tables: Tables) -> tuple[dict[int, int], float]:
    """Return the row of each operator that makes the sum least, and that sum."""
    left, between, steps = _reduce(cost, tables)
    names = list(left)
    sizes = [len(left[op]) for op in names]
    if np.prod(sizes, dtype=float) > MOST:
        raise ParallelError(
            f"optcnn: {np.prod(sizes, dtype=float):.2g} combinations are left when nodes are"
            f" eliminated, {MOST} at most"
        )
    total = np.zeros(sizes)
    for axis, op in enumerate(names):
        total += left[op].reshape([-1 if i == axis else 1 for i in range(len(names))])
    for (a, b), table in between.items():
        first, second = names.index(a), names.index(b)
        shape = [sizes[i] if i in (first, second) else 1 for i in range(len(names))]
        total += (table if first < second else table.T).reshape(shape)
    best = np.unravel_index(int(total.argmin()), total.shape)
    picked = {op: int(row) for op, row in zip(names, best)}
    for node, around, rows_of in reversed(steps):
        picked[node] = int(rows_of[tuple(picked[op] for op in around)])
    return picked, float(total.min())


__all__ = ["Linear", "costs_of", "optcnn", "solve"]
