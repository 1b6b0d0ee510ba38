"""A number of rows that comes again is bound by a thread, while runs are answered in steps."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.session_runs import fresh_answers
from test_in_rows import TAGGER, given

from soapstone import InferenceSession
from soapstone.engine.session import Bound
from soapstone.errors import DataError
from soapstone.frontend.inference.background import Background
from soapstone.frontend.inference.binding import Binder

BIND = Binder.bind


def right(session: InferenceSession, rows: int) -> None:
    feeds = given(session, rows)
    expected = fresh_answers(TAGGER, feeds)["y"]
    np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=2e-5, atol=2e-5)


def held(session: InferenceSession) -> list[int]:
    return [key[0][0][0] for key in session.serial.bounds.held]  # type: ignore[index]


def test_runs_go_on_in_steps_while_a_thread_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*asked: Any, **options: Any) -> Bound:
        if threading.current_thread().name == "soapstone-background":
            begun.set()
            assert goes_on.wait(60)
        return BIND(*asked, **options)

    monkeypatch.setattr(Binder, "bind", slow)
    with InferenceSession(TAGGER, threads=1) as session:
        right(session, 2)
        for _ in range(6):
            right(session, 6)  # three steps each
        assert begun.wait(60)
        right(session, 5)
        right(session, 6)
        assert held(session) == [2]
        goes_on.set()
        session.serial.bounds._background.wait()
        less = session.peak_bytes
        right(session, 6)
        assert held(session) == [2, 6] and session.peak_bytes > less
        right(session, 2)
        right(session, 6)


def test_what_a_thread_fails_at_is_told_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*asked: Any, **options: Any) -> Bound:
        raise DataError("no room")

    with InferenceSession(TAGGER, threads=1) as session:
        right(session, 2)
        monkeypatch.setattr(Binder, "bind", failing)
        feeds = given(session, 6)
        with pytest.raises(DataError, match="no room"):
            for _ in range(8):
                session.run(feeds)
                session.serial.bounds._background.wait()
        monkeypatch.setattr(Binder, "bind", BIND)
        for _ in range(3):
            right(session, 6)
        assert held(session) == [2, 6]


def test_what_was_bound_so_is_let_go_of_as_all_else() -> None:
    with InferenceSession(TAGGER, threads=1, bound_shapes=2) as session:
        right(session, 2)
        let_go: weakref.ref[Bound] | None = None
        for rows in (6, 7):
            while rows not in held(session):
                right(session, rows)
                session.serial.bounds._background.wait()
            if let_go is None:
                bound = session.serial.bounds.held
                let_go = weakref.ref(bound[next(reversed(bound))])
        right(session, 6 if 6 in held(session) else 2)
        session.run(given(session, 3, length=4))
        session.run(given(session, 3, length=6))
        gc.collect()
        assert let_go is not None and let_go() is None
        assert len(session.serial.bounds.held) == 2 and not session.serial.bounds._beside


def test_a_session_may_be_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*asked: Any, **options: Any) -> Bound:
        begun.set()
        assert goes_on.wait(60)
        return BIND(*asked, **options)

    with InferenceSession(TAGGER, threads=1) as session:
        right(session, 2)
        monkeypatch.setattr(Binder, "bind", slow)
        feeds = given(session, 6)
        while not begun.is_set():
            session.run(feeds)
        threading.Timer(0.1, goes_on.set).start()  # while the session waits for it
    assert session.serial.bounds._background.take() is None


def test_what_was_bound_so_is_in_timelines(tmp_path: Path) -> None:
    with InferenceSession(TAGGER, threads=1) as session:
        right(session, 2)
        while 6 not in held(session):
            right(session, 6)
            session.serial.bounds._background.wait()
        with session.profile(tmp_path / "timeline.json"):
            right(session, 6)
        told = (tmp_path / "timeline.json").read_text()
        assert all(name in told for name in session.variants(given(session, 6)))


def test_one_thing_is_made_at_a_time_and_none_that_failed_again() -> None:
    meanwhile, goes_on = Background[int](), threading.Event()
    assert meanwhile.begin(("a",), lambda: int(goes_on.wait(60)))
    assert meanwhile.begin(("b",), lambda: 2)  # later
    assert meanwhile.take() is None
    goes_on.set()
    meanwhile.wait()
    assert meanwhile.take() == (("a",), 1) and meanwhile.take() is None
    assert meanwhile.begin(("b",), lambda: 1 // 0)
    meanwhile.wait()
    assert meanwhile.take() is None
    assert not meanwhile.begin(("b",), lambda: 2)


def test_what_could_not_be_made_is_remembered_within_bounds() -> None:
    meanwhile = Background[int]()

    def make() -> int:
        raise ValueError("none")

    for number in range(600):
        assert meanwhile.begin((number,), make)
        meanwhile.wait()
        assert not meanwhile.begin((number,), make)
    assert len(meanwhile._refused) <= 256


def test_a_thread_that_binds_stops_while_a_graph_is_bound_that_a_request_waits_for() -> None:
    with InferenceSession(TAGGER, threads=1) as session:
        packed, background = session.serial.binder.packed, session.serial.bounds._background
        packed.warmup.close()
        for rows in (2, 5):
            right(session, rows)
        with packed.lock:
            feeds = given(session, 5)
            while background._thread is None:
                session.run(feeds)
            background._thread.join(0.2)
            assert background._thread.is_alive()
            session.run(feeds)
        background.wait()
        right(session, 5)
        assert held(session) == [2, 5]
