"""Simulation of one strategy: time, traffic, memory and a timeline, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from soapstone.engine.carry import carry_out
from soapstone.engine.mapper import check_backing
from soapstone.engine.required_memory import required_memory
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration, Keep
from soapstone.ir.tensor import Array
from soapstone.runtime import Machine
from soapstone.runtime.observe.profile import Event, Profile
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.bounds.step import Bound, lower_bound
from soapstone.search.parallel.problem.choice import Settled, as_strategy, needs_of
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.problem.pricing import measured
from soapstone.search.parallel.simulation import schedule
from soapstone.search.parallel.simulation.liveness import beyond, peaks
from soapstone.search.parallel.simulation.rank_order import Arrangement, by_strategy


class Held(NamedTuple):
    """The most bytes that each device's memory holds, and the total that does not fit."""

    peak_bytes_per_device: tuple[int, ...]
    missing_bytes: int


@dataclass(frozen=True)
class Simulation:
    """The simulated cost of one step of a strategy on a machine.

    Attributes:
        step_us: from the first task to the last arrival. compute_us: the sum over all tasks.
        bytes_moved: between devices. bytes_synchronized: of those, for sums of gradients and for
            parameters.
        messages: the copies and collectives that move them.
        lower_bound_us: a bound for all strategies. gap: how far the step is above it, as a share.
        estimated: whether the times of some tasks come from a description, not from measurements.
        draw: simulates the strategy again for its `timeline`.
        hold: computes `held` once.
    """

    step_us: float
    compute_us: float
    bytes_moved: int
    bytes_synchronized: int
    messages: int
    tasks: int
    lower_bound_us: float
    gap: float
    estimated: bool
    draw: Callable[[], Profile] = field(repr=False, compare=False)
    hold: Callable[[], Held] = field(repr=False, compare=False)

    @cached_property
    def held(self) -> Held:
        """The bytes that memories hold.

        On described machines they follow from liveness in the simulated step, on this computer from
        the plan that executors follow.
        """
        return self.hold()

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        """The most bytes that the memory of each device holds at once."""
        return self.held.peak_bytes_per_device

    @property
    def missing_bytes(self) -> int:
        """The total by which the devices' memories are too small; 0 if the strategy fits."""
        return self.held.missing_bytes

    @cached_property
    def timeline(self) -> Profile:
        """What each device did when; the first access simulates the strategy again."""
        return self.draw()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        names = [*self.__dataclass_fields__][:-2]
        figures = {name: getattr(self, name) for name in (*names, *Held._fields)}
        figures["peak_bytes_per_device"] = list(self.peak_bytes_per_device)
        return figures

    def __str__(self) -> str:
        return (
            f"{self.step_us:,.0f} us a step{' (estimated)' if self.estimated else ''},"
            f" {self.compute_us:,.0f} us of tasks, {self.bytes_moved / 1e6:,.1f} MB moved,"
            f" {max(self.peak_bytes_per_device) / 1e6:,.0f} MB on a device at most;"
            f" at least {self.lower_bound_us:,.0f} us ({self.gap:.0%} above)" + self._missing()
        )

    def _missing(self) -> str:
        if not self.missing_bytes:
            return ""
        return f"\nDOES NOT FIT: {self.missing_bytes / 1e6:,.1f} MB more needed on its devices"


