"""Checked mode: entries that touch memory they have no right to are caught, others run alike."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.training_runs import cnn

from soapstone.kernels.entry import Call
from soapstone.kernels.select import select
from soapstone.native import checked, memory
from soapstone.native.checked import FAULT, Argument, CheckedError, fenced
from soapstone.native.entries import Native, bind, native, sequence
from soapstone.native.intrinsics import f32p, words
from soapstone.native.memory import Array, Entry, address, aligned_array, pack, run
from soapstone.runtime import (
    Machine,
    Partition,
    PointContext,
    Read,
    Region,
    Runtime,
    StoppedError,
    Task,
    TaskError,
    Write,
)
from soapstone.search.cost.measure import Weights, timed

STOPS = TaskError, StoppedError  # the latter where a second launch meets what stopped the first


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHECKED", True)


# Words: x, y, numbers, and how many of them are read before x, or written before y or behind it.
@native()
def _twice(block: object) -> int:
    w = words(block)
    x, y = f32p(w[0]), f32p(w[1])
    for i in range(w[3], w[2] + w[4]):
        y[i] = 2 * x[i]
    return 0


@native()
def _last_plus(block: object) -> int:
    w = words(block)
    f32p(w[1])[0] = f32p(w[0])[w[2]] + 1
    return 0


@native()
def _all_but_one(block: object) -> int:
    w = words(block)
    for i in range(w[2] - 1):
        f32p(w[1])[i] = f32p(w[0])[i]
    return 0


@native()
def _into_input(block: object) -> int:
    w = words(block)
    for i in range(w[2]):
        f32p(w[1])[i] = f32p(w[0])[i]
    f32p(w[0])[0] = 7
    return 0


@native()
def _every_second(block: object) -> int:
    w = words(block)
    for i in range(2 * w[2] - 1):
        f32p(w[1])[i] = 1
    return 0


def attempt(
    kernel: Native, *more: int, x: Array | None = None, y: Array | None = None
) -> tuple[str, Array]:
    """What checked mode says of a kernel, and its output; x and y: (8,) float32 by default."""
    x = np.arange(8, dtype=np.float32) if x is None else x
    y = np.full(8, -1, np.float32) if y is None else y
    arguments = [Argument("x", x, True, False), Argument("y", y, False, True)]
    entry = fenced(arguments, lambda arrays: bind(kernel, *arrays, 8, *more))
    status = run(entry)
    assert status in (0, FAULT)
    return entry.statuses[status] if status else "", y


def test_what_is_right_is_let_through() -> None:
    said, y = attempt(_twice, 0, 0)
    assert said == "" and (y == 2 * np.arange(8)).all()


@pytest.mark.parametrize(
    ("kernel", "more", "said"),
    [
        (_twice, (0, 1), r"wrote \d bytes past the end of y, float32 \(8,\)"),
        (_twice, (0, 200), r"wrote \d bytes past the end of y"),
        (_twice, (-1, 0), r"wrote \d bytes before y"),
        (_last_plus, (), r"element \(0,\) of y, float32 \(8,\) with strides \(4,\)"),
        (_all_but_one, (), r"left element \(7,\) of y"),
        (_into_input, (), "bytes into x"),
    ],
)
def test_faults_are_caught_at_the_element(kernel: Native, more: tuple[int, ...], said: str) -> None:
    found, y = attempt(kernel, *more)
    assert re.search(said, found), found
    assert (y == -1).all()  # nothing of it has come out


def test_gaps_between_elements_are_not_the_entrys() -> None:
    y = np.full(16, -1, np.float32)
    said, _ = attempt(_every_second, y=y[::2])
    assert re.search(r"wrote between elements, \d bytes into y", said)
    assert (y == -1).all()


def test_what_is_not_aligned_is_refused() -> None:
    store = np.zeros(40, np.uint8)
    said, _ = attempt(_twice, 0, 0, x=store[1:33].view(np.float32))
    assert "not at a multiple of 4 bytes" in said


def test_views_that_reach_out_of_their_memory_are_refused() -> None:
    x = np.zeros(8, np.float32)
    wide = np.lib.stride_tricks.as_strided(x, (8,), (8,))
    said, _ = attempt(_twice, 0, 0, x=wide)
    assert "outside its allocation" in said

    def reaching(arrays: Any) -> Entry:
        wide = np.lib.stride_tricks.as_strided(arrays[0], (16,), (4,))
        return bind(_twice, wide, arrays[1], 8, 0, 0)

    y = np.zeros(8, np.float32)
    entry = fenced([Argument("x", x, True, False), Argument("y", y, False, True)], reaching)
    assert run(entry) == FAULT and "outside its allocation" in entry.statuses[FAULT]


def test_arrays_that_an_entry_does_not_keep_count_as_freed() -> None:
    """Here they would live on by luck; elsewhere they are gone when the entry runs."""
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    arguments = [Argument("x", x, True, False), Argument("y", y, False, True)]

    def forgetful(number: int) -> Callable[[Any], Entry]:
        def made(arrays: Any) -> Entry:
            given = [int(address(a)) if n == number else a for n, a in enumerate(arrays)]
            return bind(_twice, *given, 8, 0, 0)

        return made

    for number, said in ((0, "depends on bytes outside"), (1, "which it does not keep")):
        entry = fenced(arguments, forgetful(number))
        gc.collect()
        assert run(entry) == FAULT and said in entry.statuses[FAULT]


def test_scratch_memory_has_guard_zones() -> None:
    x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    arguments = [Argument("x", x, True, False), Argument("y", y, False, True)]

    def using(more: int) -> Callable[[Any], Entry]:
        def made(arrays: Any) -> Entry:
            room = aligned_array((8,), np.float32)
            steps = (
                bind(_twice, arrays[0], room, 8, 0, more),
                bind(_twice, room, arrays[1], 8, 0, 0),
            )
            return sequence(steps)

        return made

    entry = fenced(arguments, using(0))
    assert run(entry) == 0 and (y == 4).all()
    entry = fenced(arguments, using(1))
    assert run(entry) == FAULT
    assert re.search(r"wrote \d bytes past the end of scratch memory of 32", entry.statuses[FAULT])


def test_arguments_that_share_memory_still_do() -> None:
    x = np.arange(12, dtype=np.float32)
    arguments = [Argument("x", x[:8], True, False), Argument("y", x[4:], True, True)]
    entry = fenced(arguments, lambda arrays: bind(_twice, *arrays, 4, 0, 0))
    assert run(entry) == 0
    assert x.tolist() == [0, 1, 2, 3, 0, 2, 4, 6, 8, 9, 10, 11]


# ------------------------------------------------------------------------- where entries are bound
def launched(bind_: Any, traced: bool) -> Array:
    """A task of eight points, twice."""
    x, y = Region((64,), np.float32, "x"), Region((64,), np.float32, "y")
    task = Task("double", (Read, Write), bind=bind_)
    with Runtime(Machine.local(2)) as runtime:
        runtime.write(x, np.arange(64, dtype=np.float32))

        def step() -> None:
            runtime.launch(task, Partition.tiled(x, 8), Partition.tiled(y, 8))

        if traced:
            trace = runtime.capture(step)
            for _ in range(2):
                trace.replay()
        else:
            step()
            step()
        return runtime.read(y)


@pytest.mark.parametrize("traced", [False, True])
def test_launches_are_checked(traced: bool) -> None:
    """A tile that is written one element too far is its neighbour's, whoever runs when."""

    def right(context: PointContext, arrays: Any) -> Entry:
        return bind(_twice, *arrays, 8, 0, 0)

    def wrong(context: PointContext, arrays: Any) -> Entry:
        return bind(_twice, *arrays, 8, 0, int(context.point == 3))

    assert (launched(right, traced) == 2 * np.arange(64)).all()
    said = r"double.*point 3.*past the end of argument 1 \(Write\)"
    with pytest.raises(STOPS, match=said):
        launched(wrong, traced)


