"""Launches placed and cut for Legate, which finds their dependences and copies itself."""

from __future__ import annotations

from collections.abc import Callable

from soapstone.runtime.analysis.coherence import Group
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import READ, WRITE, Instance, Instances, Storage
from soapstone.runtime.executors.legate.bundles import Work
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import Mapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.observe.statistics import Statistics


class LegateAnalysis(Analysis):
    """Places launches and cuts reductions as any analysis; hands works on, and makes no instance.

    Legate finds dependences; what is checked here is that a step reads no transient region before
    it has written it.
    """

    def __init__(
        self,
        machine: Machine,
        mapper: Mapper,
        statistics: Statistics,
        take: Callable[[Work], None],
        sink: LocalExecutor,
    ) -> None:
        super().__init__(machine, mapper, statistics, sink, sink.world)
        self._take = take

    def _issue(
        self,
        launch: Launch,
        processors: list[int],
        groups: list[Group],
        origin: tuple[Launch, int] | None = None,
    ) -> None:
        how = self.policy.ordered(launch, processors, False, origin)
        transient = [group for group in groups if group.region.transient]
        for group in transient:
            if group.access & READ:
                state, instance = self._written(group.region)
                nowhere = [0] * group.tiling.points  # there is nothing to copy from
                self._acquire(state, group.region, instance, group.tiling, nowhere, launch)
        for group in transient:
            if group.access & WRITE:
                state, instance = self._written(group.region)
                state.wrote(instance, group.tiling)
        operations = self._operations(launch, processors, [()] * len(processors), how)
        self._take(Work(launch, operations, tuple(groups)))

    def _written(self, region: Region) -> tuple[Instances, Instance]:
        """What of a transient region was written."""
        state = self.state(region)
        key = (0, None, None)
        if key not in state.by_key:
            whole = ((0,) * region.rank, region.shape)
            state.by_key[key] = Instance(Storage(region, 0, whole, None), False)
        return state, state.by_key[key]
