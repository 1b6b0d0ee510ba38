"""METG: the smallest task granularity at which a system still reaches a given efficiency.

The method of the paper (section 4): with everything else fixed the tasks are made smaller and
smaller; efficiency is the rate of the kernel's work against the highest rate of the sweep; the
granularity of a run is its time, times the workers, over its tasks; METG(50 %) is where the curve
of efficiency over granularity crosses 50 %, interpolated between the runs around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One size of task: seconds of the fastest run, us of worker time a task, work a second."""

    iterations: int
    seconds: float
    granularity_us: float
    rate: float
    efficiency: float = math.nan


@dataclass(frozen=True)
class Metg:
    """A sweep and what follows from it.

    metg_us: the minimum effective task granularity; None when no run was as efficient as asked.
    bound: the smallest tasks there are were still efficient enough; METG is at most `metg_us`.
    target: the efficiency that was asked for. peak_rate: the most work a second. samples: the runs.
    interrupted: smaller tasks were to follow.
    """

    metg_us: float | None
    bound: bool
    target: float
    peak_rate: float
    samples: tuple[Sample, ...]
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def timed(
    run: Callable[[int], float],
    work: Callable[[int], float],
    tasks: int,
    workers: int,
    *,
    iterations: int,
    repeats: int,
    enough_s: float = math.inf,
) -> Sample:
    """One size of task: the fastest of some runs. The arguments are those of `metg`."""
    found: list[float] = []
    while len(found) < repeats and sum(found) < enough_s:
        found.append(run(iterations))
    seconds = min(found)
    granularity_us = seconds * workers / tasks * 1e6
    return Sample(iterations, seconds, granularity_us, work(iterations) / seconds)


def metg(
    run: Callable[[int], float],
    work: Callable[[int], float],
    tasks: int,
    workers: int,
    *,
    largest: int = 1 << 14,
    repeats: int = 5,
    target: float = 0.5,
    factor: float = 2.0,
    enough_s: float = math.inf,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Metg:
    """Measure the minimum effective task granularity.

    run: seconds of one run of all tasks with a number of iterations. work: what such a run does.
    tasks: how many a run has. workers: how many processors run them. target: the efficiency at
    which a task's time is asked for. largest: the iterations to begin with, divided by `factor`
    until efficiency is well below the target; the fastest of `repeats` runs counts, or of as many
    as take `enough_s`. progress: called with each size. An interrupt ends the sweep; what was
    measured counts, once that is something.

    Raises: ValueError for a target outside (0, 1), or sizes that cannot fall.

    Source: Slaughter et al., Task Bench, SC 2020.
    """
    if not 0 < target < 1:
        raise ValueError(f"target: {target} found; a number between 0 and 1 needed")
    if largest < 1 or repeats < 1 or tasks < 1 or factor <= 1:
        raise ValueError(
            f"largest {largest}, repeats {repeats}, tasks {tasks} and factor {factor} found;"
            " 1 or more of each, and a factor above 1, needed"
        )
    samples: list[Sample] = []
    iterations = largest
    while True:
        if progress is not None:
            progress(f"tasks of {iterations:,} iterations", 0, 1)
        try:
            sample = timed(
                *(run, work, tasks, workers),
                iterations=iterations,
                repeats=repeats,
                enough_s=enough_s,
            )
        except KeyboardInterrupt:
            if not samples:
                raise
            return replace(summary(samples, target), interrupted=True)
        samples.append(sample)
        peak = max(each.rate for each in samples)
        if iterations == 1 or sample.rate < 0.6 * target * peak:
            return summary(samples, target)
        iterations = max(1, int(iterations / factor))


def summary(samples: Sequence[Sample], target: float) -> Metg:
    """METG of the samples of a sweep, from the largest tasks to the smallest."""
    peak = max(sample.rate for sample in samples)
    done = tuple(
        Sample(s.iterations, s.seconds, s.granularity_us, s.rate, s.rate / peak) for s in samples
    )
    good = [number for number, sample in enumerate(done) if sample.efficiency >= target]
    last = good[-1]
    above = done[last]
    if last + 1 == len(done):
        return Metg(above.granularity_us, True, target, peak, done)
    below = done[last + 1]
    share = (above.efficiency - target) / (above.efficiency - below.efficiency)
    high, low = math.log(above.granularity_us), math.log(below.granularity_us)
    return Metg(math.exp(high + share * (low - high)), False, target, peak, done)
