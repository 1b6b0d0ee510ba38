"""Which calls run together: those of one cell whose operands are there.

Cells that use each other's results, however far around, are one group; groups follow each other,
and within one a call waits for the longest chain of calls of the group that it depends on. So what
is computed of the roots of trees of different heights is computed at once, after all trees.

Source: after Neubig et al., On-the-fly operation batching in dynamic computation graphs, NeurIPS
2017, section 3, whose agenda takes the kind of least mean depth instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import networkx as nx

from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.dynamic.values import Occurrence


class Agenda:
    """The order of the groups of cells, which is worked out anew when cells come to use others."""

    def __init__(self) -> None:
        self._uses: set[tuple[int, int]] = set()
        self._ranks: dict[int, int] = {}

    def batches(self, pending: Sequence[Occurrence]) -> list[tuple[Cell, list[Occurrence]]]:
        """Return which calls run together, in order.

        pending: calls that are not done, operands before those that use them.
        """
        ranks = self._order(pending)
        for call in pending:
            rank, level = ranks[call.cell.number], 0
            for operand in call.operands:
                maker = operand.call
                if maker is not None and not maker.done and ranks[maker.cell.number] == rank:
                    level = max(level, maker.level + 1)
            call.level = level
        keyed = sorted(pending, key=lambda c: (ranks[c.cell.number], c.level, c.cell.number))
        runs = groupby(keyed, key=lambda call: (call.level, call.cell.number))
        grouped = [list(calls) for _, calls in runs]
        return [(calls[0].cell, calls) for calls in grouped]

    def _order(self, pending: Iterable[Occurrence]) -> dict[int, int]:
        """Return the rank of the group of each cell, by the cell's number."""
        number = attrgetter("cell.number")
        uses = {
            (operand.call.cell.number, number(call))
            for call in pending
            for operand in call.operands
            if operand.call is not None
        }
        alone = {(number(call), number(call)) for call in pending}
        if not self._uses.issuperset(uses) or not self._ranks.keys() >= {a for a, _ in alone}:
            self._uses |= uses
            graph = nx.DiGraph(sorted(self._uses))
            graph.add_nodes_from([*self._ranks, *(cell for cell, _ in alone)])
            groups = nx.condensation(graph)
            order = enumerate(nx.lexicographical_topological_sort(groups))
            self._ranks = {
                cell: rank for rank, group in order for cell in groups.nodes[group]["members"]
            }
        return self._ranks


__all__ = ["Agenda"]
