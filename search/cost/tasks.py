"""A machine whose tasks are measured: times of point tasks by class and configuration.

The thesis measures each operator once in each configuration on the real device, and looks its time
up after that (Jia, section 3.4.1). Here a *class* is a text that says all that tells two tasks
apart, and a time is that of one of its points.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from soapstone.runtime import Machine
from soapstone.search.cost.database import CostDatabase, database

VERSION = 2
Degrees = tuple[int, ...]


class TaskTimes:
    """Nanoseconds of the points of tasks, by class and degrees; and of a step beside its tasks."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[Degrees, tuple[int, ...]]] = {}
        self._steps: dict[str, int] = {}

    def of(self, kind: str) -> Mapping[Degrees, tuple[int, ...]]:
        """Return the times of a class: ns of each point, by the degrees of the operator's dims."""
        return self._tasks.get(kind, {})

    def add(self, kind: str, degrees: Degrees, points_ns: Sequence[float]) -> None:
        """Set the times of a class in one configuration.

        Raises:
            ValueError: no points, or a time below 0.
        """
        if not points_ns or min(points_ns) < 0:
            raise ValueError(f"task times {list(points_ns)} found; one from 0 a point needed")
        found = tuple(max(1, round(ns)) for ns in points_ns)
        self._tasks.setdefault(kind, {})[degrees] = found

    def begin_ns(self, step: str) -> int:
        """Return what a step takes before its first task and after its last, 0 if unknown."""
        return self._steps.get(step, 0)

    def set_begin(self, step: str, ns: float) -> None:
        """Set what a step takes beside its tasks."""
        self._steps[step] = max(0, round(ns))

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._tasks.values())

    # Kept between runs

    def load(
        self,
        machine: Machine,
        wanted: Iterable[tuple[str, Degrees, int]],
        step: str,
        store: CostDatabase | None = None,
    ) -> list[tuple[str, Degrees]]:
        """Add what the database has of (class, degrees, points); return what it lacks."""
        store = database() if store is None else store
        where = _where(machine)
        asked = {
            (kind, degrees): [_text(where, kind, degrees, point) for point in range(points)]
            for kind, degrees, points in wanted
            if degrees not in self.of(kind)
        }
        begin = _text(where, step, (), 0)
        found = store.find([begin, *(text for texts in asked.values() for text in texts)])
        if begin in found:
            self.set_begin(step, found[begin] * 1e3)
        missing = []
        for (kind, degrees), texts in asked.items():
            if all(text in found for text in texts):
                self.add(kind, degrees, [found[text] * 1e3 for text in texts])
            else:
                missing.append((kind, degrees))
        return missing

    def save(
        self,
        machine: Machine,
        keys: Iterable[tuple[str, Degrees]],
        step: str,
        samples: int,
        store: CostDatabase | None = None,
    ) -> None:
        """Record times in the database; those that it has already stay, and are taken over."""
        store = database() if store is None else store
        where = _where(machine)
        wanted = [(kind, degrees, len(self.of(kind)[degrees])) for kind, degrees in keys]
        times = {
            _text(where, kind, degrees, point): ns / 1e3
            for kind, degrees, _ in wanted
            for point, ns in enumerate(self.of(kind)[degrees])
        }
        times[_text(where, step, (), 0)] = self.begin_ns(step) / 1e3
        store.update(times, samples)
        for kind, degrees, _ in wanted:
            del self._tasks[kind][degrees]
        self.load(machine, wanted, step, store)


@dataclass(frozen=True)
class MeasuredMachine(Machine):
    """This computer, with the times of tasks that were measured on it."""

    times: TaskTimes = field(default_factory=TaskTimes, compare=False, repr=False)


def _where(machine: Machine) -> list[list[object]]:
    """Return what the time of a task depends on beside the computer: workers and their memories."""
    return [[p.kind, p.threads, p.memory] for p in machine.processors]


def _text(where: object, kind: str, degrees: Degrees, point: int) -> str:
    return json.dumps(["strategy task", VERSION, where, kind, degrees, point])


__all__ = ["Degrees", "MeasuredMachine", "TaskTimes"]
