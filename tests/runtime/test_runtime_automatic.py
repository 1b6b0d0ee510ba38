"""Automatic tracing: what repeats is found and replayed, and nothing changes but the time."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from soapstone.native.memory import Array
from soapstone.runtime import (
    LaunchError,
    Machine,
    Partition,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    StoppedError,
    Task,
    TaskError,
    task,
)
from soapstone.runtime.tracing import automatic as module
from soapstone.runtime.tracing.repeats import period, repeats, rotation
from soapstone.runtime.tracing.step import exact


@task
def scale(a: float, x: Read, y: ReadWrite) -> None:
    y *= a
    y += x


@task
def bump(y: ReadWrite) -> None:
    y += 1


@task
def total(x: Read, out: Reduce("sum")) -> None:
    out += x.sum()


class Bench:
    """Three regions, and launches by letter."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.regions = [Region((8,), "f8", name) for name in "xyz"]
        self.tiles = [Partition.tiled(region, (2,)) for region in self.regions]
        for region in self.regions:
            runtime.fill(region, 1.0)

    def letter(self, letter: str, scalar: float = 0.5) -> None:
        x, y, z = self.tiles
        launch = self.runtime.launch
        match letter:
            case "A":
                launch(bump, x)
            case "B":
                launch(scale, scalar, x, y)
            case "C":
                launch(scale, 0.25, y, z)
            case "D":
                launch(scale, 0.125, z, x)
            case "E":
                launch(total, x, Partition.whole(self.regions[2], (2,)), initialise=True)
            case "F":
                self.runtime.fill(self.regions[0], 2.0)

    def word(self, word: str) -> None:
        for letter in word:
            self.letter(letter)

    def contents(self) -> Array:
        return np.stack([self.runtime.read(region) for region in self.regions])


def both(program: Callable[[Bench], object], cpus: int = 2, memories: int = 1) -> dict[str, int]:
    """Run a program untraced and traced automatically; returns the statistics of the latter."""
    found = []
    for automatic in (False, True):
        machine = Machine.local(cpus, memories=memories)
        with Runtime(machine, automatic=automatic) as runtime:
            bench = Bench(runtime)
            program(bench)
            found.append(bench.contents())
            statistics = runtime.statistics.describe()
    np.testing.assert_array_equal(found[0], found[1])
    return statistics


# -- repeats in a stream


def _brute(tokens: list[int], shortest: int) -> int:
    """The length of the longest substring with two occurrences that do not overlap."""
    n = len(tokens)
    for length in range(n // 2, shortest - 1, -1):
        seen: dict[tuple[int, ...], int] = {}
        for start in range(n - length + 1):
            first = seen.setdefault(tuple(tokens[start : start + length]), start)
            if start >= first + length:
                return length
    return 0


@pytest.mark.parametrize("seed", range(60))
def test_repeats_are_repeats_and_the_longest_is_among_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 + seed % 5, size=int(rng.integers(1, 60))).tolist()
    if seed % 3 == 0:
        word = rng.integers(0, 9, size=int(rng.integers(1, 9))).tolist()
        tokens = [*rng.integers(0, 9, size=5).tolist(), *word * 6][-60:]
    found = repeats(tokens, 2)
    for text, count in found:
        places = [i for i in range(len(tokens)) if tuple(tokens[i : i + len(text)]) == text]
        apart, end = 0, 0
        for place in places:
            if place >= end:
                apart, end = apart + 1, place + len(text)
        assert apart >= count >= 2
    assert sum(len(text) * count for text, count in found) <= len(tokens)
    longest = _brute(tokens, 2)
    # A run a^n has its longest repeat cut down to whole periods: never to less than half.
    assert 2 * max((len(text) for text, _ in found), default=0) >= longest


@pytest.mark.parametrize("seed", range(30))
def test_periods_and_rotations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = tuple(rng.integers(0, 3, size=int(rng.integers(1, 12))).tolist())
    whole = [p for p in range(1, len(text) + 1) if all(map(int.__eq__, text, text[p:]))]
    assert period(text) == min(whole)
    assert rotation(text) == min(text[i:] + text[:i] for i in range(len(text)))


def test_scalars_are_the_same_only_to_the_last_bit() -> None:
    different = [0.0, -0.0, 0, False, None, "0", b"0", 0j, -0j, np.float32(0), np.float64(0), (0,)]
    keys = [exact(scalar) for scalar in [*different, (0.0,), (1, 2), (1.0, 2), [1, 2], np.zeros(1)]]
    assert len(set(keys)) == len(keys)
    assert exact(float("nan")) == exact(float("nan"))
    for scalar in ({1: 2}, np.array(None), object(), {1}):
        with pytest.raises(TypeError):
            exact(scalar)


