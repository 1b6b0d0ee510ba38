"""A machine whose tasks are measured: times of point tasks by class and configuration.

The thesis measures each operator once in each configuration on the real device, and looks its time
up after that (Jia, section 3.4.1). Here a *class* is a text that says all that tells two tasks
apart, and a time is that of one of its points.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from soapstone.cache.sources import modules_of, stamp
from soapstone.cache.store import Store
from soapstone.engine.expand import Program
from soapstone.kernels.registry import registered
from soapstone.runtime import Machine
from soapstone.search.cost.database import database
from soapstone.search.cost.messages import MessageTimes

Degrees = tuple[int, ...]


@dataclass(frozen=True)
class StepTimes:
    """What a step takes beside its tasks, and what makes tasks longer than they are alone.

    Attributes:
        begin_ns: before the first task and after the last.
        slower: the share by which a task is slower while all other processors work.
        ns_per_byte: what it takes more to read what another processor of the same memory has made.
    """

    begin_ns: float = 0.0
    slower: float = 0.0
    ns_per_byte: float = 0.0


class TaskTimes:
    """Nanoseconds of the points of tasks alone, by class and degrees; and `StepTimes` of steps."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[Degrees, tuple[int, ...]]] = {}
        self._steps: dict[str, StepTimes] = {}

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

    def step(self, kind: str) -> StepTimes:
        """Return what is known of a kind of step."""
        return self._steps.get(kind, StepTimes())

    def set_step(self, kind: str, times: StepTimes) -> None:
        """Set what is known of a kind of step."""
        self._steps[kind] = times

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._tasks.values())

    # Kept between runs

    def load(
        self,
        machine: Machine,
        wanted: Iterable[tuple[str, Degrees, int]],
        step: str,
        store: Store | None = None,
        sources: str = "",
    ) -> list[tuple[str, Degrees]]:
        """Add what the database has of (class, degrees, points); return what it lacks.

        sources: the stamp of what measures tasks, which times depend on.
        """
        store = database() if store is None else store
        where = _where(machine, sources)
        asked = {
            (kind, degrees): _text(where, kind, degrees, points)
            for kind, degrees, points in wanted
            if degrees not in self.of(kind)
        }
        about = _text(where, step, (), 0)
        found = store.find([about, *asked.values()])
        if about in found:
            self.set_step(step, StepTimes(*found[about]))
        for (kind, degrees), text in asked.items():
            if text in found:
                self.add(kind, degrees, found[text])
        return [key for key, text in asked.items() if text not in found]

    def save(
        self,
        machine: Machine,
        keys: Iterable[tuple[str, Degrees]],
        step: str,
        store: Store | None = None,
        sources: str = "",
    ) -> None:
        """Record times in the database; those that it has already stay, and are taken over."""
        store = database() if store is None else store
        where = _where(machine, sources)
        wanted = [(kind, degrees, len(self.of(kind)[degrees])) for kind, degrees in keys]
        times: dict[str, object] = {
            _text(where, kind, degrees, points): self.of(kind)[degrees]
            for kind, degrees, points in wanted
        }
        times[_text(where, step, (), 0)] = astuple(self.step(step))
        store.update(times)
        for kind, degrees, _ in wanted:
            del self._tasks[kind][degrees]
        self.load(machine, wanted, step, store, sources)


@dataclass(frozen=True)
class MeasuredMachine(Machine):
    """This computer, with the times of tasks, and of messages among ranks, measured on it."""

    times: TaskTimes = field(default_factory=TaskTimes, compare=False, repr=False)
    messages: MessageTimes = field(default_factory=MessageTimes, compare=False, repr=False)


def _where(machine: Machine, sources: str) -> list[object]:
    """Return what the time of a task depends on: workers, their memories, what runs and measures.

    What runs are all kernels, and what brings launches to them.
    """
    modules = modules_of(*(each.bind for each in registered()), Program.launch)
    workers = [[p.kind, p.threads, p.memory] for p in machine.processors]
    return [workers, stamp(*modules, compiled=True), sources]


def _text(where: object, kind: str, degrees: Degrees, points: int) -> str:
    return json.dumps(["strategy task", where, kind, degrees, points])