class Simulator:
    """Simulates strategies of one graph on one machine.

    Args:
        model: graph and machine as arrays (`prepare`).
        settled: the state of the last simulated strategy, from which to continue; by default none.
    """

    def __init__(self, model: Model, settled: Settled | None = None) -> None:
        self.model, self.problem = model, model.problem
        self.settled = settled or Settled(model)
        self.arrangement = Arrangement(model) if by_strategy(model) else None
        self.state = schedule.room(self.problem, len(self.settled.choice.messages))

    @cached_property
    def bound(self) -> Bound:
        """The lower bound for all strategies."""
        return lower_bound(self.model)

    def step_ns(self, configurations: Mapping[str, Configuration]) -> int:
        """Return the time of a step in nanoseconds.

        configurations: of the graph's operators, by name; those left out follow their producers.

        Raises:
            ParallelError: a configuration is not legal.
        """
        self.settled.set(configurations)
        return self.settled_ns()

    def settled_ns(self) -> int:
        """Simulate what is set already, and return the time of a step."""
        c = self.settled.choice
        if len(self.state.arrival) < len(c.messages):
            self.state = schedule.room(self.problem, len(c.messages))
        if self.arrangement is not None:
            self.problem = self.arrangement.of(c, self.state)
        p = self.problem
        step = int(call(schedule.simulate, p, c, self.state, 0, -1))
        call(schedule.accept, p, self.state, 0)
        return step

    def simulate(self, configurations: Mapping[str, Configuration]) -> Simulation:
        """Return the simulated cost of a strategy.

        configurations: of the graph's operators, by name; those left out follow their producers, or
        are whole.

        Raises:
            ParallelError: a configuration is not legal.
        """
        return self.summary(self.step_ns(configurations))

    def simulate_strategy(self, strategy: Strategy) -> Simulation:
        """Return the simulated cost of a strategy that has configurations alone.

        Raises:
            ParallelError, StrategyError: a configuration is not legal.
        """
        graph, operators = self.model.graph, self.model.operators
        configurations = {item.name: strategy.configuration(graph, item.node) for item in operators}
        return self.summary(self.step_ns(configurations), strategy)

    def summary(self, step_ns: int, strategy: Strategy | None = None) -> Simulation:
        """Return the figures of the last simulated strategy, with a step of `step_ns` ns.

        strategy: the strategy, by default one with its configurations.
        """
        p, c, s = self.problem, self.settled.choice, self.state
        live = c.live
        moving = (live["source"] != live["target"]) | (live["source"] < 0)
        rows = c.givers["row"][live["givers"]]
        values = p.values[p.operands["value"][p.writers[rows]]]
        parameters = (values["is_sum"] | values["lasts"]) != 0
        points = c.operators["points"][p.tasks["operator"]]
        active = np.arange(len(p.devices))[None, :] < points[:, None]
        compute = int(c.task_ns[:, : len(p.devices)][active].sum())
        bound = self.bound.us
        kept = [each.copy() for each in c.chosen]
        if isinstance(self.model.machine, MeasuredMachine):
            hold = partial(_planned, self.model, kept, strategy)
        else:
            peak = peaks(p, c, self.settled.scratch, s)
            hold = partial(Held, tuple(peak.tolist()), beyond(p, peak))
        return Simulation(
            step_us=step_ns / 1e3,
            compute_us=compute / 1e3,
            bytes_moved=int(live["moved"][moving].sum()),
            bytes_synchronized=int(live["moved"][moving & parameters].sum()),
            messages=int(moving.sum()),
            tasks=int(points.sum()),
            lower_bound_us=bound,
            gap=step_ns / 1e3 / bound - 1.0 if bound else 0.0,
            estimated=any(call(measured, p, c, task) < 0 for task in range(len(p.tasks))),
            draw=lambda: _timeline_of(self.model, *kept),
            hold=hold,
        )

    def _timeline(self) -> Profile:
        """Return what each device and link did, and what each task and message waited for."""
        p, c, s = self.problem, self.settled.choice, self.state
        profile = Profile(self.model.machine, self.model.graph.name)
        devices = len(p.devices)
        names = [processor.name for processor in self.model.machine.processors]
        numbers: dict[tuple[int, int], int] = {}
        for task, op in enumerate(p.tasks["operator"].tolist()):
            for point in range(c.operators["points"][op]):
                numbers[task, point] = len(numbers)
        events = []
        for task, (op, nodes) in enumerate(self.model.tasks):
            item = self.model.operators[op]
            name = item.name + ("" if nodes[0] in item.ahead else " backward")
            for point in range(c.operators["points"][op]):
                stop = int(s.end[p.tasks[task]["place"], point]) - int(c.task_ns[task, devices])
                start = stop - int(c.task_ns[task, point])
                after = self._given(needs_of(p, c, task, point), len(numbers))
                events.append(
                    Event(
                        *(name, "task", int(c.placed[op, point]), point, start, stop, 0),
                        operator=item.node.operator + name[len(item.name) :],
                        number=numbers[task, point],
                        after=tuple(n if isinstance(n, int) else numbers[n] for n in after),
                    )
                )
        for number, row in enumerate(c.live):
            source, target = int(row["source"]), int(row["target"])
            if source == target >= 0:
                continue
            kind = "collective" if source < 0 else "copy"
            ends = ("", "") if source < 0 else (names[source], names[target])
            start = int(s.began[number])
            events.append(
                Event(
                    *(kind, kind, profile.row(" -> ".join(ends) if source >= 0 else kind), 0),
                    *(start, start + int(row["busy"]), 0),
                    number=len(numbers) + number,
                    after=tuple(numbers[giver] for giver in self._givers(number)),
                    nbytes=int(row["moved"]),
                    source=ends[0],
                    target=ends[1],
                )
            )
        profile.put(events)
        return profile

    def _givers(self, message: int) -> list[tuple[int, int]]:
        """Return the tasks, and their points, whose results a message carries."""
        p, c = self.problem, self.settled.choice
        givers = []
        giver = int(c.messages[message]["givers"])
        while giver >= 0:
            writer, point, giver = c.givers[giver].tolist()
            givers.append((int(p.makers[writer]), point))
        return givers

    def _given(self, messages: Iterable[int], first: int) -> list[int | tuple[int, int]]:
        """Return what messages stand for: themselves, or tasks if nothing has to move."""
        standing_for: dict[int | tuple[int, int], None] = {}
        for message in messages:
            row = self.settled.choice.messages[message]
            if row["source"] == row["target"] >= 0:
                standing_for.update(dict.fromkeys(self._givers(message)))
            else:
                standing_for[first + message] = None
        return list(standing_for)


