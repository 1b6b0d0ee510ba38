"""Desugaring: a user's call becomes gathers, a plain launch and scatters, which are then analysed.

Regions with several fields become one argument for each field; futures become regions that are
read; tiles that are index sets become packed tiles of a transient region, filled before the launch
and written back after it. Checks of what the user wrote (which elements two arguments share) are
made here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from functools import cache, lru_cache

import numpy as np

from soapstone.native.memory import Array
from soapstone.native.walks import FIRST
from soapstone.records import dataclass
from soapstone.runtime.analysis import gather
from soapstone.runtime.analysis.transfer import COPY, FoldPart, fold_task
from soapstone.runtime.errors import LaunchError, PrivilegeError
from soapstone.runtime.model.forms import Form, adapted
from soapstone.runtime.model.future import Future, FutureMap, Host, Result
from soapstone.runtime.model.launch import Launch, called, grid_of, internal, parameters_of, prepare
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.sparse import IndexPartition
from soapstone.runtime.model.task import Fields, Parameter, Privilege, Read, Task, Write, identity
from soapstone.runtime.model.tiling import Shape, Tiling, intern
from soapstone.runtime.tracing.step import Fill, Request

Place = Region | Partition | IndexPartition
Value = Future | FutureMap
PLACES, VALUES = (Region, Partition, IndexPartition), (Future, FutureMap)

_DESUGARED = (FieldRegion, IndexPartition, Future, FutureMap)


def needs_desugaring(task: Task, arguments: Sequence[object]) -> bool:
    """Whether a launch has other arguments than regions of one field, partitions and scalars."""
    if isinstance(task, Task) and not task.is_core:
        return True
    for argument in arguments:
        if isinstance(argument, Partition):
            if isinstance(argument.region, FieldRegion):
                return True
        elif isinstance(argument, _DESUGARED):
            return True
    return False


@dataclass(frozen=True)
class Options:
    """The settings of a launch besides its task and arguments; see `Runtime.launch`."""

    grid: Sequence[int] | None = None
    name: str = ""
    tag: Hashable = None
    initialise: bool = False


@dataclass
class Desugared:
    """The requests that one call becomes, in order, and the future of its result.

    main: the number of the request that is the launch itself.
    """

    requests: list[Request]
    result: Future | FutureMap | None = None
    main: int = 0


@dataclass
class _Call:
    """A call under construction."""

    name: str
    tag: Hashable
    initialise: bool
    grid: tuple[int, ...]
    arguments: list[object] = field(default_factory=list)
    privileges: list[Privilege] = field(default_factory=list)
    before: list[Request] = field(default_factory=list)
    after: list[Request] = field(default_factory=list)

    def take(self, argument: object, privilege: Privilege) -> None:
        """Add a region argument."""
        self.arguments.append(argument)
        self.privileges.append(privilege)


class Desugarer:
    """Desugars the calls of one host: a runtime, or the scope of a task that launches tasks.

    blocks: the number of boxes in which a scatter cuts a region. nest: opens the scopes of nested
    tasks. steady: whether the futures made now keep their values, which those of a capture do not.
    step: the futures of the step that traces itself, while one is recorded.
    """

    def __init__(self, host: Host, blocks: int, nest: object = None) -> None:
        self.host = host
        self.blocks = blocks
        self.nest = nest
        self.steady = True
        self.step: Step | None = None

    # -- calls

    def desugar(self, task: Task, arguments: Sequence[object], options: Options) -> Desugared:
        """The requests of one call, and the future of the task's result if it has one.

        Raises: LaunchError, PrivilegeError, BoundsError.
        """
        name, tag, initialise = called(task, options.name), options.tag, options.initialise
        parameters = parameters_of(task, name, arguments, PLACES, VALUES)
        grid = grid_of(name, options.grid, arguments, (Partition, IndexPartition))
        maps = [argument.grid for argument in arguments if isinstance(argument, FutureMap)]
        call = _Call(name, tag, initialise, grid or (maps[0] if maps else (1,)))
        if task.nested:
            call.arguments.append(self.nest)
        forms = [
            self._argument(call, position, argument, parameter)
            for position, (argument, parameter) in enumerate(zip(arguments, parameters))
        ]
        _check_sharing(name, arguments, parameters, initialise)
        result = self._result(task, call) if task.returns is not None else None
        if task.is_core and all(form.kind in ("scalar", "region") for form in forms):
            core = not any(start for form in forms for start in form.starts)
        else:
            core = False
        made = task if core else adapted(task, tuple(forms), tuple(call.privileges))
        main = prepare(
            made, call.arguments, grid=call.grid, name=name, tag=tag, initialise=initialise
        )
        return Desugared([*call.before, main, *call.after], result, len(call.before))

    def _argument(self, call: _Call, position: int, argument: object, parameter: Parameter) -> Form:
        """Add one argument to a call; returns the form in which the task's body sees it."""
        if isinstance(argument, Value):
            if parameter is not None and parameter is not Read:
                raise LaunchError(
                    f"task {call.name!r}: argument {position} is {argument!r} and has "
                    f"{parameter!r}: a future is only read"
                )
            call.take(self._value(call, argument), Read)
            return Form("value" if parameter is None else "row")
        if parameter is None:
            call.arguments.append(argument)
            return Form("scalar")
        assert isinstance(argument, Place)
        holder = argument if isinstance(argument, Region) else argument.region
        if isinstance(parameter, Fields) or isinstance(holder, FieldRegion):
            if not isinstance(holder, FieldRegion):
                raise LaunchError(
                    f"task {call.name!r}: argument {position} is {argument!r}, needed a region "
                    f"with fields ({parameter!r})"
                )
            if isinstance(parameter, Fields):
                wanted = parameter.privileges
            else:
                wanted = tuple((name, parameter) for name in holder.fields)
            missing = [name for name, _ in wanted if name not in holder.fields]
            if missing:
                raise LaunchError(
                    f"task {call.name!r}: argument {position}, region {holder.name!r}, has fields "
                    f"{', '.join(holder.fields)}; needed {', '.join(missing)}"
                )
            starts = tuple(
                self._region(call, argument[name], privilege)  # type: ignore[index]
                for name, privilege in wanted
            )
            return Form("fields", tuple(name for name, _ in wanted), starts)
        return Form("region", ("",), (self._region(call, argument, parameter),))

    def _region(self, call: _Call, argument: Place, privilege: Privilege) -> str | None:
        """Add a region of one field to a call; returns the reduction whose identity fills it."""
        dense = argument.dense() if isinstance(argument, IndexPartition) else argument
        if dense is not None or not isinstance(argument, IndexPartition):
            call.take(dense, privilege)
            return None
        region, sets, rest = argument.region, argument.sets, argument.rest
        tiles = sets.packed(rest)
        held = Region(tiles.shape, region.dtype, f"{region.name}.packed", transient=True)
        packed = Partition.cut(held, tiles, argument.grid)
        call.take(packed, privilege if privilege.reduction is None else Write)
        if privilege.reads:
            boxes = Partition.cut(region, sets.boxes(rest), argument.grid)
            task = gather.gather_task(sets)
            call.before.append(internal(task, (boxes, packed), f"{call.name}.gather", call.tag))
        if not privilege.writes:
            return None
        if privilege.reduction is None and not sets.disjoint:
            one, two, element = sets.shared()
            raise PrivilegeError(
                f"task {call.name!r}: points {one} and {two} both have {privilege!r} on region "
                f"{region.name!r}, and their tiles share element {element}"
            )
        if privilege.reduction is not None:
            start = identity(privilege.reduction, region.dtype)
            if call.initialise:
                call.after.insert(0, Fill(region, start))
        blocks = self.blocks if held.nbytes > gather.BLOCK_BYTES else 1
        back = gather.scatter(sets, rest, blocks, privilege.reduction)
        grid = (back.out.points,)
        partitions = (
            Partition.cut(held, back.packed, grid),
            Partition.cut(region, back.out, grid),
        )
        call.after.append(internal(back.task, partitions, f"{call.name}.scatter", call.tag))
        return privilege.reduction

    # -- futures

    def _value(self, call: _Call, value: Value) -> Partition:
        """The rows of a future's values that the points of a call read."""
        if value.result.host is not self.host:
            raise LaunchError(f"task {call.name!r}: {value!r} belongs to another runtime or task")
        result = self._taken(call.before, value.result)
        region = result.region
        points = math.prod(call.grid)
        if isinstance(value, FutureMap) and value.grid != call.grid:
            raise LaunchError(
                f"task {call.name!r}: {value!r} has grid {value.grid}, needed {call.grid}"
            )
        row = value.row if isinstance(value, Future) else None
        return Partition.cut(region, _rows(region.shape, points, row), call.grid)

    def _taken(self, before: list[Request], result: Result) -> Result:
        """The region from which this call can read the values of a result."""
        if self.step is not None:
            return self.step.take(result, self.host)
        values = result.known
        if values is not None and not result.held:
            before.append(constant(result.region, values))
            result.held = self.steady  # a capture writes them in each replay
        return result

    def _result(self, task: Task, call: _Call) -> Future | FutureMap:
        """The future of a task's result, whose rows the points of the task write."""
        assert task.returns is not None
        points = math.prod(call.grid)
        shape = (points, *task.returns.shape)
        result = self._made(Region(shape, task.returns.dtype, f"{call.name}.value"))
        call.take(Partition.cut(result.region, _rows(shape, points, None), call.grid), Write)
        return Future(result, 0) if points == 1 else FutureMap(result, call.grid)

    def _made(self, region: Region) -> Result:
        if self.step is not None:
            return self.step.make(region, self.host)
        return Result(self.host, region, self.steady)

    def combine(self, values: FutureMap, reduction: str) -> Desugared:
        """The requests that combine the values of a map in the order of points, and the future.

        Raises: LaunchError for a reduction that the dtype does not have.
        """
        before: list[Request] = []
        given = self._taken(before, values.result).region
        identity(reduction, given.dtype)
        out = Region((1, *given.shape[1:]), given.dtype, f"{given.name}.{reduction}")
        task = _combination(reduction, given.shape[0])
        made = self._made(out)
        launch = internal(task, (Partition.whole(out), Partition.whole(given)), out.name, None)
        return Desugared([*before, launch], Future(made, 0), len(before))


