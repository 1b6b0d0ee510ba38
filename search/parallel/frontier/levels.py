"""Costs of which the largest block counts, handled level by level.

At a *level*, an interval of that cost, it becomes a limit: no block may cost more than the level's
upper end, and the total counts the lower end. Blocks are then joined by their other costs alone. A
level no wider than the error that is allowed in the total adds nothing to the result's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.algebra import reduced_cells
from soapstone.search.parallel.frontier.eliminate import Table


def levels(blocks: Sequence[Table], at: int, width: float) -> Iterator[tuple[int, int]]:
    """Yield the lower and the upper end of each level, ascending.

    Args:
        blocks: the blocks' tables. at: the coordinate of the cost. width: of a level, at most.
    """
    found = [np.unique(table.costs[:, at]) for table in blocks]
    least = max(int(values.min(initial=0)) for values in found)
    values = np.unique(np.concatenate(found))
    values = values[values >= least]
    while len(values):
        many = int(np.searchsorted(values, values[0] + width, side="right"))
        yield int(values[0]), int(values[many - 1])
        values = values[many:]


def limited(table: Table, at: int, most: int) -> Table:
    """Return a table's points that cost at most `most` in coordinate `at`, without it."""
    cells = np.repeat(np.arange(table.size), np.diff(table.start))
    few = np.flatnonzero(table.costs[:, at] <= most)
    costs: Array = np.ascontiguousarray(np.delete(table.costs[few], at, axis=1))
    start, order = np.zeros(table.size + 1, np.int64), np.empty(len(few), np.int64)
    order = order[: reduced_cells(costs, cells[few], start, order)]
    origins = np.stack([few[order], np.zeros_like(order)], 1).astype(np.int32)
    return replace(
        table,
        parts=("part", table),
        start=start,
        costs=costs[order],
        origins=origins,
        slack=np.zeros(costs.shape[1], np.int64),
    )