class Foreign(NamedTuple):
    """An entry of a type of its own."""

    address: int
    block: int
    keep: object
    statuses: Mapping[int, str] = MappingProxyType({})


def test_entries_of_other_types_are_checked_too() -> None:
    """They may leave part of a tile as it is."""

    def foreign(kernel: Native, *more: int) -> Any:
        def made(context: PointContext, arrays: Any) -> Foreign:
            block = pack(*arrays, 8, *more)
            return Foreign(kernel.address, block.address, block)

        return made

    assert (launched(foreign(_all_but_one), True)[7::8] == 0).all()
    with pytest.raises(STOPS, match=r"wrote \d bytes before argument 1"):
        launched(foreign(_twice, -1, 0), False)


def test_kernels_are_checked_and_measured() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.random(shape, np.float32) for shape in ((4, 8), (8, 6)))
    y = np.zeros((4, 6), np.float32)
    flags = {"transpose_a": False, "transpose_b": False}
    call = Call("matmul", flags, (x, w), (y,), 1, frozenset({1}))
    _, entry = select(call)
    assert entry is not None and FAULT in entry.statuses
    assert run(entry) == 0 and np.allclose(y, x @ w, atol=1e-6)
    ready = timed(call, Weights.CACHED)
    assert abs(ready.run()) > 0
    wrong = fenced([Argument("y", y, False, True)], lambda a: bind(_twice, x, a[0], 24, 0, 1))
    with pytest.raises(CheckedError, match="past the end of y"):
        checked.try_out(wrong)


def test_models_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    x, labels = rng.random((32, 2, 9, 8), np.float32), rng.integers(0, 5, 32).astype(np.int32)

    def trained() -> dict[str, Array]:
        model = cnn(8)
        with model:
            model.compile("adam", cpus=2)
            model.fit(x, labels, epochs=2, progress=False)
            return {name: np.array(array) for name, array in model.weights().items()}

    fenced_ = trained()
    monkeypatch.setattr(memory, "CHECKED", False)
    plain = trained()
    assert fenced_.keys() == plain.keys()
    for name, array in plain.items():
        assert np.array_equal(array, fenced_[name]), name
