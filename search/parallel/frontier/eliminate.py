"""Tables of frontiers, and how operators are eliminated from them.

This is nonserial dynamic programming with frontiers in place of numbers (`search/elimination.py`).
All of TensorOpt's eliminations are joins of two tables. Tables of the same two operators are
multiplied (edge elimination). An operator is eliminated by the product of its tables and a union
over its configurations; the result is a table of its neighbours: two of them (node elimination), or
one, three or more (branch elimination, which multiplies configurations).

Configurations that have the same layouts on all edges of an operator form one class. A table has an
axis for each of its operators, along which classes have one place if its costs do not differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.algebra import joined
from soapstone.search.parallel.frontier.tables import Problem
from soapstone.search.parallel.problem.operators import ParallelError

PIECE = 100_000  # products of frontiers that a thread works on at a time, about
Parts = tuple[Array, Array, Array]  # start, costs, origins of a table
MOST_POINTS = (1 << 31) - 1  # of a table: origins have 32 bits


@dataclass(eq=False)
class Table:
    """Frontiers, one for each combination of classes of a few operators.

    Attributes:
        scope: the operators, ascending.
        shape: the number of places along each operator's axis.
        maps: for each operator (classes,), the place of each class along its axis.
        parts: what it was made of: two tables, (`operator` or `edge`, a number), or (`part`, a
            table).
        key: equal for tables of equal contents, whichever operators they are of.
        start: (cells + 1,), where the points of each cell begin, cells in C order.
        costs: (points, coordinates) int64.
        origins: (points, 2) int32, the points of the two `parts` that each is the sum of. In an
            operator's own table: a configuration and a choice; in an edge's: 0 and a choice.
        cells, steps, largest: of a join, as `algebra.joined` takes them.
        slack: (coordinates,), how much higher costs may be than those of points that were left out.
        many: how many operators' costs it contains.
        drop: the operator that the join eliminates, if any.
    """

    scope: tuple[int, ...]
    shape: tuple[int, ...]
    maps: tuple[Array, ...]
    parts: tuple[Any, Any]
    key: bytes
    start: Array
    costs: Array
    origins: Array
    cells: Array
    steps: Array
    largest: Array
    slack: Array
    many: int = 0
    drop: int | None = None

    @property
    def size(self) -> int:
        """The number of cells."""
        return math.prod(self.shape)

    def keep(self, keep: Array) -> None:
        """Keep the points for which `keep`, (points,) bool, is true."""
        self.costs, self.origins = self.costs[keep], self.origins[keep]
        self.start = np.concatenate([[0], np.cumsum(keep)])[self.start]


_NONE = np.zeros(0, np.int64)
UNFILLED = (_NONE, _NONE, _NONE)


def digest(*of: Any) -> bytes:
    """Return a hash of bytes, arrays (by contents) and other values (by their repr)."""
    made = blake2b(digest_size=16)
    for each in of:
        raw = each if isinstance(each, bytes) else None
        if isinstance(each, np.ndarray):
            made.update(f"{each.shape}{each.dtype}".encode())
            raw = np.ascontiguousarray(each).tobytes()
        raw = repr(each).encode() if raw is None else raw
        made.update(len(raw).to_bytes(8, "little") + raw)
    return made.digest()


class Joining:
    """Joins tables: all joins are planned first, then filled.

    Attributes:
        made: the planned joins, each after its parts.
        counts: how many eliminations of each kind, and joins that reused an equal one's points.
    """

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self.pool = pool
        self.made: list[Table] = []
        self.counts: dict[str, int] = {}
        self._known: dict[bytes, Table] = {}

    def count(self, kind: str) -> None:
        """Count one more."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def join(self, a: Table, b: Table, drop: int | None, largest: Array) -> Table:
        """Return a planned join of two tables, not yet filled.

        Args:
            a, b: the tables to multiply.
            drop: the operator that is eliminated from the product; None: none.
            largest: (coordinates,), whether the larger of two costs counts instead of their sum.
        """
        scope = tuple(sorted({*a.scope, *b.scope}))
        at = [tuple(scope.index(op) for op in each.scope) for each in (a, b)]
        gone = scope.index(drop) if drop is not None else None
        key = digest(a.key, b.key, at, gone, largest)
        left = tuple(op for op in scope if op != drop)
        axes = {op: _axis(a, b, op) for op in scope}
        shape = tuple(axes[op][1].shape[0] for op in left)
        maps, many = tuple(axes[op][0] for op in left), a.many + b.many
        cells = np.zeros((1, 2), np.int64)
        for op in left:
            cells = (cells[:, None] + axes[op][1]).reshape(-1, 2)
        steps = axes[drop][1] if drop is not None else np.zeros((1, 2), np.int64)
        how = (cells, steps, largest, np.zeros_like(a.slack))
        made = Table(left, shape, maps, (a, b), key, *UNFILLED, *how, many, drop)
        self.made.append(made)
        return made

    def fill(self, table: Table) -> None:
        """Compute a planned table's points from its filled parts, or reuse an equal table's."""
        a, b = table.parts
        table.slack = np.where(table.largest, np.maximum(a.slack, b.slack), a.slack + b.slack)
        known = self._known.get(table.key)
        if known is not None:
            self.count("known")
            table.start, table.costs, table.origins = known.start, known.costs, known.origins
            table.slack = known.slack
            return
        self.count("joins")
        counts, table.costs, table.origins = self._cells(table, a, b)
        table.start = np.concatenate([[0], np.cumsum(counts)])

    def keep(self, table: Table) -> None:
        """Remember a filled table, so that equal ones reuse its points."""
        self._known[table.key] = table

    def _cells(self, table: Table, a: Table, b: Table) -> tuple[Array, Array, Array]:
        cells, steps = table.cells, table.steps
        rows = max(1, PIECE // max(1, len(steps)))
        ranges = [(i, min(i + rows, len(cells))) for i in range(0, len(cells), rows)]

        def work(ends: tuple[int, int]) -> tuple[Array, Array, Array]:
            done: tuple[Array, Array, Array] = joined(
                *ends, cells, steps, table.largest, a.start, a.costs, b.start, b.costs
            )
            return done

        if self.pool is None or len(ranges) < 2:
            done = [work(ends) for ends in ranges]
        else:
            done = list(self.pool.map(work, ranges))
        if sum(len(costs) for _, costs, _ in done) > MOST_POINTS:
            raise ParallelError(
                f"a table of {len(cells)} frontiers has more than {MOST_POINTS} points: ask for a"
                " larger eps, or fewer configurations"
            )
        if not done:
            return _NONE, a.costs[:0], a.origins[:0]
        counts, costs, origins = (np.concatenate(each) for each in zip(*done))
        return counts, costs, origins


def _axis(a: Table, b: Table, op: int) -> tuple[Array, Array]:
    """Return one axis of a join of two tables.

    Returns:
        (classes,), the place of each class along the axis; (places, 2), by how many cells each
        place moves within the two tables.
    """
    maps: list[Array | None] = []
    strides = []
    for table in (a, b):
        if op in table.scope:
            at = table.scope.index(op)
            maps.append(table.maps[at])
            strides.append(int(np.prod(table.shape[at + 1 :])))
        else:
            maps.append(None)
            strides.append(0)
    one, other = maps
    if one is None or other is None or one is other:
        table = b if one is None else a
        at = table.scope.index(op)
        return table.maps[at], np.arange(table.shape[at])[:, None] * np.array(strides)
    wide = int(other.max(initial=-1)) + 1
    codes, of_class = np.unique(one * wide + other, return_inverse=True)
    return of_class, np.stack([codes // wide * strides[0], codes % wide * strides[1]], 1)


def eliminate(
    tables: list[Table], op: int, largest: Array, joining: Joining, kind: str = ""
) -> list[Table]:
    """Return the tables after an operator is eliminated from those that contain it.

    Args:
        kind: the kind it is counted as; empty: by the number of operators left in its table.
    """
    mine = [table for table in tables if op in table.scope]
    rest = [table for table in tables if op not in table.scope]
    around = {other for table in mine for other in table.scope} - {op}
    joining.count(kind or ("node" if len(around) == 2 else "branch"))
    mine = merged(mine, largest, joining)
    if len(mine) == 1:
        mine.append(unit(len(largest)))
    while len(mine) > 2:
        mine.sort(key=lambda table: (table.size, table.scope))
        mine[:2] = [joining.join(*_sides(mine[0], mine[1]), None, largest)]
    return [*rest, joining.join(*_sides(*mine), op, largest)]


def _sides(a: Table, b: Table) -> tuple[Table, Table]:
    """Return two tables in an order that does not depend on when they were made."""
    return (a, b) if (a.scope, a.many) <= (b.scope, b.many) else (b, a)


def merged(tables: Sequence[Table], largest: Array, joining: Joining) -> list[Table]:
    """Return the tables with those of the same operators multiplied (edge elimination)."""
    found: dict[tuple[int, ...], Table] = {}
    for table in tables:
        if table.scope in found:
            if len(table.scope) > 1:
                joining.count("edge")
            table = joining.join(found[table.scope], table, None, largest)
        found[table.scope] = table
    return list(found.values())


def unit(coordinates: int) -> Table:
    """Return the neutral table of products: of no operator, with one point of zero cost."""
    costs, origins = np.zeros((1, coordinates), np.int64), np.zeros((1, 2), np.int32)
    filled = (np.array([0, 1]), costs, origins, *UNFILLED, np.zeros(coordinates, np.int64))
    return Table((), (), (), ("unit", 0), b"unit", *filled)


def unrolled(table: Table, problem: Problem) -> tuple[Array, Array, Array]:
    """Return, for each point of a table, the configurations, operators' and edges' choices."""
    points = len(table.costs)
    configurations = np.zeros((points, len(problem.operators)), np.int64)
    choices, edges = np.zeros_like(configurations), np.zeros((points, len(problem.edges)), np.int64)
    left = [(table, np.arange(points))]
    while left:
        table, at = left.pop()
        one, other = table.origins[at].T
        kind, number = table.parts
        if isinstance(kind, Table):
            left += [(kind, one), (number, other)]
        elif kind == "part":
            left.append((number, one))
        elif kind == "operator":
            configurations[:, number], choices[:, number] = one, other
        elif kind == "edge":
            edges[:, number] = other
    return configurations, choices, edges
