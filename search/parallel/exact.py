"""The best strategy of a small graph, with a certificate: branch and bound (Jia, section 3.8.4).

Configurations cut dims of the results in equal parts; each part runs on any device. Operators are
given configurations in program order, depth first. A strategy begun is dropped when no way to end
it can be faster than the best one known, by two bounds that add up along a chain of operators:

- forward along the chain, back along it, and what has to move in between: the last point of an
  operator to end delays some point of the next one by a message at least (`tables.py`). Then, on
  the device of the first operator's last point, all updates there, which devices run last;
- the same path, and the first operator's own sums and updates.

Least sums of what is left are tables by configuration, made from the end of the chain (as the
heuristic of A*). Devices that may be exchanged without any difference are told apart only as far as
strategies do; if all may be, the device of that last point is called 0, else updates do not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import networkx
import numpy as np

from soapstone.search.parallel.arrays import CLASS, FREE, GROUP, KIND, OF_KIND, Array, Problem
from soapstone.search.parallel.configurations import degrees_of, every_placement, rows
from soapstone.search.parallel.operators import ParallelError
from soapstone.search.parallel.problem import Model
from soapstone.search.parallel.tables import Choices, Own, Pair, edges_of, own_costs, relation
from soapstone.search.parallel.walker import Walker

MOST = 20_000  # configurations of an operator


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
                for degrees in degrees_of(p, op, range(1, devices + 1), reduced=False, equal=True)
                for where in every_placement(int(np.prod(degrees)), devices)
            ]
            if len(listed) > MOST:
                raise ParallelError(
                    f"{model.operators[op].node.label}: {len(listed):,} configurations on"
                    f" {devices} devices found, {MOST:,} at most for an exhaustive search"
                )
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

    def pair(self, first: int, second: int) -> Array:
        """Return the least that moves between two operators, by their configurations."""
        pair = Pair(self.model, (first, second))
        a, b = self.kind(first), self.kind(second)
        images, others = self.images[a], self.images[b]
        source = images.argmin(axis=0)  # the renaming that makes the least one of each
        least = images.min(axis=0)
        firsts = np.unique(least)
        mine = self.choices[a]
        part = Choices(mine.degrees[firsts], mine.placed[firsts])
        table = pair.table(part, self.choices[b], least=True)
        found = np.empty((len(mine), len(self.choices[b])), np.int32)
        for i in range(len(mine)):
            found[i] = table[np.searchsorted(firsts, least[i]), others[source[i]]]
        return found


def chain_of(model: Model, free: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """Return a longest chain of operators, each of which reads what the one before it makes."""
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(free)
    return [int(op) for op in networkx.dag_longest_path(graph)]


class Exhaustive:
    """A branch and bound under way."""

    def __init__(self, model: Model, walker: Walker, go_on: Callable[[int, int], bool]) -> None:
        self.model, self.walker, self.go_on = model, walker, go_on
        self.space = Space(model)
        edges = edges_of(model)
        self.chain = chain_of(model, self.space.free, edges)
        self.order = self.space.free
        self.visited, self.stopped, self.bound = 0, False, 0
        self.assigned: dict[int, int] = {}
        self._bounds()

    def _bounds(self) -> None:
        """Make the tables: what each step adds to the bounds, and the least of what is left."""
        space = self.space
        self.moves: dict[tuple[int, int], Array] = {}
        known: dict[tuple[object, ...], Array] = {}
        for ends in itertools.pairwise(self.chain):
            key = relation(self.model, ends)
            if key not in known:
                known[key] = space.pair(*ends)
            self.moves[ends] = known[key]
        self.path: dict[int, Array] = {}  # (2, configurations): what an operator adds
        for op in self.order:
            own = space.own[space.kind(op)]
            both = np.zeros((2, space.size(op)), np.int64)
            if op in self.chain:
                both += own.ahead + own.back
            if self.space.alike:
                both[0] += own.updates[:, 0]
            if op == self.chain[0]:
                both[1] += np.maximum(own.alone - own.ahead - own.back, 0)
            self.path[op] = both
        # The least of an operator of the chain and all after it, by its own configuration.
        self.rest: dict[int, Array] = {}
        below = np.zeros((2, 1), np.int64)
        for i in range(len(self.chain) - 1, -1, -1):
            op = self.chain[i]
            if i + 1 < len(self.chain):
                move = self.moves[op, self.chain[i + 1]]
                after = self.rest[self.chain[i + 1]]
                below = np.array([(move + after[k][None, :]).min(axis=1) for k in (0, 1)])
            self.rest[op] = self.path[op] + below
        self.total_work = {op: space.own[space.kind(op)].work for op in self.order}

    def run(self) -> Certificate:
        """Search; the walker has the best strategy known, which may come from elsewhere."""
        began = time.perf_counter()
        self.devices = len(self.model.problem.devices)
        least_work = {op: int(self.total_work[op].min()) for op in self.order}
        self.work_after = [
            sum(least_work[op] for op in self.order[i + 1 :]) for i in range(len(self.order))
        ]
        fixed = np.arange(len(self.space.renamings))
        if self.space.alike:
            fixed = fixed[self.space.renamings[:, 0] == 0]
        try:
            self._branch(0, np.zeros(2, np.int64), 0, fixed)
        except KeyboardInterrupt:
            self.stopped = True
        size = float(np.prod([float(self.space.size(op)) for op in self.order]))
        best = self.walker.best_ns
        bound = best if not self.stopped else min(best, self.bound)
        return Certificate(
            bound,
            not self.stopped,
            self.visited,
            self.walker.proposals,
            size,
            time.perf_counter() - began,
        )

    def _branch(self, depth: int, so_far: Array, work: int, renamings: Array) -> None:
        """Try all configurations of the operator at a depth, those that promise most first.

        Args:
            so_far: both bounds of the operators before this one.
            renamings: those that leave all operators before this one as they are.
        """
        op = self.order[depth]
        kind = self.space.kind(op)
        rows_of = self.space.first_of(kind, renamings)
        added, estimate = self._estimates(op, so_far)
        loads = (work + self.total_work[op] + self.work_after[depth]) // self.devices
        bounds = np.maximum(estimate.max(axis=0), loads)
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
            images = self.space.images[kind][renamings, row]
            self._branch(
                depth + 1,
                added[:, row],
                work + int(self.total_work[op][row]),
                renamings[images == row],
            )
            del self.assigned[op]

    def _estimates(self, op: int, so_far: Array) -> tuple[Array, Array]:
        """Return both bounds of what is begun and of any way to end it, by configuration of `op`.

        Of the operators of the chain those before `op` have configurations, as it is in program
        order; the rest of the chain is least.
        """
        if op in self.chain:
            i = self.chain.index(op)
            before = so_far[:, None]
            if i:
                last = self.chain[i - 1]
                before = before + self.moves[last, op][self.assigned[last]][None, :]
            return before + self.path[op], before + self.rest[op]
        added = so_far[:, None] + self.path[op]
        ahead = [other for other in self.chain if other not in self.assigned]
        if not ahead:
            return added, added
        rest = self.rest[ahead[0]]
        i = self.chain.index(ahead[0])
        if i:
            last = self.chain[i - 1]
            rest = rest + self.moves[last, ahead[0]][self.assigned[last]][None, :]
        return added, added + rest.min(axis=1)[:, None]

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


__all__ = ["Certificate", "Exhaustive", "Space", "interchangeable", "permutations"]
