"""The check itself: segment by segment, first the program, then what was done for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.errors import ProfileError
from soapstone.runtime.observe.checker.cells import empty, grids, tile_of
from soapstone.runtime.observe.checker.order import (
    LIMIT,
    Access,
    ancestors,
    bit_rows,
    conflicts,
    holds,
    same_bytes,
)
from soapstone.runtime.observe.checker.ranks import merged
from soapstone.runtime.observe.checker.records import (
    Box,
    Fill,
    Host,
    Item,
    Launch,
    Operation,
    Records,
    Replay,
    Use,
    Wait,
)
from soapstone.runtime.observe.checker.report import Report
from soapstone.runtime.observe.checker.scopes import within
from soapstone.runtime.observe.checker.segment import Segment, box_text, name_of
from soapstone.runtime.observe.checker.values import Values
from soapstone.runtime.observe.checker.versions import Program, Versions


def check(*logs: Records) -> Report:
    """What the checker says of a log, or of those of all ranks of one run, in order.

    Raises: ProfileError when more ran between two waits than can be checked; for logs that are not
    those of all ranks.
    """
    records, wrong = merged(logs)
    report = Report(ranks=len(logs))
    for kind, text in wrong:
        report.add(kind, text)
    Judge(records, report).run()
    for scope in records.scopes:
        report.nested += sum(isinstance(item, Operation) for item in scope.items)
        Judge(scope, report).run()
    within(records, report)
    return report


class Judge:
    """Checks one log, or the part of it that one task with subtasks made, and fills a report.

    Operations are checked in segments: what ran untraced between two waits, or one replay.
    """

    def __init__(self, records: Records, report: Report) -> None:
        self.records = records
        self.report = report
        cells = grids(records)
        self.grids = cells
        self.versions = Versions(records)
        self.program = Program(records, cells, self.versions)
        self.values = Values(records, cells, self.versions, self.program, report)
        self._traced: dict[int, Array] = {}
        self._before: dict[int, list[tuple[Operation, tuple[int, int]]]] = {}  # of each rank
        self._launches: list[Launch] = []
        self._operations: list[Operation] = []
        self._instances: dict[int, int] = {}

    def run(self) -> None:
        """Check all segments, and at the end that every region's contents are in some instance."""
        for item in self.records.items:
            self._take(item)
        self._flush()
        self.values.kept()

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
                self.values.host(item)
            else:
                assert isinstance(item, Wait)

    def _flush(self) -> None:
        """Check what ran untraced since the last segment."""
        if self._operations or self._launches:
            operations = sorted(self._operations, key=lambda operation: operation.id)
            runs = [self.records.stamps[operation.id] for operation in operations]
            clock_ns = self.records.clock_ns
            segment = Segment(operations, self._instances, self._launches, runs, None, clock_ns)
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
        clock_ns = self.records.clock_ns
        self._segment(Segment(trace.operations, instances, launches, runs, trace, clock_ns))
        self.program.forget()
        self.report.replays += 1
        self.report.launches += len(launches)

    # -- one segment

    def _segment(self, segment: Segment) -> None:
        self.report.operations += len(segment.operations)
        trace = segment.trace
        known = None if trace is None else self._traced.get(trace.id)
        if known is None:
            self._points(segment)
            known = self._conflicts(segment)
            if trace is not None:
                self._traced[trace.id] = known
        self._obeyed(segment, known)
        for rank in dict.fromkeys(operation.rank for operation in segment.operations):
            self._apart(segment, rank)
        self.report.messages += sum(
            len(operation.messages) for operation in segment.operations if operation.what == "recv"
        )
        self.values.run(segment)

    def _points(self, segment: Segment) -> None:
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
                self.report.add("launch", f"{name_of(operation)} {why}")
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
                f"{name_of(operation)}: argument {number} (region {region.name!r}, privilege "
                f"{argument.privilege}) is {box_text(tile)}, but it used {box_text(found)} with "
                f"{use.access}",
            )

    def _conflicts(self, segment: Segment) -> Array:
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
                f"{name_of(operations[j])} reads what {name_of(operations[i])} writes: nothing "
                "orders them",
            )
        pairs = np.stack([found.first, found.second], axis=1)
        pairs[behind] = pairs[behind][:, ::-1]
        halves = self._halves(segment)
        for i, j in halves[~holds(before, halves[:, 1], halves[:, 0])].tolist():
            self.report.add(
                "dependence",
                f"{name_of(operations[j])} ends what {name_of(operations[i])} starts: nothing "
                "orders them",
            )
        everything: Array = np.concatenate([pairs[needed], flows, halves])
        self.report.conflicts += len(everything)
        return everything

    def _flows(self, segment: Segment) -> Array:
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

    def _halves(self, segment: Segment) -> Array:
        """The pairs of places that start and end a message of a trace, in one rank."""
        if segment.trace is None:
            return np.zeros((0, 2), dtype=np.int64)
        ends = {
            (operation.what, operation.rank, operation.messages): number
            for number, operation in enumerate(segment.operations)
        }
        found = []
        for start, end in (("send", "sent"), ("post", "recv")):
            for number, operation in enumerate(segment.operations):
                if operation.what not in (start, end):
                    continue
                other = end if operation.what == start else start
                match = ends.get((other, operation.rank, operation.messages))
                if match is None:
                    text = f"{name_of(operation)} has no {other} of the same messages"
                    self.report.add("message", text)
                elif operation.what == start:
                    found.append((number, match))
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def _both(self, operations: Sequence[Operation], one: Access, two: Access) -> str:
        storage = self.records.storages[two.storage]
        region = self.records.regions[storage.region]
        return (
            f"{name_of(operations[one.place])} and {name_of(operations[two.place])} use the same "
            f"bytes of region {region.name!r}, {box_text(two.box)} in memory "
            f"{self.records.memories[storage.memory]!r}"
        )

    def _obeyed(self, segment: Segment, pairs: Array) -> None:
        """Whether the clock says that conflicts were kept apart; each rank has its own."""
        ranks = np.array([operation.rank for operation in segment.operations], dtype=np.int64)
        starts = np.array([start for start, _ in segment.runs], dtype=np.int64)
        ends = np.array([end for _, end in segment.runs], dtype=np.int64)
        pairs = pairs[ranks[pairs[:, 0]] == ranks[pairs[:, 1]]]
        first, second = pairs[:, 0], pairs[:, 1]
        for number in np.nonzero(starts[second] + self.records.clock_ns < ends[first])[0].tolist():
            one, two = (int(n) for n in pairs[number])
            self.report.add(
                "order",
                f"{name_of(segment.operations[two])} started {int(ends[one] - starts[two])} ns "
                f"before {name_of(segment.operations[one])} had ended, which it conflicts with",
            )

    def _apart(self, segment: Segment, rank: int) -> None:
        """Whether a rank's segment began after its last had ended, or shares nothing with it."""
        now = [pair for pair in zip(segment.operations, segment.runs) if pair[0].rank == rank]
        before = self._before.get(rank, [])
        begin = min(start for _, (start, _) in now)
        late = [item for item in before if item[1][1] > begin + self.records.clock_ns]
        if late:
            last = max(end for _, (_, end) in late)
            early = [item for item in now if item[1][0] < last]
            both = [operation for operation, _ in (*late, *early)]
            runs = [run for _, run in (*late, *early)]
            found = conflicts(both, self.records.storages)
            for one, two in zip(*found.by):
                a, b = found.accesses[one], found.accesses[two]
                if a.place < len(late) <= b.place and runs[b.place][0] < runs[a.place][1]:
                    self.report.add("order", f"{self._both(both, a, b)}, in steps that overlap")
        self._before[rank] = now
