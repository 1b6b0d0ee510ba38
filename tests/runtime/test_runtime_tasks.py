"""Tasks and launches: declarations, privileges, arguments, and the errors of each."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest

from soapstone.native.memory import Array
from soapstone.runtime import (
    LaunchError,
    Machine,
    Partition,
    PointContext,
    PrivilegeError,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    StoppedError,
    Task,
    Write,
    task,
)


@task
def saxpy(a: float, x: Read, y: ReadWrite) -> None:
    y += a * x


@task
def total(x: Read, out: Reduce("sum")) -> None:
    out += x.sum()


@task
def stencil(x: Read, y: Write) -> None:
    y[...] = x[: y.shape[0]] + 1


def _body(*arrays: Array) -> None:
    for array in arrays:
        if array.flags.writeable:
            array[...] = 1


@pytest.fixture
def runtime() -> Any:
    with Runtime(Machine.local(2)) as made:
        yield made


def test_saxpy_over_an_index_launch(runtime: Runtime) -> None:
    x, y = Region((10,), "f4", "x"), Region((10,), "f4", "y")
    runtime.write(x, np.arange(10, dtype="f4"))
    runtime.fill(y, 1)
    runtime.launch(saxpy, 2.0, Partition.tiled(x, 3), Partition.tiled(y, 3))
    np.testing.assert_array_equal(runtime.read(y), 2 * np.arange(10, dtype="f4") + 1)


def test_a_region_stands_for_all_of_it_and_is_zero_at_first(runtime: Runtime) -> None:
    x, y = Region((2, 3), "f8", "x"), Region((2, 3), "f8", "y")
    assert (runtime.read(x) == 0).all()
    runtime.write(x, np.ones((2, 3)))
    runtime.launch(saxpy, 3, x, y)
    assert (runtime.read(y) == 3).all()


def test_reductions_combine_or_replace(runtime: Runtime) -> None:
    x, out = Region((12,), "i8", "x"), Region((), "i8", "out")
    runtime.write(x, np.arange(12))
    runtime.launch(total, Partition.tiled(x, 4), out)
    runtime.launch(total, Partition.tiled(x, 5), out)
    assert runtime.read(out) == 2 * 66
    runtime.launch(total, Partition.tiled(x, 4), out, initialise=True)
    assert runtime.read(out) == 66


def test_initialise_resets_what_no_box_covers(runtime: Runtime) -> None:
    x, out = Region((4,), "f4", "x"), Region((6,), "f4", "out")
    runtime.write(x, np.arange(4, dtype="f4"))
    runtime.fill(out, 9)
    part = Partition.of(out, [[0], [0]], [[2], [2]])

    def body(x: Array, out: Array) -> None:
        out[...] = x

    most = Task("most", (Read, Reduce("max")), body)
    runtime.launch(most, Partition.tiled(x, 2), part, initialise=True)
    assert runtime.read(out).tolist() == [2, 3] + [-np.inf] * 4


def test_bodies_cannot_write_what_they_read(runtime: Runtime) -> None:
    def body(x: Array) -> None:
        x[...] = 1

    runtime.launch(Task("thief", (Read,), body), Region((3,), "f4", "x"))
    with pytest.raises(Exception, match=r"task 'thief', point 0, .*read-only"):
        runtime.wait()
    runtime.reset()


def test_context_and_annotated_privileges(runtime: Runtime) -> None:
    seen: list[PointContext] = []

    def body(context: PointContext, scale: int, out: Array) -> None:
        seen.append(context)
        out[...] = context.index[1] * scale

    noted = Task("noted", (Write,), body, context=True)
    out = Region((2, 3), "i4", "out")
    runtime.launch(noted, 5, Partition.tiled(out, (2, 3)))
    assert runtime.read(out).tolist() == [[0, 5, 10]] * 2
    assert {c.point for c in seen} == set(range(6)) and seen[0].scalars == (5,)
    assert seen[0].processor in runtime.machine.processors

    @task
    def typed(x: Annotated[Array, Read], y: Annotated[Array, Write]) -> None:
        y[...] = x

    assert typed.privileges == (Read, Write)


def test_points_with_nothing_to_write_do_not_run(runtime: Runtime) -> None:
    ran: list[int] = []

    def body(context: PointContext, out: Array) -> None:
        ran.append(context.point)

    out = Region((2,), "f4", "out")
    runtime.launch(Task("few", (Write,), body, context=True), Partition.tiled(out, 4))
    runtime.wait()
    assert sorted(ran) == [1, 3]


# -- errors


def test_overlapping_writers_are_named(runtime: Runtime) -> None:
    y = Region((8,), "f4", "field")
    halo = Partition.halo(Partition.tiled(y, 2), 0, 1)
    with pytest.raises(
        PrivilegeError,
        match=r"'saxpy': points 0 and 1 .* 'field'.*\[0\]\.\.\[5\] and \[4\]\.\.\[8\]",
    ):
        runtime.launch(saxpy, 1.0, Region((8,), "f4", "x"), halo)


def test_reading_what_the_same_launch_writes_is_refused(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    tiles = Partition.tiled(x, 2)
    with pytest.raises(PrivilegeError, match="region 'x' is argument 0 with Read"):
        runtime.launch(stencil, Partition.halo(tiles, 1, 1), tiles)
    other = Partition.of(x, [[0], [1]], [[1], [2]])
    apart = Partition.of(x, [[4], [6]], [[6], [8]])
    runtime.launch(stencil, apart, other)
    runtime.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x, y: (2.0, x), "found 2 arguments, needed 3"),
        (lambda x, y: (x, x, y), "argument 0 is .* needed a scalar"),
        (lambda x, y: (1.0, 2.0, y), "argument 1 is 2.0, needed a region or partition"),
        (lambda x, y: (np.zeros(3), x, y), "array of shape"),
        (
            lambda x, y: (1.0, Partition.tiled(x, 2), Partition.tiled(y, 4)),
            r"region 'y' has grid \(4,\), needed \(2,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(runtime: Runtime, arguments: Any, message: str) -> None:
    x, y = Region((8,), "f4", "x"), Region((8,), "f4", "y")
    with pytest.raises(LaunchError, match=message):
        runtime.launch(saxpy, *arguments(x, y))


def test_wrong_launches_are_named(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    plain = Task("plain", (Read, Write), _body)
    with pytest.raises(LaunchError, match="found 1 region arguments, needed 2"):
        runtime.launch(plain, x)
    with pytest.raises(LaunchError, match="a Task needed"):
        runtime.launch(_body, x)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="extents >= 1"):
        runtime.launch(plain, x, x, grid=(0,))
    with pytest.raises(LaunchError, match="needed \\(3,\\)"):
        runtime.launch(plain, Partition.tiled(x, 2), x, grid=(3,))
    flag = Region((2,), bool, "flag")
    with pytest.raises(LaunchError, match=r"'flag': .*dtype bool has no such reduction"):
        runtime.launch(Task("count", (Reduce("sum"),), _body), flag)
    with pytest.raises(LaunchError, match="needed one of sum, max"):
        Reduce("mean")
    with pytest.raises(LaunchError, match="neither a body nor a bind"):
        Task("empty", (Read,))
    with pytest.raises(LaunchError, match="needed Read, Write"):
        Task("odd", ("Read",), _body)  # type: ignore[arg-type]


def test_wrong_declarations_are_named() -> None:
    def nothing(a: int) -> None: ...

    def spread(*x: Read) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(LaunchError, match="no parameter is annotated"):
        task(nothing)
    with pytest.raises(LaunchError, match="must be positional"):
        task(spread)


def test_wrong_host_access_is_named(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    with pytest.raises(LaunchError, match=r"found float64 \(8,\), needed float32 \(8,\)"):
        runtime.write(x, np.zeros(8))
    with pytest.raises(LaunchError, match=r"float32 \(7,\)"):
        runtime.write(x, np.zeros(7, "f4"))
    with pytest.raises(LaunchError, match="fill of region 'x'"):
        runtime.fill(x, "one")
    with pytest.raises(LaunchError, match="fill of region 'x'"):
        runtime.fill(x, np.zeros(3))
    with pytest.raises(LaunchError, match="fits int32"):
        runtime.fill(Region((2,), "i4", "n"), 0.5)
    with pytest.raises(LaunchError, match="transient"):
        runtime.array(Region((2,), "f4", "t", transient=True))


def test_a_closed_runtime_refuses() -> None:
    runtime = Runtime(Machine.local(1))
    runtime.close()
    runtime.close()
    with pytest.raises(StoppedError, match="closed"):
        runtime.fill(Region((2,), "f4"), 0)


def test_a_task_can_be_called_on_arrays() -> None:
    x, y = np.ones(3), np.ones(3)
    saxpy(2.0, x, y)
    assert y.tolist() == [3, 3, 3]
