"""Answers of mappers that are impossible, nonsense or errors: each is refused, and names who."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import (
    DefaultMapper,
    Layout,
    Machine,
    MapperError,
    Partition,
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
def double(x: Read, y: Write) -> None:
    y[...] = 2 * x


@task
def bump(x: ReadWrite) -> None:
    x += 1


def _answers(**answers: Any) -> DefaultMapper:
    """A mapper that answers some questions with a constant, or with what a function says."""

    def question(answer: Any) -> Callable[..., Any]:
        return answer if callable(answer) else lambda self, *asked: answer

    kind = type("Stubborn", (DefaultMapper,), {q: question(a) for q, a in answers.items()})
    found = kind()
    assert isinstance(found, DefaultMapper)
    return found


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"place": 2}, r"task 'double': place put point 0 on processor 2, needed 0\.\.1"),
        ({"place_all": [0]}, r"task 'double': place_all returned int64 \(1,\), needed .*\(4,\)"),
        ({"memory": "disk"}, r"task 'double': memory of argument 0 .* 'disk', needed one of"),
        ({"layout": (0, 1)}, r"task 'double': layout of argument 0 .* needed a Layout"),
        (
            {"layout": Layout((0, 0))},
            r"task 'double': layout of argument 0 \(region 'x'\): order \(0, 0\), needed a perm",
        ),
        (
            {"layout": Layout(None, False, ((0, 0), (9, 8)))},
            r"layout of argument 0 \(region 'x'\): extent .*, needed a box within \[8, 8\]",
        ),
        (
            {"layout": Layout(None, False, ((0,), (8,)))},
            r"layout of argument 0 \(region 'x'\): extent .*, needed a box within \[8, 8\]",
        ),
        ({"order": (0, 1, 2)}, r"region 'x': order \(0, 1, 2\), needed a permutation of its 2"),
        ({"priority": "high"}, r"task 'double': priority is 'high', needed an integer"),
        ({"variant": "avx"}, r"task 'double': variant of point 0 .* 'avx', needed one of"),
        ({"variant": 3}, r"task 'double': variant of point 0 .* is 3, needed a name or None"),
        (
            {"copy_source": 1},
            r"task 'double': copy source of region 'x' is 1, needed None or .* 0:",
        ),
        (
            {"stealable": True, "slices": np.zeros(4, np.int64)},
            r"task 'double': slice 0 has point 2 on processor 1, needed 0",
        ),
        (
            {"stealable": True, "slices": np.zeros(3, np.int64)},
            r"task 'double': slices returned int64 \(3,\), needed integers \(4,\) or None",
        ),
    ],
)
def test_impossible_answers_name_the_task_and_the_request(
    answers: dict[str, Any], message: str
) -> None:
    x, y = (Region((8, 8), np.float64, name) for name in "xy")
    tiles = [Partition.tiled(region, (4, 1)) for region in (x, y)]
    known = Task("double", double.privileges, double.body, variants=("plain",))
    with (
        Runtime(Machine.local(cpus=2, memories=2), _answers(**answers)) as runtime,
        pytest.raises(MapperError, match=message),
    ):
        runtime.array(x)  # a first instance, so that the others are copied to
        runtime.launch(known, *tiles)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"backing": "disk"}, r"backing of memory 'system.bounded' is 'disk', needed None or one"),
        (
            {"backing": "system.bounded"},
            r"backing of memory 'system.bounded' is 'system.bounded', needed None or one of",
        ),
        ({"backing": "system", "evict": 7}, r"task 'double': evict from .* is 7, needed an index"),
        (
            {"backing": "system", "arrive": 65},
            r"task 'double': arrive of region 'x' in .* is 65, needed None or a multiple of 64",
        ),
        (
            {"backing": "system", "arrive": 0},
            r"task 'double': arrive of region 'y' in .* is 0, needed 800 free bytes from there, of",
        ),
        (
            {"backing": "system", "arrive": 1664},
            r"arrive of region 'x' in .* is 1664, needed 800 free bytes from there, of 1700 in all",
        ),
        ({"backing": "system", "leave": 1}, r"task 'double': leave of .* is 1, needed a sequence"),
        (
            {"backing": "system", "leave": (0, 2)},
            r"task 'double': leave of .*, item 1 is 2, needed an index of 0: 'x'",
        ),
    ],
)
def test_impossible_evictions_are_refused(answers: dict[str, Any], message: str) -> None:
    x, y, z = (Region((100,), np.float64, name) for name in "xyz")
    with (
        pytest.raises(MapperError, match=message),
        Runtime(Machine.local(cpus=1).bounded(1700), _answers(**answers)) as runtime,
    ):
        runtime.launch(double, x, y)
        runtime.launch(double, y, z)


def _raise(self: object, *asked: object) -> Any:
    raise KeyError("who")


NONSENSE = {
    "place": (_raise, "first", 1.0, None, [0]),
    "place_all": (_raise, "first", None, [[0], [0, 1]], [0.0] * 4, [True] * 4, object(), {0, 1}),
    "memory": (_raise, [], {}, None, 3, object()),
    "layout": (_raise, None, "C", Layout("xy"), Layout(3), Layout((0, 1), "whole"), Layout((0,))),
    "order": (_raise, "rows", 3, (0, 1, 2), (0.0, 1.0), {0, 1}, object()),
    "whole_instances": (_raise, None, "yes", 1, [True]),
    "priority": (_raise, None, 1.5, "high", [1]),
    "variant": (_raise, 3, [], "avx"),
    "stealable": (_raise, None, "yes", 1, [True]),
    "slices": (_raise, "all", [0], [[0], [0, 1]], [0.0] * 4),
    "copy_source": (_raise, "near", -1, 99, True, 0.0, []),
}


@pytest.mark.parametrize("question", NONSENSE)
def test_nonsense_is_refused_by_name_and_nothing_is_half_done(question: str) -> None:
    class Wayward(DefaultMapper):
        answer: Any = None

    def answered(self: Wayward, *asked: Any) -> Any:
        if self.answer is None:
            return getattr(DefaultMapper, question)(self, *asked)
        (answer,) = self.answer
        return answer(self, *asked) if answer is _raise else answer

    setattr(Wayward, question, answered)
    if question == "slices":
        Wayward.stealable = lambda self, launch: True  # type: ignore[method-assign]
    known = Task("double", double.privileges, double.body, variants=("plain",))
    total = Task("total", (Read, Reduce("sum")), lambda x, out: out.fill(x.sum()))
    x, y, out = (Region((8, 8), np.float64, name) for name in ("x", "y", "out"))
    tiles = [Partition.tiled(region, (4, 1)) for region in (x, y)]
    with Runtime(Machine.local(cpus=2, memories=2), mapper := Wayward()) as runtime:
        runtime.write(x, np.arange(64.0).reshape(8, 8))
        runtime.launch(total, tiles[0], out)
        for turn, wrong in enumerate(NONSENSE[question]):
            runtime.write(x, np.arange(64.0).reshape(8, 8))  # valid in one memory alone
            mapper.answer = (wrong,)
            new = Partition.tiled(Region((8, 8), np.float64, "new"), (4, 1))
            for name, work, given in (
                ("double", known, (tiles[0], new)),
                ("total", total, (tiles[0], out)),
            ):
                if name == "total" and question in ("order", "variant"):
                    continue  # nothing that is asked, or any name will do
                with pytest.raises(MapperError) as caught:
                    runtime.launch(work, *given)
                said = rf"mapper 'Wayward', task '{name}': "
                assert said in str(caught.value)
                if wrong is _raise:
                    assert f"{said}{question} raised KeyError: 'who'" in str(caught.value)
            mapper.answer = None
            runtime.launch(known, *tiles)
            np.testing.assert_array_equal(runtime.read(y), 2 * runtime.read(x))
            np.testing.assert_array_equal(runtime.read(out), np.full((8, 8), 2016.0), f"{turn}")
            runtime.write(y, np.zeros((8, 8)))


@pytest.mark.parametrize("question", ["attach", "observe", "backing"])
def test_what_a_mapper_raises_when_a_runtime_begins_names_it(question: str) -> None:
    for answer in (_raise, [], 3):
        if answer is not _raise and question != "backing":
            continue
        with pytest.raises(MapperError, match=rf"mapper 'Stubborn'.*{question}"):
            Runtime(Machine.local(cpus=1).bounded(1000), _answers(**{question: answer}))


@pytest.mark.parametrize("answer", [_raise, "first", -1, 3, None])
def test_a_wrong_eviction_names_it(answer: object) -> None:
    x, y, z = (Region((100,), np.float64, name) for name in "xyz")
    mapper = _answers(backing="system", evict=answer)
    with (
        pytest.raises(MapperError, match=r"mapper 'Stubborn', task 'double': evict "),
        Runtime(Machine.local(cpus=1).bounded(1700), mapper) as runtime,
    ):
        runtime.launch(double, x, y)
        runtime.launch(double, y, z)


@pytest.mark.parametrize("answer", [_raise, "yes", 1, None])
def test_a_wrong_answer_about_a_trace_stops_the_run(answer: object) -> None:
    x = Region((4,), np.float64, "x")
    with (
        pytest.raises(MapperError, match=r"mapper 'Stubborn': trace "),
        Runtime(Machine.local(cpus=1), _answers(trace=answer), automatic=True) as runtime,
    ):
        for _ in range(300):
            runtime.launch(bump, Partition.tiled(x, 4))


def test_a_launch_that_was_half_issued_stops_the_run() -> None:
    class Late(DefaultMapper):
        def order(self, region: Region) -> Any:
            return "rows" if region.name == "out" else None

    x, out = Region((8,), np.float64, "x"), Region((8,), np.float64, "out")
    total = Task("total", (Read, Reduce("sum")), lambda x, out: out.fill(x.sum()))
    with Runtime(Machine.local(cpus=1), Late()) as runtime:
        with pytest.raises(MapperError, match=r"task 'total.fold': region 'out': order 'rows'"):
            runtime.launch(total, Partition.tiled(x, 2), out)  # its partial results are made
        with pytest.raises(StoppedError, match="call reset"):
            runtime.launch(bump, x)
        runtime.reset()
        runtime.launch(bump, x)
        np.testing.assert_array_equal(runtime.read(x), np.ones(8))


def test_only_a_mapper_or_its_name_is_taken() -> None:
    for wrong, message in (
        (object(), "a name or a DefaultMapper needed"),
        ("fastest", "'fastest' found; one of .*sequential.*, or module:Class needed"),
        ("soapstone.runtime:Machine", "is not a subclass of DefaultMapper"),
        ("strategy", "strategy.*make one and give it in place of its name"),
    ):
        with pytest.raises(MapperError, match=message):
            Runtime(Machine.local(cpus=1), wrong)  # type: ignore[arg-type]
    with Runtime(Machine.local(cpus=1), "soapstone.mappers.bounded:BoundedMemoryMapper") as runtime:
        assert isinstance(runtime.mapper, BoundedMemoryMapper)
