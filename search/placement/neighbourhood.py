"""Local improvement of a plan: a few gaps at a time are decided again, exactly.

Large neighbourhood search (Shaw 1998). Windows of some steps are drawn at random, and some of the
gaps over them are freed. The decisions on all others stay, and take their space.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np

from soapstone.deadline import Deadline
from soapstone.search.placement.optimal import Problem, search
from soapstone.search.placement.timeline import Gap, Timeline

_SPANS, _SIZES = (1, 4, 20), (48, 150, 400)  # steps of a window, gaps that are freed at once
_WIDTH, _ROUNDS, _PATIENCE = 128, 300, 12  # of the search of a window, and of its prices
STALE = 40  # windows without anything better, after which this ends


def improved(
    known: Timeline,
    start: Set[Gap],
    lower: int,
    *,
    deadline: Deadline,
    seed: int = 0,
    progress: Callable[[int, int, int], None] | None = None,
) -> frozenset[Gap]:
    """Return gaps to bridge that copy no more bytes than those given.

    Args:
        known: the nodes in their order, and the capacity. start: gaps that fit.
        lower: a lower bound of the bytes.
        deadline: the search ends then, or when nothing improves any more.
        seed: of the windows and the gaps that are freed.
        progress: receives the windows since the last improvement, their largest number, and the
            bytes of the best.
    """
    whole = Problem(known)
    best, moved = frozenset(start), known.moved_bytes(start)
    random = np.random.default_rng(seed)
    stale = 0
    while whole.gaps and stale < STALE and moved > lower and not deadline.over:
        low, span = int(random.integers(whole.room.size)), int(random.choice(_SPANS))
        near = np.nonzero((whole.low < low + span) & (whole.high > low))[0]
        near = random.permutation(near)[: int(random.choice(_SIZES))]
        among = {whole.gaps[k] for k in near.tolist()}
        problem = Problem(known, among, best)
        prices, bound = problem.prices(moved, _PATIENCE, deadline, _ROUNDS)
        stale += 1
        if problem.rounded(bound) < moved:
            found, _ = search(problem, prices, bound, moved, _WIDTH, deadline)
            if found is not None:
                best = (best - among) | found
                moved, stale = known.moved_bytes(best), 0
        if progress is not None:
            progress(stale, STALE, moved)
    return best
