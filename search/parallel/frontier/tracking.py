"""Frontier tracking: the cost frontier of a problem, each point with all that was chosen.

TensorOpt's section 3.2, Algorithms 2 and 3: blocks between operators of the marked spine are
eliminated, the spine is gone along by linear dynamic programming, and points are unrolled.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from soapstone.search.elimination import eliminated
from soapstone.search.parallel.frontier.eliminate import (
    Joining,
    Leaves,
    Table,
    eliminate,
    leaves,
    merged,
    unrolled,
)
from soapstone.search.parallel.frontier.pruning import Cells, Known, Pruning
from soapstone.search.parallel.frontier.relaxation import Relaxation
from soapstone.search.parallel.frontier.spine import Spine, marked_spine
from soapstone.search.parallel.frontier.tables import Problem, Result
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.operators import ParallelError

Method = Literal["linear", "elimination"]
Progress = Callable[[int, int, int], None]  # joins done, of how many, points of the last one
WEIGHTS = (4, 8, 16)  # for which bounds are computed, round by round
SWEEPS = 4  # of messages


def track(
    problem: Problem,
    *,
    method: Method = "linear",
    eps: float = 0.0,
    prune: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Return the cost frontier.

    Args:
        method: `linear`: blocks are eliminated, then the spine is gone along; `elimination`: all is
            eliminated down to two operators.
        eps: each point of the frontier has one in the result that costs at most 1 + eps times as
            much in every coordinate; 0: the frontier itself.
        prune: whether bounds of the whole leave out what cannot be on the frontier.
        threads: None: as many as there are processors.
        progress: called after each join of tables, with how many are done, how many there are, and
            how many points the last table has.

    Raises:
        ParallelError: arguments out of range, or a table that does not fit.
    """
    if method not in ("linear", "elimination"):
        raise ParallelError(f"method {method!r} found, 'linear' or 'elimination' needed")
    if threads is not None and threads < 1:
        raise ParallelError(f"{threads} threads found, at least 1 needed")
    if not 0 <= eps <= 1:
        raise ParallelError(f"eps of {eps} found, a share from 0 to 1 needed")
    begin = time.perf_counter()
    threads = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        tracker = Tracker(problem, method, eps, pool if threads > 1 else None, progress)
        known = tracker.pruned() if prune else tracker.plain()
    kinds = ("node", "edge", "branch", "heuristic", "linear")
    return Result(
        known.costs,
        known.configurations,
        known.choices,
        known.edge_choices,
        exact=tracker.error == 0,
        error=tracker.error,
        eliminations={kind: tracker.counts.get(kind, 0) for kind in kinds},
        seconds=time.perf_counter() - begin,
        work={kind: n for kind, n in tracker.counts.items() if kind not in kinds},
    )


