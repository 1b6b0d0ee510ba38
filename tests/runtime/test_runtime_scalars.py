"""Scalars are taken by value when they are launched, whatever the program does afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from soapstone.runtime import Machine, Partition, Reduce, Region, Runtime, Task, Write, task


@task
def add(change: object, x: Reduce("sum")) -> None:  # type: ignore[valid-type]
    x[...] = value_of(change)


def value_of(change: Any) -> float:
    """The number inside a scalar of any of the forms below."""
    while not isinstance(change, np.ndarray | np.generic | float):
        change = change["value"] if isinstance(change, dict) else change[0]
    return float(np.asarray(change).item())


def _array() -> tuple[Any, Callable[[float], None]]:
    held = np.array(0.0)
    return held, lambda value: held.fill(value)


def _list() -> tuple[Any, Callable[[float], None]]:
    held = [0.0]
    return held, lambda value: held.__setitem__(0, value)


def _dictionary() -> tuple[Any, Callable[[float], None]]:
    held = {"value": [0.0]}
    return held, lambda value: held["value"].__setitem__(0, value)


def _tuple() -> tuple[Any, Callable[[float], None]]:
    held = np.array([0.0])
    return (held, "rate"), lambda value: held.fill(value)


FORMS = (_array, _list, _dictionary, _tuple)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["plain", "automatic", "recorded"])
def test_a_scalar_that_changes_afterwards_is_taken_as_it_was(
    form: Callable[[], Any], how: str
) -> None:
    scalar, put = form()
    x = Region((40,), "f8", "x")
    wanted = 0.0
    gate = threading.Event()
    hold = Task("hold", (Write,), lambda x: gate.wait() and None)
    with Runtime(Machine.local(cpus=1), automatic=how == "automatic") as runtime:
        if how == "plain":
            runtime.launch(hold, Region((1,), "f8"))  # nothing runs before all is launched
        for turn in range(150):
            put(float(turn // 50))
            if how == "recorded":
                with runtime.trace():
                    runtime.launch(add, scalar, Partition.tiled(x, 4))
                    put(-1.0)
            else:
                runtime.launch(add, scalar, Partition.tiled(x, 4))
            put(-2.0)
            wanted += turn // 50
        gate.set()
        np.testing.assert_array_equal(runtime.read(x), np.full(40, wanted))
        if how == "recorded" and form is not _dictionary:
            assert runtime.statistics.captures == 3  # one for each value
        if how == "automatic" and form is not _dictionary:
            assert runtime.statistics.launches_traced > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_keeps_the_scalars_it_was_captured_with(form: Callable[[], Any]) -> None:
    scalar, put = form()
    x = Region((4,), "f8", "x")
    with Runtime(Machine.local(cpus=1)) as runtime:
        put(3.0)
        trace = runtime.capture(lambda: runtime.launch(add, scalar, x))
        put(5.0)
        for turn in range(1, 4):
            trace.replay()
            np.testing.assert_array_equal(runtime.read(x), np.full(4, 3.0 * turn))


def test_what_a_body_does_to_its_scalars_is_seen_by_nobody() -> None:
    def body(given: list[int], x: np.ndarray) -> None:
        given.append(len(given))
        x[...] = len(given)

    grow = Task("grow", (Write,), body)
    x = Region((6,), "i8", "x")
    given = [7]
    with Runtime(Machine.local(cpus=2)) as runtime:
        runtime.launch(grow, given, Partition.tiled(x, 6))
        np.testing.assert_array_equal(runtime.read(x), np.full(6, 2))
        trace = runtime.capture(lambda: runtime.launch(grow, given, Partition.tiled(x, 6)))
        for _ in range(3):
            trace.replay()
            np.testing.assert_array_equal(runtime.read(x), np.full(6, 2))
    assert given == [7]


def test_an_object_of_another_class_is_passed_as_it_is() -> None:
    lock = threading.Lock()
    same = Task("same", (Write,), lambda given, x: x.fill(given is lock))
    x = Region((1,), "i8", "x")
    with Runtime(Machine.local(cpus=1)) as runtime:
        runtime.launch(same, lock, x)
        assert runtime.read(x)[0]
