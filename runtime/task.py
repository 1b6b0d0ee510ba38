"""Tasks: a body, its privileges, and the native entry a point task may be bound to.

A task declares how it uses each region argument; the runtime infers everything else from that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from .errors import LaunchError
from .machine import Processor

Array = np.ndarray[Any, np.dtype[Any]]
REDUCTIONS = ("sum", "max", "min", "prod")


@dataclass(frozen=True)
class Privilege:
    """How a task uses a region argument: whether it reads it, writes it, or reduces into it."""

    name: str
    reads: bool
    writes: bool
    reduction: str | None = None

    def __repr__(self) -> str:
        return f"Reduce({self.reduction!r})" if self.reduction else self.name


Read = Privilege("Read", reads=True, writes=False)
Write = Privilege("Write", reads=False, writes=True)
ReadWrite = Privilege("ReadWrite", reads=True, writes=True)


def Reduce(reduction: str) -> Privilege:
    """The privilege to combine into a region with "sum", "max", "min" or "prod".

    Each point gets a private buffer of its tile's shape and overwrites it with its partial
    result; the runtime folds the partials in point order.

    Raises: LaunchError for an unknown reduction.
    """
    if reduction not in REDUCTIONS:
        raise LaunchError(f"Reduce: found {reduction!r}, needed one of {', '.join(REDUCTIONS)}")
    return Privilege("Reduce", reads=False, writes=True, reduction=reduction)


def identity(reduction: str, dtype: np.dtype[Any]) -> Any:
    """The identity of a reduction in a dtype, as a NumPy scalar.

    Raises: LaunchError when the dtype has none (a complex maximum, a boolean sum).
    """
    if dtype.kind in "iuf" or (dtype.kind == "c" and reduction in ("sum", "prod")):
        if reduction in ("sum", "prod"):
            return dtype.type(reduction == "prod")
        if dtype.kind == "f":
            return dtype.type(-np.inf if reduction == "max" else np.inf)
        limits = np.iinfo(dtype)
        return dtype.type(limits.min if reduction == "max" else limits.max)
    if dtype.kind == "b" and reduction in ("max", "min"):
        return dtype.type(reduction == "min")
    raise LaunchError(f"Reduce({reduction!r}): dtype {dtype} has no such reduction")


class EntryLike(Protocol):
    """A native entry: `int32_t fn(void *block)` at `address`; 0 is success.

    `keep` holds whatever the block points to. It may also have `statuses`, a mapping that
    explains the non-zero codes.
    """

    @property
    def address(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def keep(self) -> object: ...


@dataclass(frozen=True, eq=False, slots=True)
class PointContext:
    """What a point task may know besides its arrays."""

    task: Task
    point: int
    grid: tuple[int, ...]
    processor: Processor
    scalars: tuple[Any, ...]
    variant: str | None

    @property
    def index(self) -> tuple[int, ...]:
        """The coordinates of the point in the grid."""
        return tuple(int(i) for i in np.unravel_index(self.point, self.grid))


@dataclass(frozen=True, eq=False)
class Task:
    """A task: a name, a privilege for each region argument, and what runs.

    body: called as `body(*arguments)`, in the order of the launch, with NumPy views of the point's
        tiles in place of regions (read-only ones for Read); with `context=True` it is called as
        `body(context, *arguments)`.
    bind: called as `bind(context, arrays)` once the arrays have their final addresses; returns a
        native entry, or None to use the body.
    parameters: for a declared order of arguments: each is a Privilege, or None for a scalar.
    variants: the names a mapper may ask for, or None when only `bind` and `body` know them.

    Raises: LaunchError when there is nothing to run or a privilege is not one.
    """

    name: str
    privileges: tuple[Privilege, ...]
    body: Callable[..., Any] | None = None
    bind: Callable[[PointContext, Sequence[Array]], EntryLike | None] | None = None
    context: bool = False
    parameters: tuple[Privilege | None, ...] | None = None
    variants: tuple[str, ...] | None = None
    kind: str = field(default="task", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "privileges", tuple(self.privileges))
        if self.body is None and self.bind is None:
            raise LaunchError(f"task {self.name!r}: neither a body nor a bind function")
        for privilege in self.privileges:
            if not isinstance(privilege, Privilege):
                raise LaunchError(
                    f"task {self.name!r}: found {privilege!r}, needed Read, Write, ReadWrite "
                    'or Reduce("sum")'
                )

    def __call__(self, *arguments: Any) -> Any:
        """Run the body directly on arrays, outside any runtime."""
        if self.body is None:
            raise LaunchError(f"task {self.name!r} has no Python body to call")
        return self.body(*arguments)


def task(function: Callable[..., Any]) -> Task:
    """The task a function declares by its annotations.

    Each parameter annotated `Read`, `Write`, `ReadWrite` or `Reduce("sum")` (bare, or as the
    metadata of `typing.Annotated`) is a region; the others are scalars:

        @task
        def saxpy(a: float, x: Read, y: ReadWrite) -> None:
            y += a * x

    Raises: LaunchError for a function without region parameters or with variadic ones.
    """
    name = function.__name__
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise LaunchError(f"task {name!r}: an annotation cannot be resolved: {error}") from error
    parameters: list[Privilege | None] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise LaunchError(f"task {name!r}: parameter {parameter.name!r} must be positional")
        choices = (parameter.annotation, *get_args(parameter.annotation))
        found = [choice for choice in choices if isinstance(choice, Privilege)]
        parameters.append(found[0] if found else None)
    privileges = tuple(parameter for parameter in parameters if parameter is not None)
    if not privileges:
        raise LaunchError(
            f"task {name!r}: no parameter is annotated with a privilege; example: "
            "def saxpy(a: float, x: Read, y: ReadWrite)"
        )
    return Task(name, privileges, body=function, parameters=tuple(parameters))


def status_text(entry: EntryLike, status: int) -> str:
    """What a non-zero status of an entry means, by its own table if it has one."""
    table = getattr(entry, "statuses", None)
    if isinstance(table, Mapping) and status in table:
        return str(table[status])
    return f"native entry returned status {status}"
