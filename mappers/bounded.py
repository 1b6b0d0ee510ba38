"""The mapper of memories too small for a model: instances are streamed in, and leave for others.

Every value lives in a larger memory, the backing one, and is brought to the memory of the
processors when a task uses it. What has not been used for longest leaves first (LRU), or whatever a
memory plan says leaves next.
"""

from __future__ import annotations

from soapstone.engine.mapper import backing_memories
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.mappers.plugins import DataParallelMapper
from soapstone.runtime import Held, Launch, Machine


class BoundedMemoryMapper(DataParallelMapper):
    """Data-parallel, with the processors' memories backed by larger ones.

    The backing memory is the fastest reachable one of larger capacity. On a machine where
    processors work in its largest memory nothing is backed, and nothing leaves.

    plan: of the graph that is launched (after `engine.lower`); what it has sent away by the time
    of a node leaves first. None: the least recently used.
    """

    name = "bounded_memory"

    def __init__(self, plan: MemoryPlan | None = None) -> None:
        super().__init__()
        self._resident: dict[str, frozenset[str]] = {}  # while each node runs
        here: set[str] = set()
        for step in plan.steps if plan is not None else ():
            if step.action is Action.RUN:
                self._resident[step.name] = frozenset(here)
            elif step.action in (Action.ALLOCATE, Action.FETCH):
                here.add(step.name)
            else:
                here.discard(step.name)

    def attach(self, machine: Machine) -> None:
        """Find the backing memory of each memory that processors work in."""
        super().attach(machine)
        self._backing = backing_memories(machine)

    def backing(self, memory: str) -> str | None:
        """The larger memory."""
        return self._backing.get(memory)

    def evict(self, launch: Launch | None, memory: str, nbytes: int, held: tuple[Held, ...]) -> int:
        """What the plan has sent away; where it has not, or there is none, what is oldest."""
        stays = self._resident.get(launch.name) if launch is not None else None
        if stays is not None:
            for index, instance in enumerate(held):
                if instance.region.name not in stays:
                    return index
        return 0
