"""The check itself: segment by segment, first the program, then what was done for it.

A segment is a replay of a trace, or what ran untraced between two moments at which nothing did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ProfileError
from .cells import empty, grids, part_boxes, tile_of
from .memory import Memory
from .order import LIMIT, Access, ancestors, bit_rows, conflicts, holds, same_bytes
from .records import (
    Box,
    Fill,
    Host,
    Item,
    Launch,
    Operation,
    Records,
    Replay,
    Trace,
    Use,
    Wait,
)
from .versions import Program, Versions

Array = np.ndarray[Any, np.dtype[Any]]
KEPT = 50  # violations that are described


@dataclass(frozen=True)
class Violation:
    """One thing that the run did wrong.

    kind: "launch" (a point that did not run once, on its tile), "dependence" (a conflict that
    nothing orders), "order" (one that was run in the wrong order), "value" (a read of something
    else than the last value written).
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Report:
    """What was checked, and the first violations. `wrong` counts all of them.

    nested: operations of launches inside tasks, which are not judged: of their tasks, only what
    they were launched with is.
    """

    launches: int = 0
    operations: int = 0
    replays: int = 0
    conflicts: int = 0
    reads: int = 0
    nested: int = 0
    wrong: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether nothing was wrong."""
        return not self.wrong

    def add(self, kind: str, text: str) -> None:
        """Count a violation."""
        self.wrong += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(kind, text))

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON can say them."""
        return {
            "accepted": self.accepted,
            "launches": self.launches,
            "operations": self.operations,
            "replays": self.replays,
            "conflicts": self.conflicts,
            "reads": self.reads,
            "nested": self.nested,
            "wrong": self.wrong,
            "violations": [{"kind": v.kind, "text": v.text} for v in self.violations],
        }

    def __str__(self) -> str:
        said = (
            f"{self.launches} launches, {self.operations} operations, {self.replays} replays: "
            f"{self.conflicts} conflicts and {self.reads} reads checked"
        )
        if self.nested:
            said += f" ({self.nested} operations inside tasks are not judged)"
        if self.accepted:
            return f"accepted: {said}"
        shown = "\n".join(f"  {violation}" for violation in self.violations)
        more = self.wrong - len(self.violations)
        rest = f"\n  and {more} more" if more else ""
        return f"refused, {self.wrong} violations: {said}\n{shown}{rest}"


@dataclass
class _Segment:
    """Operations by place, what launches they are of, and when they ran."""

    operations: Sequence[Operation]
    instances: dict[int, int]  # of each launch, by its id
    launches: Sequence[Launch]
    runs: Sequence[tuple[int, int]]
    trace: Trace | None = None


def check(records: Records) -> Report:
    """What the checker says of a log.

    Raises: ProfileError when more ran between two waits than can be checked.
    """
    return _Checker(records).run()


