"""The frontier of a model on a machine: points that are strategies, with what they cost.

Cai et al., TensorOpt, section 3. The frontier is exact for sums of what operators and edges cost by
themselves (`costs.py`), in which nothing overlaps; each of its points is simulated too, as any
strategy is, and both figures are shown. What fits a memory is what the simulation says.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Copies, Keep, Reshard, Step
from soapstone.ir.strategy.reshards import read_in
from soapstone.ir.tensor import Array
from soapstone.runtime import Machine
from soapstone.search.parallel.frontier.baselines import Rows, joined, least_memory, one_mesh
from soapstone.search.parallel.frontier.costs import Costs, costs_of, keeping
from soapstone.search.parallel.frontier.edges import between
from soapstone.search.parallel.frontier.meshes import configurations_of
from soapstone.search.parallel.frontier.ordering import Method
from soapstone.search.parallel.frontier.saving import (
    MEMORY,
    TIME,
    Saving,
    Sent,
    Ways,
    bounds,
    savings,
    ways_of,
)
from soapstone.search.parallel.frontier.tables import Point, added
from soapstone.search.parallel.frontier.tracking import Progress, track
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.simulation.simulate import Simulation, Simulator, simulate


@dataclass(frozen=True)
class FrontierPoint:
    """A trade-off: the cost of a training step, by sums of tables and by simulation.

    Attributes:
        memory_bytes, time_us: by sums; bytes are those of the device that holds the most.
        network_us, compute_us: the parts of `time_us`.
        devices: how many devices the machine has.
        recomputed, offloaded: how many operators' results are recomputed in the backward pass, or
            fetched from the backing memory.
        copied: how many edges keep only one of the copies at their ends.
        routed: how many edges are resharded in several steps.
        replicated: how many operators compute the same on several devices.
    """

    memory_bytes: int
    time_us: float
    network_us: float
    compute_us: float
    devices: int
    recomputed: int
    offloaded: int
    copied: int
    routed: int
    replicated: int
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
        """The bytes that devices' memories lack, added over all devices; 0 if the strategy fits."""
        return self.simulation.missing_bytes

    @property
    def plain(self) -> bool:
        """Whether all that the backward pass reads is kept, and every value moves in one step."""
        return not (self.recomputed or self.offloaded or self.copied or self.routed)

    @property
    def device_us(self) -> float:
        """The time of a step (by sums) times the number of devices, as they are paid for."""
        return self.devices * self.time_us

    @property
    def fits(self) -> bool:
        """Whether a simulated step needs no more than the devices' memories have."""
        return self.missing_bytes == 0

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
        error: how much more a point here costs than some point of the exact frontier, as a share;
            infinite where it is not known.
        eliminations: how many of each kind: node, edge, branch, heuristic, linear.
        baselines: the strategies of other methods: `data` parallelism; `tofu`, of least memory;
            `mesh`, the one of Mesh-TensorFlow's with the shortest step.
        mesh: the best trade-offs of Mesh-TensorFlow, by ascending memory; the last is `mesh` above.
        configurations: how many configurations all operators have together.
        tables_s: seconds that the costs of operators and edges took to compute.
        seconds: seconds that the frontier itself took.
        interrupted: whether Ctrl-C ended it, with the points known by then.
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
    interrupted: bool = False

    @property
    def turning_point(self) -> FrontierPoint:
        """The point beyond which more memory gains little time (section 5.1).

        It is the one furthest from the line between the two ends, with both axes scaled to 0…1.
        """
        both = np.array([(each.memory_bytes, each.time_us) for each in self.points], np.float64)
        span = np.maximum(np.ptp(both, axis=0), 1e-9)
        return self.points[int(((both - both.min(0)) / span).sum(1).argmin())]

    def fastest(self) -> FrontierPoint | None:
        """Return the point with the shortest simulated step; None if none fits.

        All points that keep everything are simulated. Of the others, each of which is a graph of
        its own to simulate, only one is considered: that with the shortest step by sums among those
        that fit, which is found by bisection.
        """
        fitting = [each for each in (*self._kept, self.baselines["data"]) if each.fits]
        again = [each for each in self.points if not each.plain]  # by ascending memory
        count = bisect_left(again, True, key=lambda each: not each.fits)
        shortest = min(again[:count], key=lambda each: each.time_us, default=None)
        fitting += [shortest] if shortest is not None and shortest.fits else []
        return min(fitting, key=lambda each: each.simulated_us, default=None)

    @property
    def least(self) -> FrontierPoint:
        """The point whose simulated step needs the least memory.

        Considered are the points that keep everything, and the one of least memory by sums.
        """
        return min((self.points[0], *self._kept), key=lambda each: each.simulated_bytes)

    @property
    def _kept(self) -> list[FrontierPoint]:
        return [each for each in self.points if each.plain]

    def as_dict(self) -> dict[str, Any]:
        """Return the frontier as a dict that can be written as JSON."""
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
            "error": self.error if math.isfinite(self.error) else None,
            "baselines": {name: each.as_dict() for name, each in self.baselines.items()},
        }

    def __str__(self) -> str:
        least, turning = self.points[0], self.turning_point
        last = min(self.points, key=lambda each: each.time_us)
        rows = [("least memory", least), ("turning point", turning), ("shortest step", last)]
        rows += list(self.baselines.items())
        lines = [
            f"  {name:<14} {each.memory_bytes / 1e9:>9,.3f} GB {each.time_us / 1e3:>10,.2f} ms"
            f" (network {each.network_us / 1e3:,.2f}); simulated"
            f" {each.simulated_bytes / 1e9:,.3f} GB {each.simulated_us / 1e3:,.2f} ms"
            + (" DOES NOT FIT" if each.missing_bytes else "")
            for name, each in rows
        ]
        how = f"within {self.error:.2%}" if math.isfinite(self.error) else "how near is not known"
        how = "exact" if self.exact else how
        done = ", ".join(f"{count} {kind}" for kind, count in self.eliminations.items() if count)
        lines.insert(
            0,
            f"{len(self.points)} points ({how}) of {self.operators} operators with"
            f" {self.configurations:,} configurations; tables {self.tables_s:.1f} s, frontier"
            f" {self.seconds:.1f} s; eliminations: {done or 'none'}",
        )
        return "\n".join(lines)


