"""Times of tasks on this computer, taken in real steps of a few strategies that cover all others.

Every operator runs in each of its configurations at least once; the runtime's profile says how long
each launch took, and a launch belongs to the task whose node it was lowered from.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from soapstone.frontend.optimize_check import drawn
from soapstone.frontend.optimizers import LEARNING_RATE
from soapstone.frontend.session import Bound, Session
from soapstone.ir.configuration import Configuration
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine
from soapstone.runtime.lower import lower
from soapstone.search.cost.database import CostDatabase, database
from soapstone.search.cost.measure import Yardstick
from soapstone.search.cost.tasks import Degrees, MeasuredMachine
from soapstone.search.parallel.arrays import DEGREES, DIMS, POINTS
from soapstone.search.parallel.choice import Settled, as_strategy
from soapstone.search.parallel.covering import Homes, covering
from soapstone.search.parallel.problem import Model, prepare, step_kind

Progress = Callable[[str, int, int | None], None]
Name = TypeVar("Name", bound=Hashable)
Key = tuple[str, Degrees]  # the class of a task, and the degrees of its operator's dims

_LEAST, _SECONDS = 8, 4.0  # steps of a run that are enough, and how long it may take to get them
_SHARE = 0.25  # of the memory, for runs that are taken in turns
_EACH, _ROUND_S = 3, 0.05  # of a run's turn
_SLACK, _LEVELS = 1.15, 60  # of a product's time at one speed; speeds that are looked at


def measure(
    graph: Graph,
    machine: MeasuredMachine,
    progress: Progress | None = None,
    *,
    store: CostDatabase | None = None,
) -> int:
    """Measure the tasks of a graph that the machine's times lack; return how many.

    What is measured goes to the machine's times and to the cost database, also when an interrupt
    ends it early.

    Args:
        progress: called with a stage, and how many of its runs are done.
        store: the cost database, by default the process's.

    Raises:
        GraphError, StrategyError: the graph does not run here.
    """
    store = database() if store is None else store
    model = prepare(graph, machine)
    runs = [(found, configured(model, found)) for found in covering(model)]
    wanted = {
        (model.kinds[task], degrees): points
        for _, tasks in runs
        for task, (degrees, points) in enumerate(tasks)
    }
    asked = [(kind, degrees, points) for (kind, degrees), points in wanted.items()]
    missing = set(machine.times.load(machine, asked, step_kind(graph), store))
    if not missing:
        return 0
    covers = [
        Cover(found, tasks)
        for found, tasks in runs
        if any((model.kinds[i], degrees) in missing for i, (degrees, _) in enumerate(tasks))
    ]
    most_bytes = machine.host.capacity_bytes * _SHARE
    taken: dict[int, Sequence[Step]] = {}
    try:
        with store.measuring():
            while len(taken) < len(covers):
                with ExitStack() as stack:
                    group: dict[int, Run] = {}
                    for number in range(len(taken), len(covers)):
                        if progress is not None:
                            progress("compiling covering strategies", number, len(covers))
                        run = Run(model, strategy_of(model, covers[number].configurations))
                        stack.callback(run.close)
                        group[number] = run
                        if sum(run.session.peak_bytes for run in group.values()) > most_bytes:
                            break
                    _take(group, taken, progress, len(covers))
    finally:
        record(
            model, machine, [(covers[number], steps) for number, steps in taken.items()], missing
        )
        kept = [key for key in missing if key[1] in machine.times.of(key[0])]
        if taken:
            machine.times.save(machine, kept, step_kind(graph), _LEAST, store)
    return len(missing)


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
        speed = turns.speed(_LEAST)[0]
        taken |= {number: turns.at(number, speed) for number in group if turns.steps[number]}


@dataclass(frozen=True)
class Cover:
    """A covering strategy, with the degrees and the points of each task's operator."""

    configurations: Mapping[str, Configuration]
    tasks: Sequence[tuple[Degrees, int]]


def record(
    model: Model,
    machine: MeasuredMachine,
    runs: Iterable[tuple[Cover, Sequence[Step]]],
    wanted: Collection[Key] | None = None,
) -> None:
    """Set a machine's times from steps of covering strategies.

    A time is the mean over tasks of a class, and over strategies, of its median over steps.

    Args:
        wanted: the classes and degrees to set; by default all that were run.
    """
    samples: dict[Key, list[Array]] = {}
    beside_us: list[float] = []
    for cover, taken in runs:
        beside_us += [step.beside_us for step in taken]
        points_ns = np.median([step.points_ns for step in taken if step.points_ns is not None], 0)
        for task, (degrees, points) in enumerate(cover.tasks):
            key = model.kinds[task], degrees
            samples.setdefault(key, []).append(points_ns[task, :points])
    for (kind, degrees), found_ns in samples.items():
        if wanted is None or (kind, degrees) in wanted:
            machine.times.add(kind, degrees, np.mean(found_ns, axis=0).tolist())
    if beside_us:
        machine.times.set_begin(step_kind(model.graph), statistics.median(beside_us) * 1e3)


