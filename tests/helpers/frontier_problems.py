"""Problems of cost frontiers that are made up, and their frontiers by trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.search.parallel.frontier.tables import (
    INFEASIBLE,
    Edge,
    Monoid,
    Operator,
    Point,
    Problem,
    added,
)

SHAPES: dict[str, list[tuple[int, int]]] = {
    "one": [],
    "pair": [(0, 1)],
    "chain": [(0, 1), (1, 2), (2, 3), (3, 4)],
    "parallel": [(0, 1), (0, 1), (1, 2)],
    "residual": [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)],
    "branches": [(0, 3), (1, 3), (2, 3), (3, 4)],
    "apart": [(0, 1), (2, 3)],
    "far": [(0, 2), (1, 2), (2, 3), (0, 3), (3, 4), (0, 4), (4, 5), (0, 5)],
    "grid": [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5), (4, 5)],
    "full": [(i, j) for j in range(5) for i in range(j)],
}


def small(
    seed: int,
    edges: Sequence[tuple[int, int]] | None = None,
    monoids: tuple[Monoid, ...] = ("sum", "sum"),
    infeasible: float = 0.1,
    largest: int = 9,
) -> Problem:
    """Return a problem of few configurations, of costs so small that many tie."""
    random = np.random.default_rng(seed)
    if edges is None:
        name = list(SHAPES)[seed % len(SHAPES)]
        edges = SHAPES[name]
    count = max((j for _, j in edges), default=0) + 1

    def table(*shape: int) -> Any:
        costs = random.integers(0, largest, (*shape, len(monoids)))
        costs[random.random(shape) < infeasible] = INFEASIBLE
        return costs

    configurations = random.integers(1, 5 if count < 6 else 4, count)
    operators = [
        Operator(f"op{i}", table(many, random.integers(1, 3)))
        for i, many in enumerate(configurations)
    ]
    made = []
    for i, j in edges:
        rows, columns = (int(random.integers(1, many + 1)) for many in configurations[[i, j]])
        of_rows = random.integers(0, rows, configurations[i])
        of_columns = random.integers(0, columns, configurations[j])
        costs = table(rows, columns, int(random.integers(1, 4)))
        made.append(Edge(i, j, of_rows, of_columns, costs))
    return Problem(operators, made, monoids)


def brute(problem: Problem) -> list[tuple[int, ...]]:
    """Return the frontier by going through all configurations and choices."""
    found: set[tuple[int, ...]] = set()
    for configurations in itertools.product(*(range(len(op.costs)) for op in problem.operators)):
        tables = [op.costs[c] for op, c in zip(problem.operators, configurations)]
        for edge in problem.edges:
            row = edge.rows[configurations[edge.writer]]
            column = edge.columns[configurations[edge.reader]]
            tables.append(edge.costs[row, column])
        where = [*problem.block_of, *(problem.block_of[edge.reader] for edge in problem.edges)]
        found |= _sums(tables, where, problem.monoids)
    added_up = np.array(sorted(found), np.int64).reshape(-1, len(problem.monoids))
    return frontier({tuple(row) for row in (added_up @ problem.summing).tolist()})


def _sums(tables: list[Any], where: list[int], monoids: tuple[Monoid, ...]) -> set[tuple[int, ...]]:
    """Return sums of a choice of each table, in blocks, and blocks together."""
    blocks: dict[int, set[tuple[int, ...]]] = {}
    for table, block in zip(tables, where):
        choices = {tuple(row) for row in table.tolist() if max(row) < INFEASIBLE}
        before = blocks.get(block, {(0,) * len(monoids)})
        blocks[block] = {tuple(map(sum, zip(a, b))) for a in before for b in choices}
    whole = {(0,) * len(monoids)}
    folds = {"sum": sum, "max": max}
    for sums in blocks.values():
        whole = {
            tuple(folds[monoid](pair) for monoid, pair in zip(monoids, zip(a, b)))
            for a in whole
            for b in sums
        }
    return whole


def frontier(points: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return points that no other one is at most equal to."""
    kept: list[tuple[int, ...]] = []
    for point in sorted(points):
        if not any(all(a <= b for a, b in zip(other, point)) for other in kept):
            kept.append(point)
    return kept


def checked(problem: Problem, points: Sequence[Point]) -> list[tuple[int, ...]]:
    """Return costs of points, each added up again from the tables."""
    for point in points:
        assert added(problem, point) == point.costs
    return [point.costs for point in points]
