"""Shape warm-up: after it, other shapes are answered without translating the model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers.session_runs import fresh_answers
from test_families import EVEN, UNEVEN, arrays, model_of
from test_in_rows import APART, MEETING, given

from soapstone import InferenceSession, from_onnx
from soapstone.engine import prepare
from soapstone.frontend.inference.shape_warmup import _FEW, _TURNS, _between
from soapstone.frontend.purpose import Purpose
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array

NAMES = {**EVEN, **UNEVEN}
MIXED = model_of(
    "k = Transpose<perm = [0, 2, 1]>(x)  a = MatMul(x, k)  m = Softmax(a)  y = MatMul(m, x)"
)


def reals(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def told(session: InferenceSession) -> list[tuple[int, ...]]:
    """The shapes of x that a session's model is translated for from now on."""
    made: list[tuple[int, ...]] = []
    noted = session._source.noted

    def wrapped(given: Mapping[str, Array], purpose: Purpose) -> object:
        made.append(given["x"].shape)
        return noted(given, purpose)

    object.__setattr__(session._source, "noted", wrapped)
    return made


def settled(session: InferenceSession) -> None:
    session.serial.binder.packed.warmup.wait()


@pytest.mark.parametrize("name", EVEN)
def test_a_second_extent_needs_no_graph(name: str) -> None:
    with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as session:
        made = told(session)
        session.run(arrays(session, 2, 31, 31))
        settled(session)
        many = len(made)
        assert many <= 13  # of a row more, and of each kind of inputs some
        for length in (17, 18, 20, 19, 22):
            session.run(arrays(session, 2, length, length))
        assert len(made) == many


def test_rows_and_lengths_that_come_together_need_no_graph() -> None:
    with InferenceSession(from_onnx(MIXED), threads=1, tune=False) as session:
        made = told(session)
        session.run({"x": reals(1, 40, 8)})
        settled(session)
        many = len(made)
        for rows, length in ((3, 31), (2, 17), (5, 24)):
            session.run({"x": reals(rows, length, 8)})
        assert len(made) == many


CAUSAL = """s = Shape(x)  b = Gather(s, i0)  t = Gather(s, i1)  r = Range(i0, t, i1)
    column = Unsqueeze(r, v1)  hidden = Greater(r, column)
    low = Constant<value_float = -1e38>()  none = Constant<value_float = 0.0>()
    square = Where(hidden, low, none)  bv = Unsqueeze(b, v0)  tv = Unsqueeze(t, v0)
    whole = Concat<axis = 0>(bv, tv, tv)  mask = Expand(square, whole)
    turned = Transpose<perm = [0, 2, 1]>(x)  met = MatMul(x, turned)"""
MASKS = {
    "dropped": f"{CAUSAL} masked = Add(met, mask)  p = Softmax(masked)  y = MatMul(p, x)",
    "added": f"{CAUSAL} masked = Add(met, mask)  y = Neg(masked)",
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_made_for_longer_inputs_and_more_rows_than_any_that_came(name: str) -> None:
    """They are of any size: those of the last are larger than what is folded."""
    model = model_of(MASKS[name])
    with InferenceSession(from_onnx(model), threads=1, tune=False) as session:
        made = told(session)
        session.run({"x": reals(1, 40, 8)})
        settled(session)
        many = len(made)
        for rows, length in ((4, 40), (3, 31), (5, 64), (2, 300)):
            feeds = {"x": reals(rows, length, 8)}
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=2e-5, atol=2e-5)
        assert len(made) == many


def test_short_and_long_inputs_are_run_as_passes_choose_for_them() -> None:
    """Where a library's attention is all there is, short ones have products of their own."""
    with InferenceSession(from_onnx(MIXED), threads=1, tune=False) as session:
        made = told(session)
        session.run({"x": reals(1, 60, 8)})
        settled(session)
        many = len(made)
        for length in (13, 40, 11, 17, 29, 8, 14):
            feeds = {"x": reals(1, length, 8)}
            with InferenceSession(from_onnx(MIXED), threads=1, tune=False) as fresh:
                expected = fresh.run(feeds)["y"]
                forms = sorted(fresh.variants(feeds).values())
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
            assert sorted(session.variants(feeds).values()) == forms
        assert len(made) == many


