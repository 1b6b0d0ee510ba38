"""Dry runs: the bytes that a step needs in each memory, before anything is allocated or bound.

Its launches are analysed, ordered and laid out as a capture of them is, in all processes of a run;
only the bytes are missing. So what is counted here is what executors hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.world import World
from soapstone.runtime.model import launch as launches
from soapstone.runtime.model.mapper import Mapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import Task
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.tracing.capture import CaptureAnalysis, Recorder
from soapstone.runtime.tracing.ordering import Part


class _Counted:
    """A sink that counts the bytes of the instances that outlive a step."""

    mine: Sequence[bool] | None = None

    def __init__(self, memories: int) -> None:
        self.nbytes = [0] * memories

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Run nothing."""

    def allocate(self, storage: Storage) -> None:
        """Count a storage."""
        self.nbytes[storage.memory] += storage.nbytes


class DryRun:
    """A step that is launched here instead of on a runtime, and not executed.

    Args:
        processes: of the run; each owns as many memories of the machine.

    Raises: MapperError; MachineError for a process without a memory.
    """

    def __init__(self, machine: Machine, mapper: Mapper, processes: int = 1) -> None:
        attach(mapper, machine)
        self.machine = machine
        owners = [memory % processes for memory in range(len(machine.memories))]
        self._worlds = [World.of(machine, rank, owners) for rank in range(processes)]
        self._counted = _Counted(len(machine.memories))
        given = machine, mapper, Statistics(), self._counted, self._worlds[0]
        self._main = Analysis(*given)
        self._recorder = Recorder()
        self._capture: CaptureAnalysis | None = None

    def hold(self, region: Region, live: bool = False) -> Region:
        """Return a region that outlives the step, held by the host of each process.

        live: the host has an array of it. Regions come before launches.
        """
        self._main.host_instances(region)
        self._main.state(region).live = live
        return region

    def launch(
        self,
        task: Task,
        *arguments: object,
        name: str = "",
        tag: Hashable = None,
        initialise: bool = False,
    ) -> None:
        """Analyse a launch; see `Runtime.launch`."""
        if self._capture is None:
            self._capture = CaptureAnalysis(self._main, self._recorder)
        found = launches.prepare(task, arguments, name=name, tag=tag, initialise=initialise)
        self._capture.launch(found)

    def nbytes(self) -> tuple[int, ...]:
        """Return the bytes that each memory holds: what outlives the step, and its arenas."""
        if self._capture is None:
            return tuple(self._counted.nbytes)
        self._capture.close()
        edges, total = self._recorder.edges(), np.array(self._counted.nbytes, np.int64)
        free = [memory.capacity_bytes for memory in self.machine.memories] - total
        for world in self._worlds:
            found = Part(self._recorder.operations, edges, world).lay_out(free.tolist())
            total += np.array([plan.peak_bytes for plan in found.plans], np.int64)
        return tuple(total.tolist())
