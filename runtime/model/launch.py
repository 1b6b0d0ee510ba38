"""Index launches: a task over the common grid of its partitions, checked before it is analysed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from soapstone.records import dataclass
from soapstone.runtime.errors import LaunchError, PrivilegeError
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.scalar import FIXED, captured, loose
from soapstone.runtime.model.task import Parameter, Privilege, Task, identity
from soapstone.runtime.model.tiling import Tiling, overlaps

_PLACE = (Region, Partition)


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """One launch: every point p of `grid` runs `task` on tile p of each of its partitions.

    `scalars` are the arguments that are no regions.
    `layout` says of each argument, in order, whether it is a region; `tag` is whatever the
    launcher wants its mapper to see. `initialise` makes reductions replace a region's contents.
    `changeable`: some scalars could be changed by a body, so each call gets copies.
    """

    task: Task
    partitions: tuple[Partition, ...]
    scalars: tuple[Any, ...]
    layout: tuple[bool, ...]
    grid: tuple[int, ...]
    name: str
    tag: Hashable = None
    initialise: bool = False
    changeable: bool = False

    @property
    def points(self) -> int:
        """The number of point tasks."""
        return math.prod(self.grid)


def fold_name(launch: str) -> str:
    """What the folds of the partial results of a launch are called, in timelines too."""
    return f"{launch}.fold"


def fill_name(region: str) -> str:
    """What the fill of a region is called, in timelines too."""
    return f"fill {region}"


def internal(task: Task, arguments: Sequence[object], name: str, tag: Hashable = None) -> Launch:
    """A launch that the runtime itself adds, over partitions and scalars: nothing to check."""
    partitions = tuple([a for a in arguments if isinstance(a, Partition)])
    scalars = tuple([a for a in arguments if not isinstance(a, Partition)])
    layout = tuple([isinstance(a, Partition) for a in arguments])
    return Launch(task, partitions, scalars, layout, partitions[0].grid, name, tag)


def _describe(tiling: Tiling, point: int) -> str:
    low, high = tiling.boxes[point]
    return f"{list(low)}..{list(high)}"


def _check_writers(name: str, region: Region, tiling: Tiling, privilege: Privilege) -> None:
    if tiling.disjoint:
        return
    first, second = overlaps(tiling, tiling)
    pair = int(np.nonzero(first < second)[0][0])
    i, j = int(first[pair]), int(second[pair])
    raise PrivilegeError(
        f"task {name!r}: points {i} and {j} both have {privilege!r} on region {region.name!r}, "
        f"and their boxes {_describe(tiling, i)} and {_describe(tiling, j)} overlap"
    )


def _check_pairs(
    name: str, partitions: Sequence[Partition], privileges: Sequence[Privilege]
) -> None:
    """Two arguments on one region may share elements only if neither writes in place."""
    for b in range(1, len(partitions)):
        for a in range(b):
            if partitions[a].region is not partitions[b].region:
                continue
            one, two = privileges[a], privileges[b]
            direct = [p.writes and p.reduction is None for p in (one, two)]
            if not any(direct):
                continue
            first, second = overlaps(partitions[a].tiling, partitions[b].tiling)
            if first.size:
                i, j = int(first[0]), int(second[0])
                raise PrivilegeError(
                    f"task {name!r}: region {partitions[a].region.name!r} is argument {a} with "
                    f"{one!r} (point {i}, box {_describe(partitions[a].tiling, i)}) and argument "
                    f"{b} with {two!r} (point {j}, box {_describe(partitions[b].tiling, j)}); "
                    "use one ReadWrite argument, or boxes that do not overlap"
                )


def called(task: Task, name: str) -> str:
    """What errors and timelines call a launch: `name`, or else the task's name.

    Raises: LaunchError for what is no task.
    """
    if not isinstance(task, Task):
        raise LaunchError(f"launch: found {task!r}, a Task needed (decorate it with @task)")
    return name or task.name


def parameters_of(
    task: Task,
    name: str,
    arguments: Sequence[object],
    places: tuple[type, ...] = _PLACE,
    values: tuple[type, ...] = (),
) -> Sequence[Parameter]:
    """What the task declares of each argument.

    places: the classes of arguments that are regions. values: of those that may be either.

    Raises: LaunchError for another number of arguments, or another kind.
    """
    parameters = task.parameters
    if parameters is None:
        regions = sum([isinstance(argument, places) for argument in arguments])
        if regions != len(task.privileges):
            raise LaunchError(
                f"task {name!r}: found {regions} region arguments, needed {len(task.privileges)} "
                f"({', '.join(map(repr, task.privileges))})"
            )
        wanted = iter(task.privileges)
        return [next(wanted) if isinstance(a, places) else None for a in arguments]
    if len(arguments) != len(parameters):
        raise LaunchError(
            f"task {name!r}: found {len(arguments)} arguments, needed {len(parameters)}"
        )
    for position, (argument, parameter) in enumerate(zip(arguments, parameters)):
        if isinstance(argument, places) != (parameter is not None) and (
            not isinstance(argument, values)
        ):
            needed = "a scalar" if parameter is None else f"a region or partition ({parameter!r})"
            raise LaunchError(
                f"task {name!r}: argument {position} is {argument!r}, needed {needed}"
            )
    return parameters


def grid_of(
    name: str,
    grid: Sequence[int] | None,
    arguments: Sequence[object],
    partitions: tuple[type, ...] = (Partition,),
) -> tuple[int, ...] | None:
    """The common grid of a launch's partitions; None where it has none, and `grid` is None.

    partitions: the classes of arguments that have a grid.

    Raises: LaunchError for two grids, or one without points.
    """
    common: tuple[int, ...] | None = None
    if grid is not None:
        common = tuple(int(degree) for degree in grid)
        if not common or any(degree < 1 for degree in common):
            raise LaunchError(f"task {name!r}: grid {common} needs extents >= 1")
    for argument in arguments:
        if isinstance(argument, partitions):
            found: tuple[int, ...] = argument.grid  # type: ignore[attr-defined]
            if common is None:
                common = found
            elif common != found:
                region = argument.region.name  # type: ignore[attr-defined]
                raise LaunchError(
                    f"task {name!r}: partition of region {region!r} has grid {found}, "
                    f"needed {common}"
                )
    return common


def prepare(
    task: Task,
    arguments: Sequence[object],
    *,
    grid: Sequence[int] | None = None,
    name: str = "",
    tag: Hashable = None,
    initialise: bool = False,
) -> Launch:
    """The checked launch of a task over its arguments: partitions, regions (whole) and scalars.

    Raises: LaunchError for wrong counts, kinds, grids or dtypes; PrivilegeError for two points
    that touch the same elements when one of them writes.
    """
    name = called(task, name)
    layout = tuple([found is not None for found in parameters_of(task, name, arguments)])
    common = grid_of(name, grid, arguments) or (1,)
    partitions = []
    scalars = []
    changeable = False
    for position, argument in enumerate(arguments):
        if isinstance(argument, Partition):
            partitions.append(argument)
        elif isinstance(argument, Region):
            partitions.append(Partition.whole(argument, common))
        else:
            if type(argument) not in FIXED:
                if isinstance(argument, np.ndarray) and argument.ndim:
                    raise LaunchError(
                        f"task {name!r}: argument {position} is an array of shape "
                        f"{argument.shape}; write it to a region, and pass the region"
                    )
                argument = captured(argument)
                changeable = changeable or loose(argument)
            scalars.append(argument)
    for partition, privilege in zip(partitions, task.privileges):
        if privilege.reduction is not None:
            try:
                identity(privilege.reduction, partition.region.dtype)
            except LaunchError as error:
                raise LaunchError(
                    f"task {name!r}: region {partition.region.name!r}: {error}"
                ) from None
        elif privilege.writes:
            _check_writers(name, partition.region, partition.tiling, privilege)
    if len({id(partition.region) for partition in partitions}) < len(partitions):
        _check_pairs(name, partitions, task.privileges)
    return Launch(
        task, tuple(partitions), tuple(scalars), layout, common, name, tag, initialise, changeable
    )
