"""Times of tasks on this computer, taken in real steps of a few strategies that cover all others.

Every operator runs in each of its configurations at least once; the runtime's profile says how long
each launch took, and a launch belongs to the task whose node it was lowered from.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from soapstone.cache.sources import stamp
from soapstone.cache.store import Store
from soapstone.frontend.strategies.step_times import Run, Step, Turns
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import NOTHING, Array
from soapstone.runtime.machines.exchanges import COPY
from soapstone.search.cost.database import database
from soapstone.search.cost.messages import SHORT
from soapstone.search.cost.tasks import Degrees, MeasuredMachine, StepTimes
from soapstone.search.parallel.covering import covering
from soapstone.search.parallel.problem.arrays import UPDATES
from soapstone.search.parallel.problem.choice import Settled, as_strategy, needs_of
from soapstone.search.parallel.problem.geometry import copies
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.problem.timing import step_kind

Progress = Callable[[str, int, int | None], None]
Key = tuple[str, Degrees]  # the class of a task, and the degrees of its operator's dims

_LEAST, _SECONDS = 8, 4.0  # steps of a run that are enough, and how long it may take to get them
_SHARE = 0.25  # of the memory, for runs that are taken in turns


def measure(
    graph: Graph,
    machine: MeasuredMachine,
    progress: Progress | None = None,
    *,
    store: Store | None = None,
    constants: Mapping[str, Array] = NOTHING,
) -> int:
    """Measure the tasks of a graph that the machine's times lack; return how many.

    What is measured goes to the machine's times and to the cost database, also when an interrupt
    ends it early.

    Args:
        progress: called with a stage, and how many of its runs are done.
        store: the cost database, by default the process's.
        constants: the contents of inputs that never change, by name.

    Raises:
        GraphError, StrategyError: the graph does not run here.
    """
    store = database() if store is None else store
    model = prepare(graph, machine)
    runs = [(found, configured(model, found)) for found in covering(model)]
    wanted = {
        (model.kinds[task], degrees): len(devices)
        for _, tasks in runs
        for task, (degrees, devices) in enumerate(tasks)
    }
    asked = [(kind, degrees, points) for (kind, degrees), points in wanted.items()]
    missing = set(machine.times.load(machine, asked, step_kind(graph), store, _sources()))
    if not missing:
        return 0
    covers = [
        Cover(found, tasks)
        for found, tasks in runs
        if any((model.kinds[i], degrees) in missing for i, (degrees, _) in enumerate(tasks))
    ]
    taken: dict[int, Sequence[Step]] = {}
    try:
        with store.measuring():
            while len(taken) < len(covers):
                with ExitStack() as open_runs:
                    group = _group(model, covers, len(taken), constants, open_runs, progress)
                    _take(group, taken, progress, len(covers))
    finally:
        record(
            model, machine, [(covers[number], steps) for number, steps in taken.items()], missing
        )
        kept = [key for key in missing if key[1] in machine.times.of(key[0])]
        if taken:
            machine.times.save(machine, kept, step_kind(graph), store, _sources())
    return len(missing)


def _group(
    model: Model,
    covers: Sequence[Cover],
    first: int,
    constants: Mapping[str, Array],
    open_runs: ExitStack,
    progress: Progress | None,
) -> dict[int, Run]:
    """Return runs of covering strategies from the first on, as many as memory holds at once."""
    most_bytes = model.machine.host.capacity_bytes * _SHARE
    group: dict[int, Run] = {}
    for number in range(first, len(covers)):
        if progress is not None:
            progress("compiling covering strategies", number, len(covers))
        strategy = strategy_of(model, covers[number].configurations)
        run = group[number] = Run(model, strategy, constants=constants)
        open_runs.callback(run.close)
        if sum(run.session.peak_bytes for run in group.values()) > most_bytes:
            break
    return group


def _take(
    group: Mapping[int, Run],
    taken: dict[int, Sequence[Step]],
    progress: Progress | None,
    total: int,
) -> None:
    """Add steps of runs taken in turns; after an interrupt those that there are."""
    turns = Turns(group)
    first = min(group)

    def show(done: int) -> None:
        if progress is not None:
            progress("measuring tasks", first + done, total)

    try:
        turns.take(_LEAST, _SECONDS * len(group), show)
    finally:
        speed = turns.speed(_LEAST)
        taken |= {number: turns.at(number, speed) for number in group if turns.steps[number]}


def _sources() -> str:
    """Return the stamp of what measures tasks: this module, and what makes and times their runs."""
    return stamp(__name__, compiled=True)


@dataclass(frozen=True)
class Cover:
    """A covering strategy, with the degrees of each task's operator and its points' devices."""

    configurations: Mapping[str, Configuration]
    tasks: Sequence[tuple[Degrees, tuple[int, ...]]]


def record(
    model: Model,
    machine: MeasuredMachine,
    runs: Iterable[tuple[Cover, Sequence[Step]]],
    wanted: Collection[Key] | None = None,
) -> None:
    """Set a machine's times from steps of covering strategies.

    A time is the mean over tasks of a class, and over strategies, of what is `usual` over steps.

    Args:
        wanted: the classes and degrees to set; by default all that were run.
    """
    samples: dict[Key, list[Sample]] = {}
    beside_us: list[float] = []
    for cover, taken in runs:
        beside_us.append(
            statistics.median(step.us for step in taken)
            - statistics.median(step.inside_us for step in taken)
        )
        points_ns = np.array([s.points_ns for s in taken if s.points_ns is not None])
        beside_ns = np.array([s.beside_ns for s in taken if s.beside_ns is not None])
        shares = beside_ns.sum(axis=0) / np.maximum(points_ns.sum(axis=0), 1.0)
        parts = usual(points_ns), shares, *handed(model, cover.configurations)
        for task, (degrees, devices) in enumerate(cover.tasks):
            found = Sample(*(part[task, list(devices)] for part in parts))
            samples.setdefault((model.kinds[task], degrees), []).append(found)
    if not beside_us:
        return
    slower, ns_per_byte = influences(samples.values())
    for (kind, degrees), each in samples.items():
        if wanted is None or (kind, degrees) in wanted:
            alone_ns = [
                np.maximum(1.0, s.ns - ns_per_byte * (s.read + s.left)) / (1 + slower * s.share)
                for s in each
            ]
            machine.times.add(kind, degrees, np.mean(alone_ns, axis=0).tolist())
    about = StepTimes(max(0.0, statistics.median(beside_us) * 1e3), slower, ns_per_byte)
    machine.times.set_step(step_kind(model.graph), about)


class Sample(NamedTuple):
    """The points of a task in a strategy, an array each.

    Attributes:
        ns: what they took. share: of it, in which other processors worked.
        read: bytes that they were the first on their device to read, made by others of its memory.
        left: bytes that others have made beside them, and that are read in the next step.
    """

    ns: Array
    share: Array
    read: Array
    left: Array


def handed(model: Model, configurations: Mapping[str, Configuration]) -> tuple[Array, Array]:
    """Return `Sample.read` and `Sample.left` of all tasks, by task and device."""
    settled = Settled(model)
    settled.set(configurations)
    c, p = settled.choice, model.problem
    read, left = (np.zeros((len(model.tasks), len(p.devices))) for _ in range(2))
    memories = [processor.memory for processor in model.machine.processors]
    messages = {
        number: row
        for number, row in enumerate(c.live)
        if row["source"] >= 0 and row["source"] != row["target"]
        if memories[row["source"]] == memories[row["target"]]
    }
    for task in p.order.tolist():
        op = p.tasks["operator"][task]
        for point in range(c.operators["points"][op]):
            for message in needs_of(p, c, task, point):
                row = messages.pop(message, None)
                if row is not None:
                    read[task, c.placed[op, point]] += row["moved"]
    for row in messages.values():
        maker = p.makers[c.givers["row"][row["givers"]]]
        left[maker, row["target"]] += row["moved"]
    return read, left


def influences(classes: Iterable[Sequence[Sample]]) -> tuple[float, float]:
    """Return by which share others' work makes tasks slower, and ns a byte that others have made.

    Both are slopes of least squares over tasks of a class in strategies that differ in them, none
    below 0, the first at most 1. Differences count as shares of a task's time, long tasks for more.
    """
    squares, products = np.zeros((2, 2)), np.zeros(2)
    for samples in classes:
        ns, share, read, _ = (np.array(part) for part in zip(*samples))
        mean_ns = np.maximum(ns.mean(axis=0), 1.0)
        causes = np.stack([mean_ns * share, read])
        off = causes - causes.mean(axis=1, keepdims=True)
        squares += np.einsum("asp,bsp,p->ab", off, off, 1 / mean_ns)
        products += np.einsum("asp,sp,p->a", off, ns - mean_ns, 1 / mean_ns)
    for kept in ([0, 1], [0], [1]):
        part = squares[np.ix_(kept, kept)]
        if np.linalg.matrix_rank(part) < len(kept):
            continue
        slopes = np.zeros(2)
        slopes[kept] = np.linalg.solve(part, products[kept])
        if (slopes >= 0).all():
            return min(1.0, float(slopes[0])), float(slopes[1])
    return 0.0, 0.0


def linked(machine: MeasuredMachine, runs: Iterable[Sequence[Step]]) -> MeasuredMachine:
    """Return a machine whose messages take as long as they did in steps of some runs.

    In a step caches hold more than what is sent, and ranks are never quite in step: a message takes
    longer there than where nothing else is done. How much is told for short ones, by the median,
    and for the others, by their sum.
    """
    found = []
    for taken in runs:
        steps = [step.messages for step in taken if step.messages is not None]
        if steps and len(steps[0]):
            found.append(np.median(np.array(steps), axis=0))
    alone = replace(machine.messages, factors=(1.0, 1.0))
    copies = [each for each in alone.measured if each.kind == COPY]
    if not found or not copies:
        return machine
    nbytes, ns = np.concatenate(found).T
    usual_ns = np.array([np.mean([alone.ns(each, n) for each in copies]) for n in nbytes])
    short = nbytes < SHORT
    factors = (
        float(np.median(ns[short] / usual_ns[short])) if short.any() else 1.0,
        float(ns[~short].sum() / usual_ns[~short].sum()) if not short.all() else 1.0,
    )
    return replace(machine, messages=replace(alone, factors=factors))


def usual(points_ns: Array) -> Array:
    """Return the usual times of a step's tasks: medians over steps, all longer by one factor.

    What disturbs a task is rare for each of them and not for a step of hundreds: medians alone sum
    to less than a usual step. The factor makes up for that.

    Args:
        points_ns: (steps, tasks, devices).
    """
    medians = np.median(points_ns, axis=0)
    total = medians.sum()
    return medians * (np.median(points_ns.sum(axis=(1, 2))) / total if total else 1.0)


def configured(
    model: Model, configurations: Mapping[str, Configuration]
) -> list[tuple[Degrees, tuple[int, ...]]]:
    """Return the degrees of each task's operator under a strategy, and the devices of its points.

    An update's degrees end with how many points make each tile of its gradient (`measured`).
    """
    settled = Settled(model)
    settled.set(configurations)
    c, p = settled.choice, model.problem
    found = []
    for op, _ in model.tasks:
        row, split = p.operators[op], c.operators[op]
        degrees = split["degrees"][: row["dims"]].tolist()
        if row["kind"] == UPDATES:
            degrees.append(call(copies, p, c, op))
        devices = c.placed[op, : split["points"]].tolist()
        found.append((tuple(degrees), tuple(devices)))
    return found


def strategy_of(model: Model, configurations: Mapping[str, Configuration]) -> Strategy:
    """Return the strategy that an executor follows for configurations of a model's operators.

    Raises:
        ParallelError: a configuration is not legal.
    """
    settled = Settled(model)
    settled.set(configurations)
    return as_strategy(model.graph, model, settled.configurations(), {})
