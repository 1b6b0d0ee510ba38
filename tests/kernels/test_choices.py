"""Choices of kernels: measured again when what they rest on changes, and repeated on request."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import PROGRAMS, TESTS, ranks

from soapstone import Model
from soapstone.cache.store import Store
from soapstone.ir.spec import operator
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.kernels import measure, select as select_module
from soapstone.kernels.choices import ChoiceError, Choices, ChoiceWarning, Tune
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.measure import form
from soapstone.kernels.registry import variants
from soapstone.kernels.select import select
from soapstone.native.entries import noop
from soapstone.native.memory import run
from soapstone.runtime.errors import TaskError

_ITEMS = tuple(operator("linear").normalise({"bias": False}).items())
# Kernels of a user's module: one that does its work 2,000 times, and one that at first declines.
_KERNELS = """
from soapstone.kernels import registry
from soapstone.native.entries import sequence
native = {each.name: each for each in registry.variants("relu")}["numba"]
registry._VARIANTS["relu", "cpu"].clear()
@registry.variant("relu", "slow")
def slow(call):
    return sequence([native.bind(call)] * TIMES)
@registry.variant("relu", "quick")
def quick(call):
    return None if DECLINES else native.bind(call)
"""
_SELECT = """
import numpy as np
import mine
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select
from soapstone.runtime.errors import TaskError
x = np.ones(4096, np.float32)
print(select(Call("relu", {}, (x,), (np.empty_like(x),)))[0])
"""


def _run(folder: Path, cache: Path, *command: str) -> str:
    """Run Python with a store of its own; compiled code, which is valid anywhere, is shared."""
    from soapstone.cache.places import root

    done = subprocess.run(
        [sys.executable, *command],
        env={
            **os.environ,
            "SOAPSTONE_CACHE": str(cache),
            "NUMBA_CACHE_DIR": str(root()),
            "PYTHONPATH": str(folder),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _choice(folder: Path, times: int, declines: bool) -> str:
    kernels = _KERNELS.replace("TIMES", str(times)).replace("DECLINES", str(declines))
    (folder / "mine.py").write_text(kernels)
    return _run(folder, folder / "cache", "-c", _SELECT)


def _records(path: Path) -> list[dict[str, float | None]]:
    with closing(sqlite3.connect(path)) as file:
        found = file.execute("SELECT value FROM records WHERE kind = 'choice'").fetchall()
    return [json.loads(text) for (text,) in found]


def test_a_choice_is_made_again_when_its_candidates_change(tmp_path: Path) -> None:
    assert _choice(tmp_path, 2000, True) == "slow"  # the only one: not measured, and so recorded
    (path,) = (tmp_path / "cache").glob("measured-*.sqlite")
    assert _records(path) == [{"slow": None}]
    assert _choice(tmp_path, 2000, False) == "quick"
    assert _choice(tmp_path, 3000, False) == "quick"
    assert _choice(tmp_path, 2000, False) == "quick"
    assert len(_records(path)) == 3  # one for each state of the sources
    assert all(us is None or us > 0 for times in _records(path) for us in times.values())


# ------------------------------------------------------------------ in this process
@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A product that several variants serve, and a store of its own."""
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path))
    measure.store.cache_clear()
    rng = np.random.default_rng(0)
    x, w = (rng.random((24, 24), np.float32) for _ in range(2))
    flags = {"transpose_a": False, "transpose_b": False}
    return Call("matmul", flags, (x, w), (np.empty((24, 24), np.float32),))


@pytest.fixture(autouse=True)
def _own_store():
    yield
    measure.store.cache_clear()


def _serving(call: Call) -> list[str]:
    return [each.name for each in variants(call.operator) if each.bind(call) is not None]


def test_a_known_choice_is_not_measured_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = select(call)
    assert len(measure.store()) == 1
    measure.store.cache_clear()  # as in another process
    monkeypatch.delattr(measure, "best_us")
    assert select(call)[0] == name


def test_what_is_recorded_decides(call: Call) -> None:
    serving = _serving(call)
    if len(serving) < 2:
        pytest.skip("one kernel serves here")
    candidates = variants("matmul")
    select(call)
    times = dict(measure.known(form(call), candidates) or {})
    assert list(times) == serving and all(us and us > 0 for us in times.values())
    question = measure._question(form(call), candidates)
    for name in serving:
        measure.store().replace({question: {**dict.fromkeys(serving, 50.0), name: 10.0}})
        assert select(call)[0] == name
    close = {name: 100.0 - i for i, name in enumerate(serving)}  # within the margin of noise
    measure.store().replace({question: close})
    assert select(call)[0] == serving[0]


