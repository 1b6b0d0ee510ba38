"""The executor of a machine with GPUs: what they do is enqueued, and nothing waits for it in vain.

Each processor that works in a GPU's memory, the GPU itself and the copiers to and from it, is a
lane: a stream. An operation of a lane starts, for others on lanes, as soon as it is enqueued, since
a stream waits for another's mark by itself; for the host's it has ended when its mark occurs, which
a thread of each lane waits for.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.native.cuda.device import Device, Lane, NoDevice, connect, simulated
from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.devices.calls import device_call, give
from soapstone.runtime.devices.enqueues import Enqueues, enqueued_by, failure
from soapstone.runtime.errors import MachineError, TaskError
from soapstone.runtime.executors.bodies import as_task_error
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool


@dataclass(eq=False, slots=True)
class _Enqueued:
    """An operation that a lane has and has not ended.

    told: how many of its successors have been told that it is enqueued. call: kept until it ends.
    """

    operation: Operation
    mark: Any
    told: int
    call: object
    begun: Any
    start_ns: int
    end_ns: int


class DeviceExecutor(LocalExecutor):
    """Threads for the processors of the host, and lanes for those of GPUs.

    lanes: by processor.

    Raises: MachineError where the machine has more GPUs than this computer.
    """

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        try:
            devices = {
                where: Device(number)
                for where, number in machine.devices.items()
                if self.world.owners[where] == self.world.rank
            }
            for one, other in itertools.permutations(devices.values(), 2):
                connect(one.number, other.number)
        except NoDevice as error:
            raise MachineError(f"machine {machine.name!r}: {error}") from error
        copying = {each.memory for each in machine.processors[len(machine.workers) :]}
        for where in devices:
            name = machine.memories[where].name
            if name not in copying:
                raise MachineError(
                    f"machine {machine.name!r}: memory {name!r} of a GPU has no copiers; two needed"
                )
        names = [each.name for each in machine.memories]
        homes = [names.index(processor.memory) for processor in machine.processors]
        self.lanes = {
            number: Lane(devices[home]) for number, home in enumerate(homes) if home in devices
        }
        self._enqueued: dict[int, _Enqueued] = {}  # by operation
        self._awaited: dict[int, list[Any]] = {}  # marks that an operation of a lane follows
        self._endings: dict[int, queue.SimpleQueue[_Enqueued | None]] = {}
        self._enders: list[threading.Thread] = []

    # -- untraced operations

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations; one of a lane follows what is enqueued by its mark."""
        first = operations[0].id
        if sources.size and self._enqueued:
            kept = np.ones(sources.size, dtype=bool)
            with self._lock:
                for edge, (source, target) in enumerate(zip(sources.tolist(), targets.tolist())):
                    before, after = self._enqueued.get(source), operations[target - first]
                    if before is not None and enqueued_by(self.lanes, after):
                        self._awaited.setdefault(after.id, []).append(before.mark)
                        kept[edge] = False
            sources, targets = sources[kept], targets[kept]
        super().emit(operations, sources, targets)

    def perform(self, operation: Operation, processor: int) -> None:
        """Run an operation of the host in the calling thread, or enqueue one of a lane.

        Raises: what binding or running it raises.
        """
        lane = self.lanes.get(processor)
        if lane is None:
            super().perform(operation, processor)
            return
        begun, start_ns, call = None, time.perf_counter_ns(), None
        lane.after(self._awaited.pop(operation.id, ()))
        if not operation.idle:
            call = device_call(operation, self.machine.processors[processor], lane.device)
            begun = lane.mark() if self.profile is not None else None
            give(lane, call)
        mark = lane.mark()
        self._enqueued[operation.id] = _Enqueued(
            operation, mark, 0, call, begun, start_ns, time.perf_counter_ns()
        )

    def _run(self, operation: Operation, processor: int) -> None:
        if processor in self.lanes:
            self.perform(operation, processor)  # whoever ends it tells the profile
        else:
            super()._run(operation, processor)

    def _end(self, operation: Operation) -> None:
        found = self._enqueued.get(operation.id)
        if found is None:
            super()._end(operation)
            return
        found.told = len(operation.successors)
        for after in operation.successors:
            if enqueued_by(self.lanes, after):
                self._awaited.setdefault(after.id, []).append(found.mark)
                self._freed(after)
        self._ender(operation.processor).put(found)

    def _freed(self, after: Operation) -> None:
        """Count one of those an operation waits for as done; the lock is held."""
        after.pending -= 1
        if after.pending == 0 and self.fault is None:
            self._push(after)

    def _ender(self, processor: int) -> queue.SimpleQueue[_Enqueued | None]:
        """Where the thread that waits for a lane's marks takes them from; the lock is held."""
        inbox = self._endings.get(processor)
        if inbox is None:
            inbox = self._endings[processor] = queue.SimpleQueue()
            name = f"soapstone-{self.machine.processors[processor].name}-ends"
            thread = threading.Thread(target=self._wait_for, args=(inbox,), daemon=True, name=name)
            thread.start()
            self._enders.append(thread)
        return inbox

    def _wait_for(self, inbox: queue.SimpleQueue[_Enqueued | None]) -> None:
        """End the operations of a lane one after the other, as their marks occur."""
        while (found := inbox.get()) is not None:
            operation = found.operation
            place = self.machine.processors[operation.processor]
            try:
                self._ended(found)
            except BaseException as error:
                self._fail(
                    error
                    if isinstance(error, TaskError)
                    else as_task_error(operation, place, error)
                )
            with self._lock:
                self._enqueued.pop(operation.id, None)
                for number, after in enumerate(operation.successors):
                    if number >= found.told or not enqueued_by(self.lanes, after):
                        self._freed(after)
                operation.successors = []
                super()._end(operation)
            del found, operation

    def _ended(self, found: _Enqueued) -> None:
        """Wait until an operation has ended, and tell the profile.

        Raises: TaskError where its kernel says that something is wrong.
        """
        operation, profile = found.operation, self.profile
        self.lanes[operation.processor].wait(found.mark)
        wrong = failure(found.call, operation, self.machine.processors[operation.processor])
        if wrong is not None:
            raise wrong
        if profile is not None and self.fault is None:
            start, end = self._times(found)
            profile.add(operation, start, start, end)

    def _times(self, found: _Enqueued) -> tuple[int, int]:
        """When an operation began and ended: by the device, between what the host has seen.

        In the simulator, which has no clock, by the host.
        """
        if found.begun is None or simulated():
            return found.start_ns, found.end_ns
        now, lane = time.perf_counter_ns(), self.lanes[found.operation.processor]
        start, end = lane.times_ns(found.begun, found.mark)
        start = max(start, found.start_ns)
        return start, max(start, min(end, now))

    # -- traces

    def enqueues(
        self, operations: Sequence[Operation], order: Sequence[int], edges: Array
    ) -> Enqueues | None:
        """What a trace enqueues, where some of its operations are of lanes."""
        if not any(enqueued_by(self.lanes, operation) for operation in operations):
            return None
        return Enqueues(self.machine, self.lanes, operations, order, edges)

    # -- the end, and errors

    def _drop(self) -> None:
        super()._drop()
        self._awaited.clear()

    def reset(self) -> None:
        """Forget the error that stopped the run; what lanes have is waited for."""
        for lane in self.lanes.values():
            lane.wait()
        super().reset()

    def close(self) -> None:
        """Stop the threads and join them; what lanes have is waited for."""
        if not self._closed:
            super().close()
            for inbox in self._endings.values():
                inbox.put(None)
            for thread in self._enders:
                thread.join()
