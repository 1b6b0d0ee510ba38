"""The mapper that balances loads: idle workers steal points, and traces are placed by load.

A compiled trace is a fixed program for each worker, in which stealing has no meaning: there the
points of a launch are placed longest first, each on the processor that would have it done first
(LPT; Graham 1969: at most 4/3 of the shortest time). A point's load is what was measured (`learn`),
or else the elements it touches.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from soapstone.engine.expand import NodeLaunch
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Configuration
from soapstone.mappers.plugins import DataParallelMapper
from soapstone.native.memory import Array
from soapstone.runtime import Launch, Machine, Profile


class WorkStealingMapper(DataParallelMapper):
    """Data-parallel, with points that go where there is time for them.

    slice_points: how many neighbouring points are stolen together.
    """

    name = "work_stealing"

    def __init__(self, slice_points: int = 1) -> None:
        super().__init__()
        self.slice_points = slice_points
        self._measured_us: dict[str, Array] = {}

    def attach(self, machine: Machine) -> None:
        """Start with processors that have nothing to do."""
        super().attach(machine)
        self._load = np.zeros(len(machine.workers))

    def learn(self, profile: Profile) -> None:
        """Take the loads of points from the timeline of a run, by launch name.

        Every process of a distributed run needs the same timeline.
        """
        sums: dict[str, defaultdict[int, list[float]]] = {}
        for event in profile.events:
            if event.category == "task":
                points = sums.setdefault(event.name, defaultdict(list))
                points[event.point].append(event.duration_ns / 1000)
        for name, points in sums.items():
            times = [float(np.median(points[point])) for point in sorted(points)]
            self._measured_us[name] = np.array(times)

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the data-parallel degrees; the devices are chosen launch by launch."""
        split = super().configure(graph, machine)
        return {name: Configuration(found.degrees) for name, found in split.items()}

    def stealable(self, launch: Launch) -> bool:
        """Every point may be taken, except where a strategy names the devices."""
        return not _configured(launch)

    def slices(self, launch: Launch) -> Array | None:
        """Neighbouring points on one processor."""
        if self.slice_points == 1:
            return None
        points = np.arange(launch.points, dtype=np.int64) // self.slice_points
        return points * len(self.machine.workers) + super().place_all(launch)

    def place_all(self, launch: Launch) -> Array:
        """In traces by load, longest first; else blocks of consecutive points, to be stolen.

        Among processors that are done at the same time, the one with less to do in this trace.
        """
        if not self.view.capturing or _configured(launch):
            self._load[:] = 0
            return super().place_all(launch)
        loads = self._loads(launch)
        free = [(0.0, float(load), processor) for processor, load in enumerate(self._load)]
        heapq.heapify(free)
        placed: Array = np.zeros(launch.points, dtype=np.int64)
        for point in np.argsort(-loads, kind="stable").tolist():
            busy, before, processor = heapq.heappop(free)
            placed[point] = processor
            self._load[processor] += loads[point]
            heapq.heappush(free, (busy + float(loads[point]), before, processor))
        return placed

    def _loads(self, launch: Launch) -> Array:
        """What each point costs: measured microseconds, or elements touched."""
        measured = self._measured_us.get(launch.name)
        if measured is not None and len(measured) == launch.points:
            return measured
        touched = [partition.tiling.volume for partition in launch.partitions]
        return np.sum(touched, axis=0).astype(np.float64) if touched else np.ones(launch.points)


def _configured(launch: Launch) -> bool:
    """Whether a strategy says where the points of a launch run."""
    return isinstance(launch.tag, NodeLaunch) and bool(launch.tag.configuration.devices)
