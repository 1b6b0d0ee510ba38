"""The abstract problem of a cost frontier: operators and edges with tables of costs, and results.

Nothing here knows a model. Each operator takes one of its configurations, which costs a vector of
integers. So does each edge between two operators, depending on the layouts that their
configurations give to the value passed along it. Where something else can be chosen as well (such
as which copy of a tensor is kept), there are several vectors, of which one is chosen. The frontier
is the set of those sums that no other sum dominates (Cai et al., TensorOpt, definition 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.spine import marked_spine
from soapstone.search.parallel.problem.operators import ParallelError

INFEASIBLE = 1 << 60  # a cost of what cannot be; sums of real ones stay below it
MOST = 1 << 53  # all costs of a problem add up to less, so that floating-point numbers hold them
Monoid = Literal["sum", "max"]


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator, which takes one of several configurations.

    Attributes:
        name: as errors call it.
        costs: (configurations, choices, coordinates) int64, INFEASIBLE in any coordinate of a
            choice that there is not.
    """

    name: str
    costs: Array


@dataclass(frozen=True, eq=False)
class Edge:
    """What two configurations cost together.

    Attributes:
        writer, reader: numbers of operators, the first less than the second.
        rows: (configurations of the writer,) the row of `costs` that each has.
        columns: (configurations of the reader,) the column.
        costs: (rows, columns, choices, coordinates) int64, as an operator's are.
    """

    writer: int
    reader: int
    rows: Array
    columns: Array
    costs: Array


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators in topological order, and edges between them, several between two if need be.

    Attributes:
        monoids: how the blocks' costs combine, for each coordinate: `sum`, or `max`, which sums
            costs within each block and takes the largest sum.
        blocks: the block of each operator, needed only for `max`; an edge is in its reader's.
            None: a block is all that follows one operator of the marked spine (`spine.py`), up to
            the next one and including it.
        totals: groups of coordinates that are added up in the result, such as memory that is kept
            and the peak of what is held for a while; None: each coordinate is a total of its own.

    Raises:
        ParallelError: shapes that do not fit together, or costs out of range.
    """

    operators: Sequence[Operator]
    edges: Sequence[Edge]
    monoids: tuple[Monoid, ...] = ("sum", "sum")
    blocks: tuple[int, ...] | None = None
    totals: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def coordinates(self) -> int:
        """How many costs there are."""
        return len(self.monoids)

    @property
    def summing(self) -> Array:
        """Which coordinates are added up in which total: (coordinates, totals) int64."""
        totals = self.totals or [(at,) for at in range(self.coordinates)]
        return np.array([[at in of for of in totals] for at in range(self.coordinates)], np.int64)

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The block of each operator."""
        if self.blocks is not None:
            return self.blocks
        ends = [(edge.writer, edge.reader) for edge in self.edges]
        return marked_spine(len(self.operators), ends).blocks


@dataclass(frozen=True)
class Point:
    """A point of the frontier, and the choices that lead to it.

    Attributes:
        configurations: a number for each operator. choices: which of its costs, for each operator.
        edge_choices: the same for each edge.
    """

    costs: tuple[int, ...]
    configurations: tuple[int, ...]
    choices: tuple[int, ...]
    edge_choices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Result:
    """A frontier, in lexicographic order of costs; empty where nothing is feasible.

    Attributes:
        costs: (points, totals) int64.
        configurations, choices: (points, operators) int64. edge_choices: (points, edges) int64.
        exact: whether these are all points of the frontier, and no others.
        error: each point of the frontier has one here that costs at most 1 + error times as much in
            every coordinate; infinite where a heuristic elimination decided what may be on it.
        eliminations: how many of each kind: node, edge, branch, heuristic, linear.
        seconds: wall-clock time. work: what took it, by its name: counts and seconds.
        interrupted: whether Ctrl-C ended the search.
    """

    costs: Array
    configurations: Array
    choices: Array
    edge_choices: Array
    exact: bool
    error: float
    eliminations: dict[str, int]
    seconds: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, index: int) -> Point:
        rows = (self.costs, self.configurations, self.choices, self.edge_choices)
        return Point(*(tuple(each[index].tolist()) for each in rows))

    def __iter__(self) -> Iterator[Point]:
        return (self[index] for index in range(len(self)))


