"""OptCNN: the best strategy for a graph that is linear or becomes so, by dynamic programming.

Jia, Lin, Qi and Aiken, Exploring hidden dimensions in parallelizing convolutional neural networks
(2018), the exact method of Jia's section 3.2. The cost of a strategy is the sum of what its
operators cost by themselves (tasks, reductions, updates) and of what moves between them; nothing
overlaps. Operators with one neighbour before and one behind them are eliminated, and edges side by
side are added, until none is left or nothing can be eliminated (`elimination.py`).

Configurations cut dims of the results in equal parts, on neighbours in order. As costs do not
overlap, the strategy is the best by their sum; `search` tells what it takes when simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array
from soapstone.search.elimination import cheapest, eliminated
from soapstone.search.parallel.bounds.operator_costs import operator_costs
from soapstone.search.parallel.exact.tables import Choices, Pair, edges_of, relation
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.configurations import degrees_of, rows
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import Model

AROUND = 2  # operators that a table may be over, beside the one that is eliminated


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
            own[kind[op]] = operator_costs(model, [op], [choices[kind[op]]])[1].alone
    pairs: dict[tuple[object, ...], Array] = {}
    tables: Tables = {}
    for ends in edges:
        key = relation(model, ends)
        if key not in pairs:
            mine, others = (choices[kind[op]] for op in ends)
            pairs[key] = Pair(model, ends).moving(mine, others)
        tables[ends] = pairs[key]
    return {op: own[kind[op]] for op in free}, tables, {op: choices[kind[op]] for op in free}


def _check(model: Model, free: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
    """Raise ParallelError unless the graph becomes small when it is eliminated."""
    order = eliminated(free, [frozenset(edge) for edge in edges], AROUND)
    done = next((i for i, (_, others) in enumerate(order) if len(others) > AROUND), len(order))
    left = sorted(op for op, _ in order[done:])
    if left:
        names = ", ".join(model.operators[op].name for op in left[:4])
        raise ParallelError(
            f"graph {model.graph.name!r}: {len(left)} operators ({names}, ...) are left when nodes"
            " and edges are eliminated; a linear graph needed by optcnn, use mcmc"
        )


def solve(cost: Costs, tables: Tables) -> tuple[dict[int, int], float]:
    """Return the row of each operator that makes the sum least, and that sum."""
    own = (((op,), table) for op, table in cost.items())
    picked, total = cheapest(list(cost), [*own, *tables.items()], AROUND)
    return picked, float(total)
