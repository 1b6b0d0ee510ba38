"""Which values a plan recomputes instead of copying them out and back.

A recomputed value is a clone of its node in the backward pass (`engine/carry`), so the graph
changes and is planned like any other; what is searched for is a set of values. If there are few
values, all sets are planned. Otherwise a set is estimated by the gaps bridged greedily, without
packing: the search starts with all values that the plan without recomputation copies, or the
largest of them, and adds and removes values, each alone or with what it is made of (hill climbing).
The best set is planned in full, and so is the empty one; the better plan is returned. A value is
recomputed at most once, before its first reader in the backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from soapstone.deadline import Deadline, TimeUpError
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.errors import GraphError
from soapstone.search.placement import baselines
from soapstone.search.placement.find import BYTES, Found, memory_plan, orders
from soapstone.search.placement.optimal import Progress, fewest_bytes
from soapstone.search.placement.timeline import timeline
from soapstone.search.placement.timing import Times

FEW = 6  # values of which all sets are planned
_WITHOUT, _LAST = 0.2, 0.3  # of the time, for the plan without recomputation, and for the last one
Launched = Callable[[frozenset[str]], tuple[Footprint, Times | None]]


def recomputing(
    values: Mapping[str, Sequence[str]],
    launched: Launched,
    capacity_bytes: int,
    method: str = "dp",
    *,
    minimize: str = BYTES,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
) -> Found:
    """Return the plan of a step with the best set of values recomputed.

    Args:
        values: those that may be recomputed, each with the others that it is made of, in order.
        launched: returns the launches for a set of values, and their times.
        capacity_bytes, method, minimize, progress: as of `memory_plan`.
        deadline: of all of it.

    Raises:
        GraphError: as of `memory_plan`, for the step that recomputes nothing.
    """
    began = time.perf_counter()
    deadline = deadline or Deadline()
    aim = _Aim(launched, capacity_bytes, method, minimize, progress)
    nothing = frozenset[str]()
    few = len(values) <= FEW
    without = aim.planned(nothing, deadline.part(_WITHOUT))
    looked = 1
    found: list[Found | None] = [without]
    if few:
        sets = _subsets(values)
        for number, chosen in enumerate(sets, 1):
            if deadline.over:
                break
            part = deadline.part(1 / (len(sets) - number + 1))
            found, looked = [*found, aim.tried(chosen, part)], looked + 1
    else:
        climbing = _Climbing(values, aim, deadline.part(1 - _LAST))
        chosen, looked = climbing.best(), len(climbing.known)
        if chosen:
            found.append(aim.tried(chosen, deadline))
    return replace(
        min((each for each in found if each is not None), key=lambda each: each.score),
        sets=looked,
        all_sets=few and looked == 1 << len(values),
        without_bytes=without.transfer_bytes,
        without_us=without.step_us,
        seconds=time.perf_counter() - began,
    )


def _subsets(values: Iterable[str]) -> list[frozenset[str]]:
    """Return all non-empty sets of values."""
    known = list(values)
    return [
        frozenset(some) for size in range(1, len(known) + 1) for some in combinations(known, size)
    ]


@dataclass(frozen=True)
class _Aim:
    """The step to plan, and the objective."""

    launched: Launched
    capacity_bytes: int
    method: str
    minimize: str
    progress: Progress | None

    def planned(self, chosen: frozenset[str], deadline: Deadline) -> Found:
        """Return the plan of a step that recomputes some values."""
        footprint, times = self.launched(chosen)
        found = memory_plan(
            footprint,
            self.capacity_bytes,
            self.method,
            deadline=deadline,
            progress=self.progress,
            minimize=self.minimize,
            times=times,
        )
        return replace(found, plan=replace(found.plan, recomputed=tuple(sorted(chosen))))

    def tried(self, chosen: frozenset[str], deadline: Deadline) -> Found | None:
        """Return the same, or None where a node needs more than the capacity, or times lack."""
        try:
            return self.planned(chosen, deadline)
        except (GraphError, TimeUpError):
            return None

    def estimated(self, chosen: frozenset[str]) -> tuple[float, Mapping[str, int]]:
        """Return the objective, and the bytes copied of each value, by a greedy choice of gaps.

        Infinite if a node needs more than the capacity, or times could not be measured any more.
        """
        best, copied = math.inf, dict[str, int]()
        try:
            footprint, times = self.launched(chosen)
            both = orders(timeline(footprint, self.capacity_bytes))
        except (GraphError, TimeUpError):
            return best, copied
        for known in both:
            start = baselines.kept_by(known, baselines.latest)
            kept = fewest_bytes(known, start, widths=())
            if kept.moved_bytes < best:
                best, copied = kept.moved_bytes, {}
                for gap, price in known.prices.items():
                    if gap not in kept.gaps:
                        copied[gap.value] = copied.get(gap.value, 0) + price.fetch + price.dirty
        if self.minimize == BYTES or times is None:
            return best, copied
        return times.least_us(int(best)), copied


class _Climbing:
    """Hill climbing by estimates, from several starts."""

    def __init__(self, values: Mapping[str, Sequence[str]], aim: _Aim, deadline: Deadline) -> None:
        self.values, self.aim, self.deadline = values, aim, deadline
        self.known: dict[frozenset[str], tuple[float, Mapping[str, int]]] = {}

    def best(self) -> frozenset[str]:
        """Return the set with the best estimate; an interrupt ends the search."""
        chosen = frozenset[str]()
        try:
            self._price(chosen)
            for start in self._starts():
                chosen = self._better(chosen, start)
            while True:
                before = chosen
                for near in self._near(before):
                    chosen = self._better(chosen, near(chosen))
                if chosen == before or self.deadline.over:
                    break
        except KeyboardInterrupt:
            self.deadline.stop()
        return chosen

    def _price(self, chosen: frozenset[str]) -> float:
        if chosen not in self.known:
            self.known[chosen] = self.aim.estimated(chosen)
        return self.known[chosen][0]

    def _better(self, chosen: frozenset[str], other: frozenset[str]) -> frozenset[str]:
        """Return the better of two sets; the first once the time is over."""
        if self.deadline.over or self._price(other) >= self._price(chosen):
            return chosen
        return other

    def _ranked(self, chosen: frozenset[str]) -> list[str]:
        """Return the values by how much of them is copied under a choice, most first."""
        copied = self.known[chosen][1]
        return sorted(self.values, key=lambda value: -copied.get(value, 0))

    def _starts(self) -> Iterator[frozenset[str]]:
        """Yield sets that may be far better than the empty one."""
        nothing = frozenset[str]()
        copied = self.known[nothing][1]
        ranked = [value for value in self._ranked(nothing) if copied.get(value, 0)]
        yield frozenset(self.values)
        count = len(ranked)
        while count:
            yield frozenset(ranked[:count])
            count //= 2

    def _near(self, chosen: frozenset[str]) -> Iterator[Callable[[frozenset[str]], frozenset[str]]]:
        """Yield neighbours of a set: a value added or removed, alone or with what it is made of."""
        for value in self._ranked(chosen):
            yield frozenset((value,)).symmetric_difference
            group = frozenset((value, *self.values[value]))
            if len(group) > 1:
                yield group.union
                yield lambda now, group=group: now - group  # type: ignore[misc]
