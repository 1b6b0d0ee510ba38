"""Steps of strategies on this computer, timed in turns and at one speed of its processors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from soapstone.engine.measuring import hold, running
from soapstone.engine.peers import Peers
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array
from soapstone.runtime.analysis.message import ENDS, STARTS
from soapstone.runtime.executors.threads import do_nothing
from soapstone.runtime.model.launch import fill_name, fold_name
from soapstone.runtime.observe.profile import MESSAGE, WAIT, Event, received
from soapstone.search.cost.measure import Yardstick
from soapstone.search.parallel.covering import Homes
from soapstone.search.parallel.problem.prepare import Model
from soapstone.system import preemptions

Name = TypeVar("Name", bound=Hashable)

UNDISTURBED_S = 0.02  # of a step for each preemption: who wants a whole processor takes more
_NO_WORK = (WAIT, MESSAGE, *STARTS, *ENDS)  # of a timeline: waiting, and messages between processes
_WARM, _EACH, _ROUND_S = 2, 3, 0.05  # steps before one; steps and seconds of a run's turn
_SLACKS, _LEVELS = (1.07, 1.15, 1.32), 40  # of products' times at one speed; speeds looked at
_FEW, _BETTER = 3, 4  # steps that say something; of fewer at a speed, the better fourth is taken


@dataclass(frozen=True)
class Step:
    """What a step under a strategy took, in microseconds of the slowest process.

    Attributes:
        us: from asking for it to its end.
        inside_us: of another step, from its first task to its last; 0 where no timeline was taken.
        points_ns: in that step, of each task on each device; None where there is no timeline.
        beside_ns: of those, while other devices worked: the mean over all others.
        messages: (messages, 2), bytes between processes, and the ns from when they could be taken,
            since their sender had started them and their receiver waited, until they were.
    """

    us: float
    inside_us: float = 0.0
    points_ns: Array | None = None
    beside_ns: Array | None = None
    messages: Array | None = None


class Run:
    """A strategy of a model, bound in a session of its own, whose steps are timed.

    Every process of an executor's run must do the same with its own.

    Args:
        tasks: whether to take timelines, and what each task took on each device. No two points of
            an operator may share a device, and the strategy has configurations alone.
        constants: the contents of inputs that never change, by name.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        tasks: bool = True,
        executor: str = "local",
        constants: Mapping[str, Array] = NOTHING,
    ) -> None:
        self._stack = ExitStack()
        self._shape = len(model.tasks), len(model.machine.processors)
        self.peers = Peers(executor)
        context = running(
            model.graph, model.machine, strategy, executor=executor, constants=constants
        )
        self.session, self._bound = self._stack.enter_context(context)
        hold(self._bound)
        self._tasks = tasks
        self._task_of: dict[str, int | None] = {}
        homes = Homes(model)
        for launch in self._bound.program.launches if tasks else ():
            task = homes.of(launch)
            name = launch.node.name
            self._task_of[name] = self._task_of[fold_name(name)] = task
            for argument in launch.arguments:
                self._task_of.setdefault(fill_name(argument.region), task)

    def step(self) -> Step:
        """Return what a step takes once others have warmed the caches."""
        for _ in range(_WARM):
            self.session.run(self._bound)
        self.peers.meet()
        asked = time.perf_counter_ns()
        self.session.run(self._bound)
        spent = float(self.peers.all(np.array([time.perf_counter_ns() - asked])).max())
        if not self._tasks:
            return Step(spent / 1e3)
        self.peers.meet()
        mine = self._bound.trace.replay(profile=True)
        assert mine is not None
        timeline = self.session.runtime.executor.gathered(mine)
        found = None if timeline is None else self._read(timeline.events)
        found = self.peers.first(found)
        size = 2 * math.prod(self._shape)
        points_ns, beside_ns = found[1 : 1 + size].reshape(2, *self._shape)
        messages = found[1 + size :].reshape(-1, 2)
        return Step(spent / 1e3, found[0] / 1e3, points_ns, beside_ns, messages)

    def _read(self, events: Sequence[Event]) -> Array:
        """Return what a step took, tasks on each device, beside others, and messages (ns)."""
        points_ns, beside_ns = np.zeros(self._shape), np.zeros(self._shape)
        working = [
            _worked([e for e in events if e.processor == number and e.category not in _NO_WORK])
            for number in range(self._shape[1])
        ]
        first = min(event.start_ns for event in events)
        last = max(event.end_ns for event in events)
        for event in events:
            task = self._task_of.get(event.name)
            if event.category not in _NO_WORK and task is not None:
                points_ns[task, event.processor] += event.duration_ns
                for other, (when, done) in enumerate(working):
                    if other != event.processor:
                        both = np.diff(np.interp([event.start_ns, event.end_ns], when, done))[0]
                        beside_ns[task, event.processor] += both / (len(working) - 1)
        messages = [number for event, ns in received(events) for number in (event.nbytes, ns)]
        times = last - first, *points_ns.ravel(), *beside_ns.ravel(), *messages
        return np.array(times, np.float64)

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        """What the memory of each device holds, in all processes, each of which must ask."""
        mine = self.session.peak_bytes_per_device
        names = [processor.name for processor in self.session.machine.processors]
        found = self.peers.all(np.array([mine.get(name, 0) for name in names])).max(0)
        return tuple(int(nbytes) for nbytes in found)

    def close(self) -> None:
        """Stop the session's workers."""
        self._stack.close()


