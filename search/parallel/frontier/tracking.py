"""Frontier tracking: the cost frontier of a problem, each point with the choices that lead to it.

TensorOpt, section 3.2, Algorithms 2 and 3: the operators of each block, between two operators of
the marked spine, are eliminated; linear dynamic programming then follows the spine; and the points
of the result are unrolled to configurations.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.elimination import eliminated
from soapstone.search.parallel.frontier.cells import Cells
from soapstone.search.parallel.frontier.eliminate import Joining, Table, eliminate, merged, unrolled
from soapstone.search.parallel.frontier.leaves import LeafTables, Leaves
from soapstone.search.parallel.frontier.levels import levels, limited
from soapstone.search.parallel.frontier.ordering import Method, order
from soapstone.search.parallel.frontier.pruning import MARGIN, Known, Pruning
from soapstone.search.parallel.frontier.relaxation import NEVER
from soapstone.search.parallel.frontier.spine import marked_spine
from soapstone.search.parallel.frontier.tables import Problem, Result, added_up
from soapstone.search.parallel.problem.operators import ParallelError

Progress = Callable[[int, int, int], None]  # joins done, of how many, points of the last one
WEIGHTS = (6, 8, *[12] * 8)  # for which bounds are computed, round by round
DIVES = (1, 2, 3, 4, 6, 8)  # rounds after which combinations of what was good are tried
ENOUGH = 6  # rounds, unless what is left is still too much to go through
STEPS = 100_000_000  # products of frontiers that are made at most before operators are split
MOST_STEPS = 4_000_000_000  # and without bounds
SPLITS = 200  # of operators' configurations in two
MOST_WORK = 1_000_000_000  # cells of edges, over all weights, that bounds are had of before that
NEAREST = 8  # weights for which bounds of a half are had, of those nearest to what is open
FEW = 24  # points of a frontier that are gone on with at first
COARSE = 0.01  # how near to known points others are not asked for, before the frontier itself is
NEXT = 2  # configurations that are tried for each weight, at least
MANY = 4  # points of a frontier, on average, from which on near ones are left out
INSIDE = 16  # weights for which bounds are computed inside of tables


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
        method: `linear`: blocks are eliminated, then dynamic programming follows the spine;
            `elimination`: operators are eliminated until two are left.
        eps: for each point of the frontier, the result has one that costs at most 1 + eps times as
            much in every coordinate; 0: the frontier itself. Where bounds that show this would take
            too long, the result's error is larger, and says so.
        prune: whether lower bounds leave out partial points that cannot become part of the frontier
            (or, with eps, that known points cover). Without, eps thins out each table, and the
            error is what all tables add up to.
        threads: None: as many as there are processors.
        progress: called after each join of tables, with the number of joins done, that of all, and
            the number of points of the last table.

    Ctrl-C ends the search with the points known by then, for which no error is claimed.

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
        interrupted = False
        try:
            known = tracker.pruned() if prune else tracker.plain()
        except KeyboardInterrupt:
            interrupted = True
            known, tracker.error = tracker.pruning.known, math.inf
            if not len(known.costs):
                raise
    kinds = ("node", "edge", "branch", "heuristic", "linear")
    return Result(
        known.costs,
        known.configurations,
        known.choices,
        known.edge_choices,
        exact=tracker.error == 0,
        error=tracker.error,
        eliminations={kind: int(tracker.counts.get(kind, 0)) for kind in kinds},
        seconds=time.perf_counter() - begin,
        work={kind: n for kind, n in tracker.counts.items() if kind not in kinds},
        interrupted=interrupted,
    )


class Tracker:
    """The state of one frontier search.

    Attributes:
        error: the error that is certified, as a share of costs.
        counts: how many eliminations and joins of each kind.
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
        self.leaves = LeafTables(problem)

    def plain(self) -> Known:
        """Return the frontier without pruning by bounds."""
        alive = [np.ones(len(item.costs), np.bool_) for item in self.problem.operators]
        while True:
            made = self.leaves.of(alive)
            if sum(self._steps(made).values()) <= MOST_STEPS:
                return self._followed(made, self.pruning, None, near=self.eps)
            alive = self._decided(alive)

    def pruned(self) -> Known:
        """Return the frontier with pruning by bounds: first classes, then partial points."""
        pruning = self.pruning
        alive = [np.ones(len(item.costs), np.bool_) for item in self.problem.operators]
        made = self.leaves.of(alive)
        run: Any = map if self.pool is None else self.pool.map
        for turn, many in enumerate(WEIGHTS):
            weights = pruning.slopes(many)
            if not all(table.size for table in made.operators):
                break
            if len(weights):
                pruning.learn(made, weights, run)
            elif turn - 1 not in DIVES and turn not in DIVES:
                break
            before = pruning.certified() if self.eps else math.inf
            if turn in DIVES:
                near = (self.eps or COARSE / 2**turn) / (2 if turn < ENOUGH else 4)
                self._dive(near, max(FEW * 2 ** min(turn - 1, 3), pruning.reach(near)))
            pruning.narrow(alive)
            made = self.leaves.of(alive)
            if turn + 1 >= ENOUGH and sum(self._steps(made).values()) <= STEPS:
                break
            if turn in DIVES and not len(weights) and pruning.certified() >= before < math.inf:
                break  # halves say more
        self.counts["classes"] = sum(table.size for table in made.operators)
        self.error = self.eps
        left = [(alive, pruning)]
        while left:
            alive, node = left.pop()
            made = self.leaves.of(alive)
            node.known = pruning.known
            if not all(table.size for table in made.operators):
                continue
            if self.eps and node.certified() <= self.eps:
                continue
            goes_on = not self.eps or pruning.work < MOST_WORK
            steps = self._steps(made)
            if sum(steps.values()) <= max(STEPS, len(steps)):  # one each: there is no choice
                pruning.known = self._followed(made, node, node.spread(INSIDE))
            elif self.counts.get("splits", 0) < SPLITS and goes_on:
                self.counts["splits"] = self.counts.get("splits", 0) + 1
                left += self._split(alive, node, steps, run)
            elif self.eps and node.certified() < math.inf:  # more than was asked for
                self.error = max(self.error, node.certified())
            else:
                left.append((self._decided(alive), node))
        return pruning.known

    def _steps(self, made: Leaves) -> dict[tuple[int, ...], int]:
        """Return an estimate of the products of frontiers that each step of the elimination takes.

        Returns:
            By the operators that the step goes over.
        """
        self.sizes = {i: max(1, table.size) for i, table in enumerate(made.operators)}
        scopes = [frozenset(table.scope) for table in (*made.operators, *made.edges)]
        names = list(range(len(made.operators)))
        tables = [*made.operators, *made.edges]
        ordered = order(tables, self.sizes, self.spine, self.method)
        stages = {op: at for at, (op, _) in enumerate(ordered)}
        steps = [(op, *others) for op, others in eliminated(names, scopes, stages=stages)]
        return {step: math.prod(self.sizes[op] for op in step) for step in steps}

    def _split(
        self, alive: list[Array], node: Pruning, steps: dict[tuple[int, ...], int], run: Any
    ) -> list[tuple[list[Array], Pruning]]:
        """Return two subproblems, which halve one operator's configurations, each after pruning."""
        pruning, (op, better) = self.pruning, self._halved(alive, node, steps)
        weights = pruning.weights[pruning.spread(INSIDE)]
        if self.eps and node.weights.shape[1] == 2:  # near what is open: the rest is closed
            above, nearest = node.rooms(self.eps)
            few = nearest[above >= 0, :NEAREST].reshape(-1, 2)
            given = np.concatenate([pruning.weights[:2], few])
            _, first = np.unique(given, axis=0, return_index=True)
            weights = given[np.sort(first)]  # those of one total alone stay first
        live, halves = alive[op], []
        for half in (live & ~better, live & better):
            mine = [each.copy() for each in alive]
            mine[op] = half
            part = node.part()
            part.known = pruning.known
            made = self.leaves.of(mine)
            if all(table.size for table in made.operators):
                shares = np.array([pruning.near(weight) for weight in weights])
                part.learn(made, weights, run, shares)
                part.narrow(mine)
                pruning.known, pruning.work = part.known, pruning.work + part.work
                halves.append((mine, part))
        return halves

    def _halved(
        self, alive: list[Array], node: Pruning, steps: dict[tuple[int, ...], int]
    ) -> tuple[int, Array]:
        """Return an operator, and which of its configurations, about half, have lower bounds.

        It is the operator that most of the elimination goes over: what many blocks read, if such an
        operator has a choice, is what makes elimination large.
        """
        most = dict.fromkeys((op for op, size in self.sizes.items() if size > 1), 0)
        for step, products in steps.items():
            for op in most.keys() & set(step):
                most[op] += products
        op = max(most, key=most.__getitem__)
        live = np.flatnonzero(alive[op])
        excess = (node.bounds[op][live] / np.maximum(node.least, 1e-9)).max(1)
        middle = np.sort(excess)[(len(live) - 1) // 2]
        below = excess <= middle if middle < excess.max() else excess < middle
        better = np.zeros(len(alive[op]), np.bool_)
        better[live[below if below.any() else np.arange(len(live)) < len(live) // 2]] = True
        return op, better

    def _decided(self, alive: list[Array]) -> list[Array]:
        """Return what is left when an operator has the configuration that is best (heuristically).

        It is the one that most tables are over, of those with a choice.
        """
        degrees = np.zeros(len(alive), np.int64)
        for edge in self.problem.edges:
            degrees[[edge.writer, edge.reader]] += 1
        degrees[[live.sum() < 2 for live in alive]] = -1
        op = int(degrees.argmax())
        where = np.flatnonzero(alive[op])
        if self.pruning.bounds[op].shape[1]:
            bounds = self.pruning.bounds[op][where]
        else:
            bounds = self._alone(op)[where]
        best = where[int((bounds / np.maximum(bounds.min(0), 1e-9)).sum(1).argmin())]
        self.counts["heuristic"] = self.counts.get("heuristic", 0) + 1
        self.error = math.inf
        decided = list(alive)
        decided[op] = np.arange(len(alive[op])) == best
        return decided

    def _alone(self, op: int) -> Array:
        """Return the totals of an operator's configurations with the cheapest choices of edges."""
        costs_alone = self.problem.operators[op].costs.min(1).astype(float)
        for edge in self.problem.edges:
            costs = edge.costs.min(2)
            if edge.writer == op:
                costs_alone += costs.min(1)[edge.rows]
            if edge.reader == op:
                costs_alone += costs.min(0)[edge.columns]
        return np.asarray(costs_alone @ self.problem.summing + 1.0)

    def _dive(self, near: float, few: int) -> None:
        """Learn points: those of the configurations that were tried, in all combinations."""
        pruning, eps = self.pruning, self.pruning.eps
        alive = [np.zeros(len(item.costs), np.bool_) for item in self.problem.operators]
        for op, live in enumerate(alive):
            live[pruning.tried[:, op]] = True
            if not live.any():
                return
            bounds = pruning.bounds[op]
            live[np.argsort(bounds, 0, kind="stable")[:NEXT].reshape(-1)] = True
            live &= bounds.max(1) < NEVER
        pruning.eps = near
        made, rows = self.leaves.of(alive), pruning.spread(INSIDE)
        pruning.known = self._followed(made, pruning, rows, few)
        pruning.eps = eps

    def _followed(
        self,
        made: Leaves,
        node: Pruning,
        rows: Array | None,
        few: int | None = None,
        near: float = 0.0,
    ) -> Known:
        """Return known points and those of the problem's tables, eliminated.

        Args:
            node: the bounds of the strategies that the tables contain.
            rows: numbers of weights by whose bounds partial points are left out; None: none are.
            few: how many points of a frontier are gone on with: good ones are found soon, not all.
            near: points that are so near to others are left out, all steps together, as a share.
        """
        joining = Joining(self.pool)
        tables = [*made.operators, *made.edges]
        table, blocks = self._plan(made, joining)
        self.counts |= joining.counts
        if rows is None:
            delta = self._least(made) * near / (1 + near) / max(1, len(joining.made))
            for at, each in enumerate(joining.made):
                joining.fill(each)
                _rounded(each, delta)
                joining.keep(each)
                self._progress(at, joining, each)
            self.counts |= joining.counts
            return self._with(table, node)
        cells = Cells(node, joining, tables, rows)
        for leaf in tables:
            cells.thin(leaf)
        by_level = self.pruning.largest.sum() == 1 and self.problem.summing.shape[1] == 2
        self._filled(joining, cells, few, self.inside if by_level else len(joining.made))
        return self._by_level(blocks, node, rows, few) if by_level else self._with(table, node)

    def _filled(self, joining: Joining, cells: Cells, few: int | None, count: int) -> None:
        """Make the first so many joins."""
        for at, each in enumerate(joining.made[:count]):
            joining.fill(each)
            cells.thin(each, few)
            self._progress(at, joining, each)

    def _by_level(
        self, blocks: Sequence[Table], pruning: Pruning, rows: Array, few: int | None
    ) -> Known:
        """Return known points and those of the tables of blocks, level by level."""
        at = int(pruning.largest.argmax())
        total = int(pruning.summing[at].argmax())
        width = pruning.eps * (1 - MARGIN) * pruning.least[total] / pruning.weights[total, total]
        for least, most in levels(blocks, at, max(0.0, width)):
            tables = [limited(table, at, most) for table in blocks]
            joining, level = Joining(self.pool), pruning.level(least)
            table = self._joined(tables, level.largest, joining)
            cells = Cells(level, joining, tables, rows)
            for each in tables:
                cells.thin(each, few)
            self._filled(joining, cells, few, len(joining.made))
            pruning.known = self._with(table, pruning)
            self.counts["levels"] = self.counts.get("levels", 0) + 1
        return pruning.known

    def _with(self, table: Table, node: Pruning) -> Known:
        """Return known points and those of the table of no operator."""
        chosen = unrolled(table, self.problem)
        totals = added_up(self.problem, *chosen)
        if table.slack.any() and len(totals):
            slack = table.slack @ self.problem.summing
            self.error = max(self.error, float((slack / (totals.min(0) - slack)).max()))
        return node.known.with_points(totals, *chosen)

    def _progress(self, at: int, joining: Joining, table: Table) -> None:
        if self.progress is not None:
            self.progress(at + 1, len(joining.made), len(table.costs))

    def _least(self, made: Leaves) -> Array:
        """Return what each coordinate comes to at least: (coordinates,)."""
        tables = [table.costs for table in (*made.operators, *made.edges) if len(table.costs)]
        least = np.array([costs.min(0) for costs in tables]).reshape(-1, self.problem.coordinates)
        adds = [monoid == "sum" for monoid in self.problem.monoids]
        return np.asarray(np.where(adds, least.sum(0), least.max(0, initial=0)))

    def _plan(self, made: Leaves, joining: Joining) -> tuple[Table, list[Table]]:
        """Return the table of no operator, planned, and those of blocks, whose joins come first."""
        none = np.zeros(self.problem.coordinates, np.bool_)
        self.sizes = {i: max(1, table.size) for i, table in enumerate(made.operators)}
        tables = [*made.operators, *made.edges]
        if self.pruning.largest.any():
            tables = self._blocks(tables, none, joining)
        self.inside = len(joining.made)
        return self._joined(tables, self.pruning.largest, joining), tables

    def _joined(self, tables: list[Table], largest: Array, joining: Joining) -> Table:
        """Return the table of no operator, planned."""
        tables = self._eliminated(list(tables), largest, joining)
        while len(tables) > 1:
            tables[:2] = [joining.join(tables[0], tables[1], None, largest)]
        return tables[0]

    def _blocks(self, tables: list[Table], none: Array, joining: Joining) -> list[Table]:
        """Return a table for each block: costs are summed in it, before larger ones are taken."""
        block_of, summed = self.problem.block_of, []
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
            summed += left
        return summed

    def _eliminated(
        self, tables: list[Table], largest: Array, joining: Joining, only: set[int] | None = None
    ) -> list[Table]:
        """Return what is left of tables, merged, when operators are eliminated."""
        for op, kind in order(tables, self.sizes, self.spine, self.method, only):
            tables = eliminate(tables, op, largest, joining, kind)
        return merged(tables, largest, joining)


def _rounded(table: Table, delta: Array) -> None:
    """Keep one of points of a cell that differ by less than delta in each coordinate.

    What that may add to costs is added to the table's slack.
    """
    whole = np.floor(delta).astype(np.int64)
    if whole.max(initial=0) < 1 or len(table.costs) < MANY * max(1, table.size):
        return
    whole = np.maximum(whole, 1)
    cell = np.repeat(np.arange(table.size), np.diff(table.start))
    boxes = np.concatenate([cell[:, None], table.costs // whole], 1)
    keep = np.zeros(len(cell), np.bool_)
    keep[np.unique(boxes, axis=0, return_index=True)[1]] = True
    table.keep(keep)
    table.slack = table.slack + whole - 1
