"""The cost database: measured times, each taken once in an environment and kept between runs.

It is the store of all that is measured (`soapstone.cache`), of the kind "cost". A time is recorded
under a text that says all there is to what was measured, with the stamps of the sources that run
and measure it. TASO, section 2.6: an operator is measured once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from soapstone.cache.store import Store
from soapstone.kernels.measure import environment

ROUNDS = 7
_LEAST_US = 1e-3  # of a time: clocks tell no less


@cache
def database(path: Path | None = None) -> Store:
    """Return the process's database, or that of a file."""
    return Store("cost", path, environment())


def robust(samples: Sequence[float]) -> float:
    """Return the median of the lowest group of samples that agree.

    Another process can only make a run slower, and on a busy machine it does so to most runs. A
    group is three samples or more within a tenth; without one it is the lower quartile.
    """
    ordered = sorted(samples)
    low = _group(ordered)
    if low is None:
        return ordered[(len(ordered) - 1) // 4]
    return statistics.median(us for us in ordered if low <= us <= 1.2 * low)


class Timing(NamedTuple):
    """A robust time in microseconds, and whether the best runs agree on it."""

    us: float
    settled: bool


def interleaved(runs: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[Timing]:
    """Return a robust time of each run, taken in turns so that a busy machine hurts all alike.

    Each call of a run returns the time of one execution; a negative time is one in which the
    process was preempted, and counts only where there is no other. A run is taken again, up to six
    times as often, until it has `rounds` times of which the lowest agree.
    """
    clean: list[list[float]] = [[] for _ in runs]
    rest: list[list[float]] = [[] for _ in runs]
    for _ in range(6 * rounds):
        waiting = [i for i in range(len(runs)) if not _settled(clean[i], rounds)]
        if not waiting:
            break
        for i in waiting:
            us = runs[i]()
            (clean if us >= 0 else rest)[i].append(abs(us))
    return [
        Timing(max(_LEAST_US, robust(mine if len(mine) > 2 else mine + other)), _settled(mine, 3))
        for mine, other in zip(clean, rest)
    ]


def _group(ordered: Sequence[float]) -> float | None:
    """Return the first of three sorted samples within a tenth, or None."""
    for low, high in zip(ordered, ordered[2:]):
        if high <= 1.1 * low:
            return low
    return None


def _settled(samples: Sequence[float], rounds: int) -> bool:
    """Return whether there are enough samples, and the lowest of them agree."""
    ordered = sorted(samples)
    return len(ordered) >= rounds and _group(ordered) in ordered[:2]
