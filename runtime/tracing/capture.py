"""Capturing a step: the analysis run symbolically, its operations recorded instead of run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis import eviction
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import (
    Instance,
    Instances,
    Storage,
    each_once,
    minus,
    union,
)
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import StoppedError
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import Layout, Order
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.step import Fill, Request

if TYPE_CHECKING:
    from soapstone.runtime.tracing.trace import Trace


class Recording:
    """A capture in progress; `trace` is there once its block has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The compiled trace.

        Raises: StoppedError before the capture has ended.
        """
        if self._trace is None:
            raise StoppedError(f"capture {self.name!r} has not ended: it has no trace yet")
        return self._trace


class Recorder:
    """The sink of a capture: keeps operations and dependences; transient bytes come later.

    It takes the operations of all processes: their common order is what a trace is compiled from.
    """

    def __init__(self) -> None:
        self.mine: Sequence[bool] | None = None
        self.operations: list[Operation] = []
        self._edges: list[tuple[Array, Array]] = []

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Record operations and the dependences that end in them."""
        self.operations += operations
        if sources.size:
            self._edges.append((sources, targets))

    def allocate(self, storage: Storage) -> None:
        """Leave a transient storage without bytes: the arena planner places it."""

    def remove(self, unread: Sequence[int]) -> None:
        """Remove operations that nothing depends on for its values; the others get new ids."""
        if not unread:
            return
        kept = np.ones(len(self.operations), dtype=bool)
        kept[list(unread)] = False
        number = np.cumsum(kept) - 1
        self.operations = [operation for operation in self.operations if kept[operation.id]]
        for new, operation in enumerate(self.operations):
            operation.id = new
        self._edges = [
            (number[sources[some]], number[targets[some]])
            for sources, targets in self._edges
            for some in [kept[sources] & kept[targets]]
        ]

    def edges(self) -> Array:
        """All dependences, each once, sorted. Returns int64 (edges, 2)."""
        if not self._edges:
            return np.zeros((0, 2), dtype=np.int64)
        sources = np.concatenate([source for source, _ in self._edges])
        targets = np.concatenate([target for _, target in self._edges])
        return each_once(np.stack([sources, targets], axis=1))


class CaptureAnalysis(Analysis):
    """An analysis that starts from the validity another one ended with, and allocates nothing.

    Persistent regions use the storages of the main analysis; transient regions get storages
    without bytes. What is read as it was at the start is the trace's precondition.
    """

    steals = False  # each worker of a trace has a program of its own

    def __init__(self, main: Analysis, recorder: Recorder) -> None:
        super().__init__(main.machine, main.mapper, main.statistics, recorder, main.world)
        self._recorder = recorder
        self._main = main
        self.keep = []
        self.requests: list[Request] = []

    def launch(self, launch: Launch) -> None:
        """Analyse one launch of the step."""
        self.requests.append(launch)
        super().launch(launch)

    def fill(self, region: Region, value: Any) -> None:
        """Issue a fill that the step asks for."""
        self.requests.append(Fill(region, value))
        super().fill(region, value)

    def _begin(self, region: Region) -> Instances:
        state = Instances(region, tracking=True)
        if region.transient:
            return state
        main = self._main.state(region)
        for instance in list(main):  # replays take over the bytes of what is there
            if instance.storage.memory in self.spaces:
                eviction.drop(self._main, region, instance)
        state.live = main.live
        state.cuts = [cut.copy() for cut in main.cuts]
        hosts = self._main.host_instances(region) if main.live else []
        for key, instance in main.by_key.items():
            valid = instance.valid
            if hosts and instance not in hosts:
                valid = False  # the host may write its array before any replay
            state.by_key[key] = Instance(instance.storage, valid, valid)
        return state

    def _storage(
        self, region: Region, memory: int, box: Box, order: Order, exact: bool = False
    ) -> Storage:
        if region.transient or memory in self.spaces:
            storage = super()._storage(region, memory, box, order)
            storage.transient = True
            return storage
        return self._main.instance(region, memory, box, Layout(order), exact).storage

    def close(self) -> None:
        """Issue the copies after which the step can follow itself without any other copy."""
        self.launching = None
        self.pinned.clear()
        for region, state in list(self.regions.items()):
            for instance in list(state):
                if instance.storage.memory in self.spaces and not region.transient:
                    eviction.drop(self, region, instance)
        for region, state in list(self.regions.items()):
            if region.transient or state.sole:
                continue
            if state.live:
                for host in self.host_instances(region):
                    self.complete(region, host, True)
            else:
                for instance in list(state):
                    self.complete(region, instance, instance.required)
        if self.spaces:
            self._remove_unread()

    def _remove_unread(self) -> None:
        """Remove the copies of evicted values that nothing reads any more."""
        read: set[int] = set()
        unread: list[int] = []
        for operation in reversed(self._recorder.operations):
            if operation.kind == "copy":
                source, target = (use.storage for use in operation.uses)
                if target is not None and target.transient and id(target) not in read:
                    unread.append(operation.id)
                    self.statistics.copies -= 1
                    self.statistics.bytes_copied -= _copied_bytes(operation)
                else:
                    read.add(id(source))
            else:
                read.update(id(use.storage) for use in operation.uses)
        self._recorder.remove(unread)

    def persistent(self) -> list[Region]:
        """The persistent regions the step uses."""
        return [region for region in self.keep or [] if not region.transient]


def _copied_bytes(operation: Operation) -> int:
    partition = operation.launch.partitions[0]
    return int(partition.tiling.volume[0]) * partition.region.dtype.itemsize


def restore_needs(main: Analysis, captured: Analysis, regions: Sequence[Region]) -> int:
    """Issue the copies that make a trace's precondition hold; returns how many."""
    before = main.statistics.copies
    for region in regions:
        state = main.state(region)
        if state.sole:
            continue
        theirs = captured.regions[region]
        for key, wanted in theirs.by_key.items():
            needed = state.translated(wanted.required, theirs)
            main.complete(region, state.by_key[key], needed)
    return main.statistics.copies - before


def install_results(main: Analysis, captured: Analysis, regions: Sequence[Region]) -> None:
    """Tell the main analysis what a replayed trace wrote, and where it is valid now."""
    for region in regions:
        state = main.state(region)
        if state.sole:
            continue
        theirs = captured.regions[region]
        state.cut(theirs.cuts)  # once, so that the sets below stay comparable
        written = state.translated(theirs.written, theirs)
        for key, instance in state.by_key.items():
            kept = minus(instance.valid, written)
            made = theirs.by_key.get(key)
            if made is not None:
                fresh = minus(made.valid, made.inherited)
                kept = union(kept, state.translated(fresh, theirs))
            instance.valid = kept
