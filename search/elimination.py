"""The cheapest choice by sums of tables, exactly: one unknown eliminated after the other.

Bertele and Brioschi, Nonserial dynamic programming, 1972. An unknown is replaced by a table over
those that it shares tables with: its least cost for each choice of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]
Name = TypeVar("Name", bound=Hashable)


def eliminated(
    names: Sequence[Name],
    scopes: Sequence[frozenset[Name]],
    few: int = 0,
    *,
    sizes: Mapping[Name, int] | None = None,
    stages: Mapping[Name, int] | None = None,
) -> list[tuple[Name, tuple[Name, ...]]]:
    """Return unknowns in the order of their elimination, each with those that its table is over.

    The first that shares tables with at most `few` others is next; where there is none, the one
    with the fewest.

    Args:
        scopes: the unknowns of each table.
        sizes: how many choices each has: that of which the fewest combinations with the others have
            to be gone through is next, instead.
        stages: those of a lower stage go first.
    """
    place = {name: at for at, name in enumerate(names)}
    around: dict[Name, set[Name]] = {name: set() for name in names}
    for scope in scopes:
        for name in scope:
            around[name] |= scope

    def weight(name: Name) -> tuple[int, int]:
        many = max(few, len(around[name]) - 1)
        if sizes is not None:
            many = math.prod(sizes[other] for other in around[name] | {name})
        return (stages[name] if stages is not None else 0), many

    order = []
    weights = {name: weight(name) for name in names}
    while weights:
        name = min(weights, key=lambda each: (weights[each], place[each]))
        del weights[name]
        others = around.pop(name) - {name}
        order.append((name, tuple(sorted(others, key=place.__getitem__))))
        for other in others:
            around[other] |= others
            around[other].discard(name)
        for other in others:
            weights[other] = weight(other)
    return order


def cheapest(
    names: Sequence[Name], tables: Sequence[tuple[tuple[Name, ...], Numbers]], few: int = 0
) -> tuple[dict[Name, int], Any]:
    """Return the choice of each unknown with which tables sum to the least, and that sum.

    Args:
        tables: unknowns, and a cost for each choice of theirs. few: as `eliminated` has it.
    """
    answers = []
    for name, others in eliminated(names, [frozenset(of) for of, _ in tables], few):
        mine = [_spread(table, of, (*others, name)) for of, table in tables if name in of]
        shape = np.broadcast_shapes(*(table.shape for table in mine))
        wide = [np.broadcast_to(table, shape) for table in mine]
        least, answer = np.zeros(shape[:-1], np.result_type(*mine)), np.zeros(shape[:-1], np.intp)
        for at in np.ndindex(shape[:-2]):  # a part at a time, for room
            total = np.sum([table[at] for table in wide], axis=0)
            least[at], answer[at] = total.min(-1), total.argmin(-1)
        tables = [*((of, table) for of, table in tables if name not in of), (others, least)]
        answers.append((name, others, answer))
    chosen: dict[Name, int] = {}
    for name, others, answer in reversed(answers):
        chosen[name] = int(answer[tuple(chosen[other] for other in others)])
    return chosen, sum(table for _, table in tables)


def _spread(table: Numbers, of: Sequence[Name], axes: Sequence[Name]) -> Numbers:
    """Return a table over more unknowns, in the order of `axes`, as an array that broadcasts."""
    order = sorted(range(len(of)), key=lambda at: axes.index(of[at]))
    shape = [table.shape[of.index(name)] if name in of else 1 for name in axes]
    return table.transpose(order).reshape(shape)