class Step:
    """The futures of one run of a step that traces itself.

    made: results of its launches, in order. taken: results from outside that it reads, and regions
    that stand for them, so that the step is the same whichever futures it is given.
    """

    def __init__(self) -> None:
        self.made: list[Result] = []
        self.written: list[Region] = []  # of each of these: a result that is settled has another
        self.taken: list[tuple[Result, Result]] = []

    def make(self, region: Region, host: Host) -> Result:
        """A result of this step, unknown until the step has run."""
        result = Result(host, region, steady=False, pending=True)
        self.made.append(result)
        self.written.append(region)
        return result

    def take(self, result: Result, host: Host) -> Result:
        """The region that stands for a result; the result's own if this step makes it."""
        if result in self.made:
            return result
        for outside, inside in self.taken:
            if outside is result:
                return inside
        region = result.region
        inside = Result(host, Region(region.shape, region.dtype, "future"), steady=False)
        self.taken.append((result, inside))
        return inside

    @property
    def regions(self) -> list[Region]:
        """Regions that belong to this run; another run of the step has others."""
        return self.written + [inside.region for _, inside in self.taken]

    def bring(self, first: Step) -> list[Request]:
        """The requests that copy the futures given to this run to the regions of the traced run."""
        found: list[Request] = []
        for (outside, _), (_, inside) in zip(self.taken, first.taken, strict=True):
            values = outside.known
            if values is not None:
                found.append(constant(inside.region, values))
            else:
                whole = (Partition.whole(outside.region), Partition.whole(inside.region))
                found.append(internal(COPY, whole, f"copy {outside.region.name}", None))
        return found