def _planned(model: Model, chosen: Sequence[Array], strategy: Strategy | None) -> Held:
    """Return what executors on this computer would hold under choices, by their own plan."""
    if strategy is None:
        settled = Settled(model)
        settled.restore(*chosen)
        strategy = as_strategy(model.graph, model, settled.configurations(), {})
    return _planned_of(model.graph, strategy, model.machine)


def _planned_of(graph: Graph, strategy: Strategy, machine: Machine) -> Held:
    held = required_memory(graph, strategy, machine)
    number = {memory.name: i for i, memory in enumerate(machine.memories)}
    used = {number[processor.memory] for processor in machine.processors}
    over = sum(max(0, held[i] - machine.memories[i].capacity_bytes) for i in used)
    return Held(tuple(held[number[each.memory]] for each in machine.processors), over)


def _timeline_of(model: Model, *chosen: Array) -> Profile:
    simulator = Simulator(model)
    simulator.settled.restore(*chosen)
    simulator.settled_ns()
    return simulator._timeline()


def simulate(graph: Graph, machine: Machine, strategy: Strategy) -> Simulation:
    """Return the simulated cost of a strategy on a machine, which need not be this computer.

    What the strategy says beyond configurations is carried out first, so recomputation, resharding
    paths and offloading are simulated as tasks and copies.

    Raises:
        ParallelError, StrategyError: the strategy does not fit the graph or the machine.
    """
    carried, bare = carry_out(graph, strategy)
    away = [value for value, keep in bare.tensors.items() if keep is Keep.OFFLOAD]
    check_backing(machine, away)
    simulation = Simulator(prepare(carried, machine, away=away)).simulate_strategy(bare)
    if isinstance(machine, MeasuredMachine):
        return replace(simulation, hold=lambda: _planned_of(graph, strategy, machine))
    return simulation