def cost_frontier(
    graph: Graph,
    machine: Machine,
    *,
    eps: float = 0.0,
    saving: Collection[Saving | str] = (),
    paths: bool = False,
    replicate: bool = False,
    network: bool = False,
    method: Method = "linear",
    progress: Progress | None = None,
) -> CostFrontier:
    """Return the cost frontier of a graph on a machine.

    Args:
        graph: a training or inference graph. machine: the devices it is to run on.
        eps: how much more than the exact frontier a point may cost, as a share; 0: exact.
        saving: the techniques that may save memory at the cost of time (`Saving`, or names).
        paths: whether values may be resharded in several steps.
        replicate: whether operators may compute the same on several devices.
        network: whether time on the network is a third cost, besides memory and time.
        method: `linear`: dynamic programming along the spine; `elimination`: operators are
            eliminated until two are left.
        progress: called after each join of tables, as `track` says.

    Raises:
        ParallelError: nothing to split, eps out of range, or a machine that cannot offload.
    """
    began = time.perf_counter()
    model = prepare(graph, machine)
    choices, data = joined(model, configurations_of(model, replicate), "data")
    costs = costs_of(model, choices, paths)
    ways = ways_of(model, costs, savings(saving), network)
    made = time.perf_counter()
    result = track(ways.problem, eps=eps, method=method, progress=progress)
    ended = time.perf_counter()
    maker = _Points(model, costs, ways)
    plain = ways_of(model, costs).problem if saving or network else ways.problem
    restricted = one_mesh(model, costs, plain)
    known: dict[str, Rows | None] = {
        "data": data,
        "tofu": least_memory(costs, plain),
        "mesh": restricted[-1] if restricted else None,
    }
    return CostFrontier(
        points=tuple(map(maker.point, result)),
        exact=result.exact,
        error=result.error,
        eliminations=result.eliminations,
        baselines={name: maker.kept(rows) for name, rows in known.items() if rows},
        mesh=tuple(maker.kept(rows) for rows in restricted),
        configurations=sum(len(each.costs) for each in ways.problem.operators),
        operators=len(costs.own),
        tables_s=made - began,
        seconds=ended - made,
        interrupted=result.interrupted,
    )


