"""Tasks: a body, its privileges, and the native entry a point task may be bound to.

A task declares how it uses each region argument; the runtime infers everything else from that.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, get_args

import numpy as np

from soapstone.dtypes import integers, kind_of
from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.errors import LaunchError
from soapstone.runtime.machines.machine import Processor

REDUCTIONS = ("sum", "max", "min", "prod")


@dataclass(frozen=True)
class Privilege:
    """How a task uses a region argument: `Read`, `Write`, `ReadWrite` or `Reduce("sum")`.

    name: as it is written. reads, writes: whether it does. reduction: what is folded by, or None.

    Source: Bauer et al., Legion, SC 2012, section 2.
    """

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


@dataclass(frozen=True, init=False)
class Fields:
    """Privileges field by field, of an argument that is a region with several fields.

    `def move(p: Fields(x=ReadWrite, v=Read)) -> None: p.x += p.v` uses two fields of its region;
    others it may have are not touched. privileges: by the names of fields.

    Raises: LaunchError for no fields, or for what is no privilege.
    """

    privileges: tuple[tuple[str, Privilege], ...]

    def __init__(self, **privileges: Privilege) -> None:
        if not privileges:
            raise LaunchError("Fields: no field found, at least one needed")
        for name, privilege in privileges.items():
            if not isinstance(privilege, Privilege):
                raise LaunchError(
                    f"Fields: field {name!r} is {privilege!r}, needed Read, Write, ReadWrite or "
                    'Reduce("sum")'
                )
        object.__setattr__(self, "privileges", tuple(privileges.items()))

    def __repr__(self) -> str:
        return f"Fields({', '.join(f'{name}={p!r}' for name, p in self.privileges)})"


@dataclass(frozen=True, init=False)
class Returns:
    """The value of each point of a task: an array of `shape` and `dtype` (a scalar for ()).

    As a return annotation; `float`, `int`, `bool` and NumPy's scalar types say the same of
    scalars. Numbers come back to the host as NumPy scalars.

    Raises: LaunchError for a dtype that holds Python objects, or a negative extent.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __init__(self, dtype: Any, shape: Sequence[int] = ()) -> None:
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise LaunchError(f"Returns: found {dtype!r}, a dtype needed") from error
        extents = tuple(operator.index(extent) for extent in shape)
        if kind.hasobject or any(extent < 0 for extent in extents):
            raise LaunchError(f"Returns: found {kind} {extents}, numbers and extents >= 0 needed")
        object.__setattr__(self, "dtype", kind)
        object.__setattr__(self, "shape", extents)


Parameter = Privilege | Fields | None  # of a task: None is a scalar


