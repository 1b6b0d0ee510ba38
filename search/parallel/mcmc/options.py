"""The options of a search for a strategy: when it stops, and how its chains begin."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.initial import NAMED
from soapstone.search.parallel.problem.operators import ParallelError

SIMULATIONS = ("delta", "full")
MOST_CHAINS = 1024  # at once: each has a thread and a state of its own


@dataclass(frozen=True)
class Options:
    """The options of a search.

    Attributes:
        seconds, proposals: when to stop, for all chains together; one of both suffices.
        patience: a chain stops when its best has not improved by a thousandth over this share of
            its search; 1.0: it begins again with another seed until the search is over.
        least: the number of proposals until which a search begins again in any case. With a small
            model they take less than a second, and the end of its first chain means little.
        enough: the gap to the lower bound at which a search ends.
        simulation: delta, or full: every simulation begins at the first task.
        blocks: whether to begin with a smaller model that has two of each repeated block.
        computers: whether to begin with a smaller machine whose devices are whole computers.
        descent: whether each chain begins with a descent (`descent.py`).
        moves: the shares of proposals by kind: `proposals.INFORMED`, or `PLAIN`, the paper's.
        initial: names of initial candidates besides random ones; data parallelism is always
            simulated.
        chains: the number that runs at once.
        temperature: the increase in cost that is accepted with probability 1 / e, as a share of the
            average cost of an operator.
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
        """Return the share of a search that is left.

        began: when it started. made: its number of proposals so far.
        """
        left = 1.0
        if self.seconds is not None:
            spent = time.perf_counter() - began
            left = 1.0 - spent / self.seconds if self.seconds else 0.0
        if self.proposals is not None:
            left = min(left, 1.0 - made / self.proposals if self.proposals else 0.0)
        return left

    def check(self) -> None:
        """Check that such a search ends, and can be simulated.

        Raises:
            ParallelError: otherwise.
        """
        if self.seconds is None and self.proposals is None:
            raise ParallelError("search: neither seconds nor proposals found, one needed")
        if not 1 <= self.chains <= MOST_CHAINS:
            raise ParallelError(
                f"search: {self.chains:,} chains found, 1 to {MOST_CHAINS:,} needed: one runs on a"
                " core"
            )
        if self.simulation not in SIMULATIONS:
            raise ParallelError(
                f"search: simulation {self.simulation!r} found,"
                f" one of {', '.join(SIMULATIONS)} needed"
            )