class _Checker:
    def __init__(self, records: Records) -> None:
        self.records = records
        self.report = Report(nested=records.nested)
        cells = grids(records)
        self.grids = cells
        self.versions = Versions(records)
        self.program = Program(records, cells, self.versions)
        self.memory = Memory(records, cells, self.versions)
        self._traced: dict[int, Array] = {}
        self._before: list[tuple[Operation, tuple[int, int]]] = []  # the segment before
        self._launches: list[Launch] = []
        self._operations: list[Operation] = []
        self._instances: dict[int, int] = {}

    def run(self) -> Report:
        for item in self.records.items:
            self._take(item)
        self._flush()
        self._kept()
        return self.report

    def _take(self, item: Item) -> None:
        if isinstance(item, Launch):
            self._launches.append(item)
            self._instances[item.id] = self.program.launch(item)
            self.report.launches += 1
        elif isinstance(item, Fill):
            self.program.fill(item)
        elif isinstance(item, Operation):
            self._operations.append(item)
        else:
            self._flush()
            if isinstance(item, Replay):
                self._replay(item)
            elif isinstance(item, Host):
                self._host(item)
            else:
                assert isinstance(item, Wait)

    def _flush(self) -> None:
        """Check what ran untraced since the last segment."""
        if self._operations or self._launches:
            runs = [self.records.runs[operation.id] for operation in self._operations]
            segment = _Segment(self._operations, self._instances, self._launches, runs)
            self._segment(segment)
        self._launches, self._operations, self._instances = [], [], {}
        self.program.forget()

    def _replay(self, replay: Replay) -> None:
        trace = self.records.traces[replay.trace]
        instances: dict[int, int] = {}
        for launch in trace.launches:
            if isinstance(launch, Fill):
                self.program.fill(launch)
            else:
                instances[launch.id] = self.program.launch(launch)
        launches = [launch for launch in trace.launches if isinstance(launch, Launch)]
        runs = [replay.runs[operation.id] for operation in trace.operations]
        self._segment(_Segment(trace.operations, instances, launches, runs, trace))
        self.program.forget()
        self.report.replays += 1
        self.report.launches += len(launches)

    # -- one segment

    def _segment(self, segment: _Segment) -> None:
        self.report.operations += len(segment.operations)
        trace = segment.trace
        known = None if trace is None else self._traced.get(trace.id)
        if known is None:
            self._points(segment)
            known = self._conflicts(segment)
            if trace is not None:
                self._traced[trace.id] = known
        self._obeyed(segment, known)
        self._apart(segment)
        self._values(segment)

    def _points(self, segment: _Segment) -> None:
        """Every point of every launch ran once, on its own tiles, with its privileges."""
        seen: set[tuple[int, int]] = set()
        by_id = {launch.id: launch for launch in segment.launches}
        for operation in segment.operations:
            if operation.what != "task":
                continue
            launch = by_id.get(operation.launch or 0)
            key = operation.launch or 0, operation.point
            if launch is None or key in seen:
                why = "ran twice" if launch is not None else "is of a launch of another segment"
                self.report.add("launch", f"{_name(operation)} {why}")
                continue
            seen.add(key)
            for number, use in enumerate(operation.uses):
                self._use(operation, launch, number, use)
        for launch in segment.launches:
            for point in range(launch.points):
                if (launch.id, point) not in seen:
                    self.report.add("launch", f"task {launch.name!r}, point {point} never ran")

    def _use(self, operation: Operation, launch: Launch, number: int, use: Use) -> None:
        argument = launch.arguments[number]
        tile = tile_of(launch, number, operation.point)
        reduce = argument.privilege == "reduce"
        found: Box | None = None if use.storage is None or empty(use.box) else use.box
        region = self.records.regions[argument.region]
        if found is not None and use.storage is not None:
            if reduce:  # a slice of a buffer, of the tile's shape
                shape = tuple(b - a for a, b in zip(*found))
                wanted = None if tile is None else (1, *(b - a for a, b in zip(*tile)))
                right = shape == wanted
            else:
                right = found == tile
                right &= self.records.storages[use.storage].region == argument.region
        else:
            right = tile is None
        if not right or use.access != ("w" if reduce else argument.privilege):
            self.report.add(
                "launch",
                f"{_name(operation)}: argument {number} (region {region.name!r}, privilege "
                f"{argument.privilege}) is {_box(tile)}, but it used {_box(found)} with "
                f"{use.access}",
            )

    def _conflicts(self, segment: _Segment) -> Array:
        """The pairs of places that must be ordered, the first first. Returns int64 (pairs, 2).

        Those that no dependence orders are violations.
        """
        operations, trace = segment.operations, segment.trace
        if len(operations) > LIMIT:
            raise ProfileError(
                f"log: {len(operations)} operations between two waits, {LIMIT} at most can be "
                "checked: wait more often"
            )
        if trace is None:
            ends = [end for _, end in segment.runs]
            before = bit_rows(ancestors(operations, range(len(operations)), False, ends))
        else:
            before = bit_rows(ancestors(operations, trace.order, True))
        found = conflicts(operations, self.records.storages)
        ahead = holds(before, found.second, found.first)
        behind = holds(before, found.first, found.second) & ~found.same
        needed = ahead | behind | found.same
        for pair in np.nonzero(~ahead & ~behind)[0].tolist():
            one, two = (found.accesses[int(by[pair])] for by in found.by)
            storages = self.records.storages
            shared = found.same[pair] or same_bytes(
                *(storages[one.storage], one.box, storages[two.storage], two.box)
            )
            needed[pair] = shared
            if shared:
                both = self._both(operations, one, two)
                self.report.add("dependence", f"{both}: nothing orders them")
        flows = self._flows(segment)
        unordered = ~holds(before, flows[:, 1], flows[:, 0])
        for i, j in flows[unordered].tolist():
            self.report.add(
                "dependence",
                f"{_name(operations[j])} reads what {_name(operations[i])} writes: nothing orders "
                "them",
            )
        pairs = np.stack([found.first, found.second], axis=1)
        pairs[behind] = pairs[behind][:, ::-1]
        everything: Array = np.concatenate([pairs[needed], flows])
        self.report.conflicts += len(everything)
        return everything

    def _flows(self, segment: _Segment) -> Array:
        """The pairs of places of tasks of which the second reads what the first wrote."""
        place = {
            (segment.instances[operation.launch], operation.point): number
            for number, operation in enumerate(segment.operations)
            if operation.what == "task" and operation.launch in segment.instances
        }
        found = [
            (place[flow[:2]], place[flow[2:]])
            for flow in sorted(self.program.flows)
            if flow[:2] in place and flow[2:] in place
        ]
        idle = {n for n, operation in enumerate(segment.operations) if operation.idle}
        kept = [pair for pair in found if not idle & set(pair)]
        return np.array(kept, dtype=np.int64).reshape(-1, 2)

    def _both(self, operations: Sequence[Operation], one: Access, two: Access) -> str:
        storage = self.records.storages[two.storage]
        region = self.records.regions[storage.region]
        return (
            f"{_name(operations[one.place])} and {_name(operations[two.place])} use the same bytes "
            f"of region {region.name!r}, {_box(two.box)} in memory "
            f"{self.records.memories[storage.memory]!r}"
        )

    def _obeyed(self, segment: _Segment, pairs: Array) -> None:
        """Whether the clock says that conflicts were kept apart."""
        starts = np.array([start for start, _ in segment.runs], dtype=np.int64)
        ends = np.array([end for _, end in segment.runs], dtype=np.int64)
        first, second = pairs[:, 0], pairs[:, 1]
        for number in np.nonzero(starts[second] < ends[first])[0].tolist():
            one, two = (int(n) for n in pairs[number])
            self.report.add(
                "order",
                f"{_name(segment.operations[two])} started {int(ends[one] - starts[two])} ns "
                f"before {_name(segment.operations[one])} had ended, which it conflicts with",
            )

    def _apart(self, segment: _Segment) -> None:
        """Whether a segment began after the one before had ended, or shares nothing with it."""
        now = list(zip(segment.operations, segment.runs))
        if now and self._before:
            begin = min(start for _, (start, _) in now)
            last = max(end for _, (_, end) in self._before)
            late = [item for item in self._before if item[1][1] > begin]
            early = [item for item in now if item[1][0] < last]
            both = [operation for operation, _ in (*late, *early)]
            runs = [run for _, run in (*late, *early)]
            found = conflicts(both if late and early else [], self.records.storages)
            for one, two in zip(*found.by):
                a, b = found.accesses[one], found.accesses[two]
                if a.place < len(late) <= b.place and runs[b.place][0] < runs[a.place][1]:
                    self.report.add("order", f"{self._both(both, a, b)}, in steps that overlap")
        if now:
            self._before = now

    # -- values

    def _values(self, segment: _Segment) -> None:
        order = sorted(range(len(segment.operations)), key=lambda n: (*segment.runs[n], n))
        for number in order:
            operation = segment.operations[number]
            if operation.idle:
                continue
            if operation.what == "task":
                self._task(operation, segment)
            elif operation.what == "copy":
                source, target = operation.uses
                if source.storage is not None and target.storage is not None:
                    moved = self.memory.read(source.storage, source.box).copy()
                    self.memory.write(target.storage, target.box, moved, _name(operation))
            elif operation.what == "fill":
                version = self.versions.of("value", operation.value)
                self._put(operation, operation.uses[0], version)
            elif operation.what == "fold":
                self._fold(operation)
            else:
                raise ProfileError(f"log: {_name(operation)} cannot be judged")

    def _put(self, operation: Operation, use: Use, version: Array | int) -> None:
        if use.storage is not None and not empty(use.box):
            self.memory.write(use.storage, use.box, version, _name(operation))

    def _task(self, operation: Operation, segment: _Segment) -> None:
        instance = segment.instances.get(operation.launch or 0)
        if instance is None:
            return  # a violation already
        launch = self.versions.launches[instance]
        for number, (use, argument) in enumerate(zip(operation.uses, launch.arguments)):
            wanted = self.program.expected.get((instance, operation.point, number))
            if wanted is None or use.storage is None or argument.privilege not in ("r", "rw"):
                continue
            self.report.reads += 1
            self._compare(f"{_name(operation)} reads", use.storage, use.box, wanted)
        for number, (use, argument) in enumerate(zip(operation.uses, launch.arguments)):
            if argument.privilege in ("w", "rw"):
                version = self.versions.of("task", instance, number, operation.point)
                self._put(operation, use, version)
            elif argument.privilege == "reduce":
                version = self.versions.of("partial", instance, number, operation.point)
                self._put(operation, use, version)

    def _compare(self, who: str, storage: int, box: Box, wanted: Array) -> None:
        about = self.records.storages[storage]
        region = self.records.regions[about.region]
        found = self.memory.read(storage, box)
        if found.shape != wanted.shape:
            return  # the wrong tile: a violation already
        wrong = np.argwhere(found != wanted)
        if not len(wrong):
            return
        place = tuple(int(n) for n in wrong[0])
        cell = self.grids[region.id].box(place, box)
        self.report.add(
            "value",
            f"{who} region {region.name!r}, {_box(cell)}, in memory "
            f"{self.records.memories[about.memory]!r}: found "
            f"{self.versions.text(int(found[place]))}, needed "
            f"{self.versions.text(int(wanted[place]))}",
        )

    def _fold(self, operation: Operation) -> None:
        """Fold partial results: each must be one whole partial result, and lie where it goes."""
        use = operation.uses[0]
        if use.storage is None or empty(use.box):
            return
        if operation.fresh is not None:
            self._put(operation, use, self.versions.of("value", operation.fresh))
        for part in operation.parts:
            source, target = part_boxes(operation, part)
            buffer = operation.uses[part.use].storage
            if buffer is None or empty(source) or empty(target):
                continue
            found = np.unique(self.memory.read(buffer, source)).tolist()
            key = self.versions.key(found[0])
            self.report.reads += 1
            if len(found) > 1 or key[0] != "partial":
                name = self.records.regions[self.records.storages[buffer].region].name
                said = ", ".join(self.versions.text(version) for version in found)
                self.report.add(
                    "value",
                    f"{_name(operation)} reads region {name!r}, {_box(source)}: found {said}, "
                    "needed one partial result",
                )
                continue
            _, instance, argument, point = key
            launch = self.versions.launches[instance]
            tile = tile_of(launch, argument, point)
            base = () if tile is None else tile[0]
            place = tuple(tuple(at + first for at, first in zip(side[1:], base)) for side in source)
            if tile is None or place[0] != target[0]:
                self.report.add(
                    "value",
                    f"{_name(operation)} folds {self.versions.text(found[0])}, {_box(tile)}, into "
                    f"{_box(target)}",
                )
                continue
            before = self.memory.read(use.storage, target)
            after = self.versions.added(before, instance, argument, point)
            self.memory.write(use.storage, target, after, _name(operation))

    # -- Python

    def _host(self, host: Host) -> None:
        region = self.records.regions[host.region]
        held = self.program.contents(host.region)
        grid = self.grids[host.region]
        if host.action != "write":
            covered = np.zeros(held.shape, dtype=bool)
            for storage, box in host.seen:
                covered[grid.slices(box)] = True
                self.report.reads += 1
                self._compare(f"Python ({host.action}) sees", storage, box, held[grid.slices(box)])
            zero = self.versions.of("value", region.zero)
            if host.action == "read" and (held[~covered] != zero).any():
                self.report.add("value", f"Python reads only a part of region {region.name!r}")
        if host.action != "read":
            version = self.program.host(host.region)
            for storage, box in host.seen:
                self.memory.write(storage, box, version, "Python")

    def _kept(self) -> None:
        """Whether every region's last contents are somewhere."""
        spoiled = {"overwritten", "stale"}
        for region in self.records.regions.values():
            mine = [s for s in self.records.storages.values() if s.region == region.id]
            if region.transient or not mine or region.known:
                continue
            held = self.program.contents(region.id)
            grid = self.grids[region.id]
            there = np.zeros(held.shape, dtype=bool)
            lost = False
            for storage in mine:
                index = grid.slices(storage.box)
                found = self.memory.held(storage.id)
                there[index] |= found == held[index]
                kinds = {self.versions.key(int(version))[0] for version in np.unique(found)}
                lost |= bool(kinds & spoiled)  # the region itself may be gone
            if not lost and not there.all():
                place = tuple(int(n) for n in np.argwhere(~there)[0])
                whole = (tuple([0] * len(region.shape)), region.shape)
                self.report.add(
                    "value",
                    f"at the end no instance of region {region.name!r} holds "
                    f"{self.versions.text(int(held[place]))} in {_box(grid.box(place, whole))}",
                )


def _name(operation: Operation) -> str:
    return f"{operation.what} {operation.name!r}, point {operation.point}"


def _box(box: Box | None) -> str:
    return "nothing" if box is None else f"box {list(box[0])}..{list(box[1])}"
