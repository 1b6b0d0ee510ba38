"""The search for a strategy: Markov chains over the SOAP space, judged by simulation.

Jia, section 3.5. Beyond the paper: chains begin from everything that is known (data and model
parallelism, what experts do, an imported strategy, what suits two of each repeated block or whole
computers) and from chance; coordinate descent comes first (`descent.py`); proposals are informed
(`proposals.py`); thresholds are drawn first, and simulations stop when they must be passed; several
chains run at once. The best initial candidate is never lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from soapstone.ir.configuration import Configuration
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel import proposals
from soapstone.search.parallel.blocks import Blocks
from soapstone.search.parallel.capacity import check_capacity
from soapstone.search.parallel.choice import as_strategy
from soapstone.search.parallel.computers import Computers
from soapstone.search.parallel.descent import MATTERS, Descent
from soapstone.search.parallel.exact import Certificate
from soapstone.search.parallel.initial import NAMED, Parallel, is_recurrent, randomly
from soapstone.search.parallel.operators import ParallelError
from soapstone.search.parallel.problem import Model, prepare
from soapstone.search.parallel.simulate import Simulation, Simulator
from soapstone.search.parallel.walker import UNFIT, Walker

ALWAYS = ("expert", "tensor", "computer", "imported")  # candidates simulated in any case
CANDIDATES_SHARE = 0.25  # of the search, after which no others are
COMPUTERS_SHARE = 0.2  # of the search, for a machine of whole computers
BLOCKS_SHARE = 0.4  # of the search, for a model with two of each block
DESCENT_SHARE = 0.5  # of what is left to a chain, until which it descends
UNLIKE = (1.05, 2.0)  # times the best beginning: others that chains begin from
ROUND = 0.5  # patience of each of several searches
SEEDS = 10_007  # between their seeds
LONGER = 1.5  # times as many proposals at least does a chain make in each
HEATS = (1.0, 8.0)  # times the temperature, in turn
TURN = 10  # batches of `_LEAST_EACH` until the temperature changes
_LEAST_EACH = 10  # proposals for each operator, without a better strategy, before a chain may stop
SIMULATIONS = ("delta", "full")


@dataclass(frozen=True)
class Options:
    """How a search goes.

    Attributes:
        seconds, proposals: when to stop; of all chains together. One of both is enough.
        patience: stop a chain when its best is no better, by a thousandth, after this share of its
            search; 1.0: then begin anew with another seed, until the search is over.
        simulation: delta, or full: every pass from the first task on.
        blocks: begin with a smaller model that has two of each repeated block.
        computers: begin with a smaller machine whose devices are whole computers.
        descent: begin each chain with a descent (`descent.py`).
        moves: shares of proposals by kind: `proposals.INFORMED`, or `PLAIN`, the paper's.
        initial: names of initial candidates, besides random ones; data parallelism is simulated
            in any case.
        chains: how many run at once.
        temperature: the rise in cost that is accepted with probability 1 / e, as a share of what
            an operator costs on average.
    """

    seconds: float | None = 60.0
    proposals: int | None = None
    patience: float = 0.5
    simulation: str = "delta"
    blocks: bool = True
    computers: bool = True
    descent: bool = True
    moves: Mapping[int, float] = field(default_factory=lambda: proposals.INFORMED)
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
        certificate: of an exhaustive search.
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
    certificate: Certificate | None = None

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
            "certified": self.certificate is not None and self.certificate.complete,
        }

    def __str__(self) -> str:
        rows = sorted(self.initial_us.items(), key=lambda row: row[1])
        others = ", ".join(f"{name} {us:,.0f} us" for name, us in rows)
        return (
            f"{self.simulation}\n"
            f"{self.speedup_over_data_parallel:.2f}x data parallelism; initial: {others}\n"
            f"{self.proposals:,} proposals in {self.seconds:.1f} s, {self.accepted:,} accepted,"
            f" {self.simulation_mode} simulation"
            + ("" if self.certificate is None else f"\n{self.certificate}")
        )


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
    model = prepare(graph, machine)
    check_capacity(model)
    return _Search(model, options, start, progress).run()


class _Search:
    """A search under way: rounds, the first of them with an imported strategy."""

    def __init__(
        self,
        model: Model,
        options: Options,
        start: Mapping[str, Configuration] | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.options, self.progress = model, options, progress
        self.start = start
        self.history: list[tuple[float, float]] = []
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.best_ns = 0
        self.proposals, self.rounds = 0, 0  # of the rounds that have ended

    def run(self) -> StrategyResult:
        _Round(self.model, self.options, self.stop).walker(0).load()
        self.began = time.perf_counter()
        first = self._round(self.start)
        best, counts = first.best, first.counts
        while self.options.patience >= 1.0 and not self.stop.is_set() and self._left() > 0:
            try:
                other = self._round(None)
            except KeyboardInterrupt:
                break
            best = min(best, other.best, key=lambda walker: walker.best_ns)
            counts += other.counts
        seconds = time.perf_counter() - self.began
        simulator = Simulator(self.model, best.settled)
        best.restore(simulator.settled)
        simulation = simulator.summary(simulator.again())
        found = simulator.settled.configurations()
        provenance = {
            "search": "mcmc",
            "seed": self.options.seed,
            "proposals": self.proposals,
            "chains": self.options.chains,
            "step_us": simulation.step_us,
            "lower_bound_us": simulation.lower_bound_us,
            "estimated": simulation.estimated,
        }
        return StrategyResult(
            strategy=as_strategy(self.model.graph, self.model, found, provenance),
            simulation=simulation,
            initial_us=first.initial_us,
            proposals=self.proposals,
            accepted=int(counts[1]),
            seconds=seconds,
            simulation_mode=self.options.simulation,
            skipped=float(counts[5]) / max(1.0, float(counts[2]) * len(self.model.tasks)),
            history=tuple(self.history),
        )

    def _round(self, start: Mapping[str, Configuration] | None) -> _Round:
        """Make a round with what is left."""
        options, left = self.options, self._left()
        given = replace(
            options,
            seed=options.seed + SEEDS * self.rounds,
            seconds=None if options.seconds is None else left * options.seconds,
            proposals=None if options.proposals is None else options.proposals - self.proposals,
            patience=options.patience if options.patience < 1.0 else ROUND,
        )
        least = _LEAST_EACH * LONGER**self.rounds
        made = _Round(self.model, given, self.stop, start, self._note, least)
        made.walk()
        self.rounds += 1
        self.proposals += made.proposals
        return made

    def _left(self) -> float:
        """Return which share of the search is left."""
        left, options = 1.0, self.options
        if options.seconds is not None:
            spent = time.perf_counter() - self.began
            left = 1.0 - spent / options.seconds if options.seconds else 0.0
        if options.proposals is not None:
            done = self.proposals / options.proposals if options.proposals else 1.0
            left = min(left, 1.0 - done)
        return max(0.0, left)

    def _note(self, cost: int, proposals: int) -> None:
        """Keep the best cost so far, and say how far the search is."""
        now = time.perf_counter() - self.began
        with self.lock:
            if not self.history or cost < self.best_ns:
                self.best_ns = cost
                self.history.append((now, cost % UNFIT / 1e3))
            if self.progress is not None:
                self.progress(now, self.proposals + proposals, self.best_ns % UNFIT / 1e3)


class _Round:
    """One search from its beginnings until its chains have come to their ends.

    Attributes:
        stop: set by an interrupt. note: called with costs, and proposals made by then; None for
            a smaller model. least: proposals for each operator before a chain may stop.
        best: the chain with the best strategy. counts: of all chains of the whole model.
        proposals: of all chains that have come to their ends.
    """

    best: Walker

    def __init__(
        self,
        model: Model,
        options: Options,
        stop: threading.Event,
        start: Mapping[str, Configuration] | None = None,
        note: Callable[[int, int], None] | None = None,
        least: float = _LEAST_EACH,
    ) -> None:
        self.model, self.options, self.stop, self.least = model, options, stop, least
        self.start = start
        self.note = note
        self.proposals, self.counts = 0, np.zeros(8, np.int64)
        self.initial_us: dict[str, float] = {}
        self.began = time.perf_counter()

    def walker(self, number: int) -> Walker:
        """Return a chain with a seed of its own."""
        options, model = self.options, self.model
        seed = options.seed * 1000 + number
        if number:  # chains with arrays in common would wait for each other's reference counts
            own = type(model.problem)(*(array.copy() for array in model.problem))
            model = replace(model, problem=own)
        return Walker(model, options.moves, options.temperature, options.simulation != "full", seed)

    def _candidates(self) -> dict[str, Mapping[str, Configuration]]:
        names = dict.fromkeys(("data", *self.options.initial))
        found = {name: NAMED[name](self.model) for name in names}
        for number in range(self.options.random):
            found[f"random {number}"] = randomly(self.model, self.options.seed + number)
        if self.start is not None:
            found["imported"] = self.start
        return found

    def walk(self) -> None:
        """Try the candidates, then let chains begin from the best of them.

        In a recurrent network others follow from those that are unlike it, but not much slower:
        what chains come to there depends on where they begin more than on how long they are.
        """
        candidates = self._candidates()
        walker = self.walker(0)
        costs: dict[str, int] = {}

        def tried(name: str) -> None:
            costs[name] = walker.begin(candidates[name])
            self.initial_us[name] = walker.step_ns / 1e3
            self._say(costs[name])

        tried("data")
        try:
            others = [name for name in candidates if name != "data"]
            for name in sorted(others, key=lambda name: name not in ALWAYS):
                if name in ALWAYS or self._left() > 1.0 - CANDIDATES_SHARE or not self._timed():
                    tried(name)
            if self.options.computers and self._left() > 0:
                computers = Computers(self.model)
                if computers.model is not None:
                    found = self._small(computers.model, COMPUTERS_SHARE)
                    for inside in (Parallel.SAMPLE, Parallel.PARAMETER):
                        name = f"computers, {inside}s"
                        candidates[name] = computers.spread(found, inside)
                        tried(name)
            if self.options.blocks and self._left() > 0:
                blocks = Blocks(self.model)
                if blocks.model is not None:
                    small = self._small(blocks.model, BLOCKS_SHARE, blocks=False)
                    candidates["blocks"] = blocks.spread(small)
                    tried("blocks")
        except KeyboardInterrupt:
            self.stop.set()
        known = set(costs) - ({"data"} - set(self.options.initial))
        unlike = {costs[name]: name for name in known or costs}
        order = [unlike[cost] for cost in sorted(unlike)]
        walkers = [walker, *(self.walker(i) for i in range(1, self.options.chains))]
        for i, each in enumerate(walkers):
            each.begin(candidates[order[i % len(order)]])
        self.best = walker
        if not self.stop.is_set():
            self._together(walkers)
        self._ended(walkers)
        if self.note is None or not is_recurrent(self.model):
            return
        least, most = (share * costs[order[0]] for share in UNLIKE)
        others = [name for name in order[self.options.chains :] if least <= costs[name] <= most]
        for number, name in enumerate(others, self.options.chains):
            if self.stop.is_set() or self._left() <= 0:
                return
            other = self.walker(number)
            try:
                other.begin(candidates[name])
            except KeyboardInterrupt:
                self.stop.set()
                return
            self._together([other])
            self._ended([other])

    def _say(self, cost: int, proposals: int = 0) -> None:
        if self.note is not None:
            self.note(cost, self.proposals + proposals)

    def _ended(self, walkers: Sequence[Walker]) -> None:
        self.best = min(self.best, *walkers, key=lambda walker: walker.best_ns)
        self.proposals += sum(walker.proposals for walker in walkers)
        self.counts += np.sum([walker.chain.counts for walker in walkers], axis=0)

    def _small(self, model: Model, part: float, **given: Any) -> Mapping[str, Configuration]:
        """Return what a search in a part of the time finds for a smaller model."""
        options = self.options
        share = replace(
            options,
            seconds=None if options.seconds is None else options.seconds * part,
            proposals=None if options.proposals is None else int(options.proposals * part),
            computers=False,
            chains=1,
            **given,
        )
        inner = _Round(model, share, self.stop)
        inner.walk()
        self.proposals += inner.proposals
        inner.best.restore(inner.best.settled)
        return inner.best.settled.configurations()

    def _together(self, walkers: Sequence[Walker]) -> None:
        """Let chains walk until each has come to its end."""
        if len(walkers) == 1:
            try:
                self._one(walkers[0], 0)
            except KeyboardInterrupt:
                self.stop.set()
            return
        with ThreadPoolExecutor(len(walkers)) as pool:
            waiting = [pool.submit(self._one, walker, i) for i, walker in enumerate(walkers)]
            try:
                for future in waiting:
                    future.result()
            except KeyboardInterrupt:
                self.stop.set()

    def _timed(self) -> bool:
        """Return whether there is a time after which to leave out candidates."""
        return bool(self.options.seconds)

    def _left(self, walker: Walker | None = None) -> float:
        """Return which share of the search is left, for one chain."""
        left = 1.0
        if self.options.seconds is not None:
            spent = time.perf_counter() - self.began
            left = min(left, 1.0 - spent / self.options.seconds if self.options.seconds else 0.0)
        if self.options.proposals is not None:
            made = 0 if walker is None else walker.proposals * self.options.chains
            done = (self.proposals + made) / max(self.options.proposals, 1)
            left = min(left, 1.0 - done if self.options.proposals else 0.0)
        return left

    def _one(self, walker: Walker, number: int) -> None:
        """Descend, then run one chain until its best has not improved for long."""
        points = len(self.model.tasks) * len(self.model.machine.processors)
        floor = _LEAST_EACH * len(walker.chain.free)
        least = int(self.least * len(walker.chain.free))
        batch = max(4, min(2048, 1_000_000 // points, floor))
        best, found = walker.best_ns, 0  # a best one that matters, and after how many proposals
        left = self._left(walker)

        def go_on() -> bool:
            self._say(walker.best_ns, walker.proposals)
            return not self.stop.is_set() and self._left(walker) > left * (1.0 - DESCENT_SHARE)

        if self.options.descent:
            Descent(walker, self.options.seed + number).run(go_on)
        heat = HEATS[0]
        while not self.stop.is_set() and self._left(walker) > 0:
            if walker.best_ns < MATTERS * best:
                best, found = walker.best_ns, int(walker.chain.counts[4])
            made = walker.proposals
            vain = max(least, self.options.patience * made) - (made - found)
            if vain <= 0:
                return
            size = min(batch, math.ceil(vain))
            if self.options.proposals is not None:
                rest = self._left(walker) * self.options.proposals / self.options.chains
                size = min(size, math.ceil(rest))
            warmth = HEATS[made // (TURN * floor) % len(HEATS)]
            if warmth > heat:
                walker.again()
            heat = warmth
            walker.walk(size, heat)
            self._say(walker.best_ns, walker.proposals)


__all__ = ["Options", "Progress", "StrategyResult", "search"]
