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
    Table,
    eliminate,
    leaves,
    merged,
    unrolled,
)
from soapstone.search.parallel.frontier.spine import Spine, marked_spine
from soapstone.search.parallel.frontier.tables import Problem, Result
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.operators import ParallelError

Method = Literal["linear", "elimination"]
Progress = Callable[[int, int, int], None]  # operators eliminated, of how many, points of the last


def track(
    problem: Problem,
    *,
    method: Method = "linear",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Return the cost frontier.

    Args:
        method: `linear`: blocks are eliminated, then the spine is gone along; `elimination`: all is
            eliminated down to two operators.
        threads: None: as many as there are processors.
        progress: called after each operator, with how many are eliminated, how many there are, and
            how many points the last table has.

    Raises:
        ParallelError: arguments out of range, or a table that does not fit.
    """
    if method not in ("linear", "elimination"):
        raise ParallelError(f"method {method!r} found, 'linear' or 'elimination' needed")
    if threads is not None and threads < 1:
        raise ParallelError(f"{threads} threads found, at least 1 needed")
    begin = time.perf_counter()
    threads = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        joining = Joining(threads, pool if threads > 1 else None)
        table = _Tracker(problem, method, joining, progress).run()
    configurations, choices, edge_choices = unrolled(table, problem)
    kinds = ("node", "edge", "branch", "heuristic", "linear")
    return Result(
        table.costs,
        configurations,
        choices,
        edge_choices,
        exact=True,
        error=0.0,
        eliminations={kind: joining.counts.get(kind, 0) for kind in kinds},
        seconds=time.perf_counter() - begin,
        work={kind: n for kind, n in joining.counts.items() if kind not in kinds},
    )


class _Tracker:
    def __init__(
        self, problem: Problem, method: Method, joining: Joining, progress: Progress | None
    ) -> None:
        self.problem, self.joining, self.progress = problem, joining, progress
        self.method, self.done = method, 0
        self.leaves = leaves(problem)
        ends = [(edge.writer, edge.reader) for edge in problem.edges]
        self.spine = marked_spine(len(problem.operators), ends)
        self.sizes = {i: max(1, table.shape[0]) for i, table in enumerate(self.leaves.operators)}

    def run(self) -> Table:
        none = np.zeros(self.problem.coordinates, np.bool_)
        largest = np.array([monoid == "max" for monoid in self.problem.monoids])
        tables = [*self.leaves.operators, *self.leaves.edges]
        if largest.any():
            tables = self._blocks(tables, none)
        tables = self._eliminated(tables, largest)
        while len(tables) > 1:
            tables[:2] = [self.joining.join(tables[0], tables[1], None, largest)]
        return tables[0]

    def _blocks(self, tables: list[Table], none: Array) -> list[Table]:
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
            left = self._eliminated(mine, none, own)
            while len(left) > 1:
                left[:2] = [self.joining.join(left[0], left[1], None, none)]
            found += left
        return found

    def _eliminated(
        self, tables: list[Table], largest: Array, only: set[int] | None = None
    ) -> list[Table]:
        """Return what is left of tables, merged, when operators are eliminated."""
        for op, kind in order(tables, self.sizes, self.spine, self.method, only):
            tables = eliminate(tables, op, largest, self.joining, kind)
            self.done += 1
            if self.progress is not None:
                count = len(self.problem.operators)
                self.progress(self.done, count, len(tables[-1].costs))
        return merged(tables, largest, self.joining)


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
