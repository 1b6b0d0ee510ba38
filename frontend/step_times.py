"""Steps of strategies on this computer, timed in turns and at one speed of its processors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from soapstone.frontend.optimize_check import drawn
from soapstone.frontend.optimizers import LEARNING_RATE
from soapstone.frontend.session import Bound, Session
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine
from soapstone.runtime.lower import lower
from soapstone.search.cost.measure import Yardstick
from soapstone.search.parallel.covering import Homes
from soapstone.search.parallel.problem import Model

Name = TypeVar("Name", bound=Hashable)

_EACH, _ROUND_S, _FEW = 3, 0.05, 3  # steps and seconds of a run's turn; fewer steps say little
_SLACK, _LEVELS = 1.15, 60  # of a product's time at one speed; speeds that are looked at


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
            if time.monotonic() > until:
                break
        return speed

    def at(self, name: Name, speed: float) -> list[Step]:
        """Return the steps of a run at a speed, or all where there are few."""
        found = [step for us, step in self.steps[name] if _held(us, speed)]
        return found if len(found) >= _FEW else [step for _, step in self.steps[name]]

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


__all__ = ["Run", "Step", "Turns", "running"]
