"""The best strategy of a small graph, with a certificate: branch and bound (Jia, section 3.8.4).

Configurations cut dims of the results in equal parts; each part runs on any device. Operators are
given configurations in program order, depth first. A strategy begun is dropped when no way to end
it can be faster than the best one known. What it takes at least is followed along a chain of
operators, forward and back: when the first and when the last point of each can have ended, by the
messages between two operators (`tables.py`). Then each device that has a point of the first
operator runs all its updates: after the first of these points at least, on one device after the
last. Least times of what is left are tables by configuration, made from the end of the chain (as
the heuristic of A*).

Devices that may be exchanged without any difference are told apart only as far as strategies do; if
all may be, the device of that last point is called 0.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import networkx
import numpy as np

from soapstone.search.parallel.arrays import (
    CLASS,
    FREE,
    GROUP,
    KIND,
    OF_KIND,
    POINTS,
    Array,
    Problem,
)
from soapstone.search.parallel.configurations import degrees_of, every_placement, rows
from soapstone.search.parallel.operators import ParallelError
from soapstone.search.parallel.problem import Model
from soapstone.search.parallel.tables import (
    FIRST_FIRST,
    FIRST_LAST,
    LAST_FIRST,
    LAST_LAST,
    Choices,
    Own,
    Pair,
    edges_of,
    own_costs,
    relation,
)
from soapstone.search.parallel.walker import Walker

MOST = 20_000  # configurations of an operator
NONE = -(1 << 28)  # a delay that says nothing
_DELAY = {
    (0, 0): FIRST_FIRST,
    (0, 1): FIRST_LAST,
    (1, 0): LAST_FIRST,
    (1, 1): LAST_LAST,
}  # from the first or last point of one operator to that of another


@dataclass(frozen=True)
class Certificate:
    """What is known when the search ends.

    Attributes:
        bound_ns: no strategy of the space is faster. complete: whether the best one is proved.
        visited: strategies begun; simulated: ended. space: how many there are.
    """

    bound_ns: int
    complete: bool
    visited: int
    simulated: int
    space: float
    seconds: float

    def __str__(self) -> str:
        proved = "the best" if self.complete else "not searched to the end:"
        return (
            f"{proved} of {self.space:.3g} strategies, none below {self.bound_ns / 1e3:,.1f} us;"
            f" {self.visited:,} begun, {self.simulated:,} simulated in {self.seconds:.1f} s"
        )


def interchangeable(p: Problem) -> list[list[int]]:
    """Return groups of devices any two of which can be exchanged without a difference."""
    devices = len(p.devices)
    groups: list[list[int]] = []
    for device in range(devices):
        for group in groups:
            if _alike(p, group[0], device):
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _alike(p: Problem, a: int, b: int) -> bool:
    devices = len(p.devices)
    if (p.devices[a, [GROUP, OF_KIND]] != p.devices[b, [GROUP, OF_KIND]]).any():
        return False
    swapped = np.arange(devices)
    swapped[[a, b]] = b, a
    for matrix in (p.latency_ns, p.ns_per_byte):
        if (matrix[np.ix_(swapped, swapped)] != matrix).any():
            return False
    renamed: dict[int, int] = {}  # channels, which must be shared in the same way
    for x, y in itertools.product(range(devices), repeat=2):
        mine = _route(p, x, y)
        theirs = _route(p, int(swapped[x]), int(swapped[y]))
        if len(mine) != len(theirs):
            return False
        if any(renamed.setdefault(c, d) != d for c, d in zip(mine, theirs)):
            return False
    return len(set(renamed.values())) == len(renamed)


def _route(p: Problem, source: int, target: int) -> list[int]:
    pair = source * len(p.devices) + target
    return [int(c) for c in p.route[p.route_ptr[pair] : p.route_ptr[pair + 1]]]


def permutations(p: Problem) -> Array:
    """Return the renamings of devices that make no difference; the first leaves all as it is."""
    groups = interchangeable(p)
    found = []
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        names = np.arange(len(p.devices))
        for group, order in zip(groups, orders):
            names[group] = order
        found.append(names)
    return np.array(found)


def splits(p: Problem, op: int) -> list[tuple[int, ...]]:
    """Return the degrees of an operator that make equal parts of its results."""
    points = range(1, len(p.devices) + 1)
    return list(degrees_of(p, op, points, reduced=False, equal=True))


def check_space(model: Model) -> None:
    """Raise ParallelError, naming the operator, if one has too many configurations."""
    p, devices = model.problem, len(model.problem.devices)
    for op, item in enumerate(model.operators):
        if p.operators[op, KIND] == FREE:
            count = sum(float(devices) ** np.prod(degrees) for degrees in splits(p, op))
            if count > MOST:
                raise ParallelError(
                    f"{item.node.label}: {count:.3g} configurations on {devices} devices found,"
                    f" {MOST:,} at most for an exhaustive search"
                )


class Space:
    """Every configuration of each operator, and how devices' renamings permute them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        p, devices = model.problem, len(model.problem.devices)
        self.free = [op for op in range(len(p.operators)) if p.operators[op, KIND] == FREE]
        self.renamings = permutations(p)
        self.alike = len(interchangeable(p)) == 1
        self.choices: dict[int, Choices] = {}
        self.own: dict[int, Own] = {}
        self.images: dict[int, Array] = {}  # (renamings, configurations)
        for op in self.free:
            kind = self.kind(op)
            if kind in self.choices:
                continue
            listed = [
                (degrees, where)
                for degrees in splits(p, op)
                for where in every_placement(int(np.prod(degrees)), devices)
            ]
            self.choices[kind] = Choices(*rows(listed, devices))
            self.images[kind] = self._renamed(listed)
            self.own[kind] = own_costs(model, op, self.choices[kind])

    def kind(self, op: int) -> int:
        return int(self.model.problem.operators[op, CLASS])

    def size(self, op: int) -> int:
        return len(self.choices[self.kind(op)])

    def _renamed(self, listed: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Array:
        number = {item: i for i, item in enumerate(listed)}
        return np.array(
            [
                [number[degrees, tuple(int(names[d]) for d in where)] for degrees, where in listed]
                for names in self.renamings
            ]
        )

    def first_of(self, kind: int, renamings: Array) -> Array:
        """Return the configurations that are the least of those that renamings make of them."""
        images = self.images[kind][renamings]
        found: Array = np.nonzero(images.min(axis=0) == np.arange(images.shape[1]))[0]
        return found

    def delays(self, first: int, second: int) -> Array:
        """Return the least delays between two operators, by their configurations (`Pair`). int32"""
        pair = Pair(self.model, (first, second))
        images, others = self.images[self.kind(first)], self.images[self.kind(second)]
        source = images.argmin(axis=0)  # the renaming that makes the least one of each
        least = images.min(axis=0)
        firsts, at = np.unique(least, return_inverse=True)
        mine, theirs = (self.choices[self.kind(op)] for op in (first, second))
        part = Choices(mine.degrees[firsts], mine.placed[firsts])
        table = np.maximum(pair.delays(part, theirs), NONE).astype(np.int32)
        found = np.empty((*table.shape[:2], len(mine), len(theirs)), np.int32)
        for i in range(len(mine)):
            found[:, :, i] = table[:, :, at[i]][..., others[source[i]]]
        return found


def chain_of(model: Model, free: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """Return a longest chain of operators, each of which reads what the one before it makes."""
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(free)
    return [int(op) for op in networkx.dag_longest_path(graph)]


@dataclass(frozen=True)
class Begun:
    """A strategy begun: times in ns, scalars, or arrays by configuration of the next operator.

    Attributes:
        first, last: when the first and last point of the chain's last operator have ended.
        from_first, from_last: from when they have ended on the way back to the end of it, by device
            whose updates follow: (devices,) or (devices, configurations).
        after: what comes after that, likewise.
        work: of all tasks.
    """

    first: Any
    last: Any
    from_first: Any
    from_last: Any
    after: Any
    work: Any

    def at(self, row: int) -> Begun:
        """Return it with the next operator's configuration chosen."""
        back = (self.from_first[:, row], self.from_last[:, row], self.after[:, row])
        return Begun(self.first[row], self.last[row], *back, self.work[row])


def _then(first: Any, last: Any, delays: Array) -> tuple[Any, Any]:
    """Return when the first and last of the points after these can begin."""
    return (
        np.maximum(first + delays[FIRST_FIRST], last + delays[LAST_FIRST]),
        np.maximum(first + delays[FIRST_LAST], last + delays[LAST_LAST]),
    )


class Exhaustive:
    """A branch and bound under way."""

    def __init__(self, model: Model, walker: Walker, go_on: Callable[[int, int], bool]) -> None:
        self.model, self.walker, self.go_on = model, walker, go_on
        self.space = Space(model)
        self.devices = len(model.problem.devices)
        self.chain = chain_of(model, self.space.free, edges_of(model))
        self.order = self.space.free
        self.visited, self.stopped, self.bound = 0, False, 0
        self.assigned: dict[int, int] = {}
        self._tables()

    def _tables(self) -> None:
        """Make what each step adds, and the least of what is left."""
        space = self.space
        known: dict[tuple[object, ...], Array] = {}
        self.delays: list[Array] = []  # from each operator of the chain to the next
        for ends in itertools.pairwise(self.chain):
            key = relation(self.model, ends)
            if key not in known:
                known[key] = space.delays(*ends)
            self.delays.append(known[key])
        own = {op: space.own[space.kind(op)] for op in self.order}
        self.work = {op: own[op].work for op in self.order}
        self.ahead = [own[op].ahead for op in self.chain]
        self.back = [own[op].back for op in self.chain]
        self.ahead_all = [own[op].ahead_all for op in self.chain]
        self.back_all = [own[op].back_all for op in self.chain]
        for i, delays in enumerate(self.delays):
            if (delays[1] < 0).all():  # nothing comes back: the end of one is the other's by name
                self.delays[i] = delays.copy()
                self.delays[i][1] = np.array([0, 0, 0, NONE])[:, None, None]
                self.back[i] = self.back_all[i] = np.zeros_like(self.back[i])
        self.after: dict[int, Array] = {}  # (devices, configurations): what comes after the chain
        for op in self.order:
            self.after[op] = own[op].updates.T
        self.ends = self._ends()
        # From the forward to the backward end of an operator of the chain, with all that comes
        # after the chain for those behind it: (devices, from, to, configurations).
        self.rest: list[Array] = [np.zeros(0)] * len(self.chain)
        for i in range(len(self.chain) - 1, -1, -1):
            self.rest[i] = self._rest(i)
        self.work_after = [
            sum(int(self.work[op].min()) for op in self.order[i + 1 :])
            for i in range(len(self.order))
        ]

    def _ends(self) -> tuple[Array, Array]:
        """Return where the chain's first operator has points, and which device ends last.

        (devices, configurations) each: 0, or NONE where that is not so.
        """
        op = self.chain[0]
        table = self.space.choices[self.space.kind(op)]
        first, last = np.full((2, self.devices, len(table)), NONE, np.int64)
        if self.space.alike:
            last[0] = 0
        if self.back[0].any():  # else the last end is another operator's
            for row in range(len(table)):
                first[table.placed[row, : table.degrees[row, POINTS]], row] = 0
        return first, last

    def _rest(self, i: int) -> Array:
        """Return the least from the forward to the backward end of an operator of the chain."""
        found = np.full((self.devices, 2, 2, len(self.back[i])), NONE, np.int64)
        found[:, 0, 0] = found[:, 1, 1] = self.back[i]
        found[:, 0, 1] = self.back_all[i]
        if i + 1 == len(self.chain):
            return found
        ahead, back = self.delays[i]
        inner = self.rest[i + 1] + self.after[self.chain[i + 1]][:, None, None]
        one, all_of = self.ahead[i + 1], self.ahead_all[i + 1]
        for bound in range(self.devices):
            # From the begin of the next operator's forward pass to its backward end.
            begun = np.empty((2, 2, inner.shape[-1]), np.int64)
            for end in range(2):
                begun[0, end] = np.maximum(
                    one + inner[bound, 0, end], all_of + inner[bound, 1, end]
                )
                begun[1, end] = one + inner[bound, 1, end]
            for start in range(2):
                ways = [
                    np.maximum.reduce(
                        [
                            ahead[_DELAY[start, a]] + begun[a, b][None, :] + back[_DELAY[b, end]]
                            for a, b in itertools.product(range(2), repeat=2)
                        ]
                    )
                    for end in range(2)
                ]
                to_first = ways[0] + self.back[i][:, None]
                to_last = np.maximum(
                    ways[1] + self.back[i][:, None], ways[0] + self.back_all[i][:, None]
                )
                for end, way in enumerate((to_first, to_last)):
                    least = way.min(axis=1)
                    found[bound, start, end] = np.maximum(found[bound, start, end], least)
        return found

    def run(self) -> Certificate:
        """Search; the walker has the best strategy known, which may come from elsewhere."""
        began = time.perf_counter()
        fixed = np.arange(len(self.space.renamings))
        if self.space.alike:
            fixed = fixed[self.space.renamings[:, 0] == 0]
        try:
            self._branch(0, self.start(), fixed)
        except KeyboardInterrupt:
            self.stopped = True
        size = float(np.prod([float(self.space.size(op)) for op in self.order]))
        best = self.walker.best_ns
        return Certificate(
            best if not self.stopped else min(best, self.bound),
            not self.stopped,
            self.visited,
            self.walker.proposals,
            size,
            time.perf_counter() - began,
        )

    def start(self) -> Begun:
        """Return nothing begun."""
        none = np.zeros(self.devices, np.int64)
        return Begun(0, 0, none, none, none, 0)

    def _branch(self, depth: int, begun: Begun, renamings: Array) -> None:
        """Try all configurations of the operator at a depth, those that promise most first.

        Args:
            renamings: those that leave all operators before this one as they are.
        """
        op = self.order[depth]
        rows_of = self.space.first_of(self.space.kind(op), renamings)
        with_it, least = self.steps(op, begun)
        bounds = np.maximum(least, (with_it.work + self.work_after[depth]) // self.devices)
        rows_of = rows_of[np.argsort(bounds[rows_of], kind="stable")]
        if depth + 1 == len(self.order):
            self._leaves(op, rows_of[bounds[rows_of] < self.walker.best_ns])
            return
        for row in rows_of.tolist():
            if depth == 0:
                self.bound = max(self.bound, int(bounds[row]))
            if bounds[row] >= self.walker.best_ns:
                break
            if self.stopped or not self.go_on(self.visited, min(self.bound, self.walker.best_ns)):
                self.stopped = True
                return
            self.visited += 1
            self.assigned[op] = row
            images = self.space.images[self.space.kind(op)][renamings, row]
            self._branch(depth + 1, with_it.at(row), renamings[images == row])
            del self.assigned[op]

    def steps(self, op: int, begun: Begun) -> tuple[Begun, Array]:
        """Return what is begun with each configuration of an operator, and the least to its end.

        The operators of the chain before it have configurations; the rest of the chain is least.
        """
        size = self.space.size(op)
        after = begun.after[:, None] + self.after[op]
        work = begun.work + self.work[op]
        if op in self.chain:
            i = self.chain.index(op)
            found = replace(self._next(i, begun), after=after, work=work)
            return found, self._least(i, found)
        ahead = [i for i, other in enumerate(self.chain) if other not in self.assigned]
        flat = np.zeros(size, np.int64)
        found = Begun(
            begun.first + flat,
            begun.last + flat,
            begun.from_first[:, None] + flat,
            begun.from_last[:, None] + flat,
            after,
            work,
        )
        if not ahead:
            return found, (begun.last + found.from_last + after).max(axis=0)
        follows = self._next(ahead[0], begun)
        alone = self.after[self.chain[ahead[0]]]
        least = self._by_bound(ahead[0], replace(follows, after=alone)).min(axis=1)
        return found, (least[:, None] + after).max(axis=0)

    def _next(self, i: int, begun: Begun) -> Begun:
        """Return what is begun with each configuration of the chain's next operator."""
        first, last = begun.first, begun.last
        from_first, from_last = self.ends
        if i:
            row = self.assigned[self.chain[i - 1]]
            ahead, back = self.delays[i - 1][:, :, row]
            first, last = _then(first, last, ahead)
            one, all_of = int(self.back[i - 1][row]), int(self.back_all[i - 1][row])
            mine = np.maximum(one + begun.from_first, all_of + begun.from_last)[:, None]
            theirs = (one + begun.from_last)[:, None]
            from_first, from_last = (
                np.maximum(back[_DELAY[end, 0]] + mine, back[_DELAY[end, 1]] + theirs)
                for end in (0, 1)
            )
        last = np.maximum(first + self.ahead_all[i], last + self.ahead[i])
        first = first + self.ahead[i]
        return Begun(first, last, from_first, from_last, begun.after, begun.work)

    def _by_bound(self, i: int, begun: Begun) -> Array:
        """Return the least time of a step by bound and configuration of one of the chain."""
        starts, ends = (begun.first, begun.last), (begun.from_first, begun.from_last)
        ways = [
            starts[a] + self.rest[i][:, a, b] + ends[b]
            for a, b in itertools.product(range(2), repeat=2)
        ]
        found: Array = np.maximum.reduce(ways) + begun.after
        return found

    def _least(self, i: int, begun: Begun) -> Array:
        """Return the least time of a step for each configuration of an operator of the chain."""
        found: Array = self._by_bound(i, begun).max(axis=0)
        return found

    def _leaves(self, op: int, rows_of: Array) -> None:
        """Simulate strategies that differ in the last operator."""
        if not len(rows_of):
            return
        walker, space = self.walker, self.space
        c = walker.settled.choice
        for other, row in self.assigned.items():
            table = space.choices[space.kind(other)]
            c.operators[other], c.placed[other] = table.degrees[row], table.placed[row]
        table = space.choices[space.kind(op)]
        c.operators[op], c.placed[op] = table.degrees[rows_of[0]], table.placed[rows_of[0]]
        c.cuts[:] = -1
        walker.visit()
        walker.descend(
            np.array([op], np.int64), table.degrees[rows_of[1:]], table.placed[rows_of[1:]]
        )


__all__ = [
    "Begun",
    "Certificate",
    "Exhaustive",
    "Space",
    "check_space",
    "interchangeable",
    "permutations",
]