class Tracker:
    """One frontier as it is tracked.

    Attributes:
        error: what is certified. counts: of eliminations and joins.
    """

    def __init__(
        self,
        problem: Problem,
        method: Method,
        eps: float,
        pool: ThreadPoolExecutor | None,
        progress: Progress | None,
    ) -> None:
        self.problem, self.method, self.pool, self.progress = problem, method, pool, progress
        ends = [(edge.writer, edge.reader) for edge in problem.edges]
        self.spine = marked_spine(len(problem.operators), ends)
        self.counts: dict[str, float] = {}
        self.eps, self.error = eps, 0.0
        self.pruning = Pruning(problem, eps)

    def plain(self) -> Known:
        """Return the frontier with nothing left out by bounds."""
        return self._followed(leaves(self.problem), None)

    def pruned(self) -> Known:
        """Return the frontier, by bounds: of classes, then of partial points."""
        pruning = self.pruning
        alive = [np.ones(len(item.costs), np.bool_) for item in self.problem.operators]
        for turn, many in enumerate(WEIGHTS):
            made = leaves(self.problem, alive)
            if not all(table.size for table in made.operators):
                break
            weights = pruning.slopes(many)
            bounds = pruning.learn(made, Relaxation(made), weights, SWEEPS)
            if turn == 1:
                self._dive()
            keep = pruning.classes(bounds, weights)
            self._narrow(alive, made, keep)
        made = leaves(self.problem, alive)
        self.counts["classes"] = sum(table.size for table in made.operators)
        self.error = self.eps
        if all(table.size for table in made.operators):
            self.pruning.known = self._followed(made, pruning.slopes(WEIGHTS[-1]))
        return pruning.known

    def _dive(self) -> None:
        """Learn points: those of the configurations that were tried, in all combinations."""
        pruning, eps = self.pruning, self.pruning.eps
        alive = [np.zeros(len(item.costs), np.bool_) for item in self.problem.operators]
        for op, live in enumerate(alive):
            live[pruning.tried[:, op]] = True
        if not len(pruning.tried):
            return
        pruning.eps = eps / 4
        pruning.known = self._followed(leaves(self.problem, alive), pruning.slopes(WEIGHTS[0]))
        pruning.eps = eps

    def _narrow(self, alive: list[Array], made: Leaves, keep: Array) -> None:
        """Leave out configurations of classes that are not kept."""
        begin = 0
        for live, of, table in zip(alive, made.classes, made.operators):
            mine = np.append(keep[begin : begin + table.size], False)
            live &= mine[of]
            begin += table.size

    def _followed(self, made: Leaves, weights: Array | None) -> Known:
        """Return known points and those of the problem's tables, eliminated."""
        joining = Joining(self.pool)
        table = self._plan(made, joining)
        cells = None
        if weights is not None:
            cells = Cells(self.pruning, joining, made, weights)
            for leaf in (*made.operators, *made.edges):
                self._thin(leaf, cells)
        for at, each in enumerate(joining.made):
            joining.fill(each)
            if cells is not None:
                self._thin(each, cells)
            else:
                joining.keep(each)
            if self.progress is not None:
                self.progress(at + 1, len(joining.made), len(each.costs))
        self.counts |= joining.counts
        totals = table.costs @ self.problem.summing
        return self.pruning.known.with_points(totals, *unrolled(table, self.problem))

    def _thin(self, table: Table, cells: Cells) -> None:
        """Leave out points that cannot become points of the frontier that are not known."""
        totals = np.ascontiguousarray(table.costs @ self.problem.summing)
        keep = self.pruning.keep(table.start, totals, cells.of[id(table)], cells.weights)
        table.costs, table.origins = table.costs[keep], table.origins[keep]
        table.start = np.concatenate([[0], np.cumsum(keep)])[table.start]

    def _plan(self, made: Leaves, joining: Joining) -> Table:
        """Return the table of no operator, planned."""
        none = np.zeros(self.problem.coordinates, np.bool_)
        largest = np.array([monoid == "max" for monoid in self.problem.monoids])
        self.sizes = {i: max(1, table.size) for i, table in enumerate(made.operators)}
        tables = [*made.operators, *made.edges]
        if largest.any():
            tables = self._blocks(tables, none, joining)
        tables = self._eliminated(tables, largest, joining)
        while len(tables) > 1:
            tables[:2] = [joining.join(tables[0], tables[1], None, largest)]
        return tables[0]

    def _blocks(self, tables: list[Table], none: Array, joining: Joining) -> list[Table]:
        """Return a table for each block: costs are summed in it, before larger ones are taken."""
        block_of, found = self.problem.block_of, []
        blocks: dict[int, list[Table]] = {}
        for table in tables:
            blocks.setdefault(block_of[table.scope[-1]], []).append(table)
        inside: dict[int, set[int]] = {}
        for block, mine in blocks.items():
            for table in mine:
                for op in table.scope:
                    inside.setdefault(op, set()).add(block)
        for _, mine in sorted(blocks.items()):
            own = {op for table in mine for op in table.scope if len(inside[op]) == 1}
            left = self._eliminated(mine, none, joining, own)
            while len(left) > 1:
                left[:2] = [joining.join(left[0], left[1], None, none)]
            found += left
        return found

    def _eliminated(
        self, tables: list[Table], largest: Array, joining: Joining, only: set[int] | None = None
    ) -> list[Table]:
        """Return what is left of tables, merged, when operators are eliminated."""
        for op, kind in order(tables, self.sizes, self.spine, self.method, only):
            tables = eliminate(tables, op, largest, joining, kind)
        return merged(tables, largest, joining)


def order(
    tables: Sequence[Table],
    sizes: dict[int, int],
    spine: Spine,
    method: Method,
    only: set[int] | None = None,
) -> list[tuple[int, str]]:
    """Return operators in an order of elimination, and what it counts as ("": see `eliminate`).

    Of the spine's order, from one end to the other, and by the least tables, the one is taken that
    has the least to go through, by an estimate.
    """
    names = sorted({op for table in tables for op in table.scope})
    scopes = [frozenset(table.scope) for table in tables]
    wanted = set(names) if only is None else only
    last = len(names) + len(spine.marked) + 9
    later = {op: last for op in names if op not in wanted}
    line = [op for op in spine.marked if op in wanted and op not in spine.far]
    if method == "elimination":
        line = [*line[1:-1], *(op for op in spine.far if op in wanted), *line[:1], *line[-1:]]
    stages = dict.fromkeys(names, 0) | {op: at + 1 for at, op in enumerate(line)} | later
    stages |= {op: last - 1 for op in spine.far if op in wanted and op not in line}
    plans = [stages]
    if method == "linear":
        plans += [dict.fromkeys(names, 0) | later, {op: op for op in names} | later]
    orders = [eliminated(names, scopes, sizes=sizes, stages=plan) for plan in plans]
    found = min(orders, key=lambda each: work(each, scopes, sizes, wanted))
    linear = set(line) if found is orders[0] and method == "linear" else set()
    return [(op, "linear" if op in linear else "") for op, _ in found if op in wanted]


def work(
    order: Sequence[tuple[int, tuple[int, ...]]],
    scopes: Sequence[frozenset[int]],
    sizes: dict[int, int],
    wanted: set[int],
) -> float:
    """Return about how many points an order has to go through.

    A frontier of several operators is taken to have as many points as those.
    """
    left = [(scope, 1) for scope in scopes]
    total = 0.0
    for op, others in order:
        if op not in wanted:
            continue
        mine = [many for scope, many in left if op in scope]
        left = [each for each in left if op not in each[0]]
        total += math.prod(sizes[each] for each in (op, *others)) * math.prod(mine)
        left.append((frozenset(others), sum(mine)))
    return total
