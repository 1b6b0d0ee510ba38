"""The mapper for memories smaller than a model: values are copied in, and evicted for others.

Every value lives in a larger memory, the backing one, and is copied to the memory of the processors
when a task uses it. A memory plan says when and where; without one, the least recently used value
is evicted when space is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from soapstone.engine.expand import NodeLaunch
from soapstone.engine.footprint import footprints_of
from soapstone.engine.images import Images
from soapstone.engine.mapper import Everyone, backing_memories
from soapstone.engine.prepare import Prepared
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.ir.strategy import Configuration
from soapstone.mappers.plugins import DataParallelMapper
from soapstone.mappers.ranges import RangesMapper
from soapstone.runtime import Held, Launch, Layout, Machine, MapperError, Region
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.arena import ALIGNMENT

Planner = Callable[[Footprint, int], MemoryPlan]  # of what is launched, in a memory of these bytes


@dataclass(frozen=True)
class _Stage:
    """The part of a plan for one run of a node: where values arrive, and which remain after it."""

    name: str
    arrivals: Mapping[str, int]
    workspace: int  # where it begins
    stays: frozenset[str]


@dataclass
class _Followed:
    """A plan that is followed in one memory, and its next step."""

    stages: list[_Stage]
    extents: Mapping[str, Box]
    at: int = 0  # the stage of the next launch
    used: int = 0  # bytes of its workspace

    def stage(self, launch: Launch) -> _Stage:
        """Return the plan's part for a launch, which is the next one."""
        stage, tag = self.stages[self.at], launch.tag
        if not isinstance(tag, NodeLaunch) or tag.node.name != stage.name:
            raise MapperError(f"the plan runs {stage.name!r} next, task {launch.name!r} found")
        return stage


class BoundedMemoryMapper(DataParallelMapper):
    """Data-parallel, with the processors' memories backed by larger ones.

    The backing memory is the fastest reachable one of larger capacity. On a machine where
    processors work in its largest memory nothing is backed, and nothing leaves.

    plan: of what is launched of a graph (`engine.footprint`), which is then followed step by step,
    or a function that makes one for each graph and capacity. None: what is least recently used
    leaves, when space is needed. A plan is of one memory: where processors work in several, such as
    those of ranks, a function makes one for each. ranges: who splits operators, over the vertices
    of a graph; by default samples are.
    """

    name = "bounded_memory"

    def __init__(
        self, plan: MemoryPlan | Planner | None = None, ranges: RangesMapper | None = None
    ) -> None:
        super().__init__()
        self._plan = plan
        self._ranges = ranges
        self._followed: dict[str, _Followed] = {}  # by memory

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the ranges of the graph's vertices, where there are some, else data parallelism.

        Raises:
            StrategyError: as of `RangesMapper.configure`.
        """
        if self._ranges is not None:
            return self._ranges.configure(graph, machine)
        return super().configure(graph, machine)

    def attach(self, machine: Machine) -> None:
        """Find the backing memory of each memory that processors work in."""
        super().attach(machine)
        self._backing = backing_memories(machine)

    def backing(self, memory: str) -> str | None:
        """The larger memory."""
        return self._backing.get(memory)

    def planned(
        self, prepared: Prepared, images: Images, everyone: Everyone
    ) -> Mapping[str, MemoryPlan]:
        """Return the checked plans for the launches that follow; none without a plan.

        Each process plans for the memories in which its processors work, and learns the plans of
        others.

        Raises:
            GraphError: a plan for another graph, or for a larger memory; processors that work in a
                memory without a larger one; or plans of several memories in different orders.
        """
        self._followed = {}
        if self._plan is None:
            return {}
        machine, name = self.machine, prepared.graph.name
        for memory in dict.fromkeys(processor.memory for processor in machine.processors):
            if memory not in self._backing:
                raise GraphError(
                    f"memory plan: processors work in {memory!r}; one with a larger one behind it"
                    " needed (`Machine.bounded`)"
                )
        shares = footprints_of(prepared, machine, images)
        mine = dict.fromkeys(machine.processors[number].memory for number in everyone.processors)
        made: dict[str, MemoryPlan] = {}
        fault = ""
        try:
            for memory in mine:
                made[memory] = self._made(shares[memory].footprint, memory, len(shares), name)
        except GraphError as error:
            fault = str(error)
        both = everyone.exchanged((made, fault))
        for _, fault in both:
            if fault:  # of any process: all give up
                raise GraphError(fault)
        orders = {memory: plan.runs for plans, _ in both for memory, plan in plans.items()}
        if len(set(orders.values())) > 1:
            raise GraphError(
                f"memory plans of {', '.join(map(repr, orders))}: nodes run in different orders;"
                " one for all needed"
            )
        for plans, _ in both:
            for memory, plan in plans.items():
                self._followed[memory] = _Followed(_stages(plan), shares[memory].extents)
        return made

    def _made(self, footprint: Footprint, memory: str, memories: int, name: str) -> MemoryPlan:
        """Return the checked plan of a memory."""
        sizes = {each.name: each.capacity_bytes for each in self.machine.memories}
        capacity, plan = sizes[memory], self._plan
        assert plan is not None
        plan = plan if isinstance(plan, MemoryPlan) else plan(footprint, capacity)
        if plan.capacity_bytes > capacity:
            raise GraphError(
                f"memory plan: for {plan.capacity_bytes} bytes, {capacity} found in memory"
                f" {memory!r}"
            )
        try:
            plan.check(footprint)
        except GraphError as error:
            part = f": its part in memory {memory!r}" if memories > 1 else ""
            raise GraphError(f"graph {name!r}{part} is not what the plan is of: {error}") from None
        return plan

    def layout(self, launch: Launch, argument: int, memory: str) -> Layout:
        """A box around all that is accessed in the memory, if several memories have plans."""
        region = launch.partitions[argument].region
        followed = self._followed.get(memory)
        extent = None if followed is None else followed.extents.get(region.name)
        return Layout(self.order(region), extent is None, extent)

    def arrive(self, launch: Launch | None, region: Region, memory: str, nbytes: int) -> int | None:
        """The plan's place for the value; partial results are next in the node's workspace."""
        followed = self._followed.get(memory)
        if followed is None or launch is None:
            return None
        stage = followed.stage(launch)
        if region.name in stage.arrivals:
            return stage.arrivals[region.name]
        place = stage.workspace + followed.used
        followed.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def leave(self, launch: Launch, memory: str, held: tuple[Held, ...]) -> list[int]:
        """The instances that the plan does not keep after the node."""
        followed = self._followed.get(memory)
        if followed is None:
            return []
        stays = followed.stage(launch).stays
        followed.at, followed.used = (followed.at + 1) % len(followed.stages), 0
        return [n for n, instance in enumerate(held) if instance.region.name not in stays]


def _stages(plan: MemoryPlan) -> list[_Stage]:
    """Return the parts of a plan, one for each run of a node."""
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