class _Points:
    """Makes points of what is found, or of configurations that keep everything."""

    def __init__(self, model: Model, costs: Costs, ways: Ways) -> None:
        self.model, self.costs, self.ways = model, costs, ways
        self.late, self.ends = keeping(model.graph), bounds(costs)
        self.free = sorted(costs.own)

    def sums(self, rows: Rows) -> tuple[int, int]:
        """Return memory and time of a strategy that keeps everything, by sums."""
        return self._added(self._plain(rows))

    def kept(self, rows: Rows) -> FrontierPoint:
        """Return the point of a strategy that keeps everything."""
        point = self._plain(rows)
        return self.point(replace(point, costs=self._added(point)))

    def _plain(self, rows: Rows) -> Point:
        none = (0,) * len(self.free), (0,) * len(self.ways.edges)
        return Point((), tuple(rows[op] for op in self.free), *none)

    def _added(self, point: Point) -> tuple[int, int]:
        memory, time_ns, *_ = added(self.ways.problem, point)
        return memory, time_ns

    def point(self, found: Point) -> FrontierPoint:
        """Return a point of what has been found."""
        compute, made, keeps, made_by, copied = 0, {}, {}, {}, 0
        for op, number in zip(self.free, found.configurations):
            own, chosen = self.costs.own[op], self.costs.choices[op]
            row = number % len(chosen)
            made[op], made_by[op] = (chosen.degrees[row], chosen.placed[row]), row
            copied += bool(chosen.degrees["replicated"][row])
            compute += int(own.compute[row])
            keep = self.ways.keeps[number // len(chosen)]
            if keep is not Keep.KEEP:
                keeps[op] = keep
            if keep is Keep.RECOMPUTE:
                compute += int(own.ahead[row])
        sent = {
            ends: (choices[number], self._layouts(ends, made_by))
            for ends, choices, number in zip(self.ways.edges, self.ways.sent, found.edge_choices)
            if choices[number] is not Sent.BOTH
        }
        memory, time_ns = found.costs[MEMORY], found.costs[TIME]
        told = {"search": "frontier", "sum_us": time_ns / 1e3, "sum_bytes": memory}
        counts = Counter(keeps.values())
        return FrontierPoint(
            memory_bytes=memory,
            time_us=time_ns / 1e3,
            network_us=(time_ns - compute) / 1e3,
            compute_us=compute / 1e3,
            devices=len(self.model.problem.devices),
            recomputed=counts[Keep.RECOMPUTE],
            offloaded=counts[Keep.OFFLOAD],
            copied=sum(how is not Sent.PATH for how, _ in sent.values()),
            routed=sum(how is Sent.PATH for how, _ in sent.values()),
            replicated=copied,
            made=partial(self._strategy, made, keeps, sent, told),
            simulated=self._simulated,
        )

    def _layouts(self, ends: tuple[int, int], rows: Rows) -> tuple[int, int]:
        """Return the layouts of an edge's maker and reader in their configurations."""
        edge = self.costs.edges[ends]
        return int(edge.mine[rows[ends[0]]]), int(edge.others[rows[ends[1]]])

    def _strategy(
        self,
        made: Mapping[int, tuple[Any, Array]],
        keeps: Mapping[int, Keep],
        sent: Mapping[tuple[int, int], tuple[Sent, tuple[int, int]]],
        told: Mapping[str, Any],
    ) -> Strategy:
        settled = Settled(self.model)
        c = settled.choice
        for op, (split, placed) in made.items():
            c.operators[op], c.placed[op] = split, placed
        settled.settle()
        strategy = as_strategy(self.model.graph, self.model, settled.configurations(), told)
        values = {name: keep for op, keep in keeps.items() for name in self._values(op, keep)}
        reshards: dict[tuple[str, str], Reshard] = {}
        for ends, (how, layouts) in sent.items():
            if how is Sent.PATH:
                reshards |= dict(self._path(ends, layouts))
                continue
            first, second = (self.model.operators[op] for op in ends)
            for value, consumer in between(first.ahead, second.ahead):
                reshards[value, consumer.name] = self._reshard(strategy, value, consumer, how)
        return replace(strategy, tensors=values, reshards=reshards)

    def _path(
        self, ends: tuple[int, int], layouts: tuple[int, int]
    ) -> Iterator[tuple[tuple[str, str], Reshard]]:
        """Yield the ways of an edge's value and of its gradient, by value and consumer."""
        way = self.costs.edges[ends].routed
        assert way is not None
        first, second = (self.model.operators[op] for op in ends)
        moved = (
            (between(first.ahead, second.ahead), way.forward(*layouts)),
            (between(second.back, first.back), way.backward(*layouts)),
        )
        for values, steps in moved:
            if steps:
                path = (*(Step("all_to_all", each) for each in steps), Step("all_gather"))
                for value, consumer in values:
                    yield (value, consumer.name), Reshard(path, Copies.BOTH)

    def _values(self, op: int, keep: Keep) -> Iterator[str]:
        """Yield what is not kept of an operator: all that the backward pass reads, or a part."""
        graph, item = self.model.graph, self.model.operators[op]
        mine = {node.name for node in (*item.ahead, *item.back)}
        for node in item.ahead:
            for name in node.outputs:
                readers = {reader.name for reader in graph.consumers[name]}
                inside = keep is Keep.OFFLOAD or op not in self.ends or readers <= mine
                if inside and not readers.isdisjoint(self.late):
                    yield name

    def _reshard(self, strategy: Strategy, value: str, consumer: Node, how: Sent) -> Reshard:
        """Return the way of a value to a consumer, in one step."""
        layout = read_in(
            self.model.graph, value, consumer, strategy.configuration(self.model.graph, consumer)
        )
        collective = "all_gather" if layout is None else "all_to_all"
        return Reshard((Step(collective, layout if how is Sent.AFTER else None),), Copies(how))

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self.model)

    def _simulated(self, strategy: Strategy) -> Simulation:
        if strategy.tensors or strategy.reshards:
            return simulate(self.model.graph, self.model.machine, strategy)
        return self._simulator.simulate_strategy(strategy)
