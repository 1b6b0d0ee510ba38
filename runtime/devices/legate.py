"""GPUs under Legate: lanes are given what to do by tasks of Legate, and its stores are page-locked.

Legate's own tasks of GPUs would get arrays that Legate places, so that a step would bind kernels
anew, without an arena and without graphs. So what is in a GPU's memory is decided here, as on the
local executor, and each part of a step that the host does, which for GPUs is to enqueue, is a task
of Legate. The memory of the host is stores of Legate (`executors.legate.workers`).
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from functools import partial

from soapstone.native.cuda.arrays import page_locked
from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.devices.executor import DeviceExecutor
from soapstone.runtime.devices.machine import gpu_machine
from soapstone.runtime.errors import MachineError
from soapstone.runtime.executors.legate.start import Legate, legate_machine
from soapstone.runtime.executors.legate.stores import store_bytes
from soapstone.runtime.executors.legate.workers import LegateWorkers
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool


class LegateDeviceExecutor(LegateWorkers, DeviceExecutor):
    """Lanes, and tasks of Legate that enqueue on them; one of Legate's processors does so for all.

    Raises: MachineError as its bases do.
    """

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        memory.sources[self.world.home] = partial(_page_locked, self.legate)

    def _places(self) -> list[int]:
        hosted = [number for number in self.processors if number not in self.lanes]
        return [1 + hosted.index(n) if n in hosted else 0 for n in self.processors]

    def _run(self, operation: Operation, processor: int) -> None:
        super()._run(operation, processor)
        if processor in self.lanes:
            self._ended(self._enqueued.pop(operation.id))


def _page_locked(legate: Legate, nbytes: int, zero: bool) -> Array:
    """The bytes of a new store, which has its pages for itself: uint8 (nbytes,)."""
    pages = -(-max(nbytes, 1) // mmap.PAGESIZE)
    return page_locked(store_bytes(legate, pages * mmap.PAGESIZE, zero, mmap.PAGESIZE))[:nbytes]


def legate_gpu_machine(cpus: int | None, gpus: int) -> Machine:
    """The machine of the first `gpus` GPUs of this computer, whose host's memory is Legate's.

    Raises: MachineError where there are not as many, cpus are given beside them, or Legate has
    several nodes.
    """
    if cpus is not None:
        raise MachineError(
            f"executor 'legate': {gpus} gpus found beside {cpus} cpus; either needed"
        )
    gpu_machine(gpus)  # which says what there is not, before Legate starts and takes its share
    host, found = legate_machine(1).host, gpu_machine(gpus)
    return replace(found, name="legate", memories=(host, *found.memories[1:]))
