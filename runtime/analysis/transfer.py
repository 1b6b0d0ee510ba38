"""Copies, fills and folds: tasks that the runtime issues itself, in NumPy and as native entries.

Nothing here imports Numba until an entry is bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from soapstone.dtypes import WIDE, code_of, name_of
from soapstone.native.memory import Array, Entry, pack
from soapstone.native.walks import COMBINE, FIRST, IDENTITY, moved, walk
from soapstone.records import dataclass
from soapstone.runtime.model.task import PointContext, Read, ReadWrite, Task, Write, identity

NATIVE_FOLDS = frozenset(["f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])


class FoldPart(NamedTuple):
    """One partial result: the part `place` of an argument, which goes to a box of the output.

    `target` and `source` are slices of the output and of the partial result; None for all of it.
    """

    argument: int
    place: int | slice
    target: tuple[slice, ...] | None
    source: tuple[slice, ...] | None


def copy_entry(target: Array, source: Array) -> Entry:
    """The native entry that copies between arrays of one shape and dtype (source may broadcast).

    Raises: ValueError when shapes or dtypes differ.
    """
    from soapstone.native.copies import copy

    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"copy: source is {source.dtype} {source.shape}, target {target.dtype} {target.shape}"
        )
    to, x = moved(target, source)
    entry = copy(to, x, 1)
    assert entry is not None  # words of any strides can be copied
    return entry


@contextmanager
def folded(out: Array) -> Iterator[Array]:
    """The array to fold into: `out`, or for halves a wider copy that is rounded at the end."""
    to = WIDE.get(name_of(out.dtype))
    if to is None:
        yield out
        return
    wide = out.astype(to)
    yield wide
    with np.errstate(over="ignore", under="ignore"):
        out[...] = wide


def combine(reduction: str, out: Array, part: Array) -> None:
    """`out = out (reduction) part`, element by element, bit-equal to the native fold."""
    if reduction == "sum":
        np.add(out, part, out=out)
    elif reduction == "prod":
        np.multiply(out, part, out=out)
    else:
        better = (out >= part) if reduction == "max" else (out <= part)
        np.copyto(out, part, where=~(better | (out != out)))


def fold_arrays(
    reduction: str, mode: int, out: Array, parts: Sequence[tuple[Array, Array]]
) -> None:
    """Fold partials into `out` in order; parts: (target view, partial) pairs."""
    if mode == IDENTITY:
        out[...] = identity(reduction, out.dtype)
    for place, (target, part) in enumerate(parts):
        if place == 0 and mode == FIRST:
            np.copyto(target, part)
        else:
            combine(reduction, target, part)


def fold_entry(
    reduction: str, mode: int, out: Array, parts: Sequence[tuple[Array, Array]]
) -> Entry | None:
    """The native entry of `fold_arrays`, or None for a dtype without a native kernel."""
    if code_of(out.dtype)[1:] not in NATIVE_FOLDS or not out.dtype.isnative:
        return None
    from soapstone.native.folds import STAGE, fold_kernel

    stages: list[tuple[Any, ...]] = []

    def stage(how: int, target: Array, given: Sequence[Array]) -> None:
        extents, (out_strides, *strides) = walk(target.shape, [target, *given])
        head = STAGE.row(mode=how, parts=len(given), axes=len(extents), output=target)
        stages.append((head, extents, out_strides, list(zip(given, strides))))

    if all(target.shape == out.shape for target, _ in parts):
        stage(mode, out, [part for _, part in parts])
    else:
        if mode == IDENTITY:
            stage(IDENTITY, out, [])
        for target, part in parts:
            stage(COMBINE, target, [part])
    start = identity(reduction, out.dtype)
    kernel = fold_kernel(out.dtype.str, reduction, start.item())
    return Entry(kernel.address, pack(len(stages), stages, keep=(kernel,)))


def _copy(source: Array, target: Array) -> None:
    np.copyto(target, source)


def _bind_copy(context: PointContext, arrays: Sequence[Array]) -> Entry:
    return copy_entry(arrays[1], arrays[0])


COPY = Task("copy", (Read, Write), body=_copy, bind=_bind_copy, kind="copy")


def _fill(value: Any, target: Array) -> None:
    target[...] = value


def _bind_fill(context: PointContext, arrays: Sequence[Array]) -> Entry:
    target = arrays[0]
    value = np.full((1,) * target.ndim, context.scalars[0], dtype=target.dtype)
    return copy_entry(target, np.broadcast_to(value, target.shape))


FILL = Task("fill", (Write,), body=_fill, bind=_bind_fill, parameters=(None, Write), kind="fill")


@dataclass(frozen=True, eq=False)
class FoldTask(Task):
    """A task of folds. parts: what each point folds, in order."""

    reduction: str = "sum"
    mode: int = COMBINE
    parts: Sequence[Sequence[FoldPart]] = ()

    def views(self, point: int, arrays: Sequence[Array]) -> list[tuple[Array, Array]]:
        """What a point folds: for each part, the view of the output and of the partial result."""
        out = arrays[0]
        found = []
        for part in self.parts[point]:
            given = arrays[part.argument][part.place, ...]
            found.append(
                (
                    out if part.target is None else out[part.target],
                    given if part.source is None else given[part.source],
                )
            )
        return found


def fold_task(
    reduction: str, mode: int, arguments: int, parts: Sequence[Sequence[FoldPart]]
) -> Task:
    """The task whose point f folds `parts[f]` into its first argument.

    arguments: how many arrays of partials follow the output; each holds partials along axis 0.
    """

    def body(context: PointContext, *arrays: Array) -> None:
        with folded(arrays[0]) as out:
            fold_arrays(reduction, mode, out, made.views(context.point, (out, *arrays[1:])))

    def bind(context: PointContext, arrays: Sequence[Array]) -> Entry | None:
        return fold_entry(reduction, mode, arrays[0], made.views(context.point, arrays))

    output = ReadWrite if mode == COMBINE else Write
    privileges = (output, *[Read] * arguments)
    made = FoldTask(
        *("fold", privileges, body, bind),
        context=True,
        kind="fold",
        reduction=reduction,
        mode=mode,
        parts=parts,
    )
    return made
