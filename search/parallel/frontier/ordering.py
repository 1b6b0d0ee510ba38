"""The order in which operators are eliminated: blocks before the spine, smallest tables first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from soapstone.search.elimination import eliminated
from soapstone.search.parallel.frontier.eliminate import Table
from soapstone.search.parallel.frontier.spine import Spine

Method = Literal["linear", "elimination"]


def order(
    tables: Sequence[Table],
    sizes: dict[int, int],
    spine: Spine,
    method: Method,
    only: set[int] | None = None,
) -> list[tuple[int, str]]:
    """Return the operators in an order of elimination, each with its kind (see `eliminate`).

    The candidates are the order along the spine, from either end, and that of the smallest tables
    first; the one with the least estimated `work` is taken.
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
    found = [eliminated(names, scopes, sizes=sizes, stages=plan) for plan in plans]
    best = min(found, key=lambda each: work(each, scopes, sizes, wanted))
    linear = set(line) if best is found[0] and method == "linear" else set()
    return [(op, "linear" if op in linear else "") for op, _ in best if op in wanted]


def work(
    order: Sequence[tuple[int, tuple[int, ...]]],
    scopes: Sequence[frozenset[int]],
    sizes: dict[int, int],
    wanted: set[int],
) -> float:
    """Return an estimate of how many points an order of elimination goes through.

    A frontier is taken to have as many points as there are operators in it.
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
