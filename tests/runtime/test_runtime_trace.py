"""Traces: replays are right whatever the timing, and reductions give the same bits anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.runtime.programs import ShuffledMapper, random_program

from soapstone.native.memory import Array
from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Machine,
    Partition,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Trace,
    Write,
    task,
)
from soapstone.runtime.analysis.transfer import copy_entry
from soapstone.runtime.tracing.program import waits


@task
def bump(y: ReadWrite) -> None:
    y += 1


@task
def add(x: Read, y: ReadWrite) -> None:
    y += x


# -- order


def _happens_before(trace: Trace) -> Array:
    """What the native program guarantees, from nothing but its arrays. bool (n, n)."""
    n = len(trace.operations)
    before = np.zeros((n, n), dtype=bool)
    workers = trace._program.workers
    place = {int(o): k for mine in workers for k, o in enumerate(mine.operations)}
    of_word = {number * 8: mine for number, mine in enumerate(workers)}
    owner = {int(o): mine for mine in workers for o in mine.operations}
    for number in trace.order:
        mine, k = owner[number], place[number]
        sources = [int(mine.operations[k - 1])] if k else []
        for e in range(int(mine.first_wait[k]), int(mine.first_wait[k + 1])):
            other = of_word[int(mine.wait_word[e])]
            done = int(mine.wait_value[e])
            assert other.publish[done - 1], "waits for a count that is never published"
            sources.append(int(other.operations[done - 1]))
        for source in sources:
            before[number] |= before[source]
            before[number, source] = True
    return before


def _addresses(array: Array) -> set[int]:
    if array.size == 0:
        return set()
    found = np.array([array.__array_interface__["data"][0]])
    for extent, stride in zip(array.shape, array.strides):
        found = (found[:, None] + np.arange(extent) * stride).reshape(-1)
    words = range(0, array.itemsize, 4)
    return {(int(a) + word) // 4 for a in found for word in words}


@pytest.mark.parametrize("seed", range(30))
def test_whoever_shares_a_byte_is_ordered(seed: int) -> None:
    program = random_program(seed, steps=14)
    mapper = ShuffledMapper(seed, tiles=seed % 2 > 0)
    machine = Machine.local(2 + seed % 2, memories=1 + seed % 2)
    with Runtime(machine, mapper) as runtime:
        for region in program.persistent:
            runtime.fill(region, 3)
        trace = runtime.capture(lambda: program.launch(runtime))
        before = _happens_before(trace)
        touched: list[list[tuple[set[int], bool]]] = [
            [(_addresses(array), use.writes) for array, use in zip(o.arrays(), o.uses)]
            for o in trace.operations
        ]
        for b, mine in enumerate(touched):
            for a, theirs in enumerate(touched[:b]):
                clash = any((w or v) and not x.isdisjoint(y) for x, w in mine for y, v in theirs)
                assert not clash or before[b, a] or before[a, b], (
                    trace.operations[a].launch.name,
                    trace.operations[b].launch.name,
                )


def test_waits_leave_out_what_is_implied() -> None:
    processors = [0, 1, 0, 1, 1]
    found, publish = waits(processors, range(5), [[], [0], [0, 1], [0, 2], [2, 0]])
    assert found == [[], [(0, 1)], [(1, 1)], [(0, 2)], []]
    assert publish == [True, True, True, False, False]


def test_one_worker_waits_for_nothing() -> None:
    with Runtime(Machine.local(1)) as runtime:
        x = Region((4,), "f8", "x")
        trace = runtime.capture(lambda: [runtime.launch(bump, x) for _ in range(5)])
        assert trace.describe()["waits"] == 0
        trace.replay()
        assert (runtime.read(x) == 5).all()


# -- memory


def test_transient_regions_share_an_arena() -> None:
    with Runtime(Machine.local(2)) as runtime:
        x, y = Region((1024,), "f4", "x"), Region((1024,), "f4", "y")
        runtime.write(x, np.arange(1024, dtype="f4"))
        copy = Task("copy", (Read, Write), lambda a, b: np.copyto(b, a))
        chain = [x, *[Region((1024,), "f4", f"t{i}", transient=True) for i in range(10)], y]

        def step() -> None:
            for a, b in itertools.pairwise(chain):
                runtime.launch(copy, Partition.tiled(a, 2), Partition.tiled(b, 2))

        trace = runtime.capture(step)
        assert trace.peak_bytes == 2 * 4096
        assert trace.describe()["memories"]["system"]["bound_bytes"] == 2 * 4096
        assert trace.describe()["waits"] == 0  # reuse is tile by tile: no worker waits for another
        trace.replay()
        np.testing.assert_array_equal(runtime.read(y), np.arange(1024, dtype="f4"))


def test_array_is_live_in_both_directions() -> None:
    for memories in (1, 2):
        with Runtime(Machine.local(2, memories=memories)) as runtime:
            x, y = Region((8,), "f8", "x"), Region((8,), "f8", "y")
            late = Region((8,), "f8", "late")
            feed, result = runtime.array(x), runtime.array(y)

            with runtime.capture("step") as recording:
                runtime.launch(add, Partition.tiled(x, 2), Partition.tiled(y, 2))
                runtime.launch(add, Partition.tiled(x, 2), Partition.tiled(late, 2))
            trace = recording.trace
            found = runtime.array(late)
            for value in (1, 5, 7):
                feed[...] = value
                trace.replay()
                assert (result == {1: 1, 5: 6, 7: 13}[value]).all()
                assert (found == result).all()
            feed[...] = 100
            runtime.launch(add, Partition.tiled(x, 2), Partition.tiled(y, 2))
            runtime.wait()
            assert (result == 113).all()
            result[...] = 0
            assert (runtime.read(y) == 0).all()
            if memories == 2:
                assert runtime.statistics.copies > 0


def test_a_step_that_ends_elsewhere_can_follow_itself() -> None:
    class Alternate(DefaultMapper):
        def place(self, launch: Launch, point: int) -> int:
            return int(launch.name == "away")

    with Runtime(Machine.local(2, memories=2), Alternate()) as runtime:
        x, y = Region((8,), "i8", "x"), Region((8,), "i8", "y")

        def step() -> None:
            runtime.launch(add, x, y, name="home")
            runtime.launch(bump, x, name="away")

        trace = runtime.capture(step)
        for _ in range(3):
            trace.replay()
        assert runtime.read(y).tolist() == [3] * 8
        assert runtime.statistics.fixup_copies == 0
        runtime.launch(bump, x, name="away")
        trace.replay()
        assert runtime.read(y).tolist() == [7] * 8
        assert runtime.statistics.fixup_copies == 1


def test_a_step_captured_while_the_host_array_is_behind() -> None:
    class Split(DefaultMapper):
        def place(self, launch: Launch, point: int) -> int:
            return {"near": 0, "far": 1}.get(launch.name, point % 2)

    with Runtime(Machine.local(2, memories=2), Split()) as runtime:
        x, y = Region((2,), "i8", "x"), Region((2,), "i8", "y")
        runtime.array(x)
        runtime.launch(bump, Partition.tiled(x, 2))  # the second half is valid elsewhere

        def step() -> None:
            runtime.launch(add, x, y, name="far")
            runtime.launch(bump, x, name="near")

        trace = runtime.capture(step)
        for _ in range(3):
            trace.replay()
        assert runtime.read(y).tolist() == [1 + 2 + 3] * 2


# -- reductions


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "f2", "c8"])
@pytest.mark.parametrize("shared", [True, False])
def test_float_reductions_have_the_same_bits_anywhere(dtype: str, shared: bool) -> None:
    rng = np.random.default_rng(5)
    rows, columns = 300, 70
    data = rng.standard_normal((6, rows, columns)) * 10 ** rng.integers(0, 4, 6)[:, None, None]
    data = data.astype(dtype)
    take = Task("take", (Read, Reduce("sum")), lambda x, out: np.copyto(out, x[0, : len(out)]))
    results = []
    setups = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3)]
    for cpus, memories in setups:
        for mapper in (DefaultMapper(), ShuffledMapper(cpus * 10 + memories)):
            with Runtime(Machine.local(cpus, memories=memories), mapper) as runtime:
                x, out = Region(data.shape, dtype, "x"), Region((rows, columns), dtype, "out")
                runtime.write(x, data)
                tiles = Partition.tiled(x, (6, 1, 1))
                if shared:
                    into = Partition.whole(out, (6, 1, 1))
                else:
                    low = np.array([[40 * p, 0] for p in range(6)])
                    into = Partition.of(out, low, low + np.array([100, columns]), (6, 1, 1))

                def step(r: Any = runtime, a: Any = tiles, b: Any = into) -> None:
                    r.launch(take, a, b, initialise=True)

                step()
                results.append(runtime.read(out))
                runtime.fill(out, 1)
                trace = runtime.capture(step)
                for _ in range(2):
                    trace.replay()
                results.append(runtime.read(out))
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    wide = np.float32 if dtype == "f2" else dtype  # halves are added up in single precision
    expected = np.zeros((rows, columns), dtype=wide)
    for p in range(6):
        if shared:
            expected = data[0].astype(wide) if p == 0 else expected + data[p]
        else:
            expected[40 * p : 40 * p + 100] += data[p][:100]
    expected = expected.astype(dtype)
    assert expected.tobytes() == results[0].tobytes()


def test_a_large_fold_is_shared_by_the_workers() -> None:
    with Runtime(Machine.local(2)) as runtime:
        out = Region((512, 512), "f4", "out")
        one = Task("one", (Reduce("sum"),), lambda out: out.fill(1))
        trace = runtime.capture(
            lambda: runtime.launch(one, Partition.whole(out, (4,)), initialise=True)
        )
        folds = [o.processor for o in trace.operations if o.kind == "fold"]
        assert folds == [0, 1]
        trace.replay()
        assert (runtime.read(out) == 4).all()


@pytest.mark.parametrize("workers", [2, 3])
def test_native_workers_see_each_others_writes(workers: int) -> None:
    shift = Task("shift", (Read, Write), bind=lambda c, a: copy_entry(a[1], a[0]))
    tiles, size, stages = 6, 300, 30
    with Runtime(Machine.local(workers)) as runtime:
        names = ["x", *[f"t{i}" for i in range(stages - 1)], "y"]
        chain = [Region((tiles * size,), "i8", n, transient=n.startswith("t")) for n in names]
        feed, result = runtime.array(chain[0]), runtime.array(chain[-1])

        def step() -> None:
            for a, b in itertools.pairwise(chain):
                cut = Partition.tiled(a, tiles)
                turned = np.roll(np.arange(tiles), -1)
                runtime.launch(
                    shift,
                    Partition.of(a, cut.lo[turned], cut.hi[turned]),
                    Partition.tiled(b, tiles),
                )

        trace = runtime.capture(step)
        assert trace.describe()["python_entries"] == 0 and trace.describe()["waits"] > stages
        assert trace.peak_bytes <= 3 * chain[0].nbytes
        for round_ in range(200):
            feed[...] = np.arange(tiles * size) + round_
            trace.replay()
            np.testing.assert_array_equal(result, np.roll(feed, -stages * size))


def test_an_empty_tile_has_its_shape_wherever_the_others_lie() -> None:
    """A traced region has bytes for tiles that hold some, and an empty one may lie beside them."""
    seen: list[tuple[int, ...]] = []

    def note(x: Array, y: Array) -> None:
        seen.append(x.shape)
        y[...] = x.sum()

    middle, result = Region((4, 6), np.float64, "middle", transient=True), Region((2,), np.float64)
    tiles = Partition.of(middle, [[1, 2], [0, 0]], [[3, 6], [0, 4]])
    ones = Task("ones", (Write,), lambda x: x.fill(1.0))
    with Runtime(Machine.local(1), DefaultMapper()) as runtime:

        def step() -> None:
            runtime.launch(ones, tiles)
            runtime.launch(Task("note", (Read, Write), note), tiles, Partition.tiled(result, 2))

        runtime.capture(step).replay()
        assert runtime.read(result).tolist() == [8.0, 0.0]
    assert set(seen) == {(2, 4), (0, 4)}
