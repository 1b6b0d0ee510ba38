"""Timelines: what each processor did when, as a trace-event file for Perfetto or Chrome."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .machine import Machine

if TYPE_CHECKING:
    from .operation import Operation

Array = np.ndarray[Any, np.dtype[Any]]
_WAIT_NS = 200  # shorter waits are the cost of looking, not waiting


@dataclass(frozen=True)
class Event:
    """One operation (or wait) on a processor; times in nanoseconds of the monotonic clock."""

    name: str
    category: str
    processor: int
    point: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


class Profile:
    """The events of a run: tasks, copies, fills, folds, and waits for other processors."""

    def __init__(self, machine: Machine, name: str = "run") -> None:
        self.machine = machine
        self.name = name
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Add one operation that was next at `asked_ns` and ran from `start_ns` to `end_ns`."""
        launch = operation.launch
        place, point = operation.processor, operation.point
        found = [Event(launch.name, operation.kind, place, point, start_ns, end_ns)]
        if start_ns - asked_ns > _WAIT_NS:
            found.append(Event("wait", "wait", place, point, asked_ns, start_ns))
        with self._lock:
            self._events += found

    def add_stamps(self, operations: Iterable[Operation], stamps: Array) -> None:
        """Add the operations of one worker. stamps: int64 (operations, 3) ns."""
        for operation, (asked, start, end) in zip(operations, stamps.tolist()):
            if end:
                self.add(operation, asked, start, end)

    def put(self, events: Iterable[Event]) -> None:
        """Add events."""
        with self._lock:
            self._events += events

    def extend(self, other: Profile) -> None:
        """Add the events of another profile."""
        found = other.events
        with self._lock:
            self._events += found

    @property
    def events(self) -> list[Event]:
        """All events, in the order of their starts."""
        with self._lock:
            return sorted(self._events, key=lambda e: (e.start_ns, e.processor, e.end_ns))

    def busy_ns(self) -> dict[str, int]:
        """Nanoseconds in each category, summed over processors."""
        total: dict[str, int] = {}
        for event in self.events:
            total[event.category] = total.get(event.category, 0) + event.duration_ns
        return total

    def to_json(self) -> dict[str, Any]:
        """The timeline in the trace-event format: processors are rows, times in microseconds."""
        events = self.events
        origin = events[0].start_ns if events else 0
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": self.name}}
        ]
        for number, processor in enumerate(self.machine.processors):
            rows.append(
                {
                    "ph": "M",
                    "pid": 1,
                    "tid": number,
                    "name": "thread_name",
                    "args": {"name": f"{processor.name} ({processor.kind})"},
                }
            )
        for event in events:
            rows.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": event.processor,
                    "name": event.name,
                    "cat": event.category,
                    "ts": (event.start_ns - origin) / 1000,
                    "dur": event.duration_ns / 1000,
                    "args": {"point": event.point},
                }
            )
        return {"traceEvents": rows, "displayTimeUnit": "ns"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")
