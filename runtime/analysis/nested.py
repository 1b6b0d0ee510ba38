"""Nested launches: a task body launches tasks on parts of its own arguments (Legion's subtasks).

The scope of a body is a small runtime. Its regions are the body's arguments, whose instances are
the body's own arrays, so an analysis of its own orders the subtasks among themselves; the parent's
privileges order them with respect to everything else. Subtasks run on the processors that share the
parent's memory, as the default mapper places them.

A parent ends when its subtasks have ended. While it waits it runs ready subtasks, its own or others
of at least the same depth, so workers that all wait for subtasks never deadlock. The same holds
inside a trace, where other workers run their own parts, and for executors without workers.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np

from soapstone.native.memory import Array, aligned
from soapstone.records import dataclass
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.desugar import (
    PLACES,
    VALUES,
    Desugared,
    Desugarer,
    Options,
    region_uses,
)
from soapstone.runtime.analysis.instance import Instance, Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import (
    LaunchError,
    PrivilegeError,
    StoppedError,
    SubtaskError,
    TaskError,
)
from soapstone.runtime.executors.bodies import as_task_error
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.future import Future, FutureMap
from soapstone.runtime.model.launch import parameters_of
from soapstone.runtime.model.mapper import DefaultMapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion, FieldViews
from soapstone.runtime.model.task import Fields, PointContext, Privilege, ReadWrite, Task
from soapstone.runtime.observe.log import Log, LoggedSink, ScopeLog
from soapstone.runtime.observe.log_part import now_ns
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.tracing.step import Fill, Request, fills

_IDS = 1 << 32  # ids of operations kept for each family, below those of the runtime's own


@dataclass(eq=False)
class _Team:
    """The processors of one memory, and the subtasks that are ready to run on any of them."""

    machine: Machine
    memory: int
    processors: list[int]
    ready: list[tuple[int, int, int, Operation, Family]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # processors that will come and look
    inside: set[int] = field(default_factory=set)  # those in a body that does not wait: they won't


class Nest:
    """The subtasks of one runtime, at all depths.

    stores: for each memory, the memory that holds regions made by subtasks: an evictable memory has
    room only for what the runtime's analysis places there.
    """

    def __init__(
        self, executor: LocalExecutor, memory: MemoryPool, backing: Sequence[int | None]
    ) -> None:
        self.executor = executor
        self.memory = memory
        self.stores = [i if other is None else other for i, other in enumerate(backing)]
        self.changed = threading.Condition()
        self.tickets = itertools.count()
        self.families = itertools.count(1)
        self._teams: dict[int, _Team] = {}
        self.log: Log | None = None  # of the runtime, while there is one

    def team(self, context: PointContext) -> _Team:
        """The processors that share the memory of the processor on which a point runs."""
        machine = self.executor.machine
        names = [memory.name for memory in machine.memories]
        memory = names.index(context.processor.memory)
        with self.changed:
            found = self._teams.get(memory)
            if found is None:
                name = names[memory]
                members = [i for i, p in enumerate(machine.workers) if p.memory == name]
                part = Machine(
                    machine.name,
                    tuple(machine.processors[i] for i in members),
                    (machine.memories[memory],),
                )
                found = self._teams[memory] = _Team(part, memory, members)
            return found

    def push(self, family: Family, operation: Operation) -> None:
        """Offer a ready subtask to the processors of its team. The caller holds `changed`."""
        team = family.team
        key = (-family.depth, -operation.priority, next(self.tickets))
        heapq.heappush(team.ready, (*key, operation, family))
        count = len(team.processors)
        first = team.processors.index(operation.processor)
        for step in range(count):
            processor = team.processors[(first + step) % count]
            if processor not in team.asked and processor not in team.inside:
                visit = partial(self._visit, team, processor)
                if self.executor.offer(processor, visit):
                    team.asked.add(processor)
                    return

    def _visit(self, team: _Team, processor: int) -> None:
        """Run ready subtasks until there are none; called on a free processor."""
        with self.changed:
            team.asked.discard(processor)
        while self._run_one(team, processor, 0, self.executor.profile is not None):
            pass

    def wait(self, family: Family, processor: int) -> None:
        """Wait until a family has ended, running subtasks meanwhile."""
        team = family.team
        with self.changed:
            team.inside.discard(processor)
        while True:
            with self.changed:
                while family.busy and not self._eligible(team, family.depth):
                    self.changed.wait()
                if not family.busy:
                    team.inside.add(processor)
                    return
            self._run_one(team, processor, family.depth, False)

    @staticmethod
    def _eligible(team: _Team, depth: int) -> bool:
        return bool(team.ready) and -team.ready[0][0] >= depth

    def _run_one(self, team: _Team, processor: int, depth: int, profiled: bool) -> bool:
        """Run the deepest ready subtask if it is deep enough; return whether there was one."""
        with self.changed:
            if not self._eligible(team, depth):
                return False
            operation, family = heapq.heappop(team.ready)[-2:]
            if family.error is not None:
                return True
            family.running += 1
        operation.processor = processor
        start = now_ns() if family.log is not None else 0
        try:
            run = self.executor._run if profiled else self.executor.perform
            run(operation, processor)
            if family.log is not None:
                family.log.ran(operation, start, now_ns())
        except BaseException as error:
            place = self.executor.machine.processors[processor]
            known = isinstance(error, TaskError)
            family.fail(error if known else as_task_error(operation, place, error))
        with self.changed:
            family.end(operation)
            self.changed.notify_all()
        return True


class Family:
    """The subtasks of one point task, and the sink of its analysis."""

    mine: Sequence[bool] | None = None  # all of its operations run in this process

    def __init__(self, nest: Nest, team: _Team, depth: int) -> None:
        self.nest = nest
        self.team = team
        self.depth = depth
        self.error: BaseException | None = None
        self.running = 0
        self.log: ScopeLog | None = None
        self.live: dict[int, Operation] = {}

    @property
    def busy(self) -> bool:
        """Whether subtasks are running or waiting to run."""
        return bool(self.running or (self.live and self.error is None))

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes.

        Raises: MemoryExhausted.
        """
        what = f"region {storage.name!r}"
        memory = self.nest.stores[self.team.memory]
        self.nest.memory.claim(storage, memory, storage.nbytes, what)
        storage.attach(aligned(storage.nbytes, zero=not storage.transient))

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations; each starts when those that it depends on have ended."""
        first = operations[0].id
        with self.nest.changed:
            if self.error is not None:
                return
            for operation in operations:
                operation.processor = self.team.processors[operation.processor]
                self.live[operation.id] = operation
            for source, target in zip(sources.tolist(), targets.tolist()):
                before = self.live.get(source)
                if before is not None:
                    before.successors.append(operations[target - first])
                    operations[target - first].pending += 1
            for operation in operations:
                if operation.pending == 0:
                    self.nest.push(self, operation)
            self.nest.changed.notify_all()

    def end(self, operation: Operation) -> None:
        """Count a subtask as done; offer those that waited for it. The caller holds `changed`."""
        self.running -= 1
        self.live.pop(operation.id, None)
        if self.error is None:
            for after in operation.successors:
                after.pending -= 1
                if after.pending == 0:
                    self.nest.push(self, after)
        operation.successors = []

    def fail(self, error: BaseException) -> None:
        """Run no more subtasks; the parent raises the first error."""
        with self.nest.changed:
            if self.error is None:
                self.error = error


class Level:
    """Opens the scopes of tasks launched at one depth; the first scalar of their launches."""

    def __init__(self, nest: Nest, depth: int = 1) -> None:
        self.nest = nest
        self.depth = depth

    def run(
        self, task: Task, context: PointContext, body: Callable[..., Any], given: Sequence[Any]
    ) -> Any:
        """Call a body with a scope; return its result once its subtasks have ended.

        Raises: what the body raises; SubtaskError when a subtask failed.
        """
        scope = Scope(self, task, context, given)
        try:
            value = body(scope, *given)
            return value.get() if isinstance(value, Future) else value
        except BaseException as error:
            scope._family.fail(error)
            raise
        finally:
            scope._finish()

    def __repr__(self) -> str:
        return f"Level({self.depth})"


class Scope:
    """The scope in which the body of a nested task launches subtasks; its first parameter.

        @task
        def smooth(scope: Scope, x: ReadWrite) -> None:
            tiles = Partition.tiled(scope.region("x"), 4)
            scope.launch(relax, tiles)

    The runtime makes it of the level of nesting, the task, its context (available as `context`) and
    the arguments given. Subtasks are ordered as in a runtime. Until they have ended (after `wait`,
    or at the end of the body), the body must not touch its arrays. A scope cannot be used after its
    body has returned.
    """

    is_scope = True

    def __init__(
        self, level: Level, task: Task, context: PointContext, given: Sequence[Any]
    ) -> None:
        nest = level.nest
        places = enumerate(nest.executor.machine.processors)
        mine = next((i for i, place in places if place is context.processor), None)
        if mine is None:  # the host runs it for a GPU, and is none of the machine's processors
            raise LaunchError(
                f"task {task.name!r}: it launches tasks, and was placed on a GPU; a processor of"
                " the host needed"
            )
        team = nest.team(context)
        self.context = context
        self._task = task
        self._family = Family(nest, team, level.depth)
        self._processor = mine
        self._given = given
        self._open = True
        self._held: dict[Region, Privilege] = {}
        self._made: dict[str | int, Region] = {}
        mapper = DefaultMapper()
        mapper.attach(team.machine)
        world = World.alone(team.machine)
        self._analysis = Analysis(team.machine, mapper, Statistics(), self._family, world)
        self._analysis.next_id = -_IDS * next(nest.families)
        if nest.log is not None:
            log = nest.log.scope(team.machine, self._analysis, context, level.depth)
            self._family.log = self._analysis.log = log
            self._analysis.sink = LoggedSink(self._family, log)
        self._desugarer = Desugarer(self, len(team.processors), Level(nest, level.depth + 1))
        with nest.changed:
            team.inside.add(self._processor)

    # -- regions

    def region(self, argument: str | int) -> Region:
        """The region of one of the body's arguments, with the extents of its tile.

        argument: its name, or its position among those that are regions.

        Raises: LaunchError when there is no such argument, or it is no region.
        """
        self._check()
        found = self._made.get(argument)
        if found is None:
            found = self._made[argument] = self._seed(*self._lookup(argument))
        return found

    def _lookup(self, argument: str | int) -> tuple[str, Any, Privilege | Fields]:
        task = self._task
        names = task.names or tuple(f"argument {i}" for i in range(len(self._given)))
        places: list[tuple[str, Any, Privilege | Fields]] = []
        declared = iter(task.parameters or ())
        rest = iter(task.privileges)
        for name, value in zip(names, self._given):
            shaped = isinstance(value, FieldViews | np.ndarray)
            parameter = next(declared) if task.parameters else next(rest) if shaped else None
            if parameter is not None:
                places.append((name, value, parameter))
        if isinstance(argument, int) and 0 <= argument < len(places):
            return places[argument]
        for place in places:
            if place[0] == argument:
                return place
        raise LaunchError(
            f"task {self._task.name!r}: scope.region({argument!r}), needed one of "
            f"{', '.join(repr(name) for name, _, _ in places) or 'no region arguments'}"
        )

    def _seed(self, name: str, value: Any, parameter: Privilege | Fields) -> Region:
        """A region whose only instance is an array of the body."""
        if isinstance(value, FieldViews):
            each = dict(parameter.privileges) if isinstance(parameter, Fields) else {}
            fields = {}
            for part in value:
                privilege = each.get(part) or parameter
                fields[part] = self._seed(f"{name}.{part}", value[part], privilege)
            return FieldRegion.of(fields, name)
        assert isinstance(parameter, Privilege)
        region = Region(value.shape, value.dtype, name)
        box = (tuple([0] * region.rank), region.shape)
        storage = Storage(region, 0, box, None)
        storage.array = value
        self._analysis.state(region).by_key[(0, None, None)] = Instance(storage, True, True)
        self._held[region] = parameter
        if self._family.log is not None:
            self._family.log.argument(region, parameter)
        return region

    def make(self, shape: Sequence[int] | int, dtype: Any, name: str = "") -> Region:
        """A new region of the scope, zero at first, which is released when its subtasks have ended.

        shape, dtype, name: as of `Region`.

        Raises: BoundsError, TypeError.
        """
        region = Region(shape, dtype, name)
        self._held[region] = ReadWrite
        return region

    # -- launching

    def launch(
        self,
        task: Task,
        *arguments: object,
        grid: Sequence[int] | None = None,
        name: str = "",
        tag: Hashable = None,
        initialise: bool = False,
    ) -> Any:
        """Run a subtask at every point of its partitions' grid; see `Runtime.launch`.

        Raises: PrivilegeError for a region on which the body lacks the privilege; else as
        `Runtime.launch`.
        """
        self._check()
        if not isinstance(task, Task):
            raise LaunchError(f"launch: found {task!r}, a Task needed (decorate it with @task)")
        parameters = parameters_of(task, name or task.name, arguments, PLACES, VALUES)
        for _, _, region, privilege in region_uses(arguments, parameters):
            self._permit(name or task.name, region, privilege)
        options = Options(grid, name, tag, initialise)
        return self._issue(self._desugarer.desugar(task, arguments, options))

    def combine(self, values: FutureMap, reduction: str) -> Future:
        """The values of a future map combined by a reduction; see `FutureMap.reduce`."""
        self._check()
        found: Future = self._issue(self._desugarer.combine(values, reduction))
        return found

    def fill(self, region: Region, value: Any) -> None:
        """Set every element of a region. value: a scalar.

        Raises: PrivilegeError; LaunchError for a value that its dtype cannot hold.
        """
        self._check()
        for request in fills(region, value):
            self._permit("fill", request.region, ReadWrite)
            self._take(request)

    def _issue(self, desugared: Desugared) -> Any:
        for request in desugared.requests:
            self._take(request)
        return desugared.result

    def _take(self, request: Request) -> None:
        if isinstance(request, Fill):
            self._analysis.fill(request.region, request.value)
        else:
            self._analysis.launch(request)

    def _permit(self, name: str, region: Region, privilege: Privilege) -> None:
        held = self._held.get(region)
        parent = self._task.name
        if held is None:
            raise PrivilegeError(
                f"task {parent!r} launches {name!r} on region {region.name!r}, which is none of "
                "its arguments; use scope.region(...) or scope.make(...)"
            )
        if held.reduction is not None:
            allowed = privilege == held
        else:
            allowed = held.writes or not privilege.writes
        if not allowed:
            raise PrivilegeError(
                f"task {parent!r} launches {name!r} with {privilege!r} on region {region.name!r}, "
                f"on which it has {held!r}"
            )

    # -- waiting

    def wait(self) -> None:
        """Wait until the subtasks launched so far have ended, running subtasks meanwhile.

        Raises: SubtaskError when one failed.
        """
        self._check()
        self._family.nest.wait(self._family, self._processor)
        self._raise()
        if self._family.log is not None:
            self._family.log.waited()

    def read(self, region: Region) -> Array:
        """Return a copy of a region's contents, once the subtasks launched so far have ended.

        Raises: PrivilegeError for a region that the body may not read; SubtaskError.
        """
        if isinstance(region, FieldRegion):
            return region.join({name: self.read(each) for name, each in region.fields.items()})
        self.wait()
        found = self._analysis.instance(region, 0).storage.array
        assert found is not None
        return found.copy()

    def _check(self) -> None:
        if not self._open:
            raise StoppedError(f"task {self._task.name!r}: its scope is used after its end")
        self._raise()

    def _raise(self) -> None:
        error = self._family.error
        if error is not None:
            raise SubtaskError(f"its subtask failed: {error}") from error

    def _finish(self) -> None:
        """Wait for the subtasks, and drop the body's arrays, which do not belong to the scope.

        Raises: SubtaskError when one failed, unless the body itself raised an error.
        """
        self._open = False
        family = self._family
        family.nest.wait(family, self._processor)
        with family.nest.changed:
            family.team.inside.discard(self._processor)
        family.live.clear()
        self._held.clear()
        self._made.clear()
        self._given = ()
        if family.log is not None:
            if family.error is None:
                family.log.waited()
            family.log.close(family.error is None)
            family.log = None
        del self._analysis, self._desugarer
        if isinstance(family.error, TaskError):
            self._raise()
