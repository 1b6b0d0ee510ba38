"""Random programs as users write them: loops, traces of every kind, a host that reads and writes.

A scenario follows from its seed alone, so that every process of a run makes the same one. It is
executed beside its sequential meaning on NumPy arrays, and a failing one is made smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from helpers.runtime.model_steps import Nested, Returned, Sparse, random_nested, random_sparse
from helpers.runtime.programs import (
    ContraryMapper,
    ShuffledMapper,
    Step,
    random_partition,
    random_regions,
    random_step,
)

from soapstone.native.memory import Array
from soapstone.runtime import IndexPartition, Machine, Partition, Region, Runtime, Trace
from soapstone.runtime.machines.start import machine_of, start
from soapstone.runtime.observe.checker import check_log


@dataclass(frozen=True, eq=False)
class Fill:
    """Every element of a region becomes `value`."""

    region: Region
    value: int

    def __str__(self) -> str:
        return f"fill {self.region.name} with {self.value}"


@dataclass(frozen=True, eq=False)
class Host:
    """What the host does: "read" (and compare), "write", "array" (and write), "wait"."""

    kind: str
    region: Region
    seed: int = 0

    def contents(self) -> Array:
        """What it writes."""
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, 100, size=self.region.shape).astype(self.region.dtype)

    def __str__(self) -> str:
        return self.kind if self.kind == "wait" else f"{self.kind} {self.region.name}"


@dataclass(frozen=True, eq=False)
class Loop:
    """A body, some times: "plain", each time in a `trace` block, or captured and replayed.

    between: what the host does after every `every`th time.
    """

    name: str
    times: int
    mode: str
    body: tuple[Action, ...]
    between: tuple[Host, ...] = ()
    every: int = 1

    def __str__(self) -> str:
        inside = [f"  {line}" for action in self.body for line in str(action).splitlines()]
        host = [f"  every {self.every}: {action}" for action in self.between]
        return "\n".join([f"{self.times} times, {self.mode}:", *inside, *host])


Launch = Step | Sparse | Returned | Nested
Action = Launch | Fill | Host | Loop


@dataclass(frozen=True)
class Setup:
    """Where a scenario runs, and under what mapper.

    executor: "processes" is the local one with worker processes. tiles: whether instances of tiles
    are asked for. anywhere: whether in any memory. contrary: whether the mapper answers every
    question. bounded_bytes: of memories that instances leave, between processors and others; 0:
    none.
    """

    executor: str
    cpus: int
    memories: int
    mapper_seed: int
    tiles: bool
    anywhere: bool
    automatic: bool
    contrary: bool = False
    bounded_bytes: int = 0

    def mapper(self) -> ShuffledMapper:
        """The mapper, made anew."""
        kind = ContraryMapper if self.contrary else ShuffledMapper
        anywhere = self.anywhere and self.executor != "legate"
        return kind(self.mapper_seed, self.tiles, anywhere, self.executor == "mpi")

    def runtime(self) -> Runtime:
        """A runtime of this kind."""
        here = self.executor in ("local", "processes")
        mapper = self.mapper()
        if here:
            processes = self.executor == "processes"
            machine = Machine.local(self.cpus, memories=self.memories, processes=processes)
        else:
            machine = machine_of(self.executor, self.cpus)
        if self.bounded_bytes:
            machine = machine.bounded(self.bounded_bytes)
        executor = "local" if here else self.executor
        return start(executor, machine, mapper, automatic=self.automatic)


@dataclass(frozen=True)
class Scenario:
    """Regions, and what is done with them."""

    seed: int
    regions: tuple[Region, ...]
    actions: tuple[Action, ...]
    setup: Setup

    def __str__(self) -> str:
        regions = [str(region) for region in self.regions]
        lines = [f"seed {self.seed}", str(self.setup), *regions, *map(str, self.actions)]
        return "\n".join(lines)


class Difference(AssertionError):
    """A region does not hold what sequential execution gives."""


# -- making them


def scenario(seed: int, executor: str = "local") -> Scenario:
    """The scenario of a seed."""
    rng = np.random.default_rng([seed, 7])
    persistent, transient = random_regions(rng, 4)
    make = _Maker(rng, persistent, transient, executor)
    actions = [*make.hosts(3), *(make.action(0) for _ in range(int(rng.integers(2, 6))))]
    contrary = bool(rng.integers(0, 3))
    bounded = contrary and executor != "legate" and bool(rng.integers(0, 3) == 0)
    setup = Setup(
        executor,
        cpus=int(rng.integers(1, 4 if executor in ("local", "processes") else 3)),
        memories=int(rng.integers(1, 4)),
        mapper_seed=seed,
        tiles=bool(rng.integers(0, 3)),
        anywhere=bool(rng.integers(0, 3)),
        automatic=bool(rng.integers(0, 3)),
        contrary=contrary,
        bounded_bytes=_largest(actions) if bounded else 0,
    )
    return Scenario(seed, tuple(persistent), tuple(actions), setup)


def _room(part: Partition | IndexPartition) -> int:
    """More than the bytes of all instances of an argument, one of each tile, and their partials."""
    whole = part.region.nbytes + 64
    if isinstance(part, IndexPartition):
        return (1 + 2 * part.points) * whole
    tiles = int(part.tiling.volume.sum()) * part.region.dtype.itemsize + 64 * part.points
    return whole + 2 * tiles


def _largest(actions: Iterable[Action]) -> int:
    """More than the bytes that any one launch uses at once, with its partial results."""
    most = 0
    for action in actions:
        if isinstance(action, Loop):
            found = _largest(action.body)
        elif isinstance(action, Fill | Host):
            found = action.region.nbytes + 64
        else:
            found = sum(map(_room, action.partitions))
        most = max(most, found)
    return most


def _nests(action: Action) -> bool:
    """Whether an action has tasks that launch tasks."""
    return any(map(_nests, action.body)) if isinstance(action, Loop) else isinstance(action, Nested)


class _Maker:
    """Draws actions, of those that an executor takes."""

    def __init__(
        self,
        rng: np.random.Generator,
        persistent: list[Region],
        transient: list[Region],
        executor: str,
    ) -> None:
        self.rng = rng
        self.executor = executor
        self.persistent = persistent
        self.transient = transient
        self.count = 0

    def number(self) -> int:
        self.count += 1
        return self.count

    def region(self) -> Region:
        return self.persistent[int(self.rng.integers(0, len(self.persistent)))]

    def step(self, regions: list[Region], varies: bool = False) -> Launch:
        name, kind = f"s{self.number()}", int(self.rng.integers(0, 12))
        if kind == 0 and (sparse := random_sparse(self.rng, name, regions)):
            return sparse
        if kind == 2 and self.executor != "processes":
            return random_nested(self.rng, name, regions, regions)
        if kind == 1:
            first, second = self.rng.choice(len(regions), 2, replace=False)
            target = regions[second]
            points = int(self.rng.integers(1, 4)) if target.rank else 1
            return Returned(name, regions[first], random_partition(self.rng, target, points, True))
        return random_step(self.rng, name, regions, varies)

    def fill(self) -> Fill:
        return Fill(self.region(), int(self.rng.integers(0, 9)))

    def hosts(self, most: int) -> tuple[Host, ...]:
        kinds = ("read", "read", "write", "write", "array", "wait")
        return tuple(
            Host(kinds[int(self.rng.integers(0, 6))], self.region(), self.number())
            for _ in range(int(self.rng.integers(0, most + 1)))
        )

    def action(self, depth: int) -> Action:
        kind = int(self.rng.integers(0, 10))
        if kind < 3:
            return self.step(self.persistent)
        if kind == 3:
            return self.fill()
        if kind == 4:
            return Host("write", self.region(), self.number())
        return self.loop(depth)

    def loop(self, depth: int) -> Loop:
        rng = self.rng
        modes = ("plain", "plain", "trace", "capture") if depth == 0 else ("plain", "trace")
        mode = modes[int(rng.integers(0, len(modes)))]
        times = int(rng.choice([2, 3, 5, 20, 60])) if depth == 0 else int(rng.integers(1, 8))
        length = int(rng.integers(1, 7))
        most = 240 if mode == "plain" else 40
        times = max(2, min(times, most // length))
        body: list[Action] = []
        if mode == "plain":
            for _ in range(length):
                kind = int(rng.integers(0, 14))
                if kind == 0 and depth == 0:
                    body.append(self.loop(1))
                elif kind == 1:
                    body.append(self.fill())
                elif kind == 2:
                    body.append(self.step(self.persistent, varies=True))
                else:
                    body.append(self.step(self.persistent))
            if depth:
                times = min(times, 3)
        else:
            body += [Fill(region, 7) for region in self.transient]
            regions = [*self.persistent, *self.transient]
            body += [self.step(regions) for _ in range(length)]
            body += [self.fill()] * int(rng.integers(0, 2))
        if any(map(_nests, body)):
            times = min(times, 5)  # each of its points analyses launches of its own
        between = self.hosts(2) if rng.integers(0, 2) else ()
        every = int(rng.integers(1, 12))
        return Loop(f"loop{self.number()}", times, mode, tuple(body), between, every)


# -- running them


class Run:
    """One execution of a scenario on a runtime, beside its sequential meaning.

    fresh: whether no region has been used before, so that some can be left as they are: zero.
    """

    def __init__(self, runtime: Runtime, given: Scenario, fresh: bool = True) -> None:
        self.fresh = fresh
        self.runtime = runtime
        self.given = given
        self.arrays: dict[Region, Array] = {}
        self.views: dict[Region, Array] = {}
        self.place = "the start"

    def run(self) -> None:
        """Execute, and compare.

        Raises: Difference, and whatever the runtime raises.
        """
        for number, region in enumerate(self.given.regions):
            self.arrays[region] = np.zeros(region.shape, region.dtype)
            if not self.fresh or (self.given.seed + number) % 2:  # others have no instance yet
                contents = Host("write", region, 1000 + number).contents()
                self.arrays[region] = contents
                self.runtime.write(region, contents)
        for action in self.given.actions:
            self.do(action, 0)
        for region in self.given.regions:
            self.compare(region)

    def compare(self, region: Region) -> None:
        self.same(region, self.runtime.read(region), "read")

    def same(self, region: Region, found: Array, what: str) -> None:
        if not np.array_equal(found, self.arrays[region], equal_nan=region.dtype.kind == "f"):
            raise Difference(
                f"{what} of region {region.name!r} after {self.place}: found {found.tolist()}, "
                f"needed {self.arrays[region].tolist()}"
            )

    def do(self, action: Action, turn: int) -> None:
        if not isinstance(action, Loop):
            self.place = str(action).splitlines()[0]
        if isinstance(action, Loop):
            self.loop(action)
        elif isinstance(action, Host):
            self.host(action, turn)
        else:
            self.launch(action, turn)
            self.follow(action, turn)

    def launch(self, action: Action, turn: int) -> None:
        if isinstance(action, Fill):
            self.runtime.fill(action.region, action.value)
        elif isinstance(action, Launch):
            action.launch(self.runtime, turn)

    def follow(self, action: Action, turn: int) -> None:
        """What a launch means."""
        if isinstance(action, Fill):
            region = action.region
            self.arrays[region] = np.full(region.shape, action.value, dtype=region.dtype)
        elif isinstance(action, Launch):
            action.run(self.arrays, turn)

    def host(self, action: Host, turn: int) -> None:
        region = action.region
        if action.kind == "read":
            self.compare(region)
            return
        if action.kind == "wait":
            self.runtime.wait()
            for live, view in self.views.items():
                self.same(live, view, "array")
            return
        fresh = replace(action, seed=action.seed + 977 * turn).contents()
        if action.kind == "write":
            self.runtime.write(region, fresh)
        else:
            view = self.runtime.array(region)
            self.same(region, view, "array")
            self.views[region] = view
            view[...] = fresh
        self.arrays[region] = fresh

    def loop(self, loop: Loop) -> None:
        trace: Trace | None = None
        if loop.mode == "capture":
            trace = self.runtime.capture(lambda: [self.launch(a, 0) for a in loop.body])
        for turn in range(loop.times):
            self.place = f"turn {turn} of {loop.name} ({loop.mode})"
            if loop.mode == "plain":
                for action in loop.body:
                    self.do(action, turn)
            elif trace is not None:
                trace.replay()
            else:
                with self.runtime.trace(loop.name):
                    for action in loop.body:
                        self.launch(action, turn)
            if loop.mode != "plain":
                for action in loop.body:
                    self.follow(action, turn)
            if turn % loop.every == 0:
                for host in loop.between:
                    self.host(host, turn)


def execute(given: Scenario, log: Path | None = None) -> dict[str, int]:
    """Run a scenario; returns the runtime's statistics.

    log: where to write a log, which the offline checker must accept; rank 0 asks it.

    Raises: Difference, and whatever the runtime raises.
    """
    if given.setup.executor == "mpi":
        from soapstone.runtime.executors.mpi import executor as mpi
    with given.setup.runtime() as runtime:
        with contextlib.nullcontext() if log is None else runtime.log(log):
            Run(runtime, given).run()
        statistics = runtime.statistics.describe()
        world = runtime.executor.world
    if log is not None and world.size > 1:
        mpi.meet("the logs of all ranks")
    if log is not None and world.rank == 0:
        report = check_log(log)
        if not report.accepted:
            raise Difference(f"the checker refuses the log: {report.violations[0]}")
        if not report.launches and statistics["launches"]:
            raise Difference("the log has no launches")
    return statistics


# -- making them smaller


def shrink(
    given: Scenario, fails: Callable[[Scenario], bool], attempts: int = 400
) -> tuple[Scenario, int]:
    """The smallest scenario found that still fails, and how many were tried."""
    tried = 0
    going = True
    while going and tried < attempts:
        going = False
        for smaller in _smaller(given):
            tried += 1
            if fails(smaller):
                given, going = smaller, True
                break
            if tried >= attempts:
                break
    return given, tried


def _smaller(given: Scenario) -> Iterator[Scenario]:
    """Scenarios that are a step smaller, the most promising first."""
    for actions in _fewer(given.actions):
        yield replace(given, actions=actions)
    setup = given.setup
    for change in (
        {"automatic": False},
        {"bounded_bytes": 0},
        {"contrary": False, "bounded_bytes": 0},
        {"tiles": False},
        {"anywhere": False},
        {"memories": setup.memories - 1},
        {"cpus": setup.cpus - 1},
    ):
        smaller = replace(setup, **change)  # type: ignore[arg-type]
        if smaller != setup and smaller.memories and smaller.cpus:
            yield replace(given, setup=smaller)


def _fewer(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    half = len(actions) // 2
    if half > 1:
        yield actions[half:]
        yield actions[:half]
    for i in range(len(actions)):
        yield actions[:i] + actions[i + 1 :]
    for i, action in enumerate(actions):
        if isinstance(action, Loop):
            yield (*actions[:i], *action.body, *actions[i + 1 :])
            changes: list[Loop] = [
                replace(action, body=body) for body in _fewer(action.body) if body
            ]
            changes += [
                replace(action, times=n) for n in (action.times // 2, action.times - 1) if n
            ]
            changes += [replace(action, between=())] * bool(action.between)
            for change in changes:
                yield (*actions[:i], change, *actions[i + 1 :])
