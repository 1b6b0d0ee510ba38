"""Profiles: what each processor of each process did when, and what that depended on.

A profile is filled by an executor, a trace or the simulator; `timeline` writes and reads it as a
trace-event file, `summary` says what it means. Profiles of several processes (*ranks*) merge into
one, on the clock of the first.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.analysis.message import MESSAGES, message_of
from soapstone.runtime.errors import ProfileError
from soapstone.runtime.machines.machine import Machine

if TYPE_CHECKING:
    from soapstone.runtime.analysis.operation import Operation
    from soapstone.runtime.machines.world import World
    from soapstone.runtime.tracing.trace import Trace

_WAIT_NS = 200  # shorter waits are the cost of looking, not waiting
WAIT, MESSAGE = "wait", "message"


@dataclass(frozen=True)
class Event:
    """One operation (or wait) in a row of a profile; times in nanoseconds of a monotonic clock.

    Attributes:
        name: of the launch. category: "task", "copy", "fill", "fold", "wait", ...
        processor: its row: a processor, or a link that is busy with a message.
        operator: the kind of work, where several launches do the same.
        number: of the operation, unique in its profile; -1 for none. after: those it depends on.
        nbytes, source, target: what a copy or message moves, from which memory to which.
        message: what both ends of a message between ranks call it; "" for none.
        step: operations of one step follow all those of earlier steps.
    """

    name: str
    category: str
    processor: int
    point: int
    start_ns: int
    end_ns: int
    rank: int = 0
    operator: str = ""
    number: int = -1
    after: tuple[int, ...] = ()
    nbytes: int = 0
    source: str = ""
    target: str = ""
    message: str = ""
    step: int = 0

    @property
    def duration_ns(self) -> int:
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Row:
    """A row of a timeline: a processor, or (`kind` is "link") what messages pass through."""

    name: str
    kind: str = "cpu"


class Observer(Protocol):
    """Who is told of operations that have run: a profile, a log, or both."""

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Take one untraced operation."""

    def add_replay(
        self, trace: Trace, workers: Sequence[tuple[Sequence[Operation], Array]]
    ) -> None:
        """Take one replay of a trace, with the stamps of each worker's operations."""


