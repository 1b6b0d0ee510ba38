"""Futures: values of tasks passed on without waiting, in steps, in traces, across memories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.runtime import (
    Future,
    FutureMap,
    LaunchError,
    Machine,
    Partition,
    Read,
    ReadWrite,
    Region,
    Returns,
    Runtime,
    StoppedError,
    Task,
    TaskError,
    Write,
    task,
)


@task
def dot(a: Read, b: Read) -> float:
    return a @ b


@task
def scale(y: ReadWrite, factor: float) -> None:
    assert np.ndim(factor) == 0
    y *= factor


@task
def bounds(x: Read) -> Returns("i8", (2,)):
    return np.array([x.min(), x.max()])


@task
def shift(y: ReadWrite, by: Any, value: Read) -> None:
    y += by[0] * value[1]


@task
def number(k: int) -> np.int32:
    return k * k


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2)])
def runtime(request: Any) -> Any:
    cpus, memories = request.param
    with Runtime(Machine.local(cpus, memories=memories)) as made:
        yield made


def test_a_future_is_passed_on_and_waited_for_by_those_who_need_it(runtime: Runtime) -> None:
    x = Region((8,), "f8", "x")
    runtime.fill(x, 2)
    found = runtime.launch(dot, x, x)
    runtime.launch(scale, Partition.tiled(x, 4), found)
    assert isinstance(found, Future) and found.dtype == np.float64 and found.shape == ()
    assert found.get() == 32.0 and isinstance(found.get(), np.float64)
    assert (runtime.read(x) == 64).all()


def test_maps_reduce_in_order_and_give_each_point_its_value(runtime: Runtime) -> None:
    x, y = Region((12,), "i8", "x"), Region((12,), "i8", "y")
    data = np.random.default_rng(0).integers(-50, 50, 12)
    runtime.write(x, data)
    runtime.fill(y, 1)
    tiles = Partition.tiled(x, 4)
    found = runtime.launch(bounds, tiles)
    assert isinstance(found, FutureMap) and found.points == 4 and found.grid == (4,)
    want = np.array([[part.min(), part.max()] for part in np.split(data, 4)])
    np.testing.assert_array_equal(found.get(), want)
    np.testing.assert_array_equal(found.sum().get(), want.sum(axis=0))
    np.testing.assert_array_equal(found.min().get(), want.min(axis=0))
    np.testing.assert_array_equal(found.max().get(), want.max(axis=0))
    np.testing.assert_array_equal(found.reduce("prod").get(), want.prod(axis=0))
    np.testing.assert_array_equal(found[2].get(), want[2])
    runtime.launch(shift, Partition.tiled(y, 4), found, found[1])
    np.testing.assert_array_equal(runtime.read(y), 1 + np.repeat(want[:, 0] * want[1, 1], 3))


def test_a_task_without_regions_returns_values_over_a_grid(runtime: Runtime) -> None:
    found = runtime.launch(number, 7)
    assert found.get() == 49 and found.get().dtype == np.int32
    squares = runtime.launch(number, 3, grid=(2, 3))
    assert (squares.get() == np.full((2, 3), 9)).all() and squares[1, 2].get() == 9
    cubes = runtime.launch(number, squares)
    assert cubes.get().shape == (2, 3) and (cubes.get() == 81).all()


def test_the_sum_of_a_map_has_the_bits_of_the_sequential_sum(runtime: Runtime) -> None:
    n = 300
    x = Region((n,), "f4", "x")
    data = np.random.default_rng(1).standard_normal(n).astype("f4")
    runtime.write(x, data)
    first = Task("first", (Read,), lambda tile: tile[0], returns=Returns("f4"))
    want = np.float32(data[0])
    for value in data[1:]:
        want = np.float32(want + value)
    tiles = Partition.tiled(x, n)
    assert runtime.launch(first, tiles).sum().get() == want
    totals = []
    trace = runtime.capture(lambda: totals.append(runtime.launch(first, tiles).sum()))
    trace.replay()
    assert totals[0].get() == want


def test_a_captured_future_holds_what_the_last_replay_returned(runtime: Runtime) -> None:
    x = Region((4,), "f8", "x")
    runtime.fill(x, 1)
    outside = runtime.launch(number, 3)
    made: list[Any] = []

    def step() -> None:
        made.append(runtime.launch(dot, x, x))
        runtime.launch(scale, Partition.tiled(x, 2), made[0])
        runtime.launch(scale, x, outside)

    trace = runtime.capture(step)
    want = 1.0
    for _ in range(3):
        trace.replay()
        assert made[0].get() == 4 * want**2
        want = want * 4 * want**2 * 9
        np.testing.assert_allclose(runtime.read(x), want)


def test_a_step_that_traces_itself_is_captured_once_whatever_its_futures(runtime: Runtime) -> None:
    x = Region((4,), "f8", "x")
    runtime.write(x, np.arange(4.0) + 1)
    expected = np.arange(4.0) + 1
    last = runtime.launch(scale_down, 1024.0)
    last_value = 1.0
    kept: list[tuple[Any, float]] = []
    for _ in range(4):
        with runtime.trace("step"):
            parts = runtime.launch(dot, Partition.tiled(x, 2), Partition.tiled(x, 2))
            runtime.launch(scale, x, last)
            total = parts.max()
            with pytest.raises(StoppedError, match=r"has not been run|during a capture"):
                total.get()
        want = max(expected[:2] @ expected[:2], expected[2:] @ expected[2:])
        expected = expected * last_value
        np.testing.assert_allclose(runtime.read(x), expected)
        kept.append((total, want))
        last, last_value = runtime.launch(scale_down, total), want / 1024
    assert runtime.statistics.captures == 1
    for future, want in kept:
        assert future.get() == pytest.approx(want)
    runtime.fill(x, 1)
    runtime.launch(scale, x, kept[0][0])
    runtime.launch(shift, x, runtime.launch(pair, 2), runtime.launch(pair, 3))
    np.testing.assert_allclose(runtime.read(x), kept[0][1] + 2 * 3)


@task
def scale_down(value: float) -> float:
    return value / 1024


@task
def pair(k: int) -> Returns("f8", (2,)):
    return np.array([k, k])


def test_a_known_value_can_stand_where_a_region_is_read(runtime: Runtime) -> None:
    y = Region((2,), "f8", "y")
    with runtime.trace("pairs"):
        made = runtime.launch(pair, 5)
    runtime.launch(shift, y, made, made)
    assert (runtime.read(y) == 25).all()
    trace = runtime.capture(lambda: runtime.launch(shift, y, made, made))
    trace.replay()
    assert (runtime.read(y) == 50).all()


def test_errors_name_the_task_and_what_it_returned() -> None:
    x = Region((4,), "f8", "x")
    with Runtime(Machine.local(2)) as runtime:
        wrong = Task("wrong", (Read,), lambda tile: tile, returns=Returns("f8"))
        found = runtime.launch(wrong, x)
        with pytest.raises(TaskError, match=r"task 'wrong' returned float64 \(4,\), needed"):
            found.get()
        runtime.reset()
        nothing = Task("nothing", (Read,), lambda tile: None, returns=Returns("f8"))
        with pytest.raises(TaskError, match="returned None, needed float64"):
            runtime.launch(nothing, x).get()
        runtime.reset()
        real = Task("real", (Read,), lambda tile: 1.5, returns=Returns("i8"))
        with pytest.raises(TaskError, match="needed int64"):
            runtime.launch(real, x).get()
        runtime.reset()
        maps = runtime.launch(number, 1, grid=(3,))
        with pytest.raises(LaunchError, match=r"has? grid|grid \(3,\), needed \(2,\)"):
            runtime.launch(scale, Partition.tiled(x, 2), maps)
        with pytest.raises(LaunchError, match="point 3 found"):
            maps[3]
        with pytest.raises(LaunchError, match="only read"):
            runtime.launch(Task("w", (Write,), lambda y: None, parameters=(Write,)), maps[0])
        with pytest.raises(LaunchError, match="no Python body"):
            native = Task("n", (Read,), bind=lambda c, a: None, parameters=(Read, None))
            runtime.launch(native, x, maps[0])
    with pytest.raises(LaunchError, match="return annotation"):

        @task
        def bad(x: Read) -> str:
            return ""
