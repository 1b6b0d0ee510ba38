"""Running the lanes of bundles inside the tasks of another runtime, on the arrays it gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.native.memory import Array, address, aligned, call as native_call
from soapstone.native.threads.openmp import set_threads
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import TaskError
from soapstone.runtime.executors.bodies import as_task_error, bound, prepared_body
from soapstone.runtime.executors.legate.bundles import Lane, Slot
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import EntryLike, status_text
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.program import NativeProgram, assemble

Record = Callable[[Operation, int, int], None]  # told when an operation started and ended, ns
_KEPT = 4  # sets of addresses a lane stays bound to
_threads = threading.local()


def use_threads(threads: int) -> None:
    """Set how many threads of OpenMP the calling thread uses; its runtime set another number."""
    if getattr(_threads, "openmp", None) != threads:
        set_threads(threads)
        _threads.openmp = threads


class Faults:
    """The errors of operations that failed; after the first, nothing more runs."""

    def __init__(self) -> None:
        self._found: list[tuple[int, BaseException]] = []

    def add(self, number: int, error: BaseException) -> None:
        """Add the error of an operation."""
        self._found.append((number, error))

    def clear(self) -> None:
        """Forget all errors."""
        self._found.clear()

    @property
    def first(self) -> BaseException | None:
        """The error of the operation that was launched first, or None."""
        return min(self._found, key=lambda pair: pair[0])[1] if self._found else None

    def __bool__(self) -> bool:
        return bool(self._found)


@dataclass(eq=False)
class _Native:
    """Native entries of a lane that follow one another, called by one loop without Python."""

    operations: list[Operation]
    entries: list[EntryLike]
    program: NativeProgram


_Step = tuple[Operation, "EntryLike | Callable[[], object]"] | _Native


class LaneProgram:
    """A lane bound to arrays: its entries are made again only when an array has moved.

    shared: arrays of regions that the host holds. loops: native entries run in compiled loops,
    which is worth it for what runs many times.
    """

    def __init__(
        self,
        lane: Lane,
        machine: Machine,
        faults: Faults,
        shared: Mapping[Region, Array],
        loops: bool,
    ) -> None:
        self._lane = lane
        self._place = machine.processors[lane.processor]
        self._faults = faults
        self._shared = shared
        self._loops = loops
        self._bound: dict[tuple[Any, ...], list[_Step]] = {}
        self._private: dict[Region, Array] | None = None

    def run(self, arrays: Sequence[Array | None], record: Record | None) -> None:
        """Run all operations, unless one has failed. arrays: of the lane's box of each argument.

        Errors go to the faults, and none is raised.
        """
        if self._faults:
            return
        use_threads(self._place.threads)
        key = tuple(
            None if array is None else (int(address(array)), array.strides) for array in arrays
        )
        steps = self._bound.get(key)
        if steps is None:
            steps = self._bind(arrays)
            if steps is None:
                return
            if len(self._bound) >= _KEPT:
                self._bound.clear()
            self._bound[key] = steps
        for step in steps:
            if self._faults:
                return
            if isinstance(step, _Native) and record is None:
                self._loop(step)
            elif isinstance(step, _Native):
                for operation, entry in zip(step.operations, step.entries):
                    self._one(operation, entry, record)
            else:
                self._one(*step, record)

    def _loop(self, native: _Native) -> None:
        native.program.reset()
        native.program.run(0)
        for place, status in native.program.failures():
            self._fail(native.operations[place], status_text(native.entries[place], status))

    def _one(
        self,
        operation: Operation,
        call: EntryLike | Callable[[], object],
        record: Record | None,
    ) -> None:
        if self._faults:
            return
        start = time.perf_counter_ns()
        try:
            if callable(call):
                call()
            else:
                status = native_call(call.address, call.block)
                if status:
                    self._fail(operation, status_text(call, status))
        except BaseException as error:
            self._faults.add(operation.id, as_task_error(operation, self._place, error))
        if record is not None:
            record(operation, start, time.perf_counter_ns())

    def _fail(self, operation: Operation, reason: str) -> None:
        self._faults.add(
            operation.id,
            TaskError(operation.launch.name, operation.point, self._place.name, reason),
        )

    # -- binding

    def _bind(self, arrays: Sequence[Array | None]) -> list[_Step] | None:
        """Each operation's entry or body on these arrays; None when one cannot be made."""
        if self._private is None:
            self._private = _buffers(self._lane)
        steps: list[_Step] = []
        run: list[tuple[Operation, EntryLike]] = []

        def flush() -> None:
            if run:
                steps.append(_native(run))
                run.clear()

        for operation, slots in self._lane.work:
            task = operation.launch.task
            try:
                views = [
                    self._view(slot, arrays, partition.region.dtype)
                    for slot, partition in zip(slots, operation.launch.partitions)
                ]
                entry = None
                if task.bind is not None and (task.kind == "task" or self._loops or not task.body):
                    entry = bound(operation, self._place, views)
                if entry is None:
                    flush()
                    steps.append((operation, prepared_body(operation, self._place, views)))
                elif self._loops:
                    run.append((operation, entry))
                else:
                    steps.append((operation, entry))
            except BaseException as error:
                self._faults.add(operation.id, as_task_error(operation, self._place, error))
                return None
        flush()
        return steps

    def _view(self, slot: Slot, arrays: Sequence[Array | None], dtype: np.dtype[Any]) -> Array:
        region, box = slot.region, slot.box
        if region is None:
            return np.zeros(tuple(b - a for a, b in zip(*box)), dtype)
        base: Box | None
        if slot.argument is not None:
            array, base = arrays[slot.argument], self._lane.boxes[slot.argument]
        elif self._private is not None and region in self._private:
            array, base = self._private[region], self._lane.private[region].box
        else:
            array, base = self._shared[region], ((0,) * region.rank, region.shape)
        assert array is not None and base is not None
        if box != base:
            array = array[tuple(slice(a - o, b - o) for a, b, o in zip(*box, base[0]))]
        return array[0, ...] if slot.squeeze else array


def _buffers(lane: Lane) -> dict[Region, Array]:
    """The arrays of a lane's private regions."""
    memory = aligned(lane.buffers.peak_bytes)
    found: dict[Region, Array] = {}
    for (region, private), offset in zip(lane.private.items(), lane.buffers.offsets.tolist()):
        shape = tuple(b - a for a, b in zip(*private.box))
        found[region] = np.ndarray(shape, region.dtype, memory.data, offset, private.strides)
    return found


def _native(run: Sequence[tuple[Operation, EntryLike]]) -> _Native:
    entries = [entry for _, entry in run]
    addresses, blocks = zip(*((entry.address, entry.block) for entry in entries))
    count = len(run)
    program = assemble(range(count), [0] * count, [()] * count, addresses, blocks)
    return _Native([operation for operation, _ in run], entries, program)
