"""Lower bounds of a step's time: what no strategy on a machine can pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.bounds.cuts import cut_ns
from soapstone.search.parallel.problem.arrays import MOST_DIMS, Problem
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.prepare import Model


@dataclass(frozen=True)
class Bound:
    """Times in microseconds that no strategy can pass, whatever it moves.

    Attributes:
        path_us: the longest chain of tasks, each cut over all devices and moved at no cost.
        work_us: all tasks uncut, divided by the devices: cutting makes none of them less work.
        cut_us: that chain, and what crosses between groups of devices that share it (`cuts.py`).
    """

    path_us: float
    work_us: float
    cut_us: float

    @property
    def us(self) -> float:
        """The largest of the bounds: no step takes less."""
        return max(self.path_us, self.work_us, self.cut_us)


def lower_bound(model: Model) -> Bound:
    """Return the lower bound for a graph on a machine.

    A point task of any cut takes at least a launch, and one of the points of an operator does at
    least an equal share of its arithmetic; the bytes that all points touch are at least those of
    the operator uncut. On a machine of several kinds of devices the best rate of each is taken.
    Where times are measured the least of any configuration counts instead.
    """
    p = model.problem
    least = least_ns(p)
    path = chain(p, least)
    whole = Settled(model)
    whole.set({})
    kinds = set(p.devices["kind"].tolist())
    work = float(whole.choice.task_ns[:, 0].sum())
    if len(kinds) > 1:
        work = float(least.sum())
    elif len(p.times):
        work = sum(
            min([int(ns), *points_ns.sum(axis=1)])
            for ns, points_ns in zip(whole.choice.task_ns[:, 0], measured_ns(p))
        )
    cut = 0.0 if len(p.times) else cut_ns(model, path, *uncut_ns(p))
    found = (least[path].sum(), work / len(p.devices), cut)
    return Bound(*((int(p.begin_ns[0]) + float(ns)) / 1e3 for ns in found))


def measured_ns(p: Problem) -> list[Array]:
    """Return the measured times of each task's points, a row a configuration."""
    return [p.times[slice(*times), MOST_DIMS:] for times in p.tasks["times"]]


def uncut_ns(p: Problem) -> tuple[Array, Array]:
    """Return the time of each task's launches, and of its arithmetic in one piece. (tasks,)."""
    launches, uncut = np.zeros(len(p.tasks)), np.zeros(len(p.tasks))
    for node, row in enumerate(p.nodes):
        if not row["is_view"]:
            launches[row["task"]] += p.kinds["launch_ns"].min()
            uncut[row["task"]] += p.flops[node] / p.kinds["rates"][:, row["rate"]].max()
    return launches, uncut


def least_ns(p: Problem) -> Array:
    """Return the least time of each task, cut over all devices. int64 (tasks,)."""
    launches, uncut = uncut_ns(p)
    found: Array = np.floor((launches + uncut / len(p.devices)) * p.tasks["scale"] / 1000)
    for task, points_ns in enumerate(measured_ns(p)):
        if points_ns.size:
            found[task] = min(found[task], points_ns[points_ns > 0].min())
    return np.asarray(np.maximum(found, 1), np.int64)


def tails(p: Problem, least: Array) -> Array:
    """Return the least time from a task's readiness to the end of the step. int64 (tasks,)."""
    tail = least.copy()
    after = _after(p)
    waiting = [len(readers) for readers in after]
    before: list[list[int]] = [[] for _ in range(len(p.tasks))]
    for task, readers in enumerate(after):
        for reader in readers:
            before[reader].append(task)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    while ready:
        task = ready.pop()
        for maker in before[task]:
            tail[maker] = max(tail[maker], least[maker] + tail[task])
            waiting[maker] -= 1
            if waiting[maker] == 0:
                ready.append(maker)
    return tail


def chain(p: Problem, least: Array) -> list[int]:
    """Return the longest chain of tasks, each reading a result of the one before it."""
    tail, after = tails(p, least), _after(p)
    found = [int(tail.argmax())]
    while after[found[-1]]:
        found.append(max(after[found[-1]], key=lambda task: int(tail[task])))
    return found


def _after(p: Problem) -> list[set[int]]:
    """Return the tasks that read results of each task."""
    after: list[set[int]] = [set() for _ in range(len(p.tasks))]
    for value in range(len(p.values)):
        readers = set(p.readers_of(value)["task"].tolist()) - {-1}
        for maker in p.makers_of(value):
            after[maker] |= readers
    return after