def _worked(events: Sequence[Event]) -> tuple[Array, Array]:
    """Return when a device's tasks began and ended, and how long it had worked by then (ns)."""
    ordered = sorted(events, key=lambda event: event.start_ns)
    when = [ns for event in ordered for ns in (event.start_ns, event.end_ns)]
    done = np.cumsum([ns for event in ordered for ns in (0, event.duration_ns)])
    return np.array(when or [0], np.float64), np.array(done if when else [0], np.float64)


class Turns(Generic[Name]):
    """Steps of several runs, taken in turns, with the speed of the processors at each.

    Another guest of the same computer can slow a processor for seconds without a trace here. So
    each worker thread times a matrix product of its own (`Yardstick`) before and after a step, and
    only steps are compared at which all of them took about the same; none in which other processes
    took processors away again and again. How near the products must be to each other is chosen by
    what there is: as near as leaves every run enough steps.
    """

    def __init__(self, runs: Mapping[Name, Run]) -> None:
        self.runs = runs
        self.steps: dict[Name, list[tuple[Array, Step]]] = {name: [] for name in runs}
        self._yardsticks = {
            name: {
                number: Yardstick(run.session.machine.processors[number].threads)
                for number in run.session.runtime.executor.processors
            }
            for name, run in runs.items()
        }

    def take(
        self, least: int, seconds: float, progress: Callable[[int], None] | None = None
    ) -> Speed:
        """Take steps until each run has enough at one speed; return that.

        Args:
            least: how many steps are enough.
            seconds: how long to go on at most; then it is the speed of most steps.
            progress: called with how many runs have enough.
        """
        until = time.monotonic() + seconds
        waiting, speed = list(self.runs), Speed(0.0, _SLACKS[-1])
        while waiting:
            for name in waiting:
                self._round(name)
            speed, counts = self._best(least, _SLACKS[0])
            waiting = [name for name in self.runs if counts[name] < least]
            if progress is not None:
                progress(len(self.runs) - len(waiting))
            if self._agreed(time.monotonic() > until):
                return self.speed(least)
        return speed

    def at(self, name: Name, speed: Speed) -> list[Step]:
        """Return the steps of a run at a speed; where there are few, the shortest of all."""
        found = [step for us, step in self.steps[name] if speed.held(us)]
        if len(found) >= _FEW:
            return found
        steps = sorted((step for _, step in self.steps[name]), key=lambda step: step.us)
        return steps[: max(_FEW, len(steps) // _BETTER)]

    def _round(self, name: Name) -> None:
        run, until = self.runs[name], time.monotonic() + _ROUND_S
        before, count = self._now(name), 0
        while count < _EACH or run.peers.agreed(time.monotonic() < until):
            lost, start = preemptions(), time.monotonic()
            step = run.step()
            most = (time.monotonic() - start) / UNDISTURBED_S
            often = run.peers.all(np.array([preemptions() - lost > most])).any()
            after = self._now(name)
            us = np.full(2 * len(after), math.inf) if often else np.array([*before, *after])
            self.steps[name].append((us, step))
            before, count = after, count + 1

    def _now(self, name: Name) -> Array:
        """Return the microseconds of each worker's product now, in all processes."""
        run, found = self.runs[name], np.zeros(len(self._yardsticks[name]))

        def look(place: int, yardstick: Yardstick) -> Callable[[], None]:
            return lambda: found.__setitem__(place, yardstick.us())

        jobs = {
            number: look(place, yardstick)
            for place, (number, yardstick) in enumerate(self._yardsticks[name].items())
        }
        run.peers.meet()
        run.session.runtime.executor.run_all(jobs, do_nothing)
        return run.peers.all(found).ravel()

    def _agreed(self, mine: bool) -> bool:
        return all(run.peers.agreed(mine) for run in list(self.runs.values())[:1])

    def speed(self, least: int) -> Speed:
        """Return the narrowest speed at which each run has enough steps, else few, else most."""
        for enough in (least, _FEW):
            for slack in _SLACKS:
                speed, counts = self._best(least, slack)
                if min(counts.values()) >= enough:
                    return speed
        return speed

    def _best(self, least: int, slack: float) -> tuple[Speed, dict[Name, int]]:
        """Return the speed at which the run with the fewest steps has most, and how many."""
        lows = {n: np.array([us.min() for us, _ in s]) for n, s in self.steps.items()}
        highs = {n: np.array([us.max() for us, _ in s]) for n, s in self.steps.items()}
        levels = np.unique(np.concatenate([*lows.values()]))
        levels = levels[np.isfinite(levels)]
        best = Speed(0.0, slack), dict.fromkeys(self.runs, 0)
        most = (-1, -1)
        for low in levels[:: max(1, len(levels) // _LEVELS)]:
            speed = Speed(float(low) * math.sqrt(slack), slack)
            counts = {
                name: int(((lows[name] >= low) & (highs[name] <= low * slack)).sum())
                for name in self.runs
            }
            enough = [min(count, least) for count in counts.values()]
            if (min(enough), sum(enough)) > most:
                best, most = (speed, counts), (min(enough), sum(enough))
        return best


@dataclass(frozen=True)
class Speed:
    """A speed of all processors: what a product of matrices takes on each.

    Attributes:
        us: the middle. slack: the longest product over the shortest.
    """

    us: float
    slack: float

    def held(self, us: Array) -> bool:
        """Return whether all products were at this speed."""
        half = math.sqrt(self.slack) * (1 + 1e-9)
        return bool(us.min() * half >= self.us and us.max() <= self.us * half)
