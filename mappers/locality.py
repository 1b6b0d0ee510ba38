"""The mapper that brings tasks to their data: each point runs where most of its bytes are valid.

Moving a task is free and moving a tile is not (the owner-computes rule, decided by what the runtime
knows instead of by declaration).
"""

from __future__ import annotations

import numpy as np

from soapstone.mappers.plugins import DataParallelMapper
from soapstone.native.memory import Array
from soapstone.runtime import Launch, Machine


class LocalityMapper(DataParallelMapper):
    """Each point goes to the memory that holds most bytes of what it reads.

    What a point only writes needs no bytes, so it does not count. Memories that hold equally much,
    and the processors of one memory, are chosen by the bytes their points have touched so far:
    fewest first. `slack` bounds the imbalance: no memory's processors get more than that many times
    their share of a launch's points, rounded up.
    """

    name = "locality"
    slack = 1.5

    def attach(self, machine: Machine) -> None:
        """Learn which processors work in each memory."""
        super().attach(machine)
        names = [memory.name for memory in machine.memories]
        self._homes = np.array([names.index(p.memory) for p in machine.workers])
        self._load = np.zeros(len(machine.workers))

    def place_all(self, launch: Launch) -> Array:
        """Where most bytes of each point's arguments are valid."""
        if len(set(self._homes)) == 1:
            return super().place_all(launch)
        valid = np.zeros((launch.points, len(self.machine.memories)), dtype=np.int64)
        touched = np.zeros(launch.points)
        for partition, privilege in zip(launch.partitions, launch.task.privileges):
            touched += partition.tiling.volume * partition.region.dtype.itemsize
            if privilege.reads:
                valid += self.view.valid_bytes(partition)
        here = valid[:, self._homes]  # (points, processors)
        if not (here != here[:, :1]).any():  # all memories hold as much: nothing to gain
            placed = super().place_all(launch)
        else:
            placed = self._nearest(here, touched)
        np.add.at(self._load, placed, touched)
        return placed

    def _nearest(self, here: Array, touched: Array) -> Array:
        """The processor of each point: most bytes, then least load, while it has room for more."""
        points, processors = here.shape
        room = np.full(processors, int(np.ceil(self.slack * points / processors)))
        load = self._load.copy()
        placed: Array = np.zeros(points, dtype=np.int64)
        # Those that would lose most are placed first.
        regret = here.max(axis=1) - here.min(axis=1)
        for point in np.argsort(-regret, kind="stable").tolist():
            order = np.lexsort((load, -here[point]))
            processor = next(int(p) for p in order if room[p] > 0)
            placed[point] = processor
            room[processor] -= 1
            load[processor] += touched[point]
        return placed