def store_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Let choices be recorded in a folder."""
    known = cache(lambda: Store("choice", folder / "measured.sqlite"))
    monkeypatch.setattr(measure, "store", known)
    return known()


def test_what_is_measured_of_a_computer_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of_its_own(tmp_path, monkeypatch)
    made = []

    def make() -> dict[str, Entry]:
        made.append(1)
        return {"nothing": noop()}

    def asked(tune: Tune) -> measure.Times | None:
        with Choices(tune=tune).current():
            return measure.of_computer("nothing at all", __name__, make)

    assert asked(True) is asked(False) is None
    assert not made
    times = asked("now")
    assert times is not None and list(times) == ["nothing"]
    assert asked(True) == asked("now") == times
    assert asked(False) is None
    assert len(made) == 1


def test_what_does_not_fit_in_memory_is_not_measured_of_a_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of_its_own(tmp_path, monkeypatch)

    def make() -> dict[str, Entry]:
        raise MemoryError

    with Choices(tune="now").current():
        assert measure.of_computer("too much", __name__, make) is None
    assert not len(store)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_neither_threads_nor_children_wait_for_who_measures_if_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of_its_own(tmp_path, monkeypatch)
    begun, goes_on = threading.Event(), threading.Event()

    def make() -> dict[str, Entry]:
        begun.set()
        assert goes_on.wait(60)
        return {"nothing": noop()}

    def asked(tune: Tune, make: Callable[[], dict[str, Entry]]) -> measure.Times | None:
        with Choices(tune=tune).current():
            return measure.of_computer("slow", __name__, make)

    slow = threading.Thread(target=asked, args=("now", make))
    slow.start()
    try:
        assert begun.wait(60)
        found: list[object] = []
        quick = threading.Thread(target=lambda: found.append(asked(True, make)), daemon=True)
        quick.start()
        quick.join(30)
        child = multiprocessing.get_context("fork").Process(
            target=asked, args=("now", lambda: {"nothing": noop()}), daemon=True
        )
        child.start()
        child.join(60)
        ended = child.exitcode
        child.kill()
    finally:
        goes_on.set()
        slow.join()
    assert found == [None]
    assert ended == 0


@pytest.mark.parametrize(("disturbed", "turns"), [(0, 7), (3, 10), (1000, 28)])
def test_runs_that_were_disturbed_do_not_count(
    disturbed: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    # Asked before and after each run of two entries.
    counts = itertools.chain(range(4 * disturbed), itertools.repeat(0))
    monkeypatch.setattr(measure, "preemptions", lambda: next(counts))
    monkeypatch.setattr(measure, "native_call", lambda *_: ran.append(1))
    assert measure.best_us({"one": noop(), "other": noop()}).keys() == {"one", "other"}
    assert len(ran) == 2 * turns


def test_of_a_large_constant_one_variant_at_a_time_is_measured(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_constant = replace(call, constants=frozenset({1}))
    serving = [v for v in variants("matmul") if v.bind(of_constant) is not None]
    timed: list[list[str]] = []
    best_us = measure.best_us

    def spied(entries: dict[str, Entry]) -> dict[str, float]:
        timed.append(list(entries))
        return best_us(entries)

    monkeypatch.setattr(measure, "best_us", spied)
    monkeypatch.setattr(measure, "_LARGE", 0)
    name, entry = select(of_constant)
    assert timed == [[each.name] for each in serving] and name in [each.name for each in serving]
    assert entry is not None and run(entry) == 0
    x, w = call.inputs
    np.testing.assert_allclose(call.outputs[0], x @ w, rtol=1e-5)


def test_given_choices_are_repeated(call: Call) -> None:
    for name in _serving(call):
        choices = Choices({form(call): name}, strict=True)
        with choices.current():
            assert select(call)[0] == name
        assert choices.made == {form(call): name}
    assert len(measure.store()) == 0  # nothing was measured


def test_a_choice_that_is_no_more_is_an_error_or_said(call: Call) -> None:
    given = {form(call): "of another version"}
    error = r"matmul: variant 'of another version'.*variants are"
    with Choices(given, strict=True).current(), pytest.raises(ChoiceError, match=error):
        select(call)
    choices = Choices(given)
    with choices.current(), pytest.warns(ChoiceWarning, match="of another version.*last bits"):
        name, entry = select(call)
    assert entry is not None and choices.made == {form(call): name}


def test_choices_are_those_of_the_first_process_where_they_differ() -> None:
    first, second = Choices(), Choices()
    for choices, made in ((first, "ab"), (second, "cde")):
        for number, name in enumerate(made):
            choices.note(f"call {number}", name)
    both = [first.made, second.made]
    assert first.agree(both) and second.agree(both)
    assert second.made == {"call 0": "a", "call 1": "b", "call 2": "e"}
    both = [first.made, second.made]
    assert not first.agree(both) and not second.agree(both)


def test_the_choices_that_are_kept_are_those_made_or_repeated_last() -> None:
    choices = Choices(most=2)
    for call in ("call 0", "call 1", "call 0", "call 2"):
        choices.note(call, "numba")
    assert list(choices.made) == ["call 0", "call 2"]


def test_files_of_choices_are_checked(tmp_path: Path) -> None:
    choices, path = Choices(), tmp_path / "choices.json"
    choices.note("call", "numba")
    choices.save(path)
    assert Choices.load(path).given("call") == "numba"
    for text in ("{}", '{"format": "soapstone-choices", "version": 2, "choices": {}}', "[", ""):
        path.write_text(text)
        with pytest.raises(ChoiceError, match=r"choices\.json"):
            Choices.load(path)
    with pytest.raises(ChoiceError, match="no such file"):
        Choices.load(tmp_path / "none.json")


# ------------------------------------------------------------------ runs
def _train(folder: Path, cache: str, how: str, *files: object) -> str:
    return _run(TESTS, folder / cache, str(PROGRAMS / "choices_runs.py"), how, *map(str, files))


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The bits of a run with choices that this computer would not make, and their file."""
    folder = tmp_path_factory.mktemp("turned")
    file = folder / "turned.json"
    return _train(folder, "first", "turned", "-", file), file


