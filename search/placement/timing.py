"""The time of a step under a memory plan: nodes, and copies that may overlap with them.

Workers run nodes in the plan's order. If they copy themselves, nothing overlaps. If other
processors copy (`Machine.bounded(copiers=True)`), one in each direction, a copy begins when its
space is free and its contents exist, in the order of the plan, and a node waits only for its own
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soapstone.ir.plan import Action, MemoryPlan, Step


@dataclass(frozen=True)
class Times:
    """The times of nodes and copies.

    Attributes:
        node_us: microseconds of each node, by name.
        copy_us: of a copy, besides its bytes. bytes_per_us: of copies in one direction.
        overlapped: whether each direction has a processor of its own, so that copies overlap.
    """

    node_us: Mapping[str, float]
    copy_us: float
    bytes_per_us: float
    overlapped: bool = False

    def copied_us(self, nbytes: int) -> float:
        """Return the time of a copy of so many bytes."""
        return self.copy_us + nbytes / self.bytes_per_us if nbytes else 0.0

    def least_us(self, nbytes: int) -> float:
        """Return a lower bound of a step's time that copies so many bytes in both directions."""
        compute = sum(self.node_us.values())
        if self.overlapped:
            return max(compute, nbytes / 2 / self.bytes_per_us)
        return compute + nbytes / self.bytes_per_us


def step_us(plan: MemoryPlan, times: Times) -> float:
    """Return the microseconds of a step that follows a plan.

    times: of all its nodes.
    """
    if not times.overlapped:
        nodes = sum(times.node_us[name] for name in plan.runs)
        return nodes + sum(times.copied_us(step.copied) for step in plan.steps)
    return _Lanes(times).run(plan)


class _Lanes:
    """The times at which the processors of a memory are done: one that computes, and copiers."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.computed = self.fetched = self.evicted = 0.0
        self.bytes: list[tuple[int, int, float]] = []  # until when they are used, by range
        self.here: dict[str, float] = {}  # when the contents of what is resident are there
        self.behind: dict[str, float] = {}  # and those of what is in the backing memory

    def run(self, plan: MemoryPlan) -> float:
        """Return the end of a plan."""
        waits = 0.0  # of the node that is next
        for step in plan.steps:
            end = step.offset + step.nbytes
            if step.action in (Action.ALLOCATE, Action.FETCH):
                free = self._free(step.offset, end)
                if step.copied:
                    begin = max(self.fetched, free, self.behind.get(step.name, 0.0))
                    free = self.fetched = begin + self.times.copied_us(step.copied)
                self.here[step.name] = free
                waits = max(waits, free)
            elif step.action is Action.RUN:
                begin = max(self.computed, waits, self._free(step.offset, end))
                self.computed, waits = begin + self.times.node_us[step.name], 0.0
                self._use(step, self.computed)
            else:
                until = max(self.computed, self.here.pop(step.name))
                if step.copied:
                    begin = max(self.evicted, until)
                    until = self.evicted = begin + self.times.copied_us(step.copied)
                    self.behind[step.name] = until
                self._use(step, until)
        return max(self.computed, self.fetched, self.evicted)

    def _free(self, low: int, high: int) -> float:
        """Return when the last user of some bytes is done."""
        return max((end for a, b, end in self.bytes if a < high and low < b), default=0.0)

    def _use(self, step: Step, until: float) -> None:
        """Record until when the bytes of a step are used."""
        low, high = step.offset, step.offset + step.nbytes
        kept = []
        for a, b, end in self.bytes:
            if b <= low or high <= a:
                kept.append((a, b, end))
                continue
            if a < low:
                kept.append((a, low, end))
            if high < b:
                kept.append((high, b, end))
        self.bytes = [*kept, (low, high, until)] if high > low else kept