# -- programs


def test_a_loop_is_found_and_traced() -> None:
    statistics = both(lambda b: [b.word("ABC") for _ in range(300)])
    assert statistics["launches_traced"] > 0.85 * 900
    assert statistics["captures"] <= 5


@pytest.mark.parametrize("word", ["A", "AB", "ABCDE", "AABAAC", "FAB", "ABCDEFABD"])
def test_loops_of_any_length(word: str) -> None:
    statistics = both(lambda b: [b.word(word) for _ in range(700 // len(word))])
    assert statistics["launches_traced"] > 500


def test_nested_and_alternating_loops() -> None:
    def nested(bench: Bench) -> None:
        for _ in range(30):
            for _ in range(10):
                bench.word("AB")
            bench.word("CDE")

    def alternating(bench: Bench) -> None:
        for _ in range(4):
            for _ in range(40):
                bench.word("ABC")
            for _ in range(40):
                bench.word("DE")

    assert both(nested)["launches_traced"] > 500
    assert both(alternating)["launches_traced"] > 600


def test_a_loop_whose_epilogue_changes() -> None:
    def program(bench: Bench) -> None:
        for turn in range(200):
            bench.word("ACDC")
            bench.letter("B", 1.0 / (turn + 2))

    assert both(program)["launches_traced"] > 600


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_host_may_come_in_between(every: int) -> None:
    def program(bench: Bench) -> None:
        for turn in range(100):
            bench.word("ABCD")
            if turn % every:
                continue
            x, y, z = bench.regions
            match turn // every % 4:
                case 0:
                    seen.append(bench.runtime.read(x)[0])
                case 1:
                    bench.runtime.write(y, np.full(8, float(turn % 5)))
                case 2:
                    bench.runtime.array(z)[...] = 3.0
                case _:
                    bench.runtime.wait()

    seen: list[float] = []
    for memories in (1, 2):
        seen.clear()
        statistics = both(program, memories=memories)
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
        assert statistics["launches_traced"] > 200


def test_a_stream_that_departs_runs_as_it_was_given() -> None:
    def program(bench: Bench) -> None:
        for turn in range(60):
            bench.word("ABCDEA"[: 6 - (turn % 4 == 3) * (turn % 6)])

    both(program)
    assert both(lambda b: [b.word("ABC" * 40 + "AB")])["launches_traced"] > 40


def test_explicit_traces_and_automatic_ones_mix() -> None:
    def program(bench: Bench) -> None:
        trace = bench.runtime.capture(lambda: bench.word("CD"))
        for turn in range(80):
            bench.word("AABB")
            if turn % 3 == 0:
                trace.replay()
            if turn % 5 == 0:
                with bench.runtime.trace("block"):
                    bench.word("EB")

    assert both(program)["launches_traced"] > 100


def test_nothing_is_traced_where_nothing_repeats() -> None:
    def program(bench: Bench) -> None:
        for turn in range(300):
            bench.letter("B", turn * 0.001)

    statistics = both(program)
    assert statistics["launches_traced"] == statistics["captures"] == 0


def test_what_may_change_unseen_is_not_traced() -> None:
    factor = [0.0]
    scaled = Task("scaled", (ReadWrite,), lambda held, y: np.add(y, held[0], out=y))
    temporary = Region((8,), "f8", "temporary", transient=True)

    def program(bench: Bench) -> None:
        for turn in range(150):
            factor[0] = float(turn)
            bench.runtime.launch(scaled, factor, bench.regions[0])
            bench.runtime.fill(temporary, 1.0)
            bench.runtime.launch(scale, 0.5, temporary, bench.regions[1])
            bench.runtime.wait()

    assert both(program)["launches_traced"] == 0


def test_every_decision_follows_from_the_stream() -> None:
    def decisions(seed: int) -> tuple[int, ...]:
        with Runtime(Machine.local(1 + seed), automatic=True) as runtime:
            bench = Bench(runtime)
            rng = np.random.default_rng(5)
            for _ in range(120):
                bench.word(["ABC", "ABCD", "DE"][int(rng.integers(0, 3)) % 2])
            runtime.wait()
            found = runtime.statistics
            return (found.captures, found.launches_traced, found.steps_replayed)

    assert decisions(0) == decisions(1)


def test_tilings_made_anew_are_the_same_whatever_kept_them() -> None:
    """Ranks must decide alike, and when an old tiling is freed is not the same in all of them."""
    x, y = Region((12,), "f8", "x"), Region((12,), "f8", "y")
    with Runtime(Machine.local(1), automatic=True) as runtime:
        for _ in range(150):
            tiles = [Partition.of(region, [[0], [5]], [[5], [12]]) for region in (x, y)]
            runtime.launch(scale, 0.5, *tiles)
            runtime.launch(scale, 0.5, x, y)
            del tiles
            runtime.executor.wait()
            runtime._forget()  # and nobody else keeps the tiling
        assert runtime.statistics.launches_traced > 100


# -- memory


def test_the_finder_is_bounded_and_keeps_nothing_alive() -> None:
    with Runtime(Machine.local(1), automatic=True) as runtime:
        automatic = runtime._automatic
        assert automatic is not None
        gone = []
        for turn in range(module._SEQUENCES + 10):
            region = Region((4,), "f8", f"r{turn}")
            gone.append(weakref.ref(region))
            for _ in range(50):
                runtime.launch(bump, region)
                runtime.launch(scale, 0.5, region, Region((4,), "f8", "once"))
        runtime.wait()
        del region
        gc.collect()
        assert len(automatic._sequences) <= module._SEQUENCES
        assert len(automatic._history) <= module.WINDOW
        assert sum(reference() is not None for reference in gone) <= module._SEQUENCES + 2


# -- errors


@pytest.fixture
def loops() -> Iterator[Bench]:
    with Runtime(Machine.local(2), automatic=True) as runtime:
        yield Bench(runtime)


def _fail_at(turn: int) -> Task:
    count = itertools.count()

    def body(y: Array) -> None:
        y += 1
        if next(count) == turn:
            raise ValueError("enough")

    return Task("brittle", (ReadWrite,), body)


def test_an_error_in_a_traced_launch_is_named_as_usual(loops: Bench) -> None:
    runtime = loops.runtime
    brittle = _fail_at(400)
    with pytest.raises((TaskError, StoppedError)) as caught:
        for _ in range(500):
            runtime.launch(brittle, loops.regions[0])
            loops.word("BC")
        runtime.wait()
    assert runtime.statistics.launches_traced > 500
    assert "task 'brittle', point 0" in str(caught.value) and "enough" in str(caught.value)
    with pytest.raises((TaskError, StoppedError)):
        runtime.read(loops.regions[0])
    runtime.reset()
    loops.word("ABC" * 50)
    assert np.isfinite(loops.contents()).all()


def test_a_wrong_launch_is_refused_at_once_and_loses_nothing(loops: Bench) -> None:
    loops.word("ABC" * 40)
    loops.word("AB")
    before = loops.runtime.statistics.launches_traced
    with pytest.raises(LaunchError, match="found 1 arguments"):
        loops.runtime.launch(scale, loops.tiles[0])
    loops.word("C" + "ABC" * 9)
    found = loops.contents()
    assert loops.runtime.statistics.launches_traced > before
    with Runtime(Machine.local(1)) as plain:
        bench = Bench(plain)
        bench.word("ABC" * 50)
        np.testing.assert_array_equal(bench.contents(), found)


def test_a_trace_that_does_not_fit_is_not_made() -> None:
    machine = Machine.local(2, memory_bytes=2 * 8 * 4096 + 70000)
    with Runtime(machine, automatic=True) as runtime:
        x, out = Region((4096,), "f8", "x"), Region((4096,), "f8", "out")
        shared = Partition.whole(out, (2,))
        add = Task("add", (Read, Reduce("sum")), lambda x, out: np.copyto(out, x))
        runtime.fill(x, 1.0)
        for _ in range(60):
            runtime.launch(add, Partition.whole(x, (2,)), shared)
            runtime.launch(bump, x)
        assert runtime.read(out)[0] == 2 * (1 + 60) * 60 / 2


def test_an_interrupt_stops_the_run(loops: Bench) -> None:
    count = itertools.count()

    def body(y: Array) -> None:
        if next(count) == 300:
            raise KeyboardInterrupt

    impatient = Task("impatient", (ReadWrite,), body)
    with pytest.raises((TaskError, StoppedError), match="KeyboardInterrupt"):
        for _ in range(400):
            loops.runtime.launch(impatient, loops.regions[0])
            loops.word("B")
        loops.runtime.wait()
    loops.runtime.reset()
    loops.word("ABC")
    assert loops.contents().shape == (3, 8)


def test_a_closed_runtime_refuses() -> None:
    runtime = Runtime(Machine.local(1), automatic=True)
    bench = Bench(runtime)
    bench.word("ABC" * 100)
    runtime.close()
    with pytest.raises(StoppedError, match="closed"):
        bench.letter("A")