def test_sides_of_images_that_are_multiples_need_no_graph() -> None:
    """What is halved three times and doubled again meets what it came of: of multiples of 8."""
    body = """k = Constant<value_floats = [1.0, 1.0, 8.0, 8.0]>()
    a = Conv<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x, filters)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)
    q = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(p)
    up = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
        nearest_mode = "floor">(q, , k)
    j = Concat<axis = 1>(x, up)  y = ReduceMean<keepdims = 0>(j, v1)"""
    model = model_of(body, "float[n, 3, h, w0] x")
    with InferenceSession(from_onnx(model), threads=1, tune=False) as session:
        made = told(session)
        session.run({"x": reals(1, 3, 96, 96)})
        settled(session)
        many = len(made)
        for shape in ((1, 3, 64, 72), (1, 3, 80, 56), (3, 3, 72, 80), (2, 3, 48, 96)):
            feeds = {"x": reals(*shape)}
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
        assert len(made) == many


@pytest.mark.parametrize("name", APART)
def test_a_second_number_of_rows_needs_no_graph(name: str) -> None:
    with InferenceSession(APART[name], threads=1) as session:
        made = told(session)
        session.run(given(session, 1))
        settled(session)
        many = len(made)
        for rows in (3, 2, 5):
            found = session.run(given(session, rows))
            assert {len(array) for array in found.values()} == {rows}
        assert len(made) == many and len(session.serial.bounds.held) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [4, 7, 13, 22])
def test_random_shapes_are_answered_as_by_a_session_of_their_own(name: str, first: int) -> None:
    random = np.random.default_rng(first)
    with InferenceSession(from_onnx(NAMES[name]), threads=1, tune=False) as session:
        low = 5 if len(session.inputs[0].shape) == 4 else 2
        shapes = [(2, max(first, low), max(first, low))]
        shapes += [(int(random.integers(1, 4)), *random.integers(low, 26, 2)) for _ in range(3)]
        shapes += [(2, length, length) for length in (first + 1, low, low + 1)]
        for rows, *extents in shapes:
            feeds = arrays(session, rows, *extents)
            try:
                expected = fresh_answers(from_onnx(NAMES[name]), feeds)["y"]
            except ValueError:
                with pytest.raises(ValueError):
                    session.run(feeds)
                continue
            found = session.run(feeds)["y"]
            settled(session)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("hides", ["Greater(r, column)", "Less(zero, zero)"])
def test_what_a_mask_says_of_short_lengths_is_not_taken_to_be_so_of_others(hides: str) -> None:
    """It is causal, or hides nothing, as long as no key is thirty places away."""
    body = f"""s = Shape(x)  t = Gather(s, i1)  r = Range(i0, t, i1)  column = Unsqueeze(r, v1)
        zero = Sub(r, r)  one = {hides}  thirty = Constant<value_int = 30>()
        away = Sub(column, r)  far = Greater(away, thirty)  hidden = Or(one, far)
        low = Constant<value_float = -1e38>()  none = Constant<value_float = 0.0>()
        mask = Where(hidden, low, none)  turned = Transpose<perm = [0, 2, 1]>(x)
        met = MatMul(x, turned)  masked = Add(met, mask)  share = Softmax(masked)
        y = MatMul(share, x)"""
    model = model_of(body)
    with InferenceSession(from_onnx(model), threads=1, tune=False) as session:
        for length in (30, 24, 20, 60, 25, 45):
            feeds = arrays(session, 2, length)
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            found = session.run(feeds)["y"]
            settled(session)
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_masks_of_many_rows_and_lengths_need_no_graph() -> None:
    """They are made of extents alone: 40 KB for one row of 100, megabytes for many longer ones."""
    model = model_of(
        """s = Shape(x)  n = Gather(s, i0)  nv = Unsqueeze(n, v0)  t = Gather(s, i1)
        tv = Unsqueeze(t, v0)  r = Range(i0, t, i1)  column = Unsqueeze(r, v1)
        later = Less(column, r)  whole = Concat<axis = 0>(nv, tv, tv)
        hidden = Expand(later, whole)  low = Constant<value_float = -1e38>()
        none = Constant<value_float = 0.0>()  mask = Where(hidden, low, none)
        turned = Transpose<perm = [0, 2, 1]>(x)  met = MatMul(x, turned)
        masked = Add(met, mask)  share = Softmax(masked)  y = MatMul(share, x)"""
    )
    with InferenceSession(from_onnx(model), threads=1, tune=False) as session:
        made = told(session)
        session.run({"x": reals(1, 100, 8)})
        settled(session)
        many = len(made)
        for rows, length in ((3, 90), (2, 99), (8, 180), (1, 333), (6, 41)):
            feeds = {"x": reals(rows, length, 8)}
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            found = session.run(feeds)["y"]
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
        assert len(made) == many


