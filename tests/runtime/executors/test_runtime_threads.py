"""Threads and processes that share a runtime: each is served as a whole, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from soapstone import InferenceSession, Model
from soapstone.runtime import (
    DefaultMapper,
    FieldRegion,
    Launch,
    Machine,
    Read,
    ReadWrite,
    Region,
    Runtime,
    StoppedError,
    Task,
    TaskError,
    Write,
    task,
)

TURNS = 60


MANY = 100_000  # elements, so that a copy takes a while


@task
def slowly(x: ReadWrite) -> None:
    """Add 1 to every element, in two halves that others could see."""
    before, half = x.copy(), len(x) // 2
    x[:half] = before[:half] + 1
    time.sleep(0.0002)
    x[half:] = before[half:] + 1


class Apart(DefaultMapper):
    """Launches named "other" run on the second processor."""

    def place(self, launch: Launch, point: int) -> int:
        return int(launch.name == "other")


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads at once, and raise what one of them raised."""
    raised: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.fixture
def runtime() -> Any:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change wherever they can
    with Runtime(Machine.local(cpus=2), Apart()) as made:
        yield made
    sys.setswitchinterval(interval)


def test_what_is_read_is_between_launches_of_other_threads(runtime: Runtime) -> None:
    x = Region((MANY,), "i8", "x")
    seen: list[np.ndarray] = []

    def launch() -> None:
        for _ in range(TURNS):
            runtime.launch(slowly, x)
            time.sleep(0.0005)

    def look() -> None:
        for _ in range(3 * TURNS):
            found = runtime.read(x)
            seen.append(found[[0, MANY // 3, MANY - 1]])

    together(launch, look)
    assert all((found == found[0]).all() for found in seen)
    assert (runtime.read(x) == TURNS).all()


def test_what_is_written_is_between_launches_of_other_threads(runtime: Runtime) -> None:
    x = Region((MANY,), "i8", "x")
    seen: list[bool] = []

    def body(x: np.ndarray) -> None:
        first = x[0]
        time.sleep(0.001)
        seen.append(bool((x == first).all()))

    def launch() -> None:
        for _ in range(TURNS):
            runtime.launch(Task("look", (Read,), body), x)
            time.sleep(0.001)

    def write() -> None:
        while len(seen) < TURNS:
            runtime.write(x, np.full(MANY, len(seen)))

    together(launch, write)
    assert len(seen) == TURNS and all(seen)


def test_fields_are_read_and_written_together(runtime: Runtime) -> None:
    pairs = FieldRegion((6,), {"a": "i8", "b": "i8"}, "pairs")

    def write() -> None:
        for turn in range(TURNS):
            runtime.write(pairs, {"a": np.full(6, turn), "b": np.full(6, -turn)})

    def read() -> None:
        for _ in range(2 * TURNS):
            found = runtime.read(pairs)
            assert (found["a"] == -found["b"]).all()

    together(write, read)


@pytest.mark.parametrize("other", ["replay", "launch", "record", "write"])
def test_replays_and_what_other_threads_do_follow_each_other(runtime: Runtime, other: str) -> None:
    x = Region((8,), "i8", "x")
    first, second = (
        runtime.capture(lambda name=name: runtime.launch(slowly, x, name=name))
        for name in ("one", "other")
    )

    def replay() -> None:
        for _ in range(TURNS):
            first.replay()

    def also() -> None:
        for _ in range(TURNS):
            if other == "replay":
                second.replay()
            elif other == "launch":
                runtime.launch(slowly, x, name="other")
            elif other == "record":
                with runtime.trace():
                    runtime.launch(slowly, x, name="other")
            else:
                runtime.write(Region((8,), "i8"), np.ones(8, "i8"))

    together(replay, also)
    assert (runtime.read(x) == TURNS * (1 if other == "write" else 2)).all()


def test_steps_recorded_in_two_threads_stay_apart(runtime: Runtime) -> None:
    regions = [Region((8,), "i8", name) for name in "xy"]

    def record(region: Region) -> None:
        for _ in range(TURNS):
            with runtime.trace(region.name):
                runtime.launch(slowly, region)
                time.sleep(0)
                runtime.launch(slowly, region)

    together(*(partial(record, region) for region in regions))
    for region in regions:
        assert (runtime.read(region) == 2 * TURNS).all()
    assert runtime.statistics.captures == 2


def test_a_future_passed_on_by_two_threads_is_what_it_was(runtime: Runtime) -> None:
    @task
    def one() -> np.int64:
        return np.int64(7)

    @task
    def put(value: int, x: Write) -> None:
        x[...] = value

    for _ in range(10):
        with runtime.trace():
            future = runtime.launch(one)
        outs = [Region((2,), "i8") for _ in range(4)]
        together(*(partial(runtime.launch, put, future, out) for out in outs))
        assert all((runtime.read(out) == 7).all() for out in outs)


@pytest.mark.parametrize("how", ["launch", "read", "replay"])
def test_a_body_that_uses_the_runtime_it_runs_on_is_refused(how: str) -> None:
    x = Region((4,), "i8", "x")
    with Runtime(Machine.local(cpus=2)) as runtime:
        trace = runtime.capture(lambda: runtime.launch(slowly, x))
        uses = {
            "launch": lambda: runtime.launch(slowly, x),
            "read": lambda: runtime.read(x),
            "replay": trace.replay,
        }
        wrong = Task("wrong", (Write,), lambda y: uses[how]())
        runtime.launch(wrong, Region((1,), "i8"))
        with pytest.raises(TaskError, match="used the runtime that runs it"):
            runtime.read(x)


# -- the end


def test_close_waits_for_what_was_launched() -> None:
    ran = []
    x = Region((4,), "f8", "x")

    def body(x: np.ndarray) -> None:
        time.sleep(0.005)
        ran.append(1)

    note = Task("note", (ReadWrite,), body)
    for automatic in (False, True):
        ran.clear()
        runtime = Runtime(Machine.local(cpus=1), automatic=automatic)
        for _ in range(20):
            runtime.launch(note, x)
        runtime.close()
        assert len(ran) == 20


def test_close_raises_what_a_task_raised_once() -> None:
    def body(x: np.ndarray) -> None:
        raise ValueError("boom")

    runtime = Runtime(Machine.local(cpus=1))
    runtime.launch(Task("bad", (Write,), body), Region((1,), "f8"))
    with pytest.raises(TaskError, match=r"task 'bad', point 0, .*boom"):
        runtime.close()
    runtime.close()
    with pytest.raises(StoppedError, match="closed"):
        runtime.wait()
    runtime = Runtime(Machine.local(cpus=1))
    runtime.launch(Task("bad", (Write,), body), Region((1,), "f8"))
    with pytest.raises(TaskError, match="boom"):
        runtime.wait()
    runtime.close()


def test_an_exception_that_leaves_the_block_drops_what_has_not_begun() -> None:
    held, ran = threading.Event(), []
    x = Region((4,), "f8", "x")
    with pytest.raises(KeyError), Runtime(Machine.local(cpus=1)) as runtime:
        runtime.launch(Task("hold", (ReadWrite,), lambda x: held.wait()), x)
        runtime.launch(Task("note", (ReadWrite,), lambda x: ran.append(1)), x)
        threading.Timer(0.05, held.set).start()
        raise KeyError
    assert not ran


# -- sessions


def _session(threads: int = 1) -> InferenceSession:
    model = Model("two", seed=0)
    x = model.input("x", (4, 6))
    model.output(model.dense(x, 3, activation="relu"))
    return InferenceSession(model, threads=threads)


def test_a_session_waits_for_no_other() -> None:
    x = np.ones((4, 6), "f4")
    with _session() as one, _session() as other:
        wanted = one.run(x)
        inner = one.serial.bounds.session
        with one.serial.lock, inner.runtime.turn:  # as in the middle of a run
            found: list[dict[str, np.ndarray]] = []
            thread = threading.Thread(target=lambda: found.append(other.run(x)))
            thread.start()
            thread.join(60)
            assert found, "the other session waits"
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[0][name], array)


def test_threads_share_a_session() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((1 + n % 3, 6)).astype("f4") for n in range(12)]
    with _session() as session:
        wanted = [session.run(batch) for batch in batches]

        def run(number: int) -> None:
            for turn in range(20):
                at = (number + turn) % len(batches)
                for name, array in session.run(batches[at]).items():
                    np.testing.assert_array_equal(array, wanted[at][name])

        together(*(partial(run, number) for number in range(4)))


# -- forks

_FORK = """
    import os, sys, threading
    import numpy as np
    from soapstone import InferenceSession, Model
    from soapstone.runtime import Machine, ReadWrite, Region, Runtime, StoppedError, task

    @task
    def bump(x: ReadWrite) -> None:
        x += 1

    model = Model("two", seed=0)
    x = model.input("x", (4, 300))
    model.output(model.dense(x, 300, activation="relu"))
    session = InferenceSession(model, threads=2)
    given = np.ones((4, 300), "f4")
    wanted = session.run(given)

    region = Region((8,), "i8", "region")
    runtime = Runtime(Machine.local(cpus=2))
    runtime.launch(bump, region)
    trace = runtime.capture(lambda: runtime.launch(bump, region))
    trace.replay()
    inside, leave = threading.Event(), threading.Event()

    def busy():
        with session._lock, runtime.capture("never"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=busy)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        told = 0
        for use in (
            lambda: runtime.launch(bump, region),
            lambda: runtime.read(region),
            trace.replay,
        ):
            try:
                use()
            except StoppedError as error:
                told += "forked" in str(error)
        runtime.close()
        with Runtime(Machine.local(cpus=2)) as mine:
            for _ in range(3):
                mine.launch(bump, region)
            same = (mine.read(region) == 3).all()
        for name, array in session.run(given).items():
            same = same and (array == wanted[name]).all()
        print("child", told, bool(same), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    runtime.launch(bump, region)
    print("parent", status, runtime.read(region)[0])
    runtime.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_and_never_waits() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORK)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stdout.splitlines() == ["child 3 True", "parent 0 3"], found.stderr
