"""Lower bounds, for each cell of a table, of all costs outside the table; and pruning by them.

In a plan of joins, the least weighted sum inside each table follows from the leaves up, and the
least sum outside it from the last join down. These bounds are exact for one weighting of the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.eliminate import Joining, Table
from soapstone.search.parallel.frontier.pruning import Pruning
from soapstone.search.parallel.frontier.relaxation import NEVER, weighted
from soapstone.search.parallel.problem.compiling import entry

STEPS = 1_000_000_000  # sums for bounds of cells at most, each way
ROOM = 1 << 25  # bounds of cells that are kept at most, all weights together


@entry
def lowest(cells: Array, steps: Array, a: Array, b: Array, made: Array) -> None:
    """Write to `made`, (cells, weightings), the least weighted sums of a join of two tables.

    Args:
        cells, steps: of the join, as `algebra.joined` takes them.
        a, b: (cells, weightings), those of the two tables.
    """
    weights = made.shape[1]
    for cell in range(made.shape[0]):
        for at in range(weights):
            made[cell, at] = NEVER
        for step in range(steps.shape[0]):
            i, j = cells[cell, 0] + steps[step, 0], cells[cell, 1] + steps[step, 1]
            for at in range(weights):
                cost = a[i, at] + b[j, at]
                made[cell, at] = cost if cost < made[cell, at] else made[cell, at]


@entry
def outside(
    cells: Array, steps: Array, a: Array, b: Array, out: Array, out_a: Array, out_b: Array
) -> None:
    """Write the least weighted sums of all that is outside each of a join's two tables.

    Args:
        cells, steps: of the join, as `algebra.joined` takes them.
        a, b: (cells, weightings), the least sums inside the two tables.
        out: (cells, weightings), the least sums outside the join.
        out_a, out_b: (cells, weightings), written where they become less.
    """
    weights = out.shape[1]
    for cell in range(out.shape[0]):
        for step in range(steps.shape[0]):
            i, j = cells[cell, 0] + steps[step, 0], cells[cell, 1] + steps[step, 1]
            for at in range(weights):
                cost = out[cell, at] + b[j, at]
                out_a[i, at] = cost if cost < out_a[i, at] else out_a[i, at]
                cost = out[cell, at] + a[i, at]
                out_b[j, at] = cost if cost < out_b[j, at] else out_b[j, at]


class Cells:
    """Lower bounds of all costs outside each table of a plan, cell by cell.

    Attributes:
        rows: the numbers of the weightings that the bounds are of.
        of: by a table's id, (cells, rows) bounds.
        blocks: by a table's id, (blocks,): 1 for the blocks that it belongs to, else 0.
    """

    def __init__(
        self, pruning: Pruning, joining: Joining, tables: Sequence[Table], rows: Array
    ) -> None:
        self.pruning = pruning
        size = sum(table.size for table in (*tables, *joining.made))
        totals = pruning.weights.shape[1]
        steps = sum(table.size * len(table.steps) for table in joining.made)
        many = min(ROOM // max(1, size), STEPS // max(1, steps)) - totals
        self.rows = rows[:totals]
        if many > 0:
            rest = np.linspace(totals, len(rows) - 1, min(many, len(rows) - totals))
            self.rows = rows[[*range(totals), *rest.round().astype(int)]]
        halves = [self.rows]
        if joining.pool is not None and len(self.rows) > 3:
            halves = [self.rows[::2], self.rows[1::2]]
        run: Any = map if joining.pool is None else joining.pool.map
        parts = list(run(lambda part: _outside(pruning, joining, tables, part), halves))
        self.of: dict[int, Array] = {}
        for key in parts[0]:
            made = np.empty((len(parts[0][key]), len(self.rows)))
            for at, part in enumerate(parts):
                made[:, at :: len(parts)] = part[key]
            self.of[key] = made
        one = np.eye(pruning.shares.shape[1])
        self.blocks = {
            id(table): one[pruning.block[table.scope[-1]] if table.scope else 0] for table in tables
        }
        for table in joining.made:
            a, b = (self.blocks.get(id(part), 0 * one[0]) for part in table.parts)
            self.blocks[id(table)] = np.maximum(a, b)

    def thin(self, table: Table, few: int | None = None) -> None:
        """Leave out the points of a table that cannot become part of a point not yet covered.

        Args:
            few: how many points a cell may keep, evenly spread; None: all that bounds leave.
        """
        bounds, blocks = self.of[id(table)], self.blocks[id(table)]
        keep = self.pruning.keep(table.start, table.costs, bounds, self.rows, blocks)
        table.keep(keep)
        if few is not None:
            table.keep(_evenly(table.start, few))


def _evenly(start: Array, few: int) -> Array:
    """Return which points to keep: some of each cell, its first and its last one among them."""
    counts = np.diff(start)
    rank = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    steps = np.repeat(np.maximum(counts - 1, 1), counts)
    share = np.minimum(steps, few - 1)
    keep: Array = (rank * share // steps != (rank - 1) * share // steps) | (rank == 0)
    return keep


def _outside(
    pruning: Pruning, joining: Joining, tables: Sequence[Table], rows: Array
) -> dict[int, Array]:
    weights = [pruning.inside(pruning.weights[row], pruning.shares[row]) for row in rows]
    inner: dict[int, Array] = {}

    def of(table: Table) -> Array:
        if id(table) not in inner:
            made = np.empty((len(rows), len(table.start) - 1))
            block = pruning.block[table.scope[-1]] if table.scope else 0
            for at, weight in enumerate(weights):
                weighted(table.start, table.costs, weight[block], made[at])
            inner[id(table)] = np.ascontiguousarray(made.T)
        return inner[id(table)]

    for table in joining.made:
        a, b = (of(part) for part in table.parts)
        inner[id(table)] = np.empty((table.size, len(rows)))
        lowest(table.cells, table.steps, a, b, inner[id(table)])
    last = joining.made[-1] if joining.made else tables[-1]
    found = {id(last): np.zeros((1, len(rows)))}
    for table in reversed(joining.made):
        a, b = (of(part) for part in table.parts)
        out_a, out_b = np.full_like(a, NEVER), np.full_like(b, NEVER)
        outside(table.cells, table.steps, a, b, found[id(table)], out_a, out_b)
        for part, out in zip(table.parts, (out_a, out_b)):
            found[id(part)] = out
    return found