_CONSTANT = Task(
    "constant",
    (Write,),
    body=lambda value, out: np.copyto(out, value),
    parameters=(None, Write),
    kind="fill",
)


def constant(region: Region, values: Array) -> Launch:
    """The launch that writes known values to a region."""
    return internal(_CONSTANT, (values, Partition.whole(region)), f"constant {region.name}")


@cache
def _combination(reduction: str, points: int) -> Task:
    parts = [FoldPart(1, slice(point, point + 1), None, None) for point in range(points)]
    return fold_task(reduction, FIRST, 1, [parts])


@lru_cache(maxsize=1024)
def _rows(shape: Shape, points: int, row: int | None) -> Tiling:
    """The tiling with one row for each point, in order; or with one `row` for all points."""
    lo = np.zeros((points, len(shape)), dtype=np.int64)
    hi = np.tile(np.array(shape, dtype=np.int64), (points, 1))
    lo[:, 0] = np.arange(points) if row is None else row
    hi[:, 0] = lo[:, 0] + 1
    return intern(shape, lo, hi)


# -- checks


def region_uses(
    arguments: Sequence[object], parameters: Sequence[Parameter]
) -> Iterator[tuple[int, Place, Region, Privilege]]:
    """Each region of one field that a call uses: argument, its form as given, region, privilege."""
    for position, (argument, parameter) in enumerate(zip(arguments, parameters)):
        if not isinstance(argument, Place) or parameter is None:
            continue
        holder = argument if isinstance(argument, Region) else argument.region
        if not isinstance(holder, FieldRegion):
            if not isinstance(parameter, Fields):
                yield position, argument, holder, parameter
        elif isinstance(parameter, Fields):
            for name, privilege in parameter.privileges:
                yield position, argument, holder[name], privilege
        else:
            for region in holder.fields.values():
                yield position, argument, region, parameter