@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_are_bound(name: str) -> None:
    with InferenceSession(MEETING[name], threads=1) as session:
        for count, rows in enumerate((1, 2, 3), 1):
            feeds = given(session, rows)
            found = session.run(feeds)["y"]
            settled(session)
            assert len(session.serial.bounds.held) == count
            with InferenceSession(MEETING[name], threads=1, tune=False) as fresh:
                np.testing.assert_allclose(found, fresh.run(feeds)["y"], rtol=2e-5, atol=2e-5)


def test_shapes_that_a_model_has_no_graph_for_are_left_alone() -> None:
    body = "s = Constant<value_ints = [2, 20, 8]>()  r = Reshape(x, s)  y = MatMul(r, w)"
    with InferenceSession(from_onnx(model_of(body)), threads=1) as session:
        feeds = arrays(session, 2, 20)
        first = session.run(feeds)["y"]
        settled(session)
        np.testing.assert_array_equal(session.run(feeds)["y"], first)


def held_back(session: InferenceSession) -> tuple[threading.Event, threading.Event, list[str]]:
    """Hold the warm-up's thread; return when it begins, when it may go on, and who made graphs."""
    begun, goes_on, noted = threading.Event(), threading.Event(), session._source.noted
    made: list[str] = []

    def slow(given: Mapping[str, Array], purpose: Purpose) -> object:
        made.append(threading.current_thread().name)
        if made[-1] == "soapstone-shape-warmup":
            begun.set()
            assert goes_on.wait(60)
        return noted(given, purpose)

    object.__setattr__(session._source, "noted", slow)
    return begun, goes_on, made


def test_of_a_closed_session_no_more_are_made_and_runs_meanwhile_do_not_wait() -> None:
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1, tune=False) as session:
        begun, goes_on, made = held_back(session)
        session.run(arrays(session, 2, 20))
        assert begun.wait(60)
        session.run(arrays(session, 2, 9))  # while the other thread is making a graph
        session.serial.binder.packed.warmup.close()
        goes_on.set()
    assert len(made) == 3


def test_no_thread_reads_the_model_of_a_closed_session() -> None:
    """Its file may be written to, which would end a process that reads it."""
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1, tune=False) as session:
        begun, goes_on, _ = held_back(session)
        session.run(arrays(session, 2, 20))
        assert begun.wait(60)
        warmup = session.serial.binder.packed.warmup
        closing = threading.Thread(target=session.close)
        closing.start()
        while not warmup._stopped:
            time.sleep(0.001)
        goes_on.set()
        closing.join()
        assert warmup._thread is not None and not warmup._thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
