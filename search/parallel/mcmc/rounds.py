"""One round of a search: initial strategies are tried, and chains continue from the best ones.

Initial strategies are named ones, random ones, and those found for smaller models: two of each
repeated block, or whole computers as devices. A smaller model is searched by a round too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array
from soapstone.search.parallel.computers import Computers
from soapstone.search.parallel.mcmc.descent import MATTERS, Descent
from soapstone.search.parallel.mcmc.initial import NAMED, Parallel, is_recurrent, randomly
from soapstone.search.parallel.mcmc.options import Options
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.blocks import Blocks
from soapstone.search.parallel.problem.prepare import Model

ALWAYS = ("expert", "tensor", "computer", "imported")  # beginnings that are tried in any case
BEGINNINGS_SHARE = 0.25  # of a round, after which no others are
COMPUTERS_SHARE = 0.2  # of a round, for a machine of whole computers
BLOCKS_SHARE = 0.4  # of a round, for a model with two of each block
DESCENT_SHARE = 0.5  # of what is left to a chain, until which it descends
UNLIKE = (1.05, 3.0)  # times the best beginning: others that chains go on from
HEATS = (1.0, 8.0)  # times the temperature, in turn
TURN = 10  # batches of `LEAST_EACH` until the temperature changes
LEAST_EACH = 10  # proposals for each operator, without a better strategy, before a chain may stop


class Round:
    """A search from its initial strategies until all its chains have ended.

    Attributes:
        stop: set by an interrupt. note: called with costs and the number of proposals; None for a
            smaller model. least: the proposals for each operator before a chain may stop.
        best: the chain with the best strategy. runs: `chain_arrays.RUN` of all chains of the whole
            model.
        initial_us: the time of a step of each initial strategy.
        proposals: of all chains that have ended.
    """

    best: Walker

    def __init__(
        self,
        model: Model,
        options: Options,
        stop: threading.Event,
        start: Mapping[str, Configuration] | None = None,
        note: Callable[[int, int], None] | None = None,
        least: float = LEAST_EACH,
    ) -> None:
        self.model, self.options, self.stop, self.least = model, options, stop, least
        self.note = note
        self.proposals, self.runs = 0, list[Array]()
        self.initial_us: dict[str, float] = {}
        self._costs: dict[str, int] = {}
        self._beginnings: dict[str, Mapping[str, Configuration]] = {}
        self._start = start
        self._began = time.perf_counter()

    def walker(self, number: int) -> Walker:
        """Return a new chain with its own seed."""
        options, model = self.options, self.model
        seed = options.seed * 1000 + number
        return Walker(model, options.moves, options.temperature, options.simulation != "full", seed)

    def walk(self) -> None:
        """Try the initial strategies, then let chains continue from the best ones.

        In a recurrent network, chains also start from strategies that are quite different but not
        much slower, because the start matters more there than the length of a chain.
        """
        first = self.walker(0)
        self._beginnings = self._candidates()
        self._try(first, "data")
        try:
            self._try_others(first)
        except KeyboardInterrupt:
            self.stop.set()
        names = self._unequal()
        walkers = [first, *(self.walker(i) for i in range(1, self.options.chains))]
        self.best = first
        self._go_on({walker: names[i % len(names)] for i, walker in enumerate(walkers)})
        if self.note is None or not is_recurrent(self.model):
            return
        least, most = (share * self._costs[names[0]] for share in UNLIKE)
        others = [name for name in names[len(walkers) :] if least <= self._costs[name] <= most]
        for at in range(0, len(others), len(walkers)):
            if self.stop.is_set() or self._left() <= 0:
                return
            some = others[at : at + len(walkers)]
            self._go_on({self.walker(len(walkers) + at + i): name for i, name in enumerate(some)})

    def _try_others(self, walker: Walker) -> None:
        """Simulate the initial strategies; those that need a search of their own come last."""
        others = [name for name in self._beginnings if name != "data"]
        for name in sorted(others, key=lambda name: name not in ALWAYS):
            late = self.options.seconds and self._left() <= 1.0 - BEGINNINGS_SHARE
            if name in ALWAYS or not late:
                self._try(walker, name)
        if self.options.computers and self._left() > 0:
            computers = Computers(self.model)
            if computers.model is not None:
                found = self._small(computers.model, COMPUTERS_SHARE)
                for inside in (Parallel.SAMPLE, Parallel.PARAMETER):
                    name = f"computers, {inside}s"
                    self._try(walker, name, computers.spread(found, inside))
        if self.options.blocks and self._left() > 0:
            blocks = Blocks(self.model)
            if blocks.model is not None:
                found = self._small(blocks.model, BLOCKS_SHARE, blocks=False)
                self._try(walker, "blocks", blocks.spread(found))

    def _candidates(self) -> dict[str, Mapping[str, Configuration]]:
        """Return the initial strategies that need no search."""
        names = dict.fromkeys(("data", *self.options.initial))
        found = {name: NAMED[name](self.model) for name in names}
        for number in range(self.options.random):
            found[f"random {number}"] = randomly(self.model, self.options.seed + number)
        if self._start is not None:
            found["imported"] = self._start
        return found

    def _try(
        self, walker: Walker, name: str, configurations: Mapping[str, Configuration] | None = None
    ) -> None:
        """Simulate an initial strategy and record its cost."""
        if configurations is not None:
            self._beginnings[name] = configurations
        self._costs[name] = walker.begin(self._beginnings[name])
        self.initial_us[name] = walker.step_ns / 1e3
        self._say(self._costs[name])

    def _unequal(self) -> list[str]:
        """Return initial strategies of different costs, the best first.

        Data parallelism is always simulated, but chains start from it only if it was asked for.
        """
        known = set(self._costs) - ({"data"} - set(self.options.initial))
        names = {self._costs[name]: name for name in known or self._costs}
        return [names[cost] for cost in sorted(names)]

    def _small(self, model: Model, part: float, **given: Any) -> Mapping[str, Configuration]:
        """Return the result of a search for a smaller model, in part of the time."""
        options = self.options
        share = replace(
            options,
            seconds=None if options.seconds is None else options.seconds * part,
            proposals=None if options.proposals is None else int(options.proposals * part),
            computers=False,
            chains=1,
            **given,
        )
        inner = Round(model, share, self.stop)
        inner.walk()
        self.proposals += inner.proposals
        inner.best.restore(inner.best.settled)
        return inner.best.settled.configurations()

    def _go_on(self, begins: Mapping[Walker, str]) -> None:
        """Run chains until each has ended, or an interrupt comes.

        Args:
            begins: the initial strategy of each chain.
        """
        try:
            for walker, name in begins.items():
                walker.begin(self._beginnings[name])
            if not self.stop.is_set():
                self._together(list(begins))
        except KeyboardInterrupt:
            self.stop.set()
        begun = [walker for walker in begins if walker.best_ns]
        self.best = min(self.best, *begun, key=lambda walker: walker.best_ns)
        self.proposals += sum(walker.proposals for walker in begun)
        self.runs += [walker.chain.run for walker in begun]

    def _together(self, walkers: Sequence[Walker]) -> None:
        if len(walkers) == 1:
            self._one(walkers[0], 0)
            return
        with ThreadPoolExecutor(len(walkers)) as pool:
            waiting = [pool.submit(self._one, walker, i) for i, walker in enumerate(walkers)]
            try:
                for future in waiting:
                    future.result()
            except KeyboardInterrupt:
                self.stop.set()

    def _say(self, cost: int, proposals: int = 0) -> None:
        if self.note is not None:
            self.note(cost, self.proposals + proposals)

    def _left(self, walker: Walker | None = None) -> float:
        """Return the share of the search that is left, for one chain."""
        made = 0 if walker is None else walker.proposals * self.options.chains
        return self.options.left(self._began, self.proposals + made)

    def _one(self, walker: Walker, number: int) -> None:
        """Descend, then run one chain until its best has not improved for long."""
        points = len(self.model.tasks) * len(self.model.machine.processors)
        floor = LEAST_EACH * len(walker.chain.free)
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
                best, found = walker.best_ns, int(walker.run["before_best"])
            made = walker.proposals
            vain = max(least, self.options.patience * made) - (made - found)
            if vain <= 0:
                return
            size = min(batch, math.ceil(vain))
            if self.options.proposals is not None:
                rest = self.options.proposals - self.proposals
                size = min(size, math.ceil(rest / self.options.chains) - made)
            warmth = HEATS[made // (TURN * floor) % len(HEATS)]
            if warmth > heat:
                walker.return_to_best()
            heat = warmth
            walker.walk(size, heat)
            self._say(walker.best_ns, walker.proposals)