def identity(reduction: str, dtype: np.dtype[Any]) -> Any:
    """The identity of a reduction in a dtype, as a NumPy scalar.

    Raises: LaunchError when the dtype has none (a complex maximum, a boolean sum).
    """
    if kind_of(dtype) in "iuf" or (kind_of(dtype) == "c" and reduction in ("sum", "prod")):
        if reduction in ("sum", "prod"):
            return dtype.type(reduction == "prod")
        if kind_of(dtype) == "f":
            return dtype.type(-np.inf if reduction == "max" else np.inf)
        limits = integers(dtype)
        return dtype.type(limits.min if reduction == "max" else limits.max)
    if kind_of(dtype) == "b" and reduction in ("max", "min"):
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
    """What a point task may know besides its arrays.

    task: what runs. point: its number in the grid, row-major. grid: how many points each axis of
    the launch has. processor: where it runs. scalars: the launch's arguments that are no regions,
    in order. variant: what the mapper chose, or None.
    """

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
    parameters: for a declared order of arguments: each is a Privilege, Fields (then `privileges`
        has one for each field, in order), or None for a scalar.
    variants: the names a mapper may ask for, or None when only `bind` and `body` know them.
    returns: what each point returns; a launch then gives a future. `bind` gets the array for the
        value after those of the arguments, with an axis of extent 1 before its shape.
    kind: of its operations, for timelines and logs. names: of the parameters, for errors and for
        `Scope.region`.
    nested: the body launches tasks itself: its first argument is a `Scope`.

    Raises: LaunchError when there is nothing to run or a privilege is not one.
    """

    name: str
    privileges: tuple[Privilege, ...]
    body: Callable[..., Any] | None = None
    bind: Callable[[PointContext, Sequence[Array]], EntryLike | None] | None = None
    context: bool = False
    parameters: tuple[Parameter, ...] | None = None
    variants: tuple[str, ...] | None = None
    kind: str = field(default="task", repr=False)
    returns: Returns | None = None
    names: tuple[str, ...] = field(default=(), repr=False)
    nested: bool = False
    is_core: bool = field(init=False, repr=False)
    forms: dict[Any, Task] = field(init=False, repr=False, default_factory=dict)

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
        fields = any(isinstance(p, Fields) for p in self.parameters or ())
        if self.nested and (self.context or self.body is None):
            raise LaunchError(
                f"task {self.name!r}: a task that launches tasks needs a Python body, whose first "
                "argument is its scope and not its context"
            )
        declared = sum(
            len(p.privileges) if isinstance(p, Fields) else p is not None
            for p in self.parameters or ()
        )
        if self.parameters is not None and declared != len(self.privileges):
            raise LaunchError(
                f"task {self.name!r}: its parameters have {declared} privileges, "
                f"needed {len(self.privileges)} ({', '.join(map(repr, self.privileges))})"
            )
        object.__setattr__(self, "is_core", not (fields or self.nested or self.returns))

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

    A first parameter annotated `Scope` makes a task that launches tasks; a return annotation
    (`float`, `np.float32`, `Returns("f8", (3,))`) one whose launches give a future.

    Raises: LaunchError for a function that neither uses a region nor returns a value, or that has
    variadic parameters, or for a return annotation that is no number.
    """
    name = function.__name__
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise LaunchError(f"task {name!r}: an annotation cannot be resolved: {error}") from error
    parameters: list[Parameter] = []
    privileges: list[Privilege] = []
    given = list(signature.parameters.values())
    nested = bool(given) and getattr(given[0].annotation, "is_scope", False)
    given = given[nested:]
    for parameter in given:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise LaunchError(f"task {name!r}: parameter {parameter.name!r} must be positional")
        choices = (parameter.annotation, *get_args(parameter.annotation))
        found = [choice for choice in choices if isinstance(choice, Privilege | Fields)]
        parameters.append(found[0] if found else None)
        for declared in found[:1]:
            if isinstance(declared, Fields):
                privileges += [privilege for _, privilege in declared.privileges]
            else:
                privileges.append(declared)
    returns = _returned(name, signature.return_annotation)
    if not privileges and returns is None:
        raise LaunchError(
            f"task {name!r}: no parameter is annotated with a privilege; example: "
            "def saxpy(a: float, x: Read, y: ReadWrite)"
        )
    return Task(
        name,
        tuple(privileges),
        body=function,
        parameters=tuple(parameters),
        returns=returns,
        names=tuple(parameter.name for parameter in given),
        nested=nested,
    )


def _returned(name: str, annotation: Any) -> Returns | None:
    """What a return annotation declares."""
    choices = (annotation, *get_args(annotation))
    for choice in choices:
        if isinstance(choice, Returns):
            return choice
    if annotation in (bool, int, float, complex):
        return Returns(annotation)
    if isinstance(annotation, type) and issubclass(annotation, np.generic):
        return Returns(annotation)
    if annotation is None or annotation is inspect.Signature.empty or annotation is Any:
        return None
    raise LaunchError(
        f"task {name!r}: return annotation {annotation!r} found, needed a number type or "
        'Returns(dtype, shape), for example Returns("f8", (3,)), or None'
    )


def status_text(entry: EntryLike, status: int) -> str:
    """What a non-zero status of an entry means, by its own table if it has one."""
    table = getattr(entry, "statuses", None)
    if isinstance(table, Mapping) and status in table:
        said = table[status]
        return str(said() if callable(said) else said)
    return f"native entry returned status {status}"
