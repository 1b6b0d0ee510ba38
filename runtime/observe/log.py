"""Logs of runs: what was launched, and what was done for it, for `checker` to judge afterwards.

A log has JSON lines. The logical part is the program as it was launched: regions, tiles and
privileges. The physical part is what ran: operations with the instances they used, the dependences
they were given, and when each started and ended. A trace is written once; a replay adds its stamps
only. A runtime that keeps no log does nothing for it but look, once a launch, whether there is one.

The records of a task that launches tasks are a part of their own, marked with the number of its
scope. Of several ranks each writes the whole program to a log of its own (`path_of_rank`), and the
operations and messages that it ran.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.native.memory import Array
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.message import ENDS, STARTS
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import PointContext, Privilege
from soapstone.runtime.observe.log_part import Part, privilege_text, value_text
from soapstone.runtime.tracing.step import Fill

if TYPE_CHECKING:
    from soapstone.runtime.core import Runtime
    from soapstone.runtime.observe.profile import Profile
    from soapstone.runtime.tracing.trace import Trace


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank writes its log: rank 0 to the path that was asked for, rank 1 to `path.1`."""
    return Path(f"{os.fspath(path)}.{rank}" if rank else path)


class Log(Part):
    """The log of a runtime, written as it goes; made by `Runtime(..., log=)` or `Runtime.log`."""

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str]) -> None:
        analysis = runtime.analysis
        place = path_of_rank(path, analysis.world.rank)
        stream = place.open("w", encoding="utf-8")  # `close` ends it
        super().__init__(stream, threading.Lock(), runtime.machine, analysis, {})
        self._traces: weakref.WeakKeyDictionary[Trace, int] = weakref.WeakKeyDictionary()
        self._header()

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Take one untraced operation that has run; scopes hear of theirs by themselves."""
        if operation.id >= 0:
            self.ran(operation, start_ns, end_ns)

    # -- traces

    def add_replay(
        self, trace: Trace, workers: Sequence[tuple[Sequence[Operation], Array]]
    ) -> None:
        """Take one replay, and its trace when it is the first."""
        with self._lock:
            number = self._traces.get(trace)
            if number is None:
                number = self._traces[trace] = self._next("trace")
                self._trace(trace, number)
            runs = [
                [operation.id, start, end]
                for operations, stamps in workers
                for operation, (_, start, end) in zip(operations, stamps.tolist())
            ]
            self._put("replay", trace=number, runs=runs)

    def _trace(self, trace: Trace, number: int) -> None:
        regions = {**self._analysis.regions, **trace.regions}
        launches: list[dict[str, Any]] = []
        known: dict[int, list[int]] = {}  # one launch may be asked for several times
        taken: dict[tuple[int, int], int] = {}
        for request in trace.requests:
            if isinstance(request, Fill):
                name = self._region(request.region)
                launches.append({"region": name, "value": value_text(request.value)})
            else:
                launch = self._next("launch")
                known.setdefault(id(request), []).append(launch)
                launches.append(self._described(request, launch))
        after: dict[int, list[int]] = {}
        for source, target in trace.edges.tolist():
            after.setdefault(target, []).append(source)
        for operation in trace.operations:  # whose buffers are known from who folds or moves them
            given = operation.launch
            moves = operation.kind in (*STARTS, *ENDS)
            privileges = given.task.privileges * (len(operation.uses) if moves else 1)
            for use, privilege, partition in zip(operation.uses, privileges, given.partitions):
                if use.storage is not None and not privilege.reduction:
                    self._storage(use.storage, regions, partition.region)
        operations = []
        for operation in trace.operations:
            key = id(operation.launch), operation.point
            times = taken[key] = taken.get(key, -1) + 1
            mine = known[key[0]][times] if key[0] in known else None
            found = self._operation(operation, mine, regions)
            found["after"] = after.get(operation.id, [])
            operations.append(found)
        self._put(
            "trace",
            id=number,
            name=trace.name,
            launches=launches,
            operations=operations,
            order=list(trace.order),
        )

    # -- tasks that launch tasks

    def scope(
        self, machine: Machine, analysis: Analysis, context: PointContext, depth: int
    ) -> ScopeLog:
        """The part of a task that launches tasks. analysis: that of its scope, with no region."""
        with self._lock:
            number = self._next("scope")
            return ScopeLog(self, machine, analysis, context, {"scope": number}, depth)

    # -- the end

    def failed(self, name: str) -> None:
        """Take note that a replay failed: what it left behind is not known."""
        with self._lock:
            self._put("failed", name=name)

    def close(self, whole: bool) -> None:
        """End the log. whole: whether everything that was launched has ended well."""
        with self._lock:
            self._put("end", whole=whole, at=time.perf_counter_ns())
            self._file.close()


class ScopeLog(Part):
    """The part of one task that launches tasks; the lock of the log is held when it is made."""

    def __init__(
        self,
        log: Log,
        machine: Machine,
        analysis: Analysis,
        context: PointContext,
        mark: dict[str, Any],
        depth: int,
    ) -> None:
        super().__init__(log._file, log._lock, machine, analysis, mark, analysis.next_id)
        self._header(
            task=context.task.name, point=context.point, depth=depth, begin=time.perf_counter_ns()
        )
        self._arguments: list[tuple[Region, Storage]] = []  # that the body may write

    def argument(self, region: Region, privilege: Privilege) -> None:
        """Take an argument that subtasks may be launched on: an array that the body has."""
        held = privilege_text(privilege.reads, privilege.writes, privilege.reduction)
        state = self._analysis.state(region)
        (instance,) = state
        with self._lock:
            self._region(region, True, held=held)
            self._storage(instance.storage, {region: state}, region, instance)
        if privilege.writes:
            self._arguments.append((region, instance.storage))

    def waited(self) -> None:
        """Take note that all subtasks have ended: the body may write its arrays again."""
        self.wait()
        for region, storage in self._arguments:
            self.host("claim", region, [(storage, storage.box)])

    def close(self, whole: bool) -> None:
        """End the part, and let go of the body's arrays. whole: whether no subtask failed."""
        self._arguments.clear()
        with self._lock:
            self._put("end", whole=whole, at=time.perf_counter_ns())


class Both:
    """An observer that passes operations on to both a log and a profile."""

    def __init__(self, log: Log, profile: Profile) -> None:
        self.log = log
        self.profile = profile

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Pass on one untraced operation that has run; the times are as of `Observer.add`."""
        self.log.add(operation, asked_ns, start_ns, end_ns)
        self.profile.add(operation, asked_ns, start_ns, end_ns)

    def add_replay(
        self, trace: Trace, workers: Sequence[tuple[Sequence[Operation], Array]]
    ) -> None:
        """Pass on one replay."""
        self.log.add_replay(trace, workers)
        self.profile.add_replay(trace, workers)
