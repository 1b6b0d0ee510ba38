"""Sessions that are interrupted, at any point of a run, answer afterwards."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.interrupts import answers, interrupted

from soapstone import InferenceSession, Model
from soapstone.frontend.inference import latency
from soapstone.ir.tensor import Array
from soapstone.runtime import StoppedError


def _model() -> Model:
    model = Model("small")
    model.output(model.dense(model.input("x", (3, 8)), 8, activation="relu"))
    return model


def _needed(session: InferenceSession, x: Array) -> Array:
    weights = session.serial.source.weights()
    y = x @ weights["dense.weight"] + weights["dense.bias"]
    return np.asarray(np.maximum(y, 0))


def _answers_right(session: InferenceSession, x: Array) -> bool:
    found: list[Array] = []
    there = answers(lambda: found.append(session.run(x)["dense"]))
    return there and np.allclose(found[0], _needed(session, x), 1e-4, 1e-4)


@pytest.mark.filterwarnings("ignore:cpus")
@pytest.mark.parametrize("options", [{}, {"requests": 2}, {"cpus": 2}], ids=str)
def test_a_session_answers_after_an_interrupt_anywhere(options: dict[str, Any]) -> None:
    asked = [np.full((rows, 8), rows, np.float32) for rows in (3, 4)]
    with InferenceSession(_model(), threads=1, **options) as session:
        for x in asked:
            session.run(x)
        for point in itertools.count():
            came = interrupted(partial(session.run, asked[0]), point)
            for x in asked:
                assert _answers_right(session, x), f"not so after an interrupt at point {point}"
            if not came:
                break
        assert point > 50


def test_a_session_answers_after_an_interrupt_while_it_binds() -> None:
    """Points are taken here and there, of thousands."""
    with InferenceSession(_model(), threads=1, bound_shapes=4) as session:
        for rows in itertools.count(1):
            x = np.full((rows, 8), 0.1, np.float32)
            came = interrupted(partial(session.run, x), 23 * rows)
            assert _answers_right(session, x), f"not so after an interrupt at point {23 * rows}"
            if not came:
                break
        assert rows > 10


def test_an_interrupt_of_measured_runs_ends_those_of_other_requests() -> None:
    class Session:
        requests, runs = 2, 0

        def run(self, inputs: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                while not self.runs:
                    threading.Event().wait(0.001)
                raise KeyboardInterrupt
            self.runs += 1
            threading.Event().wait(0.001)

    session: Any = Session()
    with pytest.raises(KeyboardInterrupt):
        latency.asked(session, {}, lambda count, spent: count >= 5000)
    assert session.runs < 4000


def _held(session: InferenceSession) -> list[Future[Any]]:
    """Return many requests of a session, the first of which runs until the second is done."""
    began, goes = threading.Event(), threading.Event()

    def run(given: Any) -> dict[str, Array]:
        began.set()
        assert goes.wait(60), "who waits was not cancelled"
        return {}

    session.run = run  # type: ignore[method-assign, assignment]
    asked = [session.run_async(np.zeros((3, 8), np.float32)) for _ in range(100)]
    assert began.wait(60)
    asked[1].add_done_callback(lambda _: goes.set())
    return asked


def _only_the_first_ran(asked: list[Future[Any]]) -> bool:
    return asked[0].result(60) == {} and all(each.cancelled() for each in asked[1:])


def test_an_interrupt_inside_a_session_cancels_what_waits() -> None:
    session = InferenceSession(_model(), threads=1)
    with pytest.raises(KeyboardInterrupt), session:
        asked = _held(session)
        raise KeyboardInterrupt
    assert _only_the_first_ran(asked)
    with pytest.raises(StoppedError, match="it was closed"):
        session.run_async(np.zeros((3, 8), np.float32))


def test_an_interrupt_while_a_session_is_closed_cancels_what_waits() -> None:
    session = InferenceSession(_model(), threads=1)
    asked, pool = _held(session), session._pool
    assert pool is not None
    whole = pool.close

    def close(cancel: bool = False) -> None:
        if not cancel:
            raise KeyboardInterrupt
        whole(cancel)

    pool.close = close  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert _only_the_first_ran(asked)


def test_an_error_inside_a_session_lets_what_waits_run() -> None:
    x = np.ones((3, 8), np.float32)
    with pytest.raises(ValueError), InferenceSession(_model(), threads=1) as session:
        asked = [session.run_async(x) for _ in range(9)]
        raise ValueError
    assert all(each.result(60)["dense"].shape == (3, 8) for each in asked)
