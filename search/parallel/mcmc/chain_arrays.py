"""The arrays of a Markov chain, and its random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import record
from soapstone.search.parallel.problem.compiling import compiled
from soapstone.search.parallel.problem.packing import packed

AFFORDED = 8  # operators that a change of a whole class has on average


# The cost now, and the best; how many proposals were made, accepted and simulated, and how many
# came before the best one; tasks that passes did not begin with. `scarce`: memory is. Of the
# proposal that waits for CHECK: its threshold, first place, time and move.
RUN = record(
    "cost best proposals accepted simulated before_best skipped scarce threshold first passed move"
)


@packed
class Chain(NamedTuple):
    """The state of a chain: random numbers, costs and counts."""

    random: Array  # uint64 (1)
    run: Array  # RUN (1)
    weights: Array  # (MOVES): cumulative shares of moves
    free: Array  # operators that may be chosen, those with a configuration of their own
    group_of: Array  # (operators, 2): their class, and those that share their parameters
    group_ptr: Array  # operators of each group
    members: Array
    peer_ptr: Array  # operators that share a value with an operator
    peers: Array
    axes: Array  # (peers, dims): the peer's dim that cuts what they share as each of its own does
    path: Array  # (2, AFFORDED): operators that are changed together, and the place of their peer
    divisors: Array  # numbers of points tried first
    best: Array  # of the best choice what is chosen: operators, devices, uneven tiles
    best_placed: Array
    best_cuts: Array
    load: Array  # (2, devices): work of each device, now and as proposed
    moves: Array  # (MOVES, 2): how often proposed and accepted

    @property
    def chosen(self) -> tuple[Array, Array, Array]:
        """The best choice, as `Choice.chosen`."""
        return self.best, self.best_placed, self.best_cuts


@compiled
def _next(random: Array) -> int:
    """Return 63 random bits (xorshift64*; Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return int(np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(1)))


@compiled
def below(random: Array, limit: Any) -> int:
    """Draw an integer in [0, limit)."""
    return int(_next(random) % limit)


@compiled
def share(random: Array) -> float:
    """Draw a number in [0, 1)."""
    return float(_next(random) >> 10) / 9007199254740992.0