def _check_sharing(
    name: str, arguments: Sequence[object], parameters: Sequence[Parameter], initialise: bool
) -> None:
    """Check that no arguments share elements of which one is written; sparse ones are checked here.

    Raises: PrivilegeError.
    """
    if not any(isinstance(argument, IndexPartition) for argument in arguments):
        return
    uses: dict[Region, list[tuple[int, Place, Privilege]]] = {}
    for position, place, region, privilege in region_uses(arguments, parameters):
        uses.setdefault(region, []).append((position, place, privilege))
    for region, mine in uses.items():
        for b in range(1, len(mine)):
            for a in range(b):
                _check_pair(name, region, mine[a], mine[b], initialise)


def _check_pair(
    name: str,
    region: Region,
    first: tuple[int, Place, Privilege],
    second: tuple[int, Place, Privilege],
    initialise: bool,
) -> None:
    (a, one, p), (b, two, q) = first, second
    if not any(isinstance(place, IndexPartition) for place in (one, two)):
        return
    reduced = p.reduction is not None and q.reduction is not None
    if reduced and initialise:
        raise PrivilegeError(
            f"task {name!r}: region {region.name!r} is argument {a} with {p!r} and argument {b} "
            f"with {q!r}, and the launch replaces its contents; use two launches"
        )
    if p.reduction == q.reduction and (reduced or not (p.writes or q.writes)):
        return
    if not reduced and not any(x.writes and x.reduction is None for x in (p, q)):
        return
    shared = np.logical_and(_mask(one), _mask(two))
    if not shared.any():
        return
    element = [int(i) for i in np.unravel_index(int(shared.argmax()), region.shape)]
    raise PrivilegeError(
        f"task {name!r}: region {region.name!r} is argument {a} with {p!r} and argument {b} with "
        f"{q!r}, and both have element {element}; use one ReadWrite argument, or tiles that do not "
        "overlap"
    )


def _mask(place: Place) -> Array:
    """The elements of a region that are in some tile. Returns bool (*shape)."""
    region = place if isinstance(place, Region) else place.region
    found = np.zeros(region.shape, dtype=bool)
    if isinstance(place, IndexPartition):
        found[place.sets.coordinates(place.sets.indices)] = True
    elif isinstance(place, Partition):
        for low, high in place.tiling.boxes:
            found[tuple(slice(a, b) for a, b in zip(low, high))] = True
    else:
        found[...] = True
    return found