class Profile:
    """The events of a run: tasks, copies, messages, fills, folds, and waits for other processors.

    machine: whose processors are rows. rows: by rank and number. rank: of the process that made it.
    offset_ns: to be added to its times for those of rank 0's clock.
    """

    def __init__(
        self, machine: Machine | None = None, name: str = "run", rank: int = 0, offset_ns: int = 0
    ) -> None:
        self.name = name
        self.rank = rank
        self.offset_ns = offset_ns
        self.rows: dict[tuple[int, int], Row] = {}
        self.memories: tuple[str, ...] = ()
        if machine is not None:
            self.memories = tuple(memory.name for memory in machine.memories)
            for number, processor in enumerate(machine.processors):
                self.rows[rank, number] = Row(processor.name, processor.kind)
        self._events: list[Event] = []
        self._numbers = 0
        self._step = 0
        self._known: dict[int, int] = {}  # numbers of untraced operations, by id
        self._after: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def here(machine: Machine, world: World, name: str = "run") -> Profile:
        """An empty profile of one process of a run: its rows are that process' processors.

        machine: that of the run. world: the processes of the run, and which of them this is.
        """
        found = Profile(machine, name, world.rank)
        for number, rank in enumerate(world.runs):
            if rank != world.rank:
                del found.rows[world.rank, number]
        return found

    # -- recording

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Add one untraced operation; its successors follow it.

        asked_ns, start_ns, end_ns: when it was next, began and ended, on this process's clock.
        """
        with self._lock:
            number = self._number(operation.id)
            for after in operation.successors:
                self._after.setdefault(self._number(after.id), []).append(number)
            before = tuple(self._after.pop(number, ()))
            self._put(operation, (asked_ns, start_ns, end_ns), number, before)

    def _number(self, identity: int) -> int:
        number = self._known.get(identity)
        if number is None:
            number = self._known[identity] = self._numbers
            self._numbers += 1
        return number

    def add_replay(
        self, trace: Trace, workers: Sequence[tuple[Sequence[Operation], Array]]
    ) -> None:
        """Add one replay of a trace, which follows everything before it.

        workers: of each its operations and their stamps, as of `add_step`.
        """
        self.add_step(trace.edges, workers)

    def add_step(self, edges: Array, workers: Iterable[tuple[Sequence[Operation], Array]]) -> None:
        """Add one step, which follows everything before it.

        edges: int64 (edges, 2) ids. workers: of each the operations, and their stamps, int64
        (operations, 3) ns: when it was next, when it started, when it ended.
        """
        before: dict[int, list[int]] = {}
        for source, target in edges.tolist():
            before.setdefault(target, []).append(source)
        with self._lock:
            base, self._step = self._numbers, self._step + 1
            for operations, stamps in workers:
                for operation, found in zip(operations, stamps.tolist()):
                    number = base + operation.id
                    self._numbers = max(self._numbers, number + 1)
                    if found[2]:
                        after = tuple(base + source for source in before.get(operation.id, ()))
                        self._put(operation, found, number, after)
            self._step += 1

    def _put(
        self, operation: Operation, stamps: Sequence[int], number: int, after: tuple[int, ...]
    ) -> None:
        asked, start, end = stamps
        launch, place, point = operation.launch, operation.processor, operation.point
        kind, nbytes, source, target = operation.kind, 0, "", ""
        if kind == "copy":
            given, made = operation.uses
            if given.storage is not None and made.storage is not None:
                nbytes = _nbytes(made.storage.dtype.itemsize, made.box)
                source = self.memories[given.storage.memory]
                target = self.memories[made.storage.memory]
        message = ""
        if kind in MESSAGES:
            sent = message_of(operation)
            nbytes, message = sent.nbytes, f"{sent.region} #{sent.number}"
            source, target = self.memories[sent.source], self.memories[sent.target]
        self._events.append(
            Event(
                *(launch.name, kind, place, point, start, end, self.rank, launch.task.name),
                *(number, after, nbytes, source, target, message, self._step),
            )
        )
        if start - asked > _WAIT_NS:
            wait = Event(WAIT, WAIT, place, point, asked, start, self.rank, step=self._step)
            self._events.append(wait)

    def put(self, events: Iterable[Event]) -> None:
        """Add events whose numbers are the caller's own."""
        with self._lock:
            self._events += events
            self._numbers = 1 + max((event.number for event in self._events), default=-1)

    def row(self, name: str, kind: str = "link") -> int:
        """The number of this rank's row of a name, made of a kind if there is none."""
        with self._lock:
            for (rank, number), row in self.rows.items():
                if rank == self.rank and row.name == name:
                    return number
            number = 1 + max((n for rank, n in self.rows if rank == self.rank), default=-1)
            self.rows[self.rank, number] = Row(name, kind)
            return number

    # -- several

    def extend(self, other: Profile) -> None:
        """Add the events of the other profile, of the same rows, which came after this one's."""
        found = other.events
        with self._lock:
            base, first = self._numbers, self._step + 1
            self._events += [_renumbered(event, base, first) for event in found]
            self._numbers += other._numbers
            self._step = first + other._step + 1
            for key, row in other.rows.items():
                self.rows.setdefault(key, row)

    @staticmethod
    def merge(profiles: Sequence[Profile], offsets: Sequence[int] | None = None) -> Profile:
        """One profile of the profiles of several ranks, on one clock.

        offsets: ns to add to each profile's times; by default its own `offset_ns`. The end of a
        message that receives depends on the one that sends: the n-th of the same name. What is on
        its way between the two is an event of category "message", in the row of a link.

        Raises: ProfileError for no profiles, two of one rank, or another number of offsets.
        """
        if not profiles:
            raise ProfileError("merge: no profiles")
        shifts = [p.offset_ns for p in profiles] if offsets is None else list(offsets)
        if len(shifts) != len(profiles):
            raise ProfileError(f"merge: {len(profiles)} profiles, but {len(shifts)} offsets")
        ranks = [profile.rank for profile in profiles]
        if len(set(ranks)) < len(ranks):
            raise ProfileError(f"merge: ranks {ranks} found, each once needed")
        merged = Profile(None, profiles[0].name, profiles[0].rank)
        names = profiles[0].memories
        shared = len(names) >= len(profiles) and all(p.memories == names for p in profiles)
        events: list[Event] = []
        for profile, shift in sorted(zip(profiles, shifts), key=lambda item: item[0].rank):
            base, rank = merged._numbers, profile.rank
            prefix = "" if shared else f"rank{rank}/"
            merged.memories += tuple(prefix + name for name in profile.memories if not shared)
            merged.rows.update(profile.rows)
            for event in profile.events:
                moved = replace(
                    _renumbered(event, base, 0),
                    start_ns=event.start_ns + shift,
                    end_ns=event.end_ns + shift,
                    source=event.source and prefix + event.source,
                    target=event.target and prefix + event.target,
                )
                events.append(moved)
            merged._numbers += profile._numbers
        if shared:
            merged.memories = names
        merged._events, flights = _connected(events)
        for event in flights:
            merged.rank = event.rank
            row = merged.row(f"{event.source} -> {event.target}")
            merged._events.append(replace(event, processor=row))
        merged.rank = profiles[0].rank
        return merged

    @property
    def events(self) -> list[Event]:
        """All events, in the order of their starts."""
        with self._lock:
            return sorted(self._events, key=lambda e: (e.start_ns, e.rank, e.processor, e.end_ns))

    def busy_ns(self) -> dict[str, int]:
        """Nanoseconds in each category, summed over processors."""
        total: dict[str, int] = {}
        for event in self.events:
            total[event.category] = total.get(event.category, 0) + event.duration_ns
        return total

    # -- files

    def to_json(self) -> dict[str, Any]:
        """The timeline in the trace-event format: ranks are processes, processors their rows."""
        from soapstone.runtime.observe.timeline import to_json

        return to_json(self)

    @staticmethod
    def from_json(found: object, what: str = "timeline") -> Profile:
        """The profile that `to_json` wrote.

        found: what was read. what: what errors call it.

        Raises: ProfileError naming the event and the field that are wrong.
        """
        from soapstone.runtime.observe.timeline import from_json

        return from_json(found, what)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a JSON file."""
        from soapstone.runtime.observe.timeline import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """The profile of a file.

        Raises: ProfileError for a file that is no timeline of ours; OSError.
        """
        from soapstone.runtime.observe.timeline import load

        return load(path)


def _nbytes(itemsize: int, box: tuple[Sequence[int], Sequence[int]]) -> int:
    return itemsize * math.prod(high - low for low, high in zip(*box))


def _renumbered(event: Event, base: int, first: int) -> Event:
    if base == first == 0:
        return event
    number = event.number if event.number < 0 else event.number + base
    after = tuple(n + base for n in event.after)
    return replace(event, number=number, after=after, step=event.step + first)


def _connected(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Events in which what receives a message depends on what sent it; messages on their way."""
    sent: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda e: e.start_ns):
        if event.message and event.category == "send":
            sent.setdefault(event.message, []).append(event)
    taken: dict[str, int] = {}
    found, flights = [], []
    for event in sorted(events, key=lambda e: e.start_ns):
        if event.message and event.category == "recv":
            place = taken.get(event.message, 0)
            taken[event.message] = place + 1
            if place < len(sent.get(event.message, ())):
                by = sent[event.message][place]
                after = (*event.after, by.number) if by.number >= 0 else event.after
                event = replace(
                    event,
                    after=after,
                    source=by.source or event.source,
                    nbytes=event.nbytes or by.nbytes,
                )
                flights.append(
                    replace(
                        event,
                        name=event.message,
                        category=MESSAGE,
                        rank=by.rank,
                        start_ns=min(by.start_ns, event.end_ns),
                        number=-1,
                        after=(),
                    )
                )
        found.append(event)
    return found, flights


