"""The frontier of a model on a machine: points that are strategies, with what they cost.

Cai et al., TensorOpt, section 3. The frontier is exact for sums of what operators and edges cost by
themselves (`costs.py`), in which nothing overlaps; each of its points is simulated too, as any
strategy is, and both figures are shown. What fits a memory is what the simulation says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel.frontier.baselines import joined, least_memory, one_mesh
from soapstone.search.parallel.frontier.costs import Costs, Moving, costs_of
from soapstone.search.parallel.frontier.meshes import configurations_of
from soapstone.search.parallel.frontier.tables import Edge, Operator, Problem
from soapstone.search.parallel.frontier.tracking import Method, Progress, track
from soapstone.search.parallel.problem.arrays import WHOLE, Array
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.simulation.simulate import Simulator

MEMORY, TIME = 0, 1  # coordinates


@dataclass(frozen=True)
class FrontierPoint:
    """A trade-off: what a step costs, by sums, and when it is simulated.

    Attributes:
        memory_bytes, time_us: by sums; the first of the device that holds most.
        network_us, compute_us: which are its parts.
        simulated_us, simulated_bytes: of a simulated step, in which work and messages overlap.
        missing_bytes: by which devices' memories are too small, all together; 0 if it fits.
        devices: of the machine.
    """

    memory_bytes: int
    time_us: float
    network_us: float
    compute_us: float
    simulated_us: float
    simulated_bytes: int
    missing_bytes: int
    devices: int
    made: Callable[[], Strategy] = field(repr=False, compare=False)

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy, as a file keeps it."""
        return self.made()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them."""
        names = [name for name in self.__dataclass_fields__ if name != "made"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class CostFrontier:
    """All best trade-offs of memory and time, by ascending memory.

    Attributes:
        exact: no other strategy of the space costs less in one and no more in the other.
        error: how much more a point here costs than some point of the exact frontier, as a share.
        eliminations: of nodes, edges, branches, and those that decided something beforehand.
        baselines: what others find: `data` parallelism; `tofu`, of least memory; `mesh`, the
            shortest step of one mesh for all operators.
        configurations: how many the operators have, together.
        tables_s: seconds for the costs of operators and edges; seconds: for the frontier itself.
    """

    points: tuple[FrontierPoint, ...]
    exact: bool
    error: float
    eliminations: Mapping[str, int]
    baselines: Mapping[str, FrontierPoint]
    configurations: int
    operators: int
    tables_s: float
    seconds: float

    @property
    def turning_point(self) -> FrontierPoint:
        """The point beyond which more memory gains little (section 5.1).

        It is the one furthest from the line between both ends, where each end is 0 and 1.
        """
        both = np.array([(each.memory_bytes, each.time_us) for each in self.points], np.float64)
        span = np.maximum(np.ptp(both, axis=0), 1e-9)
        return self.points[int(((both - both.min(0)) / span).sum(1).argmin())]

    def fastest(self, memory_bytes: int | None = None) -> FrontierPoint | None:
        """Return the point with the shortest simulated step; None if none fits.

        Args:
            memory_bytes: of each device, at most; by default what the machine's devices have.
        """
        fitting = [
            each
            for each in (*self.points, self.baselines["data"])
            if (
                each.missing_bytes == 0
                if memory_bytes is None
                else each.simulated_bytes <= memory_bytes
            )
        ]
        return min(fitting, key=lambda each: each.simulated_us, default=None)

    @property
    def least(self) -> FrontierPoint:
        """The point whose simulated step needs the least memory."""
        return min(self.points, key=lambda each: each.simulated_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON can say it."""
        found = {
            "points": [each.as_dict() for each in self.points],
            "turning_point": self.points.index(self.turning_point),
        }
        names = [name for name in self.__dataclass_fields__ if name not in ("points", "baselines")]
        found |= {name: getattr(self, name) for name in names}
        return found | {
            "baselines": {name: each.as_dict() for name, each in self.baselines.items()}
        }

    def __str__(self) -> str:
        least, turning = self.points[0], self.turning_point
        last = self.points[-1]
        rows = [("least memory", least), ("turning point", turning), ("shortest step", last)]
        rows += list(self.baselines.items())
        lines = [
            f"  {name:<14} {each.memory_bytes / 1e9:>9,.3f} GB {each.time_us / 1e3:>10,.2f} ms"
            f" (network {each.network_us / 1e3:,.2f}); simulated"
            f" {each.simulated_bytes / 1e9:,.3f} GB {each.simulated_us / 1e3:,.2f} ms"
            + (" DOES NOT FIT" if each.missing_bytes else "")
            for name, each in rows
        ]
        how = "exact" if self.exact else f"within {self.error:.2%}"
        done = ", ".join(f"{count} {kind}" for kind, count in self.eliminations.items() if count)
        lines.insert(
            0,
            f"{len(self.points)} points ({how}) of {self.operators} operators with"
            f" {self.configurations:,} configurations; tables {self.tables_s:.1f} s, frontier"
            f" {self.seconds:.1f} s; eliminations: {done or 'none'}",
        )
        return "\n".join(lines)


