"""Nested launches: a task body launches tasks on parts of its own arguments (Legion's subtasks).

The scope of a body is a small runtime. Its regions are the body's arguments, whose instances are
the body's own arrays, so an analysis of its own orders the subtasks among themselves; the parent's
privileges order them with respect to everything else. Subtasks run on the processors that share the
parent's memory, as the default mapper places them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
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
from soapstone.runtime.analysis.subtasks import Family, Nest
from soapstone.runtime.errors import (
    LaunchError,
    PrivilegeError,
    StoppedError,
    SubtaskError,
    TaskError,
)
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.future import Future, FutureMap
from soapstone.runtime.model.launch import called, parameters_of
from soapstone.runtime.model.mapper import DefaultMapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion, FieldViews
from soapstone.runtime.model.task import Fields, PointContext, Privilege, ReadWrite, Task
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.tracing.step import Fill, Request, fills

_IDS = 1 << 32  # ids of operations kept for each family, below those of the runtime's own


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
            self._analysis.sink = log.logged(self._family)
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
        shown = called(task, name)
        parameters = parameters_of(task, shown, arguments, PLACES, VALUES)
        for _, _, region, privilege in region_uses(arguments, parameters):
            self._permit(shown, region, privilege)
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
