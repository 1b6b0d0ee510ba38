"""Memory plans of the graphs that a model runs, made when each is bound (docs/memory.md).

A graph is planned as it is launched: lowered under the strategy of its mapper. So a plan made
earlier for a training step is valid for the step of the same model, batch size and processors.
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
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.strategy.recomputation import recomputable
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
    """Return the footprint of a graph's launches, as it runs by default on this computer.

    cpus: the number of processors, by default all cores.
    """
    return Launches(graph, cpus)(frozenset())[0]


class Launches:
    """The launches of a graph as it runs by default on this computer, with some values recomputed.

    Args:
        cpus, threads: the number of processors, by default all cores, and of threads of each.
        timed: whether to give times of nodes and copies; those that the cost database lacks are
            measured.
        contents: of constants, by name, on which times depend.
        copiers: whether separate processors copy.
        machine: the name or file of a described GPU that runs the graph instead, whose copiers copy
            to and from its host; times are then estimated.
        deadline: after which nothing is measured; a call that needs it is a `TimeUpError`.

    Raises:
        DeviceError: an unknown device, or the description has no GPU.
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
        deadline: Deadline | None = None,
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
            self._cost.deadline = deadline or Deadline()

    def __call__(self, recomputed: Collection[str]) -> tuple[Footprint, Times | None]:
        """Return the footprint of the launches, and their times if these are wanted.

        recomputed: values that the backward pass recomputes.
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
        """The values that may be recomputed, with the others of them that each is made of."""
        graph = self._graph
        known = recomputable(graph)
        makers = {value: graph.producers[value].inputs for value in known}
        return {v: tuple(x for x in makers[v] if x in makers) for v in known}


def anew(strategy: Strategy, recomputed: Collection[str]) -> Strategy:
    """Return a strategy under which the backward pass recomputes some values."""
    if not recomputed:
        return strategy
    kept = dict.fromkeys(recomputed, Keep.RECOMPUTE)
    return replace(strategy, tensors={**strategy.tensors, **kept})


class Plans:
    """Makes the memory plans of graphs, for `BoundedMemoryMapper`.

    Args:
        plan: a method of `memory_plan`, or a plan or its file, for a training step. Other graphs,
            such as those of evaluation, are then planned by LRU.
        capacity_bytes: of the fast memory; by default that of the given plan.

    Attributes:
        given: the plan that was given, if any. capacity_bytes: of the fast memory.
        step: whether the graph that is bound next is the training step. briefly: whether it will
            soon be bound again; then LRU plans it instead of dp, without a search.

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
        """Return the strategy of the graph that is bound next, with what a given plan recomputes.

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