def test_a_fork_waits_for_the_graph_that_is_being_made() -> None:
    """Whatever it holds, in the child nobody would ever let go of it."""
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1, tune=False) as session:
        held, begun, noted = threading.Lock(), threading.Event(), session._source.noted

        def slow(given: Mapping[str, Array], purpose: Purpose) -> object:
            if threading.current_thread().name != "soapstone-shape-warmup":
                return noted(given, purpose)
            with held:
                begun.set()
                time.sleep(0.05)
                return noted(given, purpose)

        object.__setattr__(session._source, "noted", slow)
        feeds = arrays(session, 2, 20)
        expected = session.run(feeds)["y"]
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            free = held.acquire(timeout=10)
            same = np.array_equal(session.run(feeds)["y"], expected)
            os._exit(0 if free and same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_extents_of_the_warm_up_are_odd_and_even_and_not_longer() -> None:
    for extent in range(2, 2000):
        found = {_between(extent, turn, 4, 7) for turn in range(_TURNS)}
        assert len(found | {extent}) > 3 and {each % 2 for each in found} == {0, 1}
        assert extent < _FEW or max(found) < extent


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that passes are applied to from now on."""
    passes, lower = list[object](), prepare.lower

    def lowered(graph: Graph, strategy: Strategy, **how: Any) -> Graph:
        passes.append(graph)
        return lower(graph, strategy, **how)

    monkeypatch.setattr(prepare, "lower", lowered)
    return passes


@pytest.mark.parametrize("name", EVEN)
def test_a_further_extent_needs_no_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How graphs are launched is arithmetic on that for two: of each value, view and constant."""
    with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as session:
        session.run(arrays(session, 2, 31, 31))
        settled(session)
        passes = counted(monkeypatch)
        found = []
        for length in (17, 18, 20, 19, 22):
            feeds = arrays(session, 2, length, length)
            found.append((feeds, session.run(feeds)["y"]))
        monkeypatch.undo()
        assert not passes
    for feeds, made in found:
        with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as fresh:
            np.testing.assert_array_equal(made, fresh.run(feeds)["y"])


@pytest.mark.parametrize("name", EVEN)
def test_rows_and_lengths_that_change_together_need_no_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as session:
        for shape in ((2, 31, 30), (5, 12, 14), (3, 20, 22), (6, 9, 11), (4, 24, 27)):
            session.run(arrays(session, *shape))
            settled(session)
        passes = counted(monkeypatch)
        feeds = arrays(session, 7, 19, 17)
        found = session.run(feeds)["y"]
        monkeypatch.undo()
        assert not passes
    with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as fresh:
        np.testing.assert_array_equal(found, fresh.run(feeds)["y"])


def test_a_second_number_of_rows_waits_for_the_graph_that_shows_how_they_are_treated() -> None:
    """It makes none itself, which would take as long again."""
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1) as session:
        begun, goes_on, made = held_back(session)
        session.run(arrays(session, 2, 20))
        assert begun.wait(60)
        feeds = arrays(session, 5, 20)
        future = session.run_async(feeds)
        goes_on.set()
        found = future.result(timeout=60)["y"]
        assert made.count("MainThread") == 1 and set(made[1:]) == {"soapstone-shape-warmup"}
        np.testing.assert_allclose(
            found, fresh_answers(from_onnx(EVEN["attention"]), feeds)["y"], rtol=2e-5, atol=2e-5
        )


def test_the_thread_stops_between_operators_while_a_graph_is_bound() -> None:
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1, tune=False) as session:
        packed, within, stopped = session.serial.binder.packed, threading.Event(), threading.Event()
        warmup, steps = packed.warmup, [0]
        give_way = warmup.give_way

        def told() -> None:
            steps[0] += 1
            within.set()
            assert stopped.wait(60)
            give_way()

        warmup.give_way = told  # type: ignore[method-assign]
        session.run(arrays(session, 2, 20))
        assert within.wait(60)
        with packed.lock:
            stopped.set()
            before = steps[0]
            time.sleep(0.02)
            assert steps[0] - before <= 1
        settled(session)
        assert steps[0] > before + 10  # between operators, not only between graphs