@pytest.mark.long
def test_the_same_seed_and_choices_give_the_same_bits_from_any_store(
    turned: tuple[str, Path], tmp_path: Path
) -> None:
    (bits, chosen), again, own = turned, tmp_path / "again.json", tmp_path / "own.json"
    assert _train(tmp_path, "second", "train", chosen, again) == bits
    assert again.read_text() == chosen.read_text()
    # What this computer would choose is another, and once it is measured it stays.
    assert _train(tmp_path, "third", "train", "-", own) == _train(
        tmp_path, "third", "train", "-", own
    )
    if any(len(times) > 1 for times in _records(next((tmp_path / "third").glob("*.sqlite")))):
        assert own.read_text() != chosen.read_text()


def test_a_strategy_names_kernels(tmp_path: Path) -> None:
    """They are read from its file and run, or refused with a name; nothing else is chosen."""
    rng = np.random.default_rng(0)
    x, y = rng.random((8, 16), np.float32), np.zeros(8, np.int32)
    path, ran = tmp_path / "strategy.json", []
    for name in [*(each.name for each in variants("linear")), "reference", "none"]:
        Strategy({DEFAULT: Configuration()}, variants={"fc": name}).save(path)
        with Model("net") as model:
            model.output(model.dense(model.input("x", (8, 16)), 4, name="fc"))
            model.compile("sgd", cpus=1, strategy=path)
            try:
                model.fit(x, y, progress=False)
            except TaskError as error:
                text = str(error)
                assert "'fc'" in text and f"variant {name!r} does not serve this call" in text
            else:
                assert model.statistics["variants"]["fc"] == name
                ran.append(name)
    assert "reference" in ran and "none" not in ran


def test_a_resumed_run_repeats_the_choices_of_its_checkpoint(
    turned: tuple[str, Path], tmp_path: Path
) -> None:
    (bits, chosen), file = turned, tmp_path / "half.npz"
    _train(tmp_path, "second", "save", chosen, file)
    assert _train(tmp_path, "third", "resume", "-", file) == bits


def test_all_ranks_make_one_set_of_choices(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    done = ranks(2, PROGRAMS / "choices_runs.py", "ranks", tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks agree") == 2  # lines of two processes may run together


def test_of_variants_about_as_fast_that_expected_to_be_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes are registered before what does the same in one."""
    x = np.ones((4, 8), np.float32)
    at = {"operator": "linear", "items": _ITEMS, "arity": 2, "wide": False}
    call = Call(
        "with_epilogue", at | {"program": (("relu", (0,), ()),)}, (x, np.ones((8, 3), np.float32)),
        (np.zeros((4, 3), np.float32),),
    )  # fmt: skip
    served = [each.name for each in variants("with_epilogue") if each.bind(call) is not None]
    assert "two_passes" in served
    if len(served) == 1:
        pytest.skip("one variant alone serves the call")
    monkeypatch.setattr(select_module, "known", lambda *_: dict.fromkeys(served, 10.0))
    assert select(call)[0] != "two_passes"
