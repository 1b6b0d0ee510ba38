"""Times of tasks on this computer, taken in real steps of a few strategies that cover all others.

Every operator runs in each of its configurations at least once; the runtime's profile says how long
each launch took, and a launch belongs to the task whose node it was lowered from.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from soapstone.frontend.optimize_check import drawn
from soapstone.frontend.optimizers import LEARNING_RATE
from soapstone.frontend.session import Bound, Session
from soapstone.ir.configuration import Configuration
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine, Profile
from soapstone.runtime.lower import lower
from soapstone.search.cost.database import CostDatabase, database, preemptions
from soapstone.search.cost.measure import Yardstick
from soapstone.search.cost.tasks import Degrees, MeasuredMachine
from soapstone.search.parallel.arrays import DEGREES, DIMS, POINTS
from soapstone.search.parallel.choice import Settled, as_strategy
from soapstone.search.parallel.covering import Homes, covering
from soapstone.search.parallel.problem import Model, prepare, step_kind

Progress = Callable[[str, int, int | None], None]
Key = tuple[str, Degrees]  # the class of a task, and the degrees of its operator's dims

_LEAST, _MOST, _BUDGET_S = 8, 40, 0.6  # steps of one run
_SLACK = 0.15  # of a product's time, at one speed
_PATIENCE = 6  # times as long is waited for steps at one speed
T = TypeVar("T")


def measure(
    graph: Graph,
    machine: MeasuredMachine,
    progress: Progress | None = None,
    *,
    yardstick_us: float | None = None,
    store: CostDatabase | None = None,
) -> int:
    """Measure tasks of a graph that the machine's times lack; return how many, configurations apart.

    What is measured goes to the machine's times and to the cost database, also when an interrupt
    ends it early.

    Args:
        progress: called with a stage, and how many of its runs are done.
        yardstick_us: the speed at which times are taken, see `Pace`.
        store: the cost database, by default the process's.

    Raises:
        GraphError, StrategyError: the graph does not run here.
    """
    store = store or database()
    model = prepare(graph, machine)
    runs = [(found, _configured(model, found)) for found in covering(model)]
    wanted = {
        (model.kinds[task], degrees): points
        for _, tasks in runs
        for task, (degrees, points) in enumerate(tasks)
    }
    asked = [(kind, degrees, points) for (kind, degrees), points in wanted.items()]
    missing = set(machine.times.load(machine, asked, step_kind(graph), store))
    if not missing:
        return 0
    runs = [
        (found, tasks)
        for found, tasks in runs
        if any((model.kinds[i], degrees) in missing for i, (degrees, _) in enumerate(tasks))
    ]
    samples: dict[Key, list[Array]] = {}
    beside_ns: list[float] = []
    try:
        with store.measuring():
            for number, (found, tasks) in enumerate(runs):
                if progress is not None:
                    progress("measuring tasks", number, len(runs))
                points_ns, beside = measured(model, strategy_of(model, found), yardstick_us, store)
                beside_ns.append(beside)
                for task, (degrees, points) in enumerate(tasks):
                    key = model.kinds[task], degrees
                    samples.setdefault(key, []).append(points_ns[task, :points])
    finally:
        if beside_ns:
            machine.times.set_begin(step_kind(graph), statistics.median(beside_ns))
            for (kind, degrees), found_ns in samples.items():
                if (kind, degrees) in missing:
                    machine.times.add(kind, degrees, np.mean(found_ns, axis=0).tolist())
            kept = [key for key in missing if key in samples]
            machine.times.save(machine, kept, step_kind(graph), len(beside_ns), store)
    return len(missing)


def _configured(
    model: Model, configurations: Mapping[str, Configuration]
) -> list[tuple[Degrees, int]]:
    """Return the degrees and the points of each task's operator under a strategy."""
    settled = Settled(model)
    settled.set(configurations)
    rows, p = settled.choice.operators, model.problem
    return [
        (
            tuple(rows[op, DEGREES : DEGREES + p.operators[op, DIMS]].tolist()),
            int(rows[op, POINTS]),
        )
        for op, _ in model.tasks
    ]


def strategy_of(model: Model, configurations: Mapping[str, Configuration]) -> Strategy:
    """Return the strategy that an executor follows for configurations of a model's operators.

    Raises:
        ParallelError: a configuration is not legal.
    """
    settled = Settled(model)
    settled.set(configurations)
    return as_strategy(model.graph, model, settled.configurations(), {})


@contextmanager
def running(graph: Graph, machine: Machine, strategy: Strategy) -> Iterator[tuple[Session, Bound]]:
    """Yield a session in which a graph is bound under a strategy, and fed with random inputs."""
    mapper = load_mapper("strategy", strategy)
    mapper.attach(machine)
    session = Session(machine, mapper, seed=0)
    try:
        bound = session.bind(graph, strategy)
        for name, feed in bound.feeds.items():
            feed[...] = drawn(graph, name) if graph.roles[name] is Role.INPUT else 1
        if LEARNING_RATE in bound.feeds:
            bound.feeds[LEARNING_RATE][...] = 0  # parameters stay what they are
        yield session, bound
    finally:
        session.close()