def configured(
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


@dataclass(frozen=True)
class Step:
    """What a step under a strategy took.

    Attributes:
        us: from asking for it to its end.
        points_ns: of each task on each device; None where no timeline was taken.
        beside_us: what it took beside the time from its first task to its last.
    """

    us: float
    points_ns: Array | None = None
    beside_us: float = 0.0


class Run:
    """A strategy of a model, bound in a session of its own, whose steps are timed.

    Args:
        tasks: whether to take timelines, and what each task took on each device. No two points of
            an operator may share a device.
    """

    def __init__(self, model: Model, strategy: Strategy, tasks: bool = True) -> None:
        self._stack = ExitStack()
        self._shape = len(model.tasks), len(model.machine.processors)
        context = running(model.graph, model.machine, strategy)
        self.session, self._bound = self._stack.enter_context(context)
        self._tasks = tasks
        self._task_of: dict[str, int | None] = {}
        homes = Homes(model, lower(model.graph, strategy))
        for launch in self._bound.program.launches:
            task = homes.of(launch)
            name = launch.node.name
            self._task_of[name] = self._task_of[f"{name}.fold"] = task
            for argument in launch.arguments:
                self._task_of.setdefault(f"fill {argument.region}", task)

    def step(self) -> Step:
        """Return what a step takes once another has warmed the caches."""
        self.session.run(self._bound)
        asked = time.perf_counter_ns()
        self.session.run(self._bound)
        spent = time.perf_counter_ns() - asked
        if not self._tasks:
            return Step(spent / 1e3)
        timeline = self._bound.trace.replay(profile=True)
        assert timeline is not None
        points_ns = np.zeros(self._shape)
        events = timeline.events
        for event in events:
            task = self._task_of.get(event.name)
            if event.category != "wait" and task is not None:
                points_ns[task, event.processor] += event.duration_ns
        inside = max(event.end_ns for event in events) - events[0].start_ns
        return Step(spent / 1e3, points_ns, (spent - inside) / 1e3)

    def close(self) -> None:
        """Stop the session's workers."""
        self._stack.close()


class Turns(Generic[Name]):
    """Steps of several runs, taken in turns, with the speed of the processors at each.

    Another guest of the same computer can slow a processor for seconds without a trace here. So
    each worker thread times a matrix product of its own (`Yardstick`) before and after a step, and
    only steps at one speed are compared; none beside which another process wants a processor.
    """

    def __init__(self, runs: Mapping[Name, Run]) -> None:
        self.runs = runs
        self.steps: dict[Name, list[tuple[Array, Step]]] = {name: [] for name in runs}
        self._yardsticks = {
            name: [Yardstick(p.threads) for p in run.session.machine.processors]
            for name, run in runs.items()
        }

    def take(
        self, least: int, seconds: float, progress: Callable[[int], None] | None = None
    ) -> float:
        """Take steps until each run has enough at one speed; return that, as a product's us.

        Args:
            least: how many steps are enough.
            seconds: how long to go on at most; then it is the speed of most steps.
            progress: called with how many runs have enough.
        """
        until = time.monotonic() + seconds
        waiting, speed = list(self.runs), 0.0
        while waiting:
            for name in waiting:
                self._round(name)
            speed, counts = self.speed(least)
            waiting = [name for name in self.runs if counts[name] < least]
            if progress is not None:
                progress(len(self.runs) - len(waiting))
            if time.monotonic() > until and all(
                counts[name] or self.steps[name] for name in counts
            ):
                break
        return speed

    def at(self, name: Name, speed: float) -> list[Step]:
        """Return the steps of a run at a speed, or all where there are none."""
        found = [step for us, step in self.steps[name] if _held(us, speed)]
        return found or [step for _, step in self.steps[name]]

    def _round(self, name: Name) -> None:
        run, until = self.runs[name], time.monotonic() + _ROUND_S
        before, count = self._now(name), 0
        while count < _EACH or time.monotonic() < until:
            step = run.step()
            after = self._now(name)
            self.steps[name].append((np.array([*before, *after]), step))
            before, count = after, count + 1

    def _now(self, name: Name) -> list[float]:
        """Return the microseconds of each worker's product now, endless beside other processes."""
        yardsticks = self._yardsticks[name]
        found = [0.0] * len(yardsticks)

        def look(number: int) -> Callable[[], None]:
            return lambda: found.__setitem__(number, yardsticks[number].us())

        executor = self.runs[name].session.runtime.executor
        executor.run_all({number: look(number) for number in range(len(found))}, _pass)
        return found if _alone() else [math.inf] * len(found)

    def speed(self, least: int) -> tuple[float, dict[Name, int]]:
        """Return the speed at which the run with the fewest steps has most, the full one first."""
        seen = {name: np.array([_level(us) for us, _ in s]) for name, s in self.steps.items()}
        levels = np.unique(np.concatenate([*seen.values(), [0.0]]))
        levels = levels[levels > 0]
        best: tuple[float, dict[Name, int]] = (0.0, dict.fromkeys(self.runs, 0))
        most = (-1, -1)
        for speed in levels[:: max(1, len(levels) // _LEVELS)]:
            counts = {
                name: int(((us > speed / _SLACK) & (us < speed * _SLACK)).sum())
                for name, us in seen.items()
            }
            enough = [min(count, least) for count in counts.values()]
            if (min(enough), sum(enough)) > most:
                best, most = (float(speed), counts), (min(enough), sum(enough))
        return best


def _level(us: Array) -> float:
    """Return the speed of a step as a product's time, or 0 where it changed or differed."""
    low, high = float(us.min()), float(us.max())
    return (low + high) / 2 if low > 0 and high < _SLACK**2 * low else 0.0


def _held(us: Array, speed: float) -> bool:
    return speed / _SLACK < _level(us) < speed * _SLACK


def _alone() -> bool:
    """Return whether no thread but this one wants a processor; true where that is not known."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) <= 1
    except (OSError, ValueError, IndexError):
        return True


def _pass() -> None:
    """A yardstick is soon done."""


__all__ = [
    "Cover",
    "Progress",
    "Run",
    "Step",
    "Turns",
    "configured",
    "measure",
    "record",
    "running",
    "strategy_of",
]
