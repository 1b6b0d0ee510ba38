"""The options of a search for a strategy: when it stops, and what its chains begin with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.initial import NAMED
from soapstone.search.parallel.problem.operators import ParallelError

SIMULATIONS = ("delta", "full")


@dataclass(frozen=True)
class Options:
    """How a search goes.

    Attributes:
        seconds, proposals: when to stop; of all chains together. One of both is enough.
        patience: stop a chain when its best is no better, by a thousandth, after this share of its
            search; 1.0: then begin anew with another seed, until the search is over.
        least: proposals until which a search begins anew in any case: those of a small model take
            less than a second, and where its first chain ends says little.
        enough: the gap to the lower bound at which a search ends: nothing much better is left.
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
    least: int = 5_000
    enough: float = 0.01
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

    def left(self, began: float, made: float) -> float:
        """Return which share is left of a search that began then, and made so many proposals."""
        left = 1.0
        if self.seconds is not None:
            spent = time.perf_counter() - began
            left = 1.0 - spent / self.seconds if self.seconds else 0.0
        if self.proposals is not None:
            left = min(left, 1.0 - made / self.proposals if self.proposals else 0.0)
        return left

    def check(self) -> None:
        """Raise a `ParallelError` unless a search that goes so ends, and is simulated somehow."""
        if self.seconds is None and self.proposals is None:
            raise ParallelError("search: neither seconds nor proposals found, one needed")
        if self.simulation not in SIMULATIONS:
            raise ParallelError(
                f"search: simulation {self.simulation!r} found,"
                f" one of {', '.join(SIMULATIONS)} needed"
            )
