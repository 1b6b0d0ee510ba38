"""Tasks over plain arguments that do what a task does over fields, futures and sparse tiles.

The analysis, traces and executors see only these: regions of one field, boxes, scalars. The body
of such a task puts its arguments together again before it calls the body it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.errors import LaunchError
from soapstone.runtime.model.region_fields import FieldViews
from soapstone.runtime.model.task import EntryLike, PointContext, Privilege, Returns, Task, identity

Bind = Callable[[PointContext, Sequence[Array]], EntryLike | None]


@dataclass(frozen=True)
class Form:
    """What one argument of a launch is made of, and how the body sees it.

    kind: "scalar" or "region"; "fields", a region for each name; "value", a future where the task
    has a scalar; "row", a future where it reads a region. start: the reduction whose identity the
    arrays hold when the body begins, for each region, or None.
    """

    kind: str
    names: tuple[str, ...] = ("",)
    starts: tuple[str | None, ...] = (None,)


def adapted(task: Task, forms: tuple[Form, ...], privileges: tuple[Privilege, ...]) -> Task:
    """The task over plain arguments that does what `task` does over arguments of these forms.

    Its plain arguments are: for a nested task whoever opens its scope, then those of each form,
    then the array of the value it returns.

    Raises: LaunchError when a future is given as a scalar to a task that has no Python body.
    """
    key = (forms, privileges)
    found = task.forms.get(key)
    if found is None:
        values = any(form.kind == "value" for form in forms)
        if values and task.body is None:
            raise LaunchError(
                f"task {task.name!r}: a future is given as a scalar, and the task has no Python "
                "body; declare a Read argument for it"
            )
        found = Task(
            task.name,
            privileges,
            body=None if task.body is None else Adapted(task, task.body, forms),
            bind=None if task.bind is None or values else _bound(task.bind, forms),
            context=True,
            variants=task.variants,
            kind=task.kind,
        )
        task.forms[key] = found
    return found


@dataclass(frozen=True)
class Adapted:
    """The body of an adapted task. A class, so that it can be sent to a process."""

    task: Task
    body: Callable[..., Any]
    forms: tuple[Form, ...]

    def __call__(self, context: PointContext, *plain: Any) -> None:
        """Put the arguments together, run the body, and keep what it returns."""
        task = self.task
        rest = iter(plain)
        nest = next(rest) if task.nested else None
        given: list[Any] = [context] if task.context else []
        for form in self.forms:
            mine = list(islice(rest, len(form.names)))
            for array, start in zip(mine, form.starts):
                if start is not None:
                    array[...] = identity(start, array.dtype)
            if form.kind == "fields":
                given.append(FieldViews(dict(zip(form.names, mine))))
            elif form.kind == "value":
                given.append(mine[0][0, ...][()])
            else:
                given.append(mine[0][0, ...] if form.kind == "row" else mine[0])
        value = self.body(*given) if nest is None else nest.run(task, context, self.body, given)
        if task.returns is not None:
            _store(task.name, task.returns, value, next(rest))


def _store(name: str, returns: Returns, value: Any, out: Array) -> None:
    """Keep what a body returned.

    Raises: LaunchError for a value of another shape, or of another kind of numbers.
    """
    found = np.asarray(value)
    kind = found.dtype if found.ndim or isinstance(value, np.generic) else np.min_scalar_type(value)
    if found.shape != returns.shape or not np.can_cast(kind, returns.dtype, "same_kind"):
        what = repr(value) if found.dtype.kind == "O" else f"{found.dtype} {found.shape}"
        raise LaunchError(f"task {name!r} returned {what}, needed {returns.dtype} {returns.shape}")
    out[0, ...] = found


def _bound(bind: Bind, forms: tuple[Form, ...]) -> Bind:
    rows = [form.kind == "row" for form in forms if form.kind != "scalar" for _ in form.names]

    def run(context: PointContext, arrays: Sequence[Array]) -> EntryLike | None:
        given = [a[0, ...] if row else a for a, row in zip(arrays, rows)]
        return bind(context, [*given, *arrays[len(rows) :]])

    return run
