"""The search for a strategy: Markov chains over the SOAP space, judged by simulation.

Jia, section 3.5. Beyond the paper: chains begin from everything that is known (data and model
parallelism, what experts do, an imported strategy) and from chance; proposals are informed
(`chain.py`); thresholds are drawn first, and simulations stop when they must be passed; several
chains run at once. The best initial candidate is never lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone.ir.configuration import Configuration
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel import chain, schedule
from soapstone.search.parallel.arrays import CLASS, DEGREES, FREE, KIND, MOST_DIMS, POINTS
from soapstone.search.parallel.choice import Settled, as_strategy, empty
from soapstone.search.parallel.compiling import call
from soapstone.search.parallel.initial import NAMED, randomly
from soapstone.search.parallel.operators import ParallelError
from soapstone.search.parallel.problem import Model, prepare
from soapstone.search.parallel.simulate import Simulation, Simulator

_LEAST_EACH = 40  # proposals for each operator before a chain may give up
SIMULATIONS = ("delta", "full")


@dataclass(frozen=True)
class Options:
    """How a search goes.

    Attributes:
        seconds, proposals: when to stop; of all chains together. One of both is enough.
        patience: stop a chain when its best is no better after this share of its search.
        simulation: delta, or full: every pass from the first task on.
        moves: shares of proposals by kind (`chain.INFORMED`, or `chain.PLAIN`, the paper's).
        initial: names of initial candidates, besides one at random.
        chains: how many run at once.
        temperature: the rise in cost that is accepted with probability 1 / e, as a share of what
            an operator costs on average.
    """

    seconds: float | None = 60.0
    proposals: int | None = None
    patience: float = 0.5
    simulation: str = "delta"
    moves: Mapping[int, float] = field(default_factory=lambda: chain.INFORMED)
    initial: tuple[str, ...] = tuple(NAMED)
    random: int = 1
    chains: int = 1
    temperature: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class StrategyResult:
    """What a search found.

    Attributes:
        strategy: the best strategy, with where it came from.
        simulation: what it costs.
        initial_us: the time of a step of each initial candidate.
        proposals, accepted: of all chains. history: (seconds, best us) whenever it became better.
        skipped: the share of tasks before the places where passes began.
    """

    strategy: Strategy
    simulation: Simulation
    initial_us: Mapping[str, float]
    proposals: int
    accepted: int
    seconds: float
    simulation_mode: str
    skipped: float
    history: tuple[tuple[float, float], ...] = field(repr=False, default=())

    @property
    def speedup_over_data_parallel(self) -> float:
        """How many times as fast as data parallelism."""
        return self.initial_us.get("data", float("nan")) / self.simulation.step_us

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them."""
        found = self.simulation.as_dict()
        return found | {
            "speedup_over_data_parallel": self.speedup_over_data_parallel,
            "initial_us": dict(self.initial_us),
            "proposals": self.proposals,
            "proposals_per_s": self.proposals / self.seconds if self.seconds else 0.0,
            "accepted": self.accepted,
            "seconds": self.seconds,
            "simulation": self.simulation_mode,
            "tasks_skipped": self.skipped,
        }

    def __str__(self) -> str:
        rows = sorted(self.initial_us.items(), key=lambda row: row[1])
        others = ", ".join(f"{name} {us:,.0f} us" for name, us in rows)
        return (
            f"{self.simulation}\n"
            f"{self.speedup_over_data_parallel:.2f}x data parallelism; initial: {others}\n"
            f"{self.proposals:,} proposals in {self.seconds:.1f} s, {self.accepted:,} accepted,"
            f" {self.simulation_mode} simulation"
        )


class Walker:
    """One chain with everything it works on."""

    def __init__(self, model: Model, options: Options, seed: int) -> None:
        self.model, self.options = model, options
        self.settled = Settled(model)
        self.chain = _chain(model, options.moves, seed)
        self.delta = options.simulation != "full"
        self.temperature = options.temperature / len(self.chain.free)
        self.seconds = 0.0
        self._room()

    def _room(self) -> None:
        p, c = self.model.problem, self.settled.choice
        self.backup = empty(p, 1)
        self.state = schedule.room(p, len(c.messages))

    def begin(self, configurations: Mapping[str, Configuration]) -> int:
        """Start from a strategy; return its cost in ns."""
        self.settled.set(configurations)
        cost = self._pass()
        self.chain.cost[:] = cost
        call(chain.keep_best, self.settled.choice, self.chain, cost)
        return cost

    def _pass(self) -> int:
        """Simulate what is set, as the accepted strategy."""
        p, c = self.model.problem, self.settled.choice
        if len(self.state.arrival) < len(c.messages):
            self._room()
        cost = int(call(schedule.simulate, p, c, self.state, 0, -1))
        call(schedule.accept, p, self.state, 0)
        return cost

    def walk(self, proposals: int) -> None:
        """Make so many proposals."""
        began = time.perf_counter()
        target = int(self.chain.counts[0]) + proposals
        while (left := target - int(self.chain.counts[0])) > 0:
            done = call(
                chain.walk,
                self.model.problem,
                self.settled.choice,
                self.backup,
                self.settled.scratch,
                self.state,
                self.chain,
                self.temperature * float(self.chain.cost[1]),
                left,
                self.delta,
            )
            if done == chain.FULL:
                self.settled.grow()
                self.settled.settle()
                self._pass()
        self.seconds += time.perf_counter() - began

    @property
    def proposals(self) -> int:
        return int(self.chain.counts[0])

    @property
    def best_ns(self) -> int:
        return int(self.chain.cost[1])

    def best(self) -> dict[str, Configuration]:
        """Return the configurations of the best strategy's operators, without what follows."""
        found = {}
        for op, item in enumerate(self.model.operators):
            if item.source is None:
                row = self.chain.best[op]
                dims = self.model.graph.signature(item.node).dims
                degrees = {
                    dim.name: int(row[DEGREES + j])
                    for j, dim in enumerate(dims)
                    if row[DEGREES + j] > 1
                }
                placed = self.chain.best_placed[op, : row[POINTS]]
                found[item.name] = Configuration(degrees, tuple(map(int, placed)))
        return found


def _chain(model: Model, moves: Mapping[int, float], seed: int) -> chain.Chain:
    p = model.problem
    operators = len(p.operators)
    free = np.nonzero(p.operators[:, KIND] == FREE)[0]
    if not free.size:
        raise ParallelError(f"graph {model.graph.name!r} has no operator to choose for")
    classes: dict[int, list[int]] = {}
    for op in free.tolist():
        classes.setdefault(int(p.operators[op, CLASS]), []).append(op)
    ptr, members = [0], []
    for number in range(int(p.operators[:, CLASS].max()) + 1):
        members += classes.get(number, [])
        ptr.append(len(members))
    peers = _peers(model, set(free.tolist()))
    peer_ptr = np.cumsum([0, *(len(peers[op]) for op in range(operators))])
    devices = len(p.devices)
    random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    return chain.Chain(
        random=random,
        cost=np.zeros(2, np.int64),
        counts=np.zeros(8, np.int64),
        weights=chain.moves(dict(moves)),
        free=free.astype(np.int64),
        class_ptr=np.array(ptr, np.int64),
        members=np.array(members, np.int64),
        peer_ptr=peer_ptr.astype(np.int64),
        peers=np.array([peer for op in range(operators) for peer in peers[op]], np.int64),
        divisors=np.array([n for n in range(1, devices + 1) if devices % n == 0], np.int64),
        best=np.zeros((operators, DEGREES + MOST_DIMS), np.int64),
        best_placed=np.zeros((operators, devices), np.int64),
        moves=np.zeros((chain.MOVES, 2), np.int64),
    )


def _peers(model: Model, free: set[int]) -> list[list[int]]:
    """Return, for each operator, the free ones before or after it, past those that follow."""
    source: dict[str, set[int]] = {}
    found: list[set[int]] = [set() for _ in model.operators]
    for mine, item in enumerate(model.operators):
        if mine not in free:
            continue
        before: set[int] = set()
        for node in item.ahead:
            for name in node.inputs:
                before |= source.get(name, set())
        for other in before - {mine}:
            found[mine].add(other)
            found[other].add(mine)
        for node in item.ahead:
            for name in node.outputs:
                source[name] = {mine}
    return [sorted(peers) for peers in found]


Progress = Callable[[float, int, float], None]


def search(
    graph: Graph,
    machine: Machine,
    options: Options | None = None,
    *,
    start: Mapping[str, Configuration] | None = None,
    progress: Progress | None = None,
) -> StrategyResult:
    """Return the fastest strategy found for a training or inference graph on a machine.

    Args:
        start: an imported strategy's configurations, one more initial candidate.
        progress: called with seconds, proposals and the best time of a step in us.

    Ctrl-C ends the search with what it has found. With `proposals` in place of seconds the same
    seed gives the same strategy.

    Raises:
        ParallelError: the graph or the machine cannot be searched, or a limit is missing.
    """
    options = options or Options()
    if options.seconds is None and options.proposals is None:
        raise ParallelError("search: neither seconds nor proposals found, one needed")
    if options.simulation not in SIMULATIONS:
        raise ParallelError(
            f"search: simulation {options.simulation!r} found,"
            f" one of {', '.join(SIMULATIONS)} needed"
        )
    return _Search(prepare(graph, machine), options, start, progress).run()


class _Search:
    """A search under way."""

    def __init__(
        self,
        model: Model,
        options: Options,
        start: Mapping[str, Configuration] | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.options, self.progress = model, options, progress
        self.simulator = Simulator(model.graph, model.machine, model)
        self.candidates: dict[str, Mapping[str, Configuration]] = {}
        for name in options.initial:
            self.candidates[name] = NAMED[name](model)
        for number in range(options.random):
            self.candidates[f"random {number}"] = randomly(model, options.seed + number)
        if start is not None:
            self.candidates["imported"] = start
        self.history: list[tuple[float, float]] = []
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def run(self) -> StrategyResult:
        costs = {name: self.simulator.step_ns(found) for name, found in self.candidates.items()}
        if "data" not in costs:
            costs["data"] = self.simulator.step_ns(NAMED["data"](self.model))
        order = sorted(self.candidates, key=lambda name: costs[name])
        self.best_ns = costs[order[0]]
        self.began = time.perf_counter()
        self.history.append((0.0, self.best_ns / 1e3))
        starts = [order[i % len(order)] for i in range(max(self.options.chains, 1))]
        walkers = [
            Walker(self.model, self.options, self.options.seed * 1000 + i)
            for i in range(len(starts))
        ]
        for walker, name in zip(walkers, starts):
            walker.begin(self.candidates[name])
        self._walk(walkers)
        seconds = time.perf_counter() - self.began
        best = min(walkers, key=lambda walker: walker.best_ns)
        found: Mapping[str, Configuration] = best.best()
        if best.best_ns > costs[order[0]]:
            found = self.candidates[order[0]]
        simulation = self.simulator.simulate(found)
        found = self.simulator.settled.configurations()
        proposals = sum(walker.proposals for walker in walkers)
        counts = np.sum([walker.chain.counts for walker in walkers], axis=0)
        provenance = {
            "search": "mcmc",
            "seed": self.options.seed,
            "proposals": proposals,
            "chains": len(walkers),
            "step_us": simulation.step_us,
            "lower_bound_us": simulation.lower_bound_us,
            "estimated": simulation.estimated,
        }
        return StrategyResult(
            strategy=as_strategy(self.model.graph, self.model, found, provenance),
            simulation=simulation,
            initial_us={name: cost / 1e3 for name, cost in costs.items()},
            proposals=proposals,
            accepted=int(counts[1]),
            seconds=seconds,
            simulation_mode=self.options.simulation,
            skipped=float(counts[5]) / max(1.0, float(counts[2]) * len(self.model.tasks)),
            history=tuple(self.history),
        )

    def _walk(self, walkers: Sequence[Walker]) -> None:
        each = None
        if self.options.proposals is not None:
            each = -(-self.options.proposals // len(walkers))
        if len(walkers) == 1:
            try:
                self._one(walkers[0], each)
            except KeyboardInterrupt:
                self.stop.set()
            return
        with ThreadPoolExecutor(len(walkers)) as pool:
            waiting = [pool.submit(self._one, walker, each) for walker in walkers]
            try:
                for future in waiting:
                    future.result()
            except KeyboardInterrupt:
                self.stop.set()

    def _one(self, walker: Walker, most: int | None) -> None:
        """Run one chain until its budget is spent, or its best has not improved for long."""
        points = len(self.model.tasks) * len(self.model.machine.processors)
        batch = max(4, min(2048, 1_000_000 // points))
        floor = _LEAST_EACH * len(walker.chain.free)
        while not self.stop.is_set():
            size = batch if most is None else min(batch, most - walker.proposals)
            if size <= 0:
                return
            walker.walk(size)
            now = time.perf_counter() - self.began
            with self.lock:
                if walker.best_ns < self.best_ns:
                    self.best_ns = walker.best_ns
                    self.history.append((now, self.best_ns / 1e3))
                if self.progress is not None:
                    self.progress(now, walker.proposals, self.best_ns / 1e3)
            if self.options.seconds is not None and now >= self.options.seconds:
                return
            since = walker.proposals - int(walker.chain.counts[4])
            if walker.proposals > floor and since > self.options.patience * walker.proposals:
                return


__all__ = ["Options", "Progress", "StrategyResult", "Walker", "search"]