def received(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """The ends of messages, in order, and what each took (ns).

    That is from when it could be taken, since its sender had started it and its receiver waited,
    until it was.
    """
    ready: dict[str, list[int]] = {}
    ends = []
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.category == "send":
            ready.setdefault(event.message, []).append(event.end_ns)
        elif event.category == "recv":
            ends.append(event)
    found = []
    for event in ends:
        if ready.get(event.message):
            began = max(event.start_ns, ready[event.message].pop(0))
            found.append((event, max(0, event.end_ns - began)))
    return found


def estimate_offset(samples: Sequence[tuple[int, int, int]]) -> int:
    """Nanoseconds to add to a remote clock's times for those of the local clock.

    samples: of each round trip (sent, remote, received): the local clock when asked, the remote
    clock when it answered, the local clock when the answer was there. The shortest round trip
    counts: the remote clock was read at most half of it from its middle.
    Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.

    Raises: ProfileError for no samples, or an answer before its question.
    """
    if not samples:
        raise ProfileError("estimate_offset: no samples, one round trip or more needed")
    for number, (sent, _, received) in enumerate(samples):
        if received < sent:
            raise ProfileError(
                f"estimate_offset: sample {number} was sent at {sent} ns and received at "
                f"{received} ns, a later time needed"
            )
    sent, remote, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return (int(sent) + int(received)) // 2 - int(remote)