def problem_of(model: Model, costs: Costs) -> Problem:
    """Return the abstract problem: memory and time, by operator and edge."""
    number = {op: i for i, op in enumerate(sorted(costs.own))}
    own: dict[int, Array] = {}
    for each in costs.own.values():
        own.setdefault(id(each), np.stack([each.fixed + each.kept, each.time], -1)[:, None])
    moving = {id(each): _edge_costs(each) for each in costs.edges.values()}
    operators = [Operator(model.operators[op].name, own[id(costs.own[op])]) for op in number]
    edges = [
        Edge(number[a], number[b], each.mine, each.others, moving[id(each)])
        for (a, b), each in costs.edges.items()
    ]
    return Problem(operators, edges)


def _edge_costs(moving: Moving) -> Array:
    """Return costs (layouts, layouts, 1, 2) of an edge: copies are kept for the backward pass."""
    return np.stack([moving.copies, moving.ahead + moving.back], -1)[:, :, None]


def cost_frontier(
    graph: Graph,
    machine: Machine,
    *,
    method: Method = "linear",
    progress: Progress | None = None,
) -> CostFrontier:
    """Return the cost frontier of a graph on a machine.

    Args:
        method: linear: dynamic programming along the spine; elimination: down to two operators.

    Raises:
        ParallelError: nothing to split.
    """
    began = time.perf_counter()
    model = prepare(graph, machine)
    choices, data = joined(model, configurations_of(model), "data")
    costs = costs_of(model, choices)
    problem = problem_of(model, costs)
    made = time.perf_counter()
    result = track(problem, method=method, progress=progress)
    ended = time.perf_counter()
    simulator, known = Simulator(model), {"data": data}
    tofu = least_memory(costs, problem, track)
    if tofu is not None:
        known["tofu"] = tofu
    meshed = min(one_mesh(model, costs), key=lambda rows: _sums(costs, rows)[TIME], default=None)
    if meshed is not None:
        known["mesh"] = meshed

    def point(rows: Mapping[int, int], sums: Sequence[int]) -> FrontierPoint:
        return _point(simulator, costs, rows, sums)

    free = sorted(costs.own)
    points = [point(dict(zip(free, each.configurations)), each.costs) for each in result]
    return CostFrontier(
        points=tuple(points),
        exact=result.exact,
        error=result.error,
        eliminations=result.eliminations,
        baselines={name: point(rows, _sums(costs, rows)) for name, rows in known.items()},
        configurations=sum(len(each) for each in costs.choices.values()),
        operators=len(costs.own),
        tables_s=made - began,
        seconds=ended - made,
    )


def _sums(costs: Costs, rows: Mapping[int, int]) -> tuple[int, int]:
    """Return memory and time of one strategy, by sums."""
    memory = time_ns = 0
    for op, row in rows.items():
        own = costs.own[op]
        memory += int(own.fixed[row] + own.kept[row])
        time_ns += int(own.time[row])
    for (a, b), each in costs.edges.items():
        at = each.mine[rows[a]], each.others[rows[b]]
        memory += int(each.copies[at])
        time_ns += int(each.ahead[at] + each.back[at])
    return memory, time_ns


def _point(
    simulator: Simulator, costs: Costs, rows: Mapping[int, int], sums: Sequence[int]
) -> FrontierPoint:
    c, model = simulator.settled.choice, simulator.model
    c.operators[:], c.placed[:] = WHOLE, 0
    for op, row in rows.items():
        c.operators[op], c.placed[op] = (
            costs.choices[op].degrees[row],
            costs.choices[op].placed[row],
        )
    simulator.settled.settle()
    simulation = simulator.summary(simulator.settled_ns())
    compute = sum(int(costs.own[op].compute[row]) for op, row in rows.items())
    kept = [each.copy() for each in simulator.settled.choice.chosen]
    return FrontierPoint(
        memory_bytes=sums[MEMORY],
        time_us=sums[TIME] / 1e3,
        network_us=(sums[TIME] - compute) / 1e3,
        compute_us=compute / 1e3,
        simulated_us=simulation.step_us,
        simulated_bytes=max(simulation.peak_bytes_per_device),
        missing_bytes=simulation.missing_bytes,
        devices=len(model.problem.devices),
        made=partial(_strategy, model, kept, simulation.step_us, tuple(sums)),
    )


def _strategy(
    model: Model, kept: Sequence[Array], step_us: float, sums: tuple[int, ...]
) -> Strategy:
    settled = Settled(model)
    settled.restore(*kept)
    told = {"search": "frontier", "step_us": step_us}
    told |= {"sum_us": sums[TIME] / 1e3, "sum_bytes": sums[MEMORY]}
    return as_strategy(model.graph, model, settled.configurations(), told)
