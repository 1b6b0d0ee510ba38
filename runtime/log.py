"""Logs of runs: what was launched, and what was done for it, for `checker` to judge afterwards.

A log has JSON lines. The logical part is the program as it was launched: regions, tiles and
privileges. The physical part is what ran: operations with the instances they used, the dependences
they were given, and when each started and ended. A trace is written once; a replay adds its stamps
only. A runtime that keeps no log does nothing for it but look, once a launch, whether there is one.

Records have a kind and are in the order of the program: header, region, tiling, storage, launch,
fill, operation, run, nested, trace, replay, host, wait, failed, end (`checker.records` has their
fields).
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .instance import Instance, Instances, Storage
from .launch import Launch
from .operation import Operation
from .region import Region
from .step import Fill
from .task import identity
from .tiling import Box, Tiling
from .transfer import FoldTask

if TYPE_CHECKING:
    from .core import Runtime
    from .profile import Profile
    from .trace import Trace

Array = np.ndarray[Any, np.dtype[Any]]
Regions = Mapping[Region, Instances]
FORMAT, VERSION = "soapstone log", 1


class Log:
    """The log of a runtime, written as it goes; made by `Runtime(..., log=)` or `Runtime.log`."""

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str]) -> None:
        self._runtime = runtime
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - `close` ends it
        self._lock = threading.Lock()
        self._regions: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()
        self._storages: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()
        self._traces: weakref.WeakKeyDictionary[Trace, int] = weakref.WeakKeyDictionary()
        self._tilings: set[int] = set()
        self._counts = dict.fromkeys(("region", "storage", "trace", "launch"), 0)
        self._asked: Launch | None = None  # the launch being analysed
        self._answer = 0  # the id of the launch being analysed; 0 until it has operations
        machine = runtime.machine
        self._put(
            "header",
            format=FORMAT,
            version=VERSION,
            rank=runtime.executor.world.rank,
            ranks=runtime.executor.world.size,
            processors=[processor.name for processor in machine.processors],
            memories=[memory.name for memory in machine.memories],
            first=runtime.analysis.next_id,
        )
        for region, state in list(runtime.analysis.regions.items()):
            self._region(region, known=True)
            for instance in state:
                self._storage(instance.storage, {region: state}, region, instance)

    # -- the program

    def launch(self, launch: Launch) -> None:
        """Take a launch that is about to be analysed, untraced.

        It is written with its first operation: an analysis may refuse it, and then it never was.
        """
        with self._lock:
            self._asked, self._answer = launch, 0

    def fill(self, region: Region, value: Any) -> None:
        """Take a fill that is about to be analysed, untraced."""
        with self._lock:
            self._put("fill", region=self._region(region), value=_value(value))

    def host(self, action: str, region: Region, seen: Iterable[tuple[Storage, Box]]) -> None:
        """Take what Python does to a region: "read" it, "write" it, or "claim" its array."""
        with self._lock:
            regions = self._runtime.analysis.regions
            given = [
                [self._storage(storage, regions, region), list(box[0]), list(box[1])]
                for storage, box in seen
                if storage.array is not None
            ]
            name = self._region(region)
            self._put("host", action=action, region=name, seen=given, at=_now())

    def wait(self) -> None:
        """Take note that nothing is running any more."""
        with self._lock:
            self._put("wait", at=_now())

    # -- untraced operations: it is their sink, and their profile

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations that are about to be given to the executor."""
        after: dict[int, list[int]] = {}
        for source, target in zip(sources.tolist(), targets.tolist()):
            after.setdefault(target, []).append(source)
        with self._lock:
            for operation in operations:
                asked = operation.launch is self._asked
                if asked and not self._answer:
                    self._answer = self._next("launch")
                    self._put("launch", **self._described(operation.launch, self._answer))
                mine = self._answer if asked else None
                found = self._operation(operation, mine, self._runtime.analysis.regions)
                found["after"] = after.get(operation.id, [])
                self._put("operation", issued=_now(), **found)

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Take one untraced operation that has run; those of nested launches are only counted."""
        with self._lock:
            if operation.id < 0:
                self._put("nested", name=operation.launch.name)
            else:
                self._put("run", operation=operation.id, start=start_ns, end=end_ns)

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
        regions = {**self._runtime.analysis.regions, **trace.regions}
        launches: list[dict[str, Any]] = []
        known: dict[int, list[int]] = {}  # one launch may be asked for several times
        taken: dict[tuple[int, int], int] = {}
        for request in trace.requests:
            if isinstance(request, Fill):
                name = self._region(request.region)
                launches.append({"region": name, "value": _value(request.value)})
            else:
                launch = self._next("launch")
                known.setdefault(id(request), []).append(launch)
                launches.append(self._described(request, launch))
        after: dict[int, list[int]] = {}
        for source, target in trace.edges.tolist():
            after.setdefault(target, []).append(source)
        for operation in trace.operations:  # whose buffers are known from who folds or moves them
            given = operation.launch
            for use, privilege, partition in zip(
                operation.uses, given.task.privileges, given.partitions
            ):
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

    def failed(self, name: str) -> None:
        """Take note that a replay failed: what it left behind is not known."""
        with self._lock:
            self._put("failed", name=name)

    def close(self, whole: bool) -> None:
        """End the log. whole: whether everything that was launched has ended well."""
        with self._lock:
            self._put("end", whole=whole)
            self._file.close()

    # -- records

    def _put(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def _next(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what]

    def _region(self, region: Region, known: bool = False) -> int:
        number = self._regions.get(region)
        if number is None:
            number = self._regions[region] = self._next("region")
            self._put(
                "region",
                id=number,
                name=region.name,
                shape=list(region.shape),
                zero=_value(np.zeros((), region.dtype)),
                transient=region.transient,
                known=known,
            )
        return number

    def _tiling(self, tiling: Tiling) -> int:
        if tiling.uid not in self._tilings:
            self._tilings.add(tiling.uid)
            tiles = [[[list(low), list(high)]] for low, high in tiling.boxes]
            self._put("tiling", id=tiling.uid, tiles=tiles)
        return tiling.uid

    def _storage(
        self,
        storage: Storage,
        regions: Regions,
        region: Region | None = None,
        instance: Instance | None = None,
    ) -> int:
        number = self._storages.get(storage)
        if number is None:
            if region is None:
                region = next(
                    region
                    for region, states in regions.items()
                    if any(one.storage is storage for one in states)
                )
            valid = None  # all of it is zero, or nothing when transient
            if instance is not None:
                state = regions[region]
                cells = state.cells(instance.valid).copy()
                valid = [[list(a), list(b)] for a, b in state.boxes(cells, (0,) * cells.ndim)]
            array = storage.array
            name = self._region(region)
            number = self._storages[storage] = self._next("storage")
            self._put(
                "storage",
                id=number,
                region=name,
                memory=storage.memory,
                box=[list(storage.box[0]), list(storage.box[1])],
                address=0 if array is None else int(array.ctypes.data),
                strides=list(storage.strides()),
                itemsize=storage.dtype.itemsize,
                valid=valid,
            )
        return number

    def _described(self, launch: Launch, number: int) -> dict[str, Any]:
        arguments = [
            {
                "region": self._region(partition.region),
                "privilege": _privilege(privilege.reads, privilege.writes, privilege.reduction),
                "reduction": privilege.reduction,
                "identity": None
                if privilege.reduction is None
                else _value(identity(privilege.reduction, partition.region.dtype)),
                "tiling": self._tiling(partition.tiling),
            }
            for partition, privilege in zip(launch.partitions, launch.task.privileges)
        ]
        return {
            "id": number,
            "name": launch.name,
            "points": launch.points,
            "initialise": launch.initialise,
            "arguments": arguments,
        }

    def _operation(
        self, operation: Operation, launch: int | None, regions: Regions
    ) -> dict[str, Any]:
        given = operation.launch
        task = given.task
        uses = []
        for use, privilege, partition in zip(operation.uses, task.privileges, given.partitions):
            access = "r" * privilege.reads + "w" * privilege.writes
            region = None if privilege.reduction else partition.region  # else that of a buffer
            where = None if use.storage is None else self._storage(use.storage, regions, region)
            uses.append([where, list(use.box[0]), list(use.box[1]), access])
        found: dict[str, Any] = {
            "id": operation.id,
            "what": operation.kind if launch is None else "task",
            "name": given.name,
            "launch": launch,
            "point": operation.point,
            "processor": operation.processor,
            "idle": operation.idle,
            "uses": uses,
        }
        if found["what"] == "fill":
            found["value"] = _value(given.scalars[0])
        if launch is None and isinstance(task, FoldTask):
            found["fresh"] = (
                None
                if task.privileges[0].reads
                else _value(identity(task.reduction, given.partitions[0].region.dtype))
            )
            found["parts"] = [
                [part.argument, part.place, _slices(part.target), _slices(part.source)]
                for part in task.parts[operation.point]
            ]
        return found


class Both:
    """A log and a profile of the same operations."""

    def __init__(self, log: Log, profile: Profile) -> None:
        self.log = log
        self.profile = profile

    def add(self, operation: Operation, asked_ns: int, start_ns: int, end_ns: int) -> None:
        """Give both one untraced operation that has run."""
        self.log.add(operation, asked_ns, start_ns, end_ns)
        self.profile.add(operation, asked_ns, start_ns, end_ns)

    def add_replay(
        self, trace: Trace, workers: Sequence[tuple[Sequence[Operation], Array]]
    ) -> None:
        """Give both one replay."""
        self.log.add_replay(trace, workers)
        self.profile.add_replay(trace, workers)


class LoggedSink:
    """The executor as the sink of an analysis whose operations are logged."""

    def __init__(self, runtime: Runtime, log: Log) -> None:
        self.mine: Sequence[bool] | None = runtime.executor.mine
        self._executor = runtime.executor
        self._log = log

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes."""
        self._executor.allocate(storage)

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Log operations, then give them to the executor."""
        self._log.emit(operations, sources, targets)
        self._executor.emit(operations, sources, targets)


def _now() -> int:
    return time.perf_counter_ns()


def _value(value: Any) -> str:
    """A scalar as text; equal scalars of one dtype have equal texts."""
    return repr(np.asarray(value)[()].item())


def _privilege(reads: bool, writes: bool, reduction: str | None) -> str:
    if reduction is not None:
        return "reduce"
    return "r" * reads + "w" * writes


def _slices(found: tuple[slice, ...] | None) -> list[list[int]] | None:
    return None if found is None else [[part.start, part.stop] for part in found]
