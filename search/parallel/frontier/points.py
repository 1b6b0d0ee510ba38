"""The frontier of a model on a machine: points that are strategies, with what they cost.

Cai et al., TensorOpt, section 3. The frontier is exact for sums of what operators and edges cost by
themselves (`costs.py`), in which nothing overlaps; each of its points is simulated too, as any
strategy is, and both figures are shown. What fits a memory is what the simulation says.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from soapstone.ir.configuration import Keep
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel.frontier.baselines import Rows, joined, least_memory, one_mesh
from soapstone.search.parallel.frontier.costs import Costs, Moving, Own, costs_of, keeping
from soapstone.search.parallel.frontier.meshes import configurations_of
from soapstone.search.parallel.frontier.spine import marked_spine
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Edge, Operator, Problem
from soapstone.search.parallel.frontier.tracking import Method, Progress, track
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.simulation.simulate import Simulation, Simulator, simulate

MEMORY, TIME, PASSING = 0, 1, 2  # coordinates; the last is held while a block is gone through


@dataclass(frozen=True)
class FrontierPoint:
    """A trade-off: what a step costs, by sums, and when it is simulated.

    Attributes:
        memory_bytes, time_us: by sums; the first of the device that holds most.
        network_us, compute_us: which are its parts.
        devices: of the machine. recomputed: operators whose results the backward pass makes again.
    """

    memory_bytes: int
    time_us: float
    network_us: float
    compute_us: float
    devices: int
    recomputed: int
    made: Callable[[], Strategy] = field(repr=False, compare=False)
    simulated: Callable[[Strategy], Simulation] = field(repr=False, compare=False)

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy, as a file keeps it."""
        return self.made()

    @cached_property
    def simulation(self) -> Simulation:
        """What a simulated step costs, in which work and messages overlap."""
        return self.simulated(self.strategy)

    @property
    def simulated_us(self) -> float:
        """The time of a simulated step."""
        return self.simulation.step_us

    @property
    def simulated_bytes(self) -> int:
        """The most bytes that a device holds in a simulated step."""
        return max(self.simulation.peak_bytes_per_device)

    @property
    def missing_bytes(self) -> int:
        """By which devices' memories are too small, all together; 0 if it fits."""
        return self.simulation.missing_bytes

    def fits(self, memory_bytes: int | None) -> bool:
        """Return whether a simulated step needs no more than so much, or than the machine has."""
        if memory_bytes is None:
            return self.missing_bytes == 0
        return self.simulated_bytes <= memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them; simulated ones are null until they are known."""
        found = {name: getattr(self, name) for name in [*self.__dataclass_fields__][:-2]}
        for name in ("simulated_us", "simulated_bytes", "missing_bytes"):
            found[name] = getattr(self, name) if "simulation" in self.__dict__ else None
        return found


@dataclass(frozen=True)
class CostFrontier:
    """All best trade-offs of memory and time, by ascending memory.

    Attributes:
        exact: no other strategy of the space costs less in one and no more in the other.
        error: how much more a point here costs than some point of the exact frontier, as a share.
        eliminations: of nodes, edges, branches, and those that decided something beforehand.
        baselines: what others find: `data` parallelism; `tofu`, of least memory; `mesh`, the
            shortest step of Mesh-TensorFlow's. mesh: the best trade-offs of one mesh for all
            operators, which ends there.
        configurations: how many the operators have, together.
        tables_s: seconds for the costs of operators and edges; seconds: for the frontier itself.
    """

    points: tuple[FrontierPoint, ...]
    exact: bool
    error: float
    eliminations: Mapping[str, int]
    baselines: Mapping[str, FrontierPoint]
    mesh: tuple[FrontierPoint, ...]
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

        Of points that recompute, each of which is a graph of its own to simulate, one is looked at:
        that with the shortest step by sums of those that fit, found by halves.

        Args:
            memory_bytes: of each device, at most; by default what the machine's devices have.
        """
        fitting = [
            each for each in (*self._kept, self.baselines["data"]) if each.fits(memory_bytes)
        ]
        again = [each for each in self.points if each.recomputed]  # by ascending memory
        count = bisect_left(again, True, key=lambda each: not each.fits(memory_bytes))
        fitting += again[count - 1 : count] if count else []
        return min(fitting, key=lambda each: each.simulated_us, default=None)

    @property
    def least(self) -> FrontierPoint:
        """The point whose simulated step needs the least memory, of those that keep everything and
        the one of least memory by sums."""
        return min((self.points[0], *self._kept), key=lambda each: each.simulated_bytes)

    @property
    def _kept(self) -> list[FrontierPoint]:
        return [each for each in self.points if not each.recomputed]

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON can say it."""
        found = {
            "points": [each.as_dict() for each in self.points],
            "mesh": [each.as_dict() for each in self.mesh],
            "turning_point": self.points.index(self.turning_point),
        }
        names = [
            name
            for name in self.__dataclass_fields__
            if name not in ("points", "baselines", "mesh")
        ]
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


def problem_of(model: Model, costs: Costs, recompute: bool = False) -> Problem:
    """Return the abstract problem: memory and time, by operator and edge.

    Args:
        recompute: a configuration more for each: what the backward pass reads of its results is not
            kept, but made again, from what its block begins with. That is a third cost: bytes that
            blocks hold while they are gone through backward, of which the most counts.
    """
    number = {op: i for i, op in enumerate(sorted(costs.own))}
    ends = bounds(costs)
    own: dict[tuple[int, bool], Array] = {}
    for op, each in costs.own.items():
        own.setdefault((id(each), op in ends), _own_costs(each, op in ends, recompute))
    moving = {id(each): _edge_costs(each, recompute) for each in costs.edges.values()}
    operators = [
        Operator(model.operators[op].name, own[id(costs.own[op]), op in ends]) for op in number
    ]
    edges = []
    for (a, b), between in costs.edges.items():
        rows, columns = between.mine, between.others
        if recompute:
            rows = twice(rows, 0 if a in ends else len(between.ahead))
            columns = twice(columns, between.ahead.shape[1])
        edges.append(Edge(number[a], number[b], rows, columns, moving[id(between)]))
    if not recompute:
        return Problem(operators, edges)
    return Problem(operators, edges, ("sum", "sum", "max"), totals=((MEMORY, PASSING), (TIME,)))


def bounds(costs: Costs) -> set[int]:
    """Return the operators whose results are kept for others: the ends of blocks.

    Were these recomputed, a block would have to be for the next one to be.
    """
    free = sorted(costs.own)
    number = {op: i for i, op in enumerate(free)}
    spine = marked_spine(len(free), [(number[a], number[b]) for a, b in costs.edges])
    return {free[i] for i in (*spine.marked, *spine.far)}


def twice(numbers: Array, count: int) -> Array:
    """Return layouts of configurations that keep results, then of those that recompute them."""
    return np.concatenate([numbers, numbers + count])


def _own_costs(own: Own, ends: bool, recompute: bool) -> Array:
    """Return costs (configurations, 1, coordinates).

    Args:
        ends: whether a block ends with it, so that what others read of it is kept.
    """
    kept = np.stack([own.fixed + own.kept, own.time], -1)
    if recompute:
        none = np.zeros_like(own.kept)
        made = own.inner if ends else own.kept
        again = np.stack([own.fixed + own.kept - made, own.time + own.ahead, made], -1)
        again[made == 0] = INFEASIBLE  # nothing that could be made again
        kept = np.concatenate([np.concatenate([kept, none[:, None]], -1), again])
    return kept[:, None]


def _edge_costs(moving: Moving, recompute: bool) -> Array:
    """Return costs (layouts, layouts, 1, coordinates) of an edge.

    What the reader's backward pass, or its recomputation, reads stays as a copy; what the maker
    recomputes is moved again.
    """
    once, none = moving.ahead + moving.back, np.zeros_like(moving.ahead)
    copies = moving.copies if moving.again else none
    if not recompute:
        return np.stack([copies, once], -1)[:, :, None]
    held = moving.copies + moving.passed[:, None]
    kept = np.concatenate(
        [np.stack([copies, once, none], -1), np.stack([held, once, none], -1)], axis=1
    )
    moved = np.stack([none, once + moving.ahead, moving.copies], -1)
    first = moved if moving.again else np.stack([none, once, none], -1)
    return np.concatenate([kept, np.concatenate([first, moved], axis=1)])[:, :, None]


def cost_frontier(
    graph: Graph,
    machine: Machine,
    *,
    eps: float = 0.0,
    recompute: bool = False,
    method: Method = "linear",
    progress: Progress | None = None,
) -> CostFrontier:
    """Return the cost frontier of a graph on a machine.

    Args:
        eps: how much more a point may cost than the exact frontier's, as a share; 0: exact.
        recompute: whether values may be made again for the backward pass instead of kept.
        method: linear: dynamic programming along the spine; elimination: down to two operators.

    Raises:
        ParallelError: nothing to split, or eps out of range.
    """
    began = time.perf_counter()
    model = prepare(graph, machine)
    choices, data = joined(model, configurations_of(model), "data")
    costs = costs_of(model, choices)
    problem = problem_of(model, costs, recompute)
    made = time.perf_counter()
    result = track(problem, eps=eps, method=method, progress=progress)
    ended = time.perf_counter()
    maker = _Points(model, costs)
    plain = problem_of(model, costs)
    restricted = one_mesh(model, costs, plain)
    known: dict[str, Rows | None] = {
        "data": data,
        "tofu": least_memory(costs, plain),
        "mesh": restricted[-1] if restricted else None,
    }
    free = sorted(costs.own)
    points = [maker.point(dict(zip(free, each.configurations)), each.costs) for each in result]
    return CostFrontier(
        points=tuple(points),
        exact=result.exact,
        error=result.error,
        eliminations=result.eliminations,
        baselines={
            name: maker.point(rows, maker.sums(rows)) for name, rows in known.items() if rows
        },
        mesh=tuple(maker.point(rows, maker.sums(rows)) for rows in restricted),
        configurations=sum(len(each.costs) for each in problem.operators),
        operators=len(costs.own),
        tables_s=made - began,
        seconds=ended - made,
    )


class _Points:
    """Makes points of configurations, by number for each operator.

    Numbers beyond those of an operator's configurations are of the same, recomputed.
    """

    def __init__(self, model: Model, costs: Costs) -> None:
        self.model, self.costs = model, costs
        self.late, self.ends = keeping(model.graph), bounds(costs)

    def sums(self, rows: Rows) -> tuple[int, int]:
        """Return memory and time of a strategy that recomputes nothing, by sums."""
        memory = time_ns = 0
        for op, row in rows.items():
            own = self.costs.own[op]
            memory += int(own.fixed[row] + own.kept[row])
            time_ns += int(own.time[row])
        for (a, b), each in self.costs.edges.items():
            at = each.mine[rows[a]], each.others[rows[b]]
            memory += int(each.copies[at]) if each.again else 0
            time_ns += int(each.ahead[at] + each.back[at])
        return memory, time_ns

    def point(self, rows: Rows, costs: Sequence[int]) -> FrontierPoint:
        """Return a point. costs: memory and time."""
        compute, made = 0, {}
        again: list[int] = []
        for op, number in rows.items():
            own, chosen = self.costs.own[op], self.costs.choices[op]
            row = number % len(chosen)
            made[op] = chosen.degrees[row], chosen.placed[row]
            compute += int(own.compute[row])
            if number >= len(chosen):
                again.append(op)
                compute += int(own.ahead[row])
        memory = costs[MEMORY]
        return FrontierPoint(
            memory_bytes=memory,
            time_us=costs[TIME] / 1e3,
            network_us=(costs[TIME] - compute) / 1e3,
            compute_us=compute / 1e3,
            devices=len(self.model.problem.devices),
            recomputed=len(again),
            made=partial(self._strategy, made, again, memory, costs[TIME]),
            simulated=self._simulated,
        )

    def _strategy(
        self,
        made: Mapping[int, tuple[Any, Array]],
        again: Sequence[int],
        memory: int,
        time_ns: int,
    ) -> Strategy:
        settled = Settled(self.model)
        c = settled.choice
        for op, (split, placed) in made.items():
            c.operators[op], c.placed[op] = split, placed
        settled.settle()
        told = {"search": "frontier", "sum_us": time_ns / 1e3, "sum_bytes": memory}
        strategy = as_strategy(self.model.graph, self.model, settled.configurations(), told)
        values = {name: Keep.RECOMPUTE for op in again for name in self._made_again(op)}
        return replace(strategy, tensors=values)

    def _made_again(self, op: int) -> Iterator[str]:
        """Yield what is recomputed of an operator: all that the backward pass reads, or a part."""
        graph, item = self.model.graph, self.model.operators[op]
        mine = {node.name for node in (*item.ahead, *item.back)}
        for node in item.ahead:
            for name in node.outputs:
                readers = {reader.name for reader in graph.consumers[name]}
                inside = op not in self.ends or readers <= mine
                if inside and not readers.isdisjoint(self.late):
                    yield name

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self.model)

    def _simulated(self, strategy: Strategy) -> Simulation:
        if strategy.tensors:
            return simulate(self.model.graph, self.model.machine, strategy)
        return self._simulator.simulate_strategy(strategy)
