"""Summaries of profiles: utilisation, time by operator, the critical path, bytes over links.

The critical path is the one the run followed: from what ended last back to what it waited for last
(a dependence, the operation before it on its processor, or the step before), to the beginning. What
lies between the two is waiting. `bound_ns` is the longest chain of dependences alone, which no
number of processors makes shorter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from soapstone.runtime.observe.profile import MESSAGE, WAIT, Event, Profile

GAP = "wait"
_WAITS = (WAIT, "sent", "recv")  # the last two wait for the end of a message


@dataclass(frozen=True)
class RowUse:
    """How one row of a timeline spent the wall time: busy, waiting for others, or idle; in ns."""

    rank: int
    name: str
    kind: str
    busy_ns: int
    wait_ns: int
    idle_ns: int


@dataclass(frozen=True)
class Work:
    """All operations of one kind. imbalance: the longest point over the mean, 1 when equal."""

    category: str
    name: str
    count: int
    total_ns: int
    share: float
    imbalance: float

    @property
    def mean_ns(self) -> float:
        """The mean duration of one operation."""
        return self.total_ns / self.count


@dataclass(frozen=True)
class LinkUse:
    """Copies and messages from one memory to another. busy_ns: the sum of their durations."""

    source: str
    target: str
    count: int
    nbytes: int
    busy_ns: int

    @property
    def bytes_per_s(self) -> float:
        """The mean bandwidth while busy, in bytes/s; 0 if it never was."""
        return self.nbytes / self.busy_ns * 1e9 if self.busy_ns else 0.0


@dataclass(frozen=True)
class Part:
    """The operations of one kind on the critical path, or all waiting on it, with their share."""

    category: str
    name: str
    count: int
    total_ns: int
    share: float


@dataclass(frozen=True)
class Summary:
    """The summary of a profile; times in ns.

    Attributes:
        steps: replays, and untraced stretches between them.
        bound_ns: the longest chain of dependences, a lower bound for any number of processors.
        rows, work, path, links: by row, by kind of operation, along the critical path, by link.
        chain: the events of the critical path, in order.
    """

    name: str
    ranks: int
    steps: int
    events: int
    wall_ns: int
    bound_ns: int
    rows: tuple[RowUse, ...]
    work: tuple[Work, ...]
    path: tuple[Part, ...]
    links: tuple[LinkUse, ...]
    chain: tuple[Event, ...]

    @property
    def utilisation(self) -> float:
        """The share of the processors' time in which they were busy."""
        rows = [row for row in self.rows if row.kind != "link"]
        whole = len(rows) * self.wall_ns
        return sum(row.busy_ns for row in rows) / whole if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON can say them."""
        about = ("name", "ranks", "steps", "events", "wall_ns", "bound_ns", "utilisation")
        return {
            **_figures(self, about),
            "processors": [_figures(row, _names(row)) for row in self.rows],
            "operators": [_figures(item, (*_names(item), "mean_ns")) for item in self.work],
            "critical_path": [_figures(part, _names(part)) for part in self.path],
            "links": [_figures(link, (*_names(link), "bytes_per_s")) for link in self.links],
        }


def _names(item: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(item))


def _figures(item: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes as JSON has them: nanoseconds as microseconds, bytes by that name."""
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(item, name)
        if name.endswith("_ns"):
            found[f"{name.removesuffix('_ns')}_us"] = value / 1e3
        else:
            found["bytes" if name == "nbytes" else name] = value
    return found


def summarise(profile: Profile, by: str = "operator") -> Summary:
    """The summary of a profile. by: "operator" groups tasks by kind of work, "name" by launch."""
    named = _namer(by)
    everything = profile.events
    events = [event for event in everything if event.category not in (WAIT, MESSAGE)]
    first = min((event.start_ns for event in everything), default=0)
    wall = max((event.end_ns for event in everything), default=0) - first
    chain = critical_path(events)
    return Summary(
        name=profile.name,
        ranks=len({rank for rank, _ in profile.rows}),
        steps=len({event.step for event in events}),
        events=len(events),
        wall_ns=wall,
        bound_ns=longest_chain(events),
        rows=_rows(profile, everything, wall),
        work=_work(events, named),
        path=_path(chain, wall, first, named),
        links=_links(everything),
        chain=tuple(chain),
    )


