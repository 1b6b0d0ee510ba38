"""The tables of a problem before any elimination, over those configurations that are considered.

A search asks for them again and again, each time with fewer configurations. What an edge costs is
not asked again: the frontier of each of its cells is made once, and picked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.algebra import reduced_cells
from soapstone.search.parallel.frontier.eliminate import UNFILLED, Parts, Table, digest
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Edge, Problem


@dataclass
class Leaves:
    """The tables of a problem before any elimination.

    Attributes:
        problem: the problem.
        classes: for each operator (configurations,), the class of each, -1 if it was left out.
        operators, edges: the table of each operator and of each edge.
    """

    problem: Problem
    classes: list[Array]
    operators: list[Table] = field(default_factory=list)
    edges: list[Table] = field(default_factory=list)


class LeafTables:
    """Makes the tables of operators and edges of one problem; equal ones share their points."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._codes: list[list[Array]] = [[] for _ in problem.operators]
        for edge in problem.edges:
            self._codes[edge.writer].append(edge.rows)
            self._codes[edge.reader].append(edge.columns)
        self._contents: dict[int, bytes] = {}
        self._whole: dict[bytes, Parts] = {}  # by an edge's costs, the frontiers of all cells

    def of(self, alive: Sequence[Array]) -> Leaves:
        """Return the tables.

        Args:
            alive: for each operator (configurations,), whether each of them is considered.
        """
        problem, made = self.problem, dict[bytes, Any]()
        found, zero = Leaves(problem, []), np.zeros(problem.coordinates, np.int64)

        def once(key: bytes, make: Callable[[], Any]) -> Any:
            if key not in made:
                made[key] = make()
            return made[key]

        parts: Parts
        for i, (item, live, codes) in enumerate(zip(problem.operators, alive, self._codes)):
            key = digest(self._content(item.costs), live, *(self._content(code) for code in codes))
            classes, parts = once(key, lambda: _operator(item.costs, live, codes))  # noqa: B023
            found.classes.append(classes)
            own = np.arange(int(classes.max(initial=-1)) + 1)
            table = Table((i,), (len(own),), (own,), ("operator", i), key, *parts, *UNFILLED, zero)
            table.many = 1
            found.operators.append(table)
        for number, edge in enumerate(problem.edges):
            sides = []
            for op, code in ((edge.writer, edge.rows), (edge.reader, edge.columns)):
                classes = found.classes[op]
                of_class = np.zeros(int(classes.max(initial=-1)) + 1, np.int64)
                of_class[classes[classes >= 0]] = code[classes >= 0]
                sides.append(np.unique(of_class, return_inverse=True))
            (rows, row_of), (columns, column_of) = sides
            key = digest(self._content(edge.costs), rows, columns)
            parts = once(key, lambda: self._edge(edge, rows, columns))  # noqa: B023
            key, shape = digest(key, row_of, column_of), (len(rows), len(columns))
            scope, maps = (edge.writer, edge.reader), (row_of, column_of)
            table = Table(scope, shape, maps, ("edge", number), key, *parts, *UNFILLED, zero)
            found.edges.append(table)
        return found

    def _content(self, array: Array) -> bytes:
        if id(array) not in self._contents:
            self._contents[id(array)] = digest(array)
        return self._contents[id(array)]

    def _edge(self, edge: Edge, rows: Array, columns: Array) -> Parts:
        """Return starts, costs and origins of an edge's cells, those of some rows and columns."""
        key = self._content(edge.costs)
        if key not in self._whole:
            wide, high, choices, _ = edge.costs.shape
            cells, choice = np.repeat(np.arange(wide * high), choices), np.arange(choices)
            origins = np.stack([0 * cells, np.tile(choice, wide * high)], 1)
            self._whole[key] = _cells(edge.costs, cells, origins, wide * high)
        start, costs, origins = self._whole[key]
        cells = (rows[:, None] * edge.costs.shape[1] + columns).reshape(-1)
        counts = start[cells + 1] - start[cells]
        made = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(made[-1]) + np.repeat(start[cells] - made[:-1], counts)
        return made, costs[at], origins[at]


def _operator(costs: Array, live: Array, codes: list[Array]) -> tuple[Array, Parts]:
    """Return classes of configurations, and the frontier of each class."""
    classes = np.full(len(costs), -1, np.int64)
    where = np.flatnonzero(live & (costs.max(-1) < INFEASIBLE).any(-1))
    if codes and len(where):
        _, classes[where] = np.unique(
            np.stack([code[where] for code in codes]), axis=1, return_inverse=True
        )
    else:
        classes[where] = 0
    order = where[np.argsort(classes[where], kind="stable")]
    picked, cells = costs[order], np.repeat(classes[order], costs.shape[1])
    choice = np.tile(np.arange(costs.shape[1]), len(order))
    origins = np.stack([np.repeat(order, costs.shape[1]), choice], 1)
    return classes, _cells(picked, cells, origins, int(classes.max(initial=-1)) + 1)


def _cells(costs: Array, cells: Array, origins: Array, many: int) -> Parts:
    """Return starts, costs and origins of the frontiers of points that are given cell by cell."""
    flat = np.ascontiguousarray(costs.reshape(-1, costs.shape[-1]))
    feasible = np.flatnonzero(flat.max(1, initial=0) < INFEASIBLE)
    flat = flat[feasible]
    start, order = np.zeros(many + 1, np.int64), np.empty(len(flat), np.int64)
    order = order[: reduced_cells(flat, cells[feasible], start, order)]
    return start, flat[order], np.ascontiguousarray(origins[feasible][order], np.int32)