def measured(
    model: Model,
    strategy: Strategy,
    yardstick_us: float | None = None,
    store: CostDatabase | None = None,
) -> tuple[Array, float]:
    """Return the ns of each task's points under a strategy, and those of a step beside its tasks.

    A point's are those of its device: no two points of an operator may share one. Medians over
    steps. float64 (tasks, devices).
    """
    with running(model.graph, model.machine, strategy) as (session, bound):
        timelines, beside = _timelines(bound, Pace(session, yardstick_us, store))
    homes = Homes(model, lower(model.graph, strategy))
    tasks_of: dict[str, int | None] = {}
    for launch in bound.program.launches:
        task = homes.of(launch)
        tasks_of[launch.node.name] = tasks_of[f"{launch.node.name}.fold"] = task
        for argument in launch.arguments:
            tasks_of.setdefault(f"fill {argument.region}", task)
    steps = np.zeros((len(timelines), len(model.tasks), len(model.machine.processors)))
    for step, timeline in zip(steps, timelines):
        for event in timeline.events:
            task = tasks_of.get(event.name)
            if event.category != "wait" and task is not None:
                step[task, event.processor] += event.duration_ns
    return np.median(steps, axis=0), statistics.median(beside)


class Pace:
    """Tells whether all processors of a session run at one speed, by default their full one.

    Another guest of the same computer can slow one of them for seconds without a trace here, so
    each worker thread times a matrix product of its own (`Yardstick`) before and after a step.
    Nor does a step count in which a thread lost its core to another process.

    Args:
        yardstick_us: what the product takes at that speed; by default the least ever seen.
    """

    def __init__(
        self,
        session: Session,
        yardstick_us: float | None = None,
        store: CostDatabase | None = None,
    ) -> None:
        self._store = store or database()
        self._executor = session.runtime.executor
        threads = [processor.threads for processor in session.machine.processors]
        self._mark = f"pace of workers {threads}"
        self._yardsticks = [Yardstick(count) for count in threads]
        self._given = yardstick_us is not None
        self.yardstick_us = yardstick_us or self._store.get(self._mark) or math.inf
        self.kept = self.taken = 0

    def now(self) -> list[float]:
        """Return the microseconds of each worker's product now; all run at once."""
        found = [0.0] * len(self._yardsticks)

        def look(number: int) -> Callable[[], None]:
            return lambda: found.__setitem__(number, self._yardsticks[number].us())

        self._executor.run_all({n: look(n) for n in range(len(found))}, _pass)
        return found

    def held(self) -> bool:
        """Return whether no processor is much slower or faster now."""
        found = self.now()
        if not self._given and min(found) < self.yardstick_us:
            self.yardstick_us = self._store.lowest(self._mark, min(found))
        slack = 1.0 + _SLACK
        return all(self.yardstick_us / slack < us < self.yardstick_us * slack for us in found)

    def during(self, run: Callable[[], T], least: int, most: int, seconds: float) -> list[T]:
        """Return what at least so many runs at that speed give; others too where they are fewer.

        Args:
            seconds: how long to go on for more than `least`; six times as long for `least`.
        """
        kept: list[T] = []
        rest: list[T] = []
        began = time.monotonic()
        before = self.held()
        while len(kept) < most:
            spent = time.monotonic() - began
            if spent > seconds and (len(kept) >= least or spent > _PATIENCE * seconds):
                break
            lost = preemptions()
            found = run()
            alone = preemptions() == lost
            after = self.held()
            (kept if before and after and alone else rest).append(found)
            before = after
        self.kept, self.taken = self.kept + len(kept), self.taken + len(kept) + len(rest)
        return kept if len(kept) >= least else kept + rest


def _pass() -> None:
    """A yardstick is soon done."""


def _timelines(bound: Bound, pace: Pace) -> tuple[Sequence[Profile], Sequence[float]]:
    """Return the timelines of some steps, and what each took before its first task began."""

    def run() -> tuple[Profile, float]:
        bound.trace.replay()  # what ran between steps has emptied the caches
        asked = time.perf_counter_ns()
        timeline = bound.trace.replay(profile=True)
        assert timeline is not None
        return timeline, float(timeline.events[0].start_ns - asked)

    run()
    found = pace.during(run, _LEAST, _MOST, _BUDGET_S)
    return [timeline for timeline, _ in found], [beside for _, beside in found]


def step_us(session: Session, bound: Bound, pace: Pace, steps: int, seconds: float) -> float:
    """Return the median time of a step at one speed, in microseconds.

    Args:
        steps: at least so many, where they can be had within six times as many seconds.
    """

    def run() -> float:
        session.run(bound)
        asked = time.perf_counter_ns()
        session.run(bound)
        return (time.perf_counter_ns() - asked) / 1e3

    run()
    return statistics.median(pace.during(run, steps, 1 << 30, seconds))


__all__ = ["Pace", "Progress", "measure", "measured", "running", "step_us", "strategy_of"]
