"""Which calls run together as a batch: those of one cell whose operands are available.

Cells that use each other's results, directly or indirectly, form a group. Groups run one after
another; within a group, a call's batch is given by the longest chain of the group's calls on which
it depends. So what is computed from the roots of trees of different heights is one batch, after all
trees.

Source: after Neubig et al., On-the-fly operation batching in dynamic computation graphs, NeurIPS
2017, section 3, whose agenda takes the kind of least mean depth instead.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array

_CELLS = 1 << 32  # of a session, at most


class Agenda:
    """The order of the groups of cells, updated when a cell begins to use another's results."""

    def __init__(self) -> None:
        self._uses: set[int] = set()  # pairs of cells, as one number
        self._ranks = np.zeros(0, np.int64)  # of the group of each cell, -1 of those not seen

    def batches(self, cells: Array, first: Array, makers: Array) -> tuple[Array, Array]:
        """Return the pending calls in the order of their runs, and where each run begins and ends.

        Args:
            cells: int64 (calls,), the cell of each pending call, calls in topological order.
            first: (calls + 1,), where each call's operands begin.
            makers: (operands,), the pending call that makes each operand, or -1.
        """
        if not len(cells):
            return cells, np.zeros(1, np.int64)
        ranks = self._order(cells, first, makers)[cells]
        levels = _levels(ranks, first, makers)
        order = np.lexsort((cells, levels, ranks))
        keys = np.stack((levels[order], cells[order]))
        changes = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        return order, np.concatenate(([0], changes, [len(cells)]))

    def _order(self, cells: Array, first: Array, makers: Array) -> Array:
        """Return the position of each cell's group in the order of groups, by the cell's number."""
        users = np.repeat(cells, np.diff(first))
        inside = makers >= 0
        uses = set(np.unique(cells[makers[inside]] * _CELLS + users[inside]).tolist())
        seen = np.unique(cells)
        known = seen[-1] < len(self._ranks) and bool((self._ranks[seen] >= 0).all())
        if not known or not self._uses.issuperset(uses):
            self._uses |= uses
            graph = nx.DiGraph(divmod(pair, _CELLS) for pair in sorted(self._uses))
            graph.add_nodes_from(np.flatnonzero(self._ranks >= 0).tolist())
            graph.add_nodes_from(seen.tolist())
            self._ranks = np.full(max(graph) + 1, -1, np.int64)
            groups = nx.condensation(graph)
            for rank, group in enumerate(nx.lexicographical_topological_sort(groups)):
                self._ranks[list(groups.nodes[group]["members"])] = rank
        return self._ranks


@njit(nogil=True)
def _levels(ranks: Any, first: Any, makers: Any) -> Any:
    """Return how many calls of its group each waits for, one after the other."""
    levels = np.zeros_like(ranks)
    for call in range(ranks.size):
        for e in range(first[call], first[call + 1]):
            m = makers[e]
            if m >= 0 and ranks[m] == ranks[call]:
                levels[call] = max(levels[call], levels[m] + 1)
    return levels
