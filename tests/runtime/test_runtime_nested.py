"""Nested launches: subtasks on parts of a task's arguments, without deadlock, with clear errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from soapstone.runtime import (
    FieldRegion,
    Fields,
    LaunchError,
    Machine,
    Partition,
    PrivilegeError,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Scope,
    StoppedError,
    SubtaskError,
    Task,
    TaskError,
    Write,
    by_field,
    task,
)


@task
def add(x: ReadWrite, k: int) -> None:
    x += k


@task
def shifted(x: Read, y: Write) -> None:
    y[...] = x[1:] if x.shape[0] > y.shape[0] else x


@task
def total(x: Read) -> float:
    return x.sum()


@task
def accumulate(x: Read, out: Reduce("sum")) -> None:
    out += x.sum()


@task
def rounds(scope: Scope, x: ReadWrite, k: int) -> float:
    """Adds to tiles, then to other tiles: the second launch depends on parts of the first."""
    region = scope.region("x")
    scope.launch(add, Partition.tiled(region, 3), k)
    scope.launch(add, Partition.tiled(region, 2), 2 * k)
    return scope.launch(total, Partition.tiled(region, 4)).sum()


@task
def deep(scope: Scope, x: ReadWrite, levels: int) -> None:
    """A binary tree of tasks; each level waits for its children in its body."""
    if levels == 0:
        x += 1
        return
    halves = Partition.tiled(scope.region("x"), 2)
    scope.launch(deep, halves, levels - 1)
    scope.wait()
    scope.launch(add, halves, 1)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("cpus", "memories"), [(1, 1), (2, 1), (2, 2)])
def test_subtasks_follow_each_other_and_the_parent_ends_last(
    cpus: int, memories: int, traced: bool
) -> None:
    x = Region((40,), "f8", "x")
    with Runtime(Machine.local(cpus, memories=memories)) as runtime:
        runtime.write(x, np.arange(40.0))
        sums: list[Any] = []

        def step() -> None:
            sums.append(runtime.launch(rounds, Partition.tiled(x, 5), 4))
            runtime.launch(add, Partition.tiled(x, 3), 1)

        times = 1
        if traced:
            trace = runtime.capture(step)
            times = 3
            for _ in range(times):
                trace.replay()
        else:
            step()
        np.testing.assert_array_equal(runtime.read(x), np.arange(40.0) + 13 * times)
        before = np.arange(40.0) + 13 * (times - 1) + 12
        np.testing.assert_array_equal(sums[0].get(), before.reshape(5, 8).sum(axis=1))


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_all_workers_in_waiting_parents_do_not_wait_for_each_other(cpus: int) -> None:
    x = Region((64,), "i8", "x")
    with Runtime(Machine.local(cpus)) as runtime:
        for _ in range(3):
            runtime.fill(x, 0)
            runtime.launch(deep, Partition.tiled(x, 4), 4)
            assert (runtime.read(x) == 5).all()
        with runtime.trace("deep"):
            runtime.launch(deep, Partition.tiled(x, 4), 4)
        assert (runtime.read(x) == 10).all()


def test_subtasks_run_on_another_worker_while_the_parent_runs() -> None:
    met = threading.Event()
    x = Region((2,), "i8", "x")
    meet = Task("meet", (ReadWrite,), lambda x: met.set())

    @task
    def parent(scope: Scope, x: ReadWrite) -> None:
        scope.launch(meet, Partition.tiled(scope.region(0), 2))
        if not met.wait(20):  # without waiting for subtasks, so without helping
            raise TimeoutError("no other worker ran the subtask")

    with Runtime(Machine.local(2)) as runtime:
        runtime.launch(parent, x)
        runtime.wait()


def test_scopes_have_reductions_fields_sparse_tiles_and_regions_of_their_own() -> None:
    particles = FieldRegion((12,), {"x": "f8", "c": "i4"}, "p")
    colours = (np.arange(12) * 5 % 3).astype("i4")

    @task
    def parent(scope: Scope, p: Fields(x=ReadWrite, c=Read), out: Reduce("sum")) -> None:
        mine = scope.region("p")
        assert isinstance(mine, FieldRegion)
        tiles = by_field(scope, mine["c"], 2, mine["x"])
        scope.launch(add, tiles, 10)
        mean = scope.make((1,), "f8", "mean")
        scope.launch(accumulate, tiles, Partition.whole(mean, tiles.grid))
        scope.launch(accumulate, mean, scope.region("out"))
        scope.fill(mean, 1)
        np.testing.assert_array_equal(scope.read(mean), [1])
        scope.launch(accumulate, mean, scope.region("out"))

    with Runtime(Machine.local(2)) as runtime:
        runtime.write(particles, {"x": np.arange(12.0), "c": colours})
        out = Region((1,), "f8", "out")
        runtime.fill(out, 100)
        tiles = Partition.tiled(particles, 2)
        runtime.launch(parent, tiles, Partition.whole(out, (2,)))
        want = np.arange(12.0) + 10 * (colours < 2)
        np.testing.assert_array_equal(runtime.read(particles["x"]), want)
        assert runtime.read(out)[0] == 100 + want[colours < 2].sum() + 2


def _parent(body: Any, privilege: Any) -> Task:
    return Task("parent", (privilege,), body, nested=True, names=("x",), parameters=(privilege,))


@pytest.mark.parametrize("traced", [False, True])
def test_privileges_of_subtasks_lie_within_the_parents(traced: bool) -> None:
    x, other = Region((4,), "f8", "x"), Region((4,), "f8", "other")
    cases = [
        (
            _parent(lambda s, x: s.launch(add, s.region("x"), 1), Read),
            "'add' with ReadWrite on .*'x'",
        ),
        (_parent(lambda s, x: s.launch(total, s.region("x")), Reduce("sum")), "'total' with Read"),
        (_parent(lambda s, x: s.launch(total, other), ReadWrite), "'other', which is none"),
        (_parent(lambda s, x: s.fill(s.region("x"), 1), Read), "'fill' with ReadWrite"),
    ]
    with Runtime(Machine.local(2)) as runtime:
        for parent, message in cases:
            with pytest.raises(TaskError, match=f"task 'parent', .*{message}") as caught:
                if traced:
                    runtime.capture(lambda parent=parent: runtime.launch(parent, x)).replay()
                else:
                    runtime.launch(parent, x)
                    runtime.wait()
            assert isinstance(caught.value.__cause__, PrivilegeError)
            if not traced:
                runtime.reset()


@pytest.mark.parametrize("traced", [False, True])
def test_an_error_of_a_subtask_names_both(traced: bool) -> None:
    ran = []

    @task
    def fails(x: ReadWrite) -> None:
        raise ValueError("boom")

    @task
    def never(x: ReadWrite) -> None:
        ran.append(1)

    @task
    def middle(scope: Scope, x: ReadWrite) -> None:
        tiles = Partition.tiled(scope.region("x"), 2)
        scope.launch(fails, tiles)
        scope.launch(never, tiles)

    @task
    def top(scope: Scope, x: ReadWrite) -> None:
        scope.launch(middle, scope.region("x"))

    x = Region((4,), "f8", "x")
    with Runtime(Machine.local(2)) as runtime:
        with pytest.raises(TaskError) as caught:
            if traced:
                runtime.capture(lambda: runtime.launch(top, x)).replay()
            else:
                runtime.launch(top, x)
                runtime.wait()
        text = str(caught.value)
        assert text.startswith("task 'top', point 0") and text.endswith("ValueError: boom")
        assert "'middle'" in text and "'fails'" in text
        assert isinstance(caught.value.__cause__, SubtaskError) and not ran
        if not traced:
            runtime.reset()
        runtime.launch(rounds, x, 1)
        assert (runtime.read(x) == 3).all()


def test_a_body_that_raises_waits_for_its_subtasks_and_its_error_comes_out() -> None:
    started, release = threading.Event(), threading.Event()
    done = []

    @task
    def slow(x: ReadWrite) -> None:
        started.set()
        release.wait(20)
        done.append(float(x[0]))

    @task
    def parent(scope: Scope, x: ReadWrite) -> None:
        scope.launch(slow, scope.region("x"))
        assert started.wait(20)
        threading.Timer(0.05, release.set).start()
        raise KeyError("own")

    x = Region((4,), "f8", "x")
    with Runtime(Machine.local(2)) as runtime:
        runtime.launch(parent, x)
        with pytest.raises(TaskError, match=r"'parent'.*KeyError: 'own'"):
            runtime.wait()
        assert done == [0]


def test_misuse_is_refused() -> None:
    kept: list[Any] = []

    @task
    def leaks(scope: Scope, x: ReadWrite) -> None:
        kept.append(scope)
        kept.append(scope.launch(total, scope.region("x")))
        with pytest.raises(LaunchError, match=r"region\('y'\), needed one of 'x'"):
            scope.region("y")
        with pytest.raises(LaunchError, match="fill of region 'x': found 'z'"):
            scope.fill(scope.region("x"), "z")
        with pytest.raises(LaunchError, match="a Task needed"):
            scope.launch(abs, x)  # type: ignore[arg-type]

    x = Region((4,), "f8", "x")
    with Runtime(Machine.local(1)) as runtime:
        runtime.launch(leaks, x)
        runtime.wait()
        with pytest.raises(StoppedError, match="after its end"):
            kept[0].launch(total, x)
        with pytest.raises(LaunchError, match="another runtime or task"):
            runtime.launch(add, x, kept[1])
    with pytest.raises(LaunchError, match="needs a Python body"):
        Task("n", (Read,), bind=lambda c, a: None, nested=True)
