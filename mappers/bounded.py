"""The mapper of memories too small for a model: instances are streamed in, and leave for others.

Every value lives in a larger memory, the backing one, and is brought to the memory of the
processors when a task uses it. A memory plan says when and where; without one what has not been
used for longest leaves first (LRU) when space is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from soapstone.engine.expand import NodeLaunch
from soapstone.engine.footprint import footprint_of
from soapstone.engine.mapper import backing_memories
from soapstone.engine.prepare import Prepared
from soapstone.ir.errors import GraphError
from soapstone.ir.footprint import Footprint
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.mappers.plugins import DataParallelMapper
from soapstone.runtime import Held, Launch, Machine, MapperError, Region
from soapstone.runtime.tracing.arena import ALIGNMENT

Planner = Callable[[Footprint, int], MemoryPlan]  # of what is launched, in a memory of these bytes


@dataclass(frozen=True)
class _Stage:
    """What a plan says of one run of a node: where values come, and which are there after it."""

    name: str
    arrivals: Mapping[str, int]
    workspace: int  # where it begins
    stays: frozenset[str]


class BoundedMemoryMapper(DataParallelMapper):
    """Data-parallel, with the processors' memories backed by larger ones.

    The backing memory is the fastest reachable one of larger capacity. On a machine where
    processors work in its largest memory nothing is backed, and nothing leaves.

    plan: of what is launched of a graph (`engine.footprint`), which is then followed step by step,
    or a function that makes one for each graph and capacity. None: what is least recently used
    leaves, when space is needed. A plan is of one memory, that of all processors.
    """

    name = "bounded_memory"

    def __init__(self, plan: MemoryPlan | Planner | None = None) -> None:
        super().__init__()
        self._plan = plan
        self._stages: list[_Stage] = []
        self._at = 0  # the stage of the next launch
        self._used = 0  # bytes of its workspace

    def attach(self, machine: Machine) -> None:
        """Find the backing memory of each memory that processors work in."""
        super().attach(machine)
        self._backing = backing_memories(machine)

    def backing(self, memory: str) -> str | None:
        """The larger memory."""
        return self._backing.get(memory)

    def planned(self, prepared: Prepared) -> MemoryPlan | None:
        """Return the plan that the launches which come next follow, checked; None without one.

        Raises:
            GraphError: a plan of another graph, or for a larger memory; or processors that work in
                several memories, or in one without a larger one.
        """
        self._stages, self._at, self._used = [], 0, 0
        if self._plan is None:
            return None
        working = sorted({processor.memory for processor in self.machine.processors})
        if len(working) != 1 or working[0] not in self._backing:
            raise GraphError(
                f"memory plan: processors work in {', '.join(map(repr, working))}; one memory with"
                " a larger one behind it needed (`Machine.bounded`)"
            )
        sizes = {memory.name: memory.capacity_bytes for memory in self.machine.memories}
        capacity, footprint = sizes[working[0]], footprint_of(prepared)
        plan = self._plan
        plan = plan if isinstance(plan, MemoryPlan) else plan(footprint, capacity)
        if plan.capacity_bytes > capacity:
            raise GraphError(
                f"memory plan: for {plan.capacity_bytes} bytes, {capacity} found in memory"
                f" {working[0]!r}"
            )
        try:
            plan.check(footprint)
        except GraphError as error:
            name = prepared.graph.name
            raise GraphError(f"graph {name!r} is not what the plan is of: {error}") from None
        self._stages = _stages(plan)
        return plan

    def arrive(self, launch: Launch | None, region: Region, memory: str, nbytes: int) -> int | None:
        """Where the plan has the value, or, for partial results, next in the node's workspace."""
        if not self._stages or launch is None:
            return None
        stage = self._stage(launch)
        if region.name in stage.arrivals:
            return stage.arrivals[region.name]
        place = stage.workspace + self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def leave(self, launch: Launch, memory: str, held: tuple[Held, ...]) -> list[int]:
        """What the plan has no more after the node."""
        if not self._stages:
            return []
        stays = self._stage(launch).stays
        self._at, self._used = (self._at + 1) % len(self._stages), 0
        return [n for n, instance in enumerate(held) if instance.region.name not in stays]

    def _stage(self, launch: Launch) -> _Stage:
        """Return what the plan says of a launch, which is the next."""
        stage, tag = self._stages[self._at], launch.tag
        if not isinstance(tag, NodeLaunch) or tag.node.name != stage.name:
            raise MapperError(f"the plan runs {stage.name!r} next, task {launch.name!r} found")
        return stage


def _stages(plan: MemoryPlan) -> list[_Stage]:
    """Return what a plan says, run by run."""
    here: set[str] = set()
    arrivals: dict[str, int] = {}
    found: list[_Stage] = []
    for step in plan.steps:
        if step.action is Action.RUN:
            found.append(_Stage(step.name, arrivals, step.offset, frozenset(here)))
            arrivals = {}
        elif step.action in (Action.ALLOCATE, Action.FETCH):
            here.add(step.name)
            arrivals[step.name] = step.offset
        else:
            here.discard(step.name)
            if found:
                last = found[-1]
                found[-1] = _Stage(last.name, last.arrivals, last.workspace, frozenset(here))
    return found
