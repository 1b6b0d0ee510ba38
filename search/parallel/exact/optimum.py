"""The best strategy of a small graph, with a certificate: branch and bound (Jia, section 3.8.4).

Configurations are those of `space.py`. The search is made in rounds, each for strategies below a
limit: what is known of pairs of neighbours (`pairs.py`) leaves few configurations below a low
limit, and the round shows quickly that there is none, or finds one. The limits go from what no
strategy can pass to the best one known, so that at every moment a bound is proved.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from soapstone.ir.dims import equal_cuts
from soapstone.ir.tensor import Array
from soapstone.search.parallel.bounds.operator_costs import Sieve
from soapstone.search.parallel.exact import branching, pairs
from soapstone.search.parallel.exact.exact_arrays import HUGE
from soapstone.search.parallel.exact.exact_tables import Encoder, path_of, place_of
from soapstone.search.parallel.exact.space import Space
from soapstone.search.parallel.exact.tables import edges_back, edges_of, passes
from soapstone.search.parallel.mcmc.descent import Descent
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model

VISITS = 50_000  # strategies begun between looks at the clock
BEGINNINGS = 20  # random strategies of the space, from which descents begin
SHARES = (0.5, 0.75, 0.9, 1.0)  # of the way to the best strategy known: limits of rounds


@dataclass(frozen=True)
class Certificate:
    """What the search has proved when it ends.

    Attributes:
        bound_ns: no strategy of the space is faster than this.
        complete: whether the best strategy known is proved to be the fastest.
        inside: whether that strategy is one of the space. If not, it has uneven tiles or partial
            sums, and was given to the search.
        visited: how many partial strategies were visited.
        simulated: how many complete strategies were simulated.
        space: how many strategies there are.
        seconds: the time of the whole search.
        prepared: the part of `seconds` spent on tables, and on compiling or loading the code.
    """

    bound_ns: int
    complete: bool
    visited: int
    simulated: int
    space: float
    seconds: float
    prepared: float
    inside: bool = True

    def __str__(self) -> str:
        best = "the best" if self.inside else "faster than any"
        proved = best if self.complete else "not searched to the end:"
        return (
            f"{proved} of {self.space:.3g} strategies, none below {self.bound_ns / 1e3:,.1f} us;"
            f" {self.visited:,} begun, {self.simulated:,} simulated in {self.seconds:.1f} s"
            f" ({self.prepared:.1f} s of them for tables and compilation)"
        )


class Exhaustive:
    """The state of a branch and bound.

    Attributes:
        order: the operators in the order in which they get configurations.
        levels: after how many operators partial strategies are simulated (`Sieve`).
        bound: no strategy of the space is faster than this, in ns.
    """

    def __init__(self, model: Model, walker: Walker, go_on: Callable[[int, int], bool]) -> None:
        self.began = time.perf_counter()
        self.model, self.walker, self.go_on = model, walker, go_on
        self.space = Space(model)
        self.edges = edges_of(model)
        self.order = self._order()
        number = {op: i for i, op in enumerate(self.order)}
        back = {(a, b) for a, b in edges_back(model) if number[a] < number[b]}
        tables = Encoder(model, self.space, self.order, sorted({*self.edges, *back}))
        self.tree = tables.tree()
        self.path = path_of(self.tree)
        choices = [self.space.choices[self.space.kind(op)] for op in self.order]
        self.degrees = np.concatenate([each.degrees for each in choices])
        self.levels = tables.levels()
        self.sieves = [Sieve(model, self.order[:level]) for level in self.levels]
        self.bound, self.visited, self.simulated = 0, 0, 0
        self._load()
        self.prepared = time.perf_counter() - self.began

    def _load(self) -> None:
        """Compile what searches, or load it, before any clock runs."""
        call(branching.begin, self.tree, self.path, self.tree.first, 0)
        call(branching.search, self.tree, self.path, 1, 1, 0, 0)
        self.narrow(0)

    def _order(self) -> list[int]:
        """Return the operators by their forward tasks; those that only lead to one, before it."""
        place = {op: place_of(self.model, op, 0) for op in self.space.free}
        for op in self.space.free:
            readers = [b for a, b in self.edges if a == op]
            alone = all(b != op for _, b in self.edges)
            if readers and alone and passes(self.model, op)[1] < 0:
                place[op] = min(place[b] for b in readers) - 0.5
        return sorted(self.space.free, key=lambda op: place[op])

    def run(self, seed: int | None = None) -> Certificate:
        """Search, and return what is proved; the walker has the best strategy before and after.

        Args:
            seed: of random strategies of the space. The search then begins with the best one that
                descents from these find, instead of the walker's.
        """
        complete = False
        with contextlib.suppress(KeyboardInterrupt):
            if seed is not None:
                self._begin_inside(seed)
            complete = self._rounds()
        best = self.walker.best_ns
        size = float(np.prod([float(self.space.size(op)) for op in self.order]))
        return Certificate(
            best if complete else min(best, self.bound),
            complete,
            self.visited,
            self.simulated,
            size,
            time.perf_counter() - self.began,
            self.prepared,
            self._inside(),
        )

    def _begin_inside(self, seed: int) -> None:
        """Let the walker begin from the best strategy of the space that descents find."""
        walker, best = self.walker, int(HUGE)
        found = walker.settled.configurations()

        def go_on() -> bool:
            return self.go_on(self.visited, self.bound)

        try:
            for number in range(BEGINNINGS):
                if not go_on():
                    break
                random = np.random.default_rng([seed, number])
                self._set([int(random.integers(self.space.size(op))) for op in self.order])
                walker.settled.settle()
                walker.begin(walker.settled.configurations())
                before = 0
                while walker.best_ns != before and go_on():
                    before = walker.best_ns
                    descent = int(random.integers(1 << 30))
                    Descent(walker, descent, self.space.listed).run(go_on)
                if walker.best_ns < best:
                    best = walker.best_ns
                    walker.restore(walker.settled)
                    found = walker.settled.configurations()
        finally:
            walker.begin(found)

    def _inside(self) -> bool:
        """Return whether the best strategy known is one of the space."""
        k, p = self.walker.chain, self.model.problem
        for op in self.order:
            table, best = self.space.choices[self.space.kind(op)], k.best[op]
            cut, degrees = int(best["cut"]), best["degrees"]
            if not (table.degrees["degrees"] == degrees).all(axis=1).any():
                return False
            if cut >= 0:
                bounds = k.best_cuts[op, : degrees[cut] + 1]
                extent = int(p.operators[op]["extent"][cut])
                if tuple(bounds.tolist()) != equal_cuts(extent, len(bounds) - 1):
                    return False
        return True

    def _rounds(self) -> bool:
        self.narrow(int(HUGE))
        self.bound = self.least()
        first = self.bound
        for share in SHARES:
            best = self.walker.best_ns
            limit = int(np.ceil(first + share * (best - first)))
            if limit <= self.bound and share < 1.0:
                continue
            if not self.go_on(self.visited, self.bound):
                return False
            self.narrow(limit)
            self.path.counts[:] = 0
            self.path.cursor[:] = 0
            self.path.fixed[0] = 1
            if not self._search(limit):
                return False
            self.bound = max(self.bound, min(limit, self.walker.best_ns))
        return True

    def narrow(self, limit: int) -> None:
        """Leave out the pairs of configurations that no strategy below `limit` ns contains."""
        self.tree.alive[:], self.tree.shared[:] = 1, 0
        alive = len(self.tree.alive)
        while True:
            call(pairs.reaches, self.tree, self.path)
            left = int(call(pairs.rests, self.tree, self.path, limit))
            if left >= 0.98 * alive:
                return
            alive = left

    def least(self) -> int:
        """Return a lower bound, in ns, of the strategies made of remaining pairs."""
        bounds = [int(call(pairs.shortest, self.tree, op)) for op in range(len(self.order))]
        return max(bounds)

    def bounds(self, rows: Array) -> Array:
        """Return the lower bound of a strategy, in ns, after each operator gets its row.

        Args:
            rows: (operators), the row of each operator, in `order`.
        """
        found = np.zeros(len(rows), np.int64)
        call(branching.bounds, self.tree, self.path, rows + self.tree.first[:-1], found)
        return found

    def _search(self, limit: int, bottom: int = 0, level: int = 0) -> bool:
        """Look for strategies below a limit; return whether all were looked for.

        Those that begin as what is chosen, `bottom` operators, are listed up to the next level;
        of them what survives a simulation of as much of the model is gone on with.
        """
        y, top = self.path, self.levels[level]
        done = False
        while not done:
            below = min(limit, self.walker.best_ns)
            done = bool(call(branching.search, self.tree, y, bottom, top, below, VISITS))
            self.visited += int(y.counts[1])
            y.counts[1] = 0
            at, cursor, count = int(y.counts[0]), y.cursor.copy(), int(y.counts[2])
            chosen, found = y.chosen.copy(), y.leaves[:count, :top].copy()
            if count:
                given = self.degrees, self.tree.placed, found
                found = found[self.sieves[level].keep(*given, below)]
                self.simulated += count
            if top == len(self.order):
                self._simulate(found)
            else:
                for rows in found:
                    call(branching.begin, self.tree, y, rows, top)
                    if not self._search(limit, top, level + 1):
                        return False
            if not done:
                if len(found) and top < len(self.order):  # back to where this level was
                    call(branching.begin, self.tree, y, chosen, at)
                    y.counts[0], y.cursor[:] = at, cursor
                if not self.go_on(self.visited, self.bound):
                    return False
        return True

    def _simulate(self, leaves: Array) -> None:
        """Simulate strategies, and what renamings of the devices make of them.

        Those differ where messages share channels by the devices' numbers.
        """
        for leaf in leaves:
            for rows in np.unique(self.tree.image[leaf].T, axis=0):
                self._set(rows.tolist())
                self.walker.visit()
                self.simulated += 1

    def _set(self, rows: list[int]) -> None:
        """Set the walker's configurations to rows of the space, by the order of operators."""
        c = self.walker.settled.choice
        for op, row in zip(self.order, rows):
            table = self.space.choices[self.space.kind(op)]
            c.operators[op], c.placed[op] = table.degrees[row], table.placed[row]