def _namer(by: str) -> Callable[[Event], tuple[str, str]]:
    if by not in ("operator", "name"):
        raise ValueError(f"summary by {by!r}, 'operator' or 'name' needed")

    def named(event: Event) -> tuple[str, str]:
        kind = event.category
        if by == "name" or kind == "task":
            return kind, (event.operator if by == "operator" else "") or event.name
        return kind, event.category

    return named


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length of a union of intervals."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def _rows(profile: Profile, events: Sequence[Event], wall: int) -> tuple[RowUse, ...]:
    busy: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        spans = waits if event.category in _WAITS else busy
        spans[event.rank, event.processor].append((event.start_ns, event.end_ns))
    found = []
    for key, row in sorted(profile.rows.items()):
        used, waited = _covered(busy[key]), _covered(waits[key])
        idle = max(0, wall - used - waited)
        found.append(RowUse(key[0], row.name, row.kind, used, waited, idle))
    return tuple(found)


def _work(events: Sequence[Event], named: Callable[[Event], tuple[str, str]]) -> tuple[Work, ...]:
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        groups[named(event)].append(event)
    everything = sum(event.duration_ns for event in events)
    found = []
    for (category, name), members in groups.items():
        launches: dict[tuple[int, str], list[int]] = defaultdict(list)
        for event in members:
            launches[event.step, event.name].append(event.duration_ns)
        worst = sum(max(times) for times in launches.values())
        mean = sum(sum(times) / len(times) for times in launches.values())
        total = sum(event.duration_ns for event in members)
        share = total / everything if everything else 0.0
        balance = worst / mean if mean else 1.0
        found.append(Work(category, name, len(members), total, share, balance))
    return tuple(sorted(found, key=lambda item: (-item.total_ns, item.category, item.name)))


def _links(events: Sequence[Event]) -> tuple[LinkUse, ...]:
    """Copies and messages; a message on its way stands for both its ends."""
    moved = {event.message for event in events if event.category == MESSAGE}
    received = moved | {event.message for event in events if event.category == "recv"}
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        twice = event.message in (received if event.category == "send" else moved)
        if (event.nbytes or event.source) and (event.category == MESSAGE or not twice):
            groups[event.source, event.target].append(event)
    return tuple(
        LinkUse(
            *(source, target, len(members)),
            sum(event.nbytes for event in members),
            sum(event.duration_ns for event in members),
        )
        for (source, target), members in sorted(groups.items())
    )


# -- the critical path


def critical_path(events: Sequence[Event]) -> list[Event]:
    """The events of the critical path, in order; see the module."""
    if not events:
        return []
    by_number = {event.number: event for event in events if event.number >= 0}
    before: dict[int, Event] = {}  # the event before on the same row, by identity
    for mine in _by_row(events).values():
        for earlier, later in itertools.pairwise(mine):
            before[id(later)] = earlier
    ends: dict[int, Event] = {}
    for event in events:
        if event.step not in ends or event.end_ns > ends[event.step].end_ns:
            ends[event.step] = event
    steps = sorted(ends)
    barrier = {later: ends[earlier] for earlier, later in itertools.pairwise(steps)}
    last: Event | None = max(events, key=lambda e: e.end_ns)
    chain = []
    while last is not None:
        chain.append(last)
        near = [by_number[n] for n in last.after if n in by_number]
        near += [e for e in (before.get(id(last)), barrier.get(last.step)) if e is not None]
        ended = (last.end_ns, last.start_ns)  # what receives may have begun before what sends
        near = [event for event in near if (event.end_ns, event.start_ns) < ended]
        last = max(near, key=lambda e: e.end_ns, default=None)
    return chain[::-1]


def _by_row(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start_ns, e.end_ns)):
        rows[event.rank, event.processor].append(event)
    return rows


def longest_chain(events: Sequence[Event]) -> int:
    """The ns of the longest chain of dependences, steps one after the other."""
    total = 0
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        steps[event.step].append(event)
    for step in steps.values():
        reached: dict[int, int] = {}
        longest = 0
        for event in sorted(step, key=lambda e: (e.start_ns, e.end_ns)):
            begin = max((reached.get(n, 0) for n in event.after), default=0)
            end = begin + (event.duration_ns if event.category not in _WAITS else 0)
            longest = max(longest, end)
            if event.number >= 0:
                reached[event.number] = end
        total += longest
    return total


def _path(
    chain: Sequence[Event], wall: int, first: int, named: Callable[[Event], tuple[str, str]]
) -> tuple[Part, ...]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    totals: dict[tuple[str, str], int] = defaultdict(int)
    at = first
    for event in chain:
        if event.start_ns > at:
            counts[GAP, GAP] += 1
            totals[GAP, GAP] += event.start_ns - at
        key = named(event)
        counts[key] += 1
        totals[key] += max(0, event.end_ns - max(at, event.start_ns))
        at = max(at, event.end_ns)
    parts = [
        Part(*key, counts[key], total, total / wall if wall else 0.0)
        for key, total in totals.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.total_ns, part.category, part.name)))
