"""The records of one program: what a runtime launches, or what the body of a task does.

They are in the order of the program: header, region, tiling, storage, launch, fill, operation, run,
host, wait, and of a runtime also trace, replay, failed; end (`checker.reader` has their fields).
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from soapstone.native.memory import Array, address
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import Instance, Instances, Storage
from soapstone.runtime.analysis.message import ENDS, STARTS
from soapstone.runtime.analysis.operation import Operation, Sink
from soapstone.runtime.analysis.transfer import FoldTask
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import identity
from soapstone.runtime.model.tiling import Box, Tiling

Regions = Mapping[Region, Instances]
FORMAT, VERSION = "soapstone log", 2


class Part:
    """A program's part of a log file.

    mark: fields that all its records have. first: the id of the analysis' first operation; ids are
    written less `base`.
    """

    def __init__(
        self,
        stream: IO[str],
        lock: threading.Lock,
        machine: Machine,
        analysis: Analysis,
        mark: Mapping[str, Any],
        base: int = 0,
    ) -> None:
        self._file = stream
        self._lock = lock
        self._analysis = analysis
        self._mark = mark
        self._base = base
        self._machine = machine
        self._regions: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()
        self._storages: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()
        self._tilings: set[int] = set()
        self._counts = dict.fromkeys(("region", "storage", "trace", "launch", "scope"), 0)
        self._asked: Launch | None = None  # the launch being analysed
        self._answer = 0  # its id; 0 until it is written

    def _header(self, **fields: Any) -> None:
        world, clock = self._analysis.world, 0
        if self._machine.devices:
            from soapstone.native.cuda.device import CLOCK_NS as clock
        self._put(
            "header",
            format=FORMAT,
            version=VERSION,
            rank=world.rank,
            ranks=world.size,
            processors=[processor.name for processor in self._machine.processors],
            memories=[memory.name for memory in self._machine.memories],
            runs=list(world.runs),
            owners=list(world.owners),
            first=self._analysis.next_id - self._base,
            clock_ns=clock,
            **fields,
        )
        for region, state in list(self._analysis.regions.items()):
            self._region(region, known=True)
            for instance in state:
                if instance.storage.array is not None:
                    self._storage(instance.storage, {region: state}, region, instance)

    # -- the program

    def launch(self, launch: Launch) -> None:
        """Take a launch that is about to be analysed, untraced.

        It is written with its first operation, or by `launched`: an analysis may refuse it, and
        then it never was.
        """
        with self._lock:
            self._asked, self._answer = launch, 0

    def launched(self) -> None:
        """Take note that the launch was analysed; it may be that none of its points runs here."""
        with self._lock:
            self._write_launch()
            self._asked = None

    def _write_launch(self) -> None:
        if self._asked is not None and not self._answer:
            self._answer = self._next("launch")
            self._put("launch", **self._described(self._asked, self._answer))

    def fill(self, region: Region, value: Any) -> None:
        """Take a fill that is about to be analysed, untraced."""
        with self._lock:
            self._put("fill", region=self._region(region), value=value_text(value))

    def host(self, action: str, region: Region, seen: Iterable[tuple[Storage, Box]]) -> None:
        """Take what Python does to a region: "read" it, "write" it, or "claim" its array."""
        with self._lock:
            given = [
                [self._storage(storage, self._analysis.regions, region), list(box[0]), list(box[1])]
                for storage, box in seen
                if storage.array is not None
            ]
            name = self._region(region)
            self._put("host", action=action, region=name, seen=given, at=time.perf_counter_ns())

    def wait(self) -> None:
        """Take note that nothing is running any more."""
        with self._lock:
            self._put("wait", at=time.perf_counter_ns())

    # -- untraced operations

    def logged(self, sink: Sink) -> Sink:
        """Return a sink that logs the operations of the analysis before it passes them on."""
        return _LoggedSink(sink, self)

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations that are about to be given to whoever runs them; those of this rank."""
        world = self._analysis.world
        after: dict[int, list[int]] = {}
        for source, target in zip(sources.tolist(), targets.tolist()):
            after.setdefault(target, []).append(source - self._base)
        with self._lock:
            for operation in operations:
                if world.runs[operation.processor] != world.rank:
                    continue
                asked = operation.launch is self._asked
                if asked:
                    self._write_launch()
                mine = self._answer if asked else None
                found = self._operation(operation, mine, self._analysis.regions)
                found["after"] = after.get(operation.id, [])
                self._put("operation", issued=time.perf_counter_ns(), **found)

    def ran(self, operation: Operation, start_ns: int, end_ns: int) -> None:
        """Take one untraced operation that has run."""
        with self._lock:
            self._put("run", operation=operation.id - self._base, start=start_ns, end=end_ns)

    # -- records

    def _put(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **self._mark, **fields}) + "\n")

    def _next(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what]

    def _region(self, region: Region, known: bool = False, **fields: Any) -> int:
        number = self._regions.get(region)
        if number is None:
            number = self._regions[region] = self._next("region")
            self._put(
                "region",
                id=number,
                name=region.name,
                shape=list(region.shape),
                zero=value_text(np.zeros((), region.dtype)),
                transient=region.transient,
                known=known,
                **fields,
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
                found = state.boxes(cells, (0,) * cells.ndim)
                valid = [[list(a), list(b)] for a, b in found]
            array = storage.array
            name = self._region(region)
            number = self._storages[storage] = self._next("storage")
            strides = storage.strides()
            self._put(
                "storage",
                id=number,
                region=name,
                memory=storage.memory,
                box=[list(storage.box[0]), list(storage.box[1])],
                address=0 if array is None else int(address(array)),
                strides=list(strides if array is None else array.strides),
                itemsize=storage.dtype.itemsize,
                valid=valid,
            )
        return number

    def _described(self, launch: Launch, number: int) -> dict[str, Any]:
        arguments = [
            {
                "region": self._region(partition.region),
                "privilege": privilege_text(privilege.reads, privilege.writes, privilege.reduction),
                "reduction": privilege.reduction,
                "identity": None
                if privilege.reduction is None
                else value_text(identity(privilege.reduction, partition.region.dtype)),
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
        moves = task.kind in (*STARTS, *ENDS)
        privileges = task.privileges * len(operation.uses) if moves else task.privileges
        uses = []
        for use, privilege, partition in zip(operation.uses, privileges, given.partitions):
            access = "r" * privilege.reads + "w" * privilege.writes
            region = None if privilege.reduction else partition.region  # else that of a buffer
            where = None if use.storage is None else self._storage(use.storage, regions, region)
            uses.append([where, list(use.box[0]), list(use.box[1]), access])
        found: dict[str, Any] = {
            "id": operation.id - self._base,
            "what": operation.kind if launch is None else "task",
            "name": given.name,
            "launch": launch,
            "point": operation.point,
            "processor": operation.processor,
            "idle": operation.idle,
            "uses": uses,
        }
        if found["what"] == "fill":
            found["value"] = value_text(given.scalars[0])
        if moves:
            found["messages"] = [message.number for message in given.scalars]
        if launch is None and isinstance(task, FoldTask):
            found["fresh"] = (
                None
                if task.privileges[0].reads
                else value_text(identity(task.reduction, given.partitions[0].region.dtype))
            )
            found["parts"] = [
                [part.argument, part.place, _slices(part.target), _slices(part.source)]
                for part in task.parts[operation.point]
            ]
        return found


class _LoggedSink:
    """A sink that logs the operations of an analysis before it passes them to another sink."""

    def __init__(self, sink: Sink, log: Part) -> None:
        self.mine: Sequence[bool] | None = sink.mine
        self._sink = sink
        self._log = log

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes."""
        self._sink.allocate(storage)

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Log operations, then hand them on."""
        self._log.emit(operations, sources, targets)
        self._sink.emit(operations, sources, targets)


def value_text(value: Any) -> str:
    """A scalar as text; equal scalars of one dtype have equal texts."""
    return repr(np.asarray(value)[()].item())


def privilege_text(reads: bool, writes: bool, reduction: str | None) -> str:
    """A privilege as the log says it: r, w, rw or reduce."""
    if reduction is not None:
        return "reduce"
    return "r" * reads + "w" * writes


def _slices(slices: tuple[slice, ...] | None) -> list[list[int]] | None:
    return None if slices is None else [[part.start, part.stop] for part in slices]
