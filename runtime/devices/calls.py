"""What is enqueued for an operation of a GPU: a copy, a fold, its kernel, or the host's own code.

A task's `bind` is asked for a kernel of a processor of kind "cuda": something that can be enqueued.
Whatever has none is run by the host, as it would be there, on pinned copies of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from soapstone.dtypes import code_of
from soapstone.native.cuda.arrays import pinned_array, pinned_like
from soapstone.native.cuda.copies import copied, filled
from soapstone.native.cuda.device import Device, Enqueued, Lane
from soapstone.native.cuda.folds import folded
from soapstone.native.memory import Array, call as native_call
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.analysis.transfer import NATIVE_FOLDS, FoldTask
from soapstone.runtime.errors import TaskError
from soapstone.runtime.executors.bodies import bound, context_of, prepared_body
from soapstone.runtime.machines.machine import Processor
from soapstone.runtime.model.task import identity, status_text

HOST = Processor("host")  # whose kernels run what a GPU has none for


def device_call(operation: Operation, place: Processor, device: Device) -> Enqueued | OnHost:
    """What a lane is given for an operation. place: the processor that it is on, of the device.

    Raises: what binding its task raises.
    """
    arrays = operation.arrays()
    task = operation.launch.task
    with device:
        if operation.kind == "copy":
            return copied(arrays[1], arrays[0])
        if operation.kind == "fill":
            return filled(arrays[0], operation.launch.scalars[0])
        if isinstance(task, FoldTask):
            if code_of(arrays[0].dtype)[1:] in NATIVE_FOLDS and arrays[0].dtype.isnative:
                start = identity(task.reduction, arrays[0].dtype)
                parts = task.views(operation.point, arrays)
                return folded(task.reduction, task.mode, start, arrays[0], parts)
        elif task.bind is not None:
            found: Any = task.bind(context_of(operation, place), arrays)
            if hasattr(found, "enqueue"):
                return found if found.status is None else Kernel(found, device)
        return OnHost(operation, arrays)


class DeviceEntryLike(Enqueued, Protocol):
    """What `bind` gives for a GPU.

    status: None, or int32 (1,) in its memory, which is 0 until the kernel finds something wrong.
    """

    @property
    def status(self) -> Any: ...

    def explain(self, code: int) -> str:
        """Return what a status means."""


class Kernel:
    """A kernel with a status, which comes to the host after it."""

    def __init__(self, entry: DeviceEntryLike, device: Device) -> None:
        self._entry = entry
        self._device = device
        self._word = pinned_array((1,), np.int32)
        self._word[0] = 0

    def enqueue(self, stream: Any) -> None:
        """Enqueue the kernel, and the copy of its status."""
        self._entry.enqueue(stream)
        self._entry.status.copy_to_host(self._word, stream=stream)

    def failure(self) -> str:
        """What it said the last time, as text; empty if nothing. It is forgotten then."""
        code = int(self._word[0])
        if not code:
            return ""
        self._word[0] = 0
        with self._device:
            self._entry.status.copy_to_device(self._word)
        return self._entry.explain(code)


class OnHost:
    """An operation that the host runs, on copies of its arguments in pinned memory.

    Whoever enqueues it waits for what it reads, and until it has run.
    """

    def __init__(self, operation: Operation, arrays: Sequence[Array]) -> None:
        task = operation.launch.task
        mine = [pinned_like(array) for array in arrays]
        pairs = list(zip(mine, arrays, task.privileges, strict=True))
        self._bring = [copied(here, there) for here, there, use in pairs if use.reads]
        self._take = [copied(there, here) for here, there, use in pairs if use.writes]
        self._call = _host_call(operation, mine)

    def run(self, lane: Lane) -> None:
        """Copy, wait, run, and enqueue the copies back.

        Raises: what the task raises.
        """
        for copy in self._bring:
            lane.enqueue(copy)
        lane.wait()
        self._call()
        for copy in self._take:
            lane.enqueue(copy)


def give(lane: Lane, call: Enqueued | OnHost) -> None:
    """Have a lane do what was made for an operation.

    Raises: what the host raises that runs it.
    """
    if isinstance(call, OnHost):
        call.run(lane)
    else:
        lane.enqueue(call)


def _host_call(operation: Operation, arrays: Sequence[Array]) -> Callable[[], object]:
    """The call of an operation's own code on arrays of the host."""
    entry = bound(operation, HOST, arrays)
    if entry is None:
        return prepared_body(operation, HOST, arrays)

    def run() -> None:
        status = native_call(entry.address, entry.block)
        if status:
            reason = status_text(entry, status)
            raise TaskError(operation.launch.name, operation.point, HOST.name, reason)

    return run
