"""The search for a strategy: Markov chains over the SOAP space, judged by simulation.

Jia, section 3.5. Beyond the paper: chains start from everything that is known (data and model
parallelism, expert-designed strategies, an imported strategy, results for two of each repeated
block or for whole computers) and from random strategies; coordinate descent comes first
(`descent.py`); proposals are informed (`proposals.py`); thresholds are drawn first, and simulations
stop when they exceed them; several chains run at once. The best initial candidate is never lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.runtime import Machine
from soapstone.search.parallel.bounds.capacity import check_capacity
from soapstone.search.parallel.bounds.step import lower_bound
from soapstone.search.parallel.exact.optimum import Certificate
from soapstone.search.parallel.mcmc.options import Options
from soapstone.search.parallel.mcmc.rounds import LEAST_EACH, Round
from soapstone.search.parallel.mcmc.walker import UNFIT
from soapstone.search.parallel.problem.choice import as_strategy
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.simulation.simulate import Simulation, Simulator

ROUND = 0.5  # patience of each of several rounds
SEEDS = 10_007  # between their seeds
LONGER = 1.5  # times as many proposals at least does a chain make in each


@dataclass(frozen=True)
class StrategyResult:
    """The result of a search.

    Attributes:
        strategy: the best strategy, with its provenance.
        simulation: its simulated cost.
        initial_us: the time of a step of each initial candidate.
        proposals, accepted: of all chains. history: (seconds, best us) whenever it improved.
        seconds: of the search. simulation_mode: whether simulations began at the change ("delta")
            or at the first task ("full").
        skipped: the share of tasks that delta simulation skipped.
        certificate: of an exhaustive search.
        interrupted: whether Ctrl-C ended it.
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
    interrupted: bool = False

    @property
    def speedup_over_data_parallel(self) -> float:
        """The time of data parallelism over that of the strategy."""
        return self.initial_us.get("data", float("nan")) / self.simulation.step_us

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
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
        options: budget, chains, seed and what else chains need (`Options`).
        start: an imported strategy's configurations, one more initial candidate.
        progress: called with seconds, proposals and the best time of a step in us.

    Ctrl-C ends the search with what it has found. With `proposals` in place of seconds the same
    seed gives the same strategy.

    Raises:
        ParallelError: the graph or the machine cannot be searched, or a limit is missing.

    Source: FlexFlow: Jia, Automated Discovery of Machine Learning Optimizations, 2020, chapter 3.
    """
    options = options or Options()
    options.check()
    model = prepare(graph, machine)
    check_capacity(model)
    return _Search(model, options, start, progress).run()


class _Search:
    """A search in progress: a sequence of rounds, the first of them with an imported strategy."""

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
        self.bound_ns = lower_bound(model).us * 1e3

    def run(self) -> StrategyResult:
        Round(self.model, self.options, self.stop).walker(0).load()
        self.began = time.perf_counter()
        first = self._round(self.start)
        best, runs = first.best, first.runs
        while self._goes_on(best.best_ns):
            try:
                other = self._round(None)
            except KeyboardInterrupt:
                self.stop.set()
                break
            best = min(best, other.best, key=lambda walker: walker.best_ns)
            runs = runs + other.runs
        seconds, run = time.perf_counter() - self.began, np.concatenate(runs)
        simulator = Simulator(self.model, best.settled)
        best.restore(simulator.settled)
        simulation = simulator.summary(simulator.settled_ns())
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
            accepted=int(run["accepted"].sum()),
            seconds=seconds,
            simulation_mode=self.options.simulation,
            skipped=float(
                run["skipped"].sum() / max(1, run["simulated"].sum() * len(self.model.tasks))
            ),
            history=tuple(self.history),
            interrupted=self.stop.is_set(),
        )

    def _goes_on(self, best_ns: int) -> bool:
        """Return whether to begin another round: there is time, patience, and something to gain."""
        options = self.options
        if self.stop.is_set() or self._left() <= 0:
            return False
        if best_ns <= (1.0 + options.enough) * self.bound_ns:
            return False
        return options.patience >= 1.0 or self.proposals < options.least

    def _round(self, start: Mapping[str, Configuration] | None) -> Round:
        """Return a round with the remaining budget."""
        options, left = self.options, self._left()
        given = replace(
            options,
            seed=options.seed + SEEDS * self.rounds,
            seconds=None if options.seconds is None else left * options.seconds,
            proposals=None if options.proposals is None else options.proposals - self.proposals,
            patience=options.patience if options.patience < 1.0 else ROUND,
        )
        least = LEAST_EACH * LONGER**self.rounds
        made = Round(self.model, given, self.stop, start, self._note, least)
        made.walk()
        self.rounds += 1
        self.proposals += made.proposals
        return made

    def _left(self) -> float:
        """Return the share of the search that is left."""
        return max(0.0, self.options.left(self.began, self.proposals))

    def _note(self, cost: int, proposals: int) -> None:
        """Record the best cost so far, and report progress."""
        now = time.perf_counter() - self.began
        with self.lock:
            if not self.history or cost < self.best_ns:
                self.best_ns = cost
                self.history.append((now, cost % UNFIT / 1e3))
            if self.progress is not None:
                self.progress(now, self.proposals + proposals, self.best_ns % UNFIT / 1e3)
