"""What a point task calls: its native entry, or its Python body, on the arrays of its instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from soapstone.native import memory
from soapstone.native.memory import Array, Entry
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import BodyError, StoppedError, TaskError
from soapstone.runtime.machines.machine import Processor
from soapstone.runtime.model.scalar import captured
from soapstone.runtime.model.task import EntryLike, PointContext, identity

if TYPE_CHECKING:
    from soapstone.runtime.executors.process.processes import WorkerProcess


def context_of(operation: Operation, processor: Processor) -> PointContext:
    """What the task of an operation may know."""
    launch = operation.launch
    return PointContext(
        launch.task,
        operation.point,
        launch.grid,
        processor,
        launch.scalars,
        operation.variant,
    )


def bound(operation: Operation, processor: Processor, arrays: Sequence[Array]) -> EntryLike | None:
    """The native entry of an operation's task on arrays, or None where its Python body runs.

    In checked mode it runs on fenced copies of them; see `native.checked`.
    """
    task = operation.launch.task
    if task.bind is None:
        return None
    context = context_of(operation, processor)
    if not memory.CHECKED:
        return task.bind(context, arrays)
    from soapstone.native.checked import Argument, fenced

    arguments = [
        Argument(f"argument {number} ({use})", array, use.reads, use.writes)
        for number, (array, use) in enumerate(zip(arrays, task.privileges, strict=True))
    ]
    entry: EntryLike | None = fenced(arguments, partial(task.bind, context))
    return entry


def checked_message(entry: EntryLike) -> EntryLike:
    """The entry of a message that also checks the memory it was given."""
    from soapstone.native.checked import watched

    return watched(entry) if isinstance(entry, Entry) else entry


def prepared_body(
    operation: Operation,
    processor: Processor,
    arrays: Sequence[Array],
    process: WorkerProcess | None = None,
) -> Callable[[], object]:
    """The call of an operation's Python body on its arrays (read-only views where it only reads).

    It may be called many times: reduce buffers are set to the identity before each. process: where
    the body runs, if not in the calling thread.

    Raises: StoppedError for a task without a body; BodyError for one that no process can run.
    """
    launch = operation.launch
    task = launch.task
    body = task.body
    if body is None:
        raise StoppedError(f"task {task.name!r} has no body, and its bind function gave no entry")
    views = []
    partials: list[tuple[Array, Any]] = []
    for array, privilege in zip(arrays, task.privileges):
        if not privilege.writes:
            array = array.view()
            array.setflags(write=False)
        elif privilege.reduction is not None:
            partials.append((array, identity(privilege.reduction, array.dtype)))
        views.append(array)
    given: list[Any] = [context_of(operation, processor)] if task.context else []
    if launch.scalars:
        regions, scalars = iter(views), iter(launch.scalars)
        given += [next(regions) if region else next(scalars) for region in launch.layout]
    else:
        given += views
    call: Callable[[], object] = partial(body, *given)
    if process is not None:
        call = process.prepared(task.name, body, given)
    elif launch.changeable:
        scalar = [False] * task.context + [not region for region in launch.layout]
        call = partial(_with_copies, body, given, scalar)
    return partial(_on_identities, call, partials) if partials else call


def _with_copies(body: Callable[..., object], given: list[Any], scalar: list[bool]) -> object:
    """Call a body that could change its scalars: each call gets copies."""
    return body(*[captured(x) if mine else x for x, mine in zip(given, scalar)])


def _on_identities(call: Callable[[], object], partials: list[tuple[Array, Any]]) -> None:
    """Call a body that reduces into buffers of its own, which begin with the identity."""
    for array, value in partials:
        array[...] = value
    call()


def as_task_error(operation: Operation, processor: Processor, error: BaseException) -> TaskError:
    """The error of a point task, caused by what its body raised."""
    reason = error.reason if isinstance(error, BodyError) else f"{type(error).__name__}: {error}"
    described = TaskError(operation.launch.name, operation.point, processor.name, reason)
    described.__cause__ = error
    return described