def added(problem: Problem, point: Point) -> tuple[int, ...]:
    """Return the totals of a point, (totals,), added up from the problem's tables."""
    chosen = (point.configurations, point.choices, point.edge_choices)
    found = added_up(problem, *(np.array(each, np.int64)[None] for each in chosen))
    return tuple(found[0].tolist())


def added_up(problem: Problem, configurations: Array, choices: Array, edges: Array) -> Array:
    """Return the totals of points, (points, totals) int64, added up from the problem's tables.

    Args:
        configurations, choices, edges: as a `Result` has them.
    """
    where = problem.block_of
    sums = np.zeros((max(where) + 1, len(configurations), problem.coordinates), np.int64)
    for i, item in enumerate(problem.operators):
        sums[where[i]] += item.costs[configurations[:, i], choices[:, i]]
    for i, edge in enumerate(problem.edges):
        rows = edge.rows[configurations[:, edge.writer]]
        columns = edge.columns[configurations[:, edge.reader]]
        sums[where[edge.reader]] += edge.costs[rows, columns, edges[:, i]]
    largest = [monoid == "max" for monoid in problem.monoids]
    totals: Array = np.where(largest, sums.max(0), sums.sum(0)) @ problem.summing
    return totals


def check(problem: Problem) -> None:
    """Raise ParallelError unless a problem's tables fit together."""
    operators, coordinates, total = problem.operators, problem.coordinates, 0
    if not operators:
        raise ParallelError("a frontier needs an operator, found none")
    if not 1 <= coordinates <= 4 or any(each not in ("sum", "max") for each in problem.monoids):
        raise ParallelError(
            f"monoids {problem.monoids!r} found, 1 to 4 of 'sum' and 'max' needed, one a coordinate"
        )
    for item in operators:
        name = f"operator {item.name!r}"
        total += _dearest(name, item.costs, ("configurations", "choices"), coordinates)
        if not len(item.costs):
            raise ParallelError(f"{name}: no configuration found, at least one needed")
    for edge in problem.edges:
        i, j = edge.writer, edge.reader
        if not 0 <= i < j < len(operators):
            raise ParallelError(
                f"edge from operator {i} to {j}: the first must be less than the second, and both"
                f" less than {len(operators)}, operators being in topological order"
            )
        name = f"edge from {operators[i].name!r} to {operators[j].name!r}"
        total += _dearest(name, edge.costs, ("rows", "columns", "choices"), coordinates)
        ends = (("rows", edge.rows, i, 0), ("columns", edge.columns, j, 1))
        for what, numbers, op, axis in ends:
            count, extent = len(operators[op].costs), edge.costs.shape[axis]
            if numbers.shape != (count,) or numbers.min() < 0 or numbers.max() >= extent:
                found = f"{numbers.shape}"
                if numbers.shape == (count,):
                    found = f"numbers {numbers.min()} to {numbers.max()}"
                raise ParallelError(
                    f"{name}: {what} of {found} found, ({count},) of 0 to {extent - 1} needed"
                )
    if total >= MOST:
        raise ParallelError(f"costs add up to {total}, less than {MOST} needed: use larger units")
    each = [at for of in problem.totals or [range(coordinates)] for at in of]
    if sorted(each) != list(range(coordinates)) or () in (problem.totals or ()):
        raise ParallelError(
            f"totals {problem.totals} found, each of the coordinates 0 to {coordinates - 1} needed"
            " in one of them"
        )
    if problem.blocks is not None and (
        len(problem.blocks) != len(operators) or min(problem.blocks) < 0
    ):
        raise ParallelError(
            f"{len(problem.blocks)} blocks found, {len(operators)} numbers of at least 0 needed,"
            " one an operator"
        )


def _dearest(name: str, costs: Array, axes: tuple[str, ...], coordinates: int) -> int:
    """Return the largest cost of a table that is feasible."""
    needed = (*axes, f"{coordinates} coordinates")
    if costs.ndim != len(needed) or costs.shape[-1] != coordinates or costs.dtype != np.int64:
        raise ParallelError(
            f"{name}: costs of shape {costs.shape} {costs.dtype} found,"
            f" ({', '.join(needed)}) int64 needed"
        )
    if costs.size and costs.min() < 0:
        raise ParallelError(f"{name}: a cost of {costs.min()} found, none below 0 can be")
    return int(np.max(costs, initial=0, where=costs < INFEASIBLE))
