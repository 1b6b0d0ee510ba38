"""Memory plans of the graphs that a model runs, made when each is bound (docs/memory.md).

A graph is planned as it is launched: lowered under the strategy of its mapper. So a plan that was
made before for a training step serves the step of the same model, batch size and processors.
"""

from __future__ import annotations

from pathlib import Path

from soapstone.deadline import Deadline
from soapstone.engine.footprint import footprint_of
from soapstone.engine.mapper import strategy_of
from soapstone.engine.prepare import prepare
from soapstone.ir.errors import GraphError
from soapstone.ir.footprint import Footprint
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.tensor import Role
from soapstone.mappers import load
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.start import machine_of
from soapstone.search.placement.find import METHODS, memory_plan

SECONDS = 30.0  # of search for the plan of a graph, at most


def launched(graph: Graph, cpus: int | None = None, threads: int = 1) -> Footprint:
    """Return what the launches of a graph touch, as it is run by default on this computer.

    Args:
        cpus, threads: processors that it runs on, by default all cores, and threads of each.
    """
    machine, mapper = machine_of("local", cpus, threads), load("data_parallel")
    attach(mapper, machine)
    strategy = strategy_of(mapper, graph, machine)
    return footprint_of(prepare(graph, strategy, set(graph.inputs(Role.CONSTANT))))


class Plans:
    """Makes the plans of graphs in a fast memory: what `BoundedMemoryMapper` asks.

    Args:
        plan: a method of `memory_plan`, or a plan or its file, which is of a training step. Other
            graphs, such as those of evaluation, are planned by LRU then.
        capacity_bytes: of the fast memory; None: what a given plan is for.

    Attributes:
        given: the plan that was given, if any. capacity_bytes: of the fast memory.
        step: whether the graph that is bound next is the training step.

    Raises:
        GraphError: an unknown method, a file that is no plan, or no capacity.
    """

    def __init__(self, plan: MemoryPlan | str | Path = "dp", capacity_bytes: int | None = None):
        self.step = False
        self._method = plan if isinstance(plan, str) and plan in METHODS else "lru"
        self.given: MemoryPlan | None = None
        if isinstance(plan, MemoryPlan):
            self.given = plan
        elif plan not in METHODS:
            if not Path(plan).is_file():
                raise GraphError(
                    f"plan {str(plan)!r} found; one of {', '.join(METHODS)}, or a plan's file"
                    " needed"
                )
            self.given = MemoryPlan.load(plan)
        if capacity_bytes is None and self.given is None:
            raise GraphError(f"plan {plan!r} found without a fast memory; its bytes needed")
        least = 0 if self.given is None else self.given.capacity_bytes
        self.capacity_bytes = least if capacity_bytes is None else capacity_bytes

    def __call__(self, footprint: Footprint, capacity_bytes: int) -> MemoryPlan:
        """Return the plan of a graph; see `BoundedMemoryMapper`."""
        if self.step and self.given is not None:
            return self.given
        deadline = Deadline(SECONDS)
        return memory_plan(footprint, capacity_bytes, self._method, deadline=deadline).plan


__all__ = ["Plans", "launched"]
