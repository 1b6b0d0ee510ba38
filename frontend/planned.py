"""Memory plans of the graphs that a model runs, made when each is bound (docs/memory.md).

A graph is planned as it is launched: lowered under the strategy of its mapper. So a plan that was
made before for a training step serves the step of the same model, batch size and processors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from soapstone.deadline import Deadline
from soapstone.engine.footprint import footprint_of
from soapstone.engine.mapper import strategy_of
from soapstone.engine.prepare import prepare
from soapstone.ir.errors import GraphError
from soapstone.ir.footprint import Footprint
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.strategy.keeping import recomputable
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.start import machine_of
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.machine import RooflineCost
from soapstone.search.cost.profile import copies
from soapstone.search.placement.find import METHODS, memory_plan
from soapstone.search.placement.timing import Times

SECONDS = 30.0  # of search for the plan of a graph, at most


def launched(graph: Graph, cpus: int | None = None) -> Footprint:
    """Return what the launches of a graph touch, as it is run by default on this computer.

    cpus: processors that it runs on, by default all cores.
    """
    return Launches(graph, cpus)(frozenset())[0]


class Launches:
    """What is launched of a graph by default on this computer, where some values are recomputed.

    Args:
        cpus, threads: processors that it runs on, by default all cores, and threads of each.
        timed: whether to tell what nodes and copies take; what the cost database lacks is measured.
        contents: of constants, by name, which times depend on.
        copiers: whether processors of their own copy.
        machine: the name or file of a described GPU that runs the graph instead, whose copiers copy
            to and from its host: times are estimated then.

    Raises:
        DeviceError: there is no such device, or no GPU is said of it.
    """

    def __init__(
        self,
        graph: Graph,
        cpus: int | None = None,
        threads: int = 1,
        *,
        timed: bool = False,
        contents: Mapping[str, Array] = MappingProxyType({}),
        copiers: bool = False,
        machine: str | Path | None = None,
    ) -> None:
        described = None if machine is None else RooflineCost(machine, training=True)
        here, mapper = machine_of("local", 1 if described else cpus, threads), load("data_parallel")
        attach(mapper, here)
        self._graph, self._contents = graph, contents
        self._strategy = strategy_of(mapper, graph, here)
        self._workers, self._halves = len(here.processors), described is not None
        self._copiers = copiers or described is not None
        self._cost: ExecutorCost | RooflineCost | None = None
        self._copy = 0.0, 1.0
        if timed and described is not None:
            self._cost, self._copy = described, described.device.host_link
        elif timed:
            self._cost, self._copy = ExecutorCost(threads, training=True), copies()

    def __call__(self, recomputed: Collection[str]) -> tuple[Footprint, Times | None]:
        """Return what is touched by the launches, and their times where those are wanted.

        recomputed: values that the backward pass makes anew.
        """
        strategy, constants = anew(self._strategy, recomputed), self._graph.inputs(Role.CONSTANT)
        prepared = prepare(self._graph, strategy, set(constants), halves=self._halves)
        if self._cost is None:
            return footprint_of(prepared), None
        latency_s, bytes_per_s = self._copy
        rate = bytes_per_s / 1e6 * (1 if self._copiers else self._workers)
        node_us = self._cost.launch_us(prepared, self._contents)
        return footprint_of(prepared), Times(node_us, latency_s * 1e6, rate, self._copiers)

    @property
    def values(self) -> dict[str, tuple[str, ...]]:
        """The values that may be recomputed, and of which others of them each is made."""
        graph = self._graph
        known = recomputable(graph)
        makers = {value: graph.producers[value].inputs for value in known}
        return {v: tuple(x for x in makers[v] if x in makers) for v in known}


def anew(strategy: Strategy, recomputed: Collection[str]) -> Strategy:
    """Return a strategy by which the backward pass makes some values anew."""
    if not recomputed:
        return strategy
    kept = dict.fromkeys(recomputed, Keep.RECOMPUTE)
    return replace(strategy, tensors={**strategy.tensors, **kept})


class Plans:
    """Makes the plans of graphs in a fast memory: what `BoundedMemoryMapper` asks.

    Args:
        plan: a method of `memory_plan`, or a plan or its file, which is of a training step. Other
            graphs, such as those of evaluation, are planned by LRU then.
        capacity_bytes: of the fast memory; None: what a given plan is for.

    Attributes:
        given: the plan that was given, if any. capacity_bytes: of the fast memory.
        step: whether the graph that is bound next is the training step. briefly: whether it will
            soon be bound again: then nothing is searched for, and LRU plans in place of dp.

    Raises:
        GraphError: an unknown method, a file that is no plan, or no capacity.
    """

    def __init__(self, plan: MemoryPlan | str | Path = "dp", capacity_bytes: int | None = None):
        self.step = self.briefly = False
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

    def strategy(self, strategy: Strategy) -> Strategy:
        """Return how the graph runs that is bound next: what a given plan recomputes is made anew.

        strategy: of that graph, without a plan.
        """
        given = self.given if self.step else None
        return strategy if given is None else anew(strategy, given.recomputed)

    def __call__(self, footprint: Footprint, capacity_bytes: int) -> MemoryPlan:
        """Return the plan of a graph; see `BoundedMemoryMapper`."""
        if self.step and self.given is not None:
            return self.given
        method = "lru" if self.briefly and self._method == "dp" else self._method
        return memory_plan(footprint, capacity_bytes, method, deadline=Deadline(SECONDS)).plan
