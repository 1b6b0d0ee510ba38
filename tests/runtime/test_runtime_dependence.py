"""The analysis: launches are analysed whole, and exactly what conflicts is ordered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Machine,
    MemoryExhausted,
    Partition,
    Processor,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    UnwrittenError,
    Write,
)


def _nothing(*arrays: Any) -> None:
    """A body without an effect: only the analysis matters here."""


READ = Task("reader", (Read,), _nothing)
WRITE = Task("writer", (Write,), _nothing)
UPDATE = Task("updater", (ReadWrite,), _nothing)
MOVE = Task("mover", (Read, Write), _nothing)
SUM = Task("summer", (Reduce("sum"),), _nothing)


def _edges(runtime: Runtime, *launches: tuple[Task, Any]) -> set[tuple[str, str]]:
    with runtime.capture("edges") as recording:
        for task, partition in launches:
            runtime.launch(task, partition)
    trace = recording.trace
    label = [f"{o.launch.name}{o.point}" for o in trace.operations]
    return {(label[a], label[b]) for a, b in trace.edges.tolist()}


@pytest.fixture
def runtime() -> Any:
    with Runtime(Machine.local(2)) as made:
        yield made


def test_readers_follow_the_writer_and_not_each_other(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    edges = _edges(runtime, (WRITE, x), (READ, Partition.tiled(x, 2)), (UPDATE, x))
    assert edges == {
        ("writer0", "reader0"),
        ("writer0", "reader1"),
        ("reader0", "updater0"),
        ("reader1", "updater0"),
        ("writer0", "updater0"),
    }


def test_the_same_disjoint_partition_is_pointwise(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    tiles = Partition.tiled(x, 4)
    edges = _edges(runtime, (WRITE, tiles), (UPDATE, tiles))
    assert edges == {(f"writer{p}", f"updater{p}") for p in range(4)}


def test_halos_depend_on_neighbours(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    tiles = Partition.tiled(x, 4)
    edges = _edges(runtime, (WRITE, tiles), (READ, Partition.halo(tiles, 1, 0)))
    expected = {(f"writer{p}", f"reader{p}") for p in range(4)}
    assert edges == expected | {(f"writer{p}", f"reader{p + 1}") for p in range(3)}


def test_a_partial_write_keeps_the_rest_of_the_old_writer(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    part = Partition.of(x, [[0]], [[3]])
    again = Task("again", (Write,), _nothing)
    edges = _edges(runtime, (WRITE, x), (again, part), (READ, Partition.tiled(x, 2)))
    assert edges == {
        ("writer0", "again0"),
        ("writer0", "reader0"),
        ("again0", "reader0"),
        ("writer0", "reader1"),
    }


def test_reductions_run_in_any_order_and_fold_in_launch_order(runtime: Runtime) -> None:
    x = Region((8,), "f4", "x")
    everyone = Partition.whole(x, (2,))
    with runtime.capture("sums") as recording:
        runtime.launch(SUM, everyone, name="a")
        runtime.launch(SUM, everyone, name="b")
    trace = recording.trace
    label = [f"{o.launch.name}{o.point}" for o in trace.operations]
    reuse = {tuple(pair) for pair in trace.layout.edges.tolist()}
    edges = {(label[a], label[b]) for a, b in trace.edges.tolist() if (a, b) not in reuse}
    assert {("a0", "a.fold0"), ("a1", "a.fold0"), ("a.fold0", "b.fold0")} <= edges
    assert not any(a.startswith("a") and b in ("b0", "b1") for a, b in edges)


def test_an_index_launch_of_1024_points_is_analysed_as_one(runtime: Runtime) -> None:
    x, y = Region((4096,), "f4", "x"), Region((4096,), "f4", "y")
    a, b = Partition.tiled(x, 1024), Partition.tiled(y, 1024)
    halo = Partition.halo(a, 1, 1)
    before = runtime.statistics.interference_tests
    with runtime.capture("wide") as recording:
        for _ in range(10):
            runtime.launch(MOVE, halo, b)
            runtime.launch(MOVE, Partition.halo(b, 1, 1), a)
    statistics = runtime.statistics
    assert statistics.launches == 20 and statistics.points == 20 * 1024
    # The halo against the tiles, both ways round; same tiles against same tiles need no test.
    assert statistics.interference_tests - before <= 3
    assert len(recording.trace.operations) == 20 * 1024
    again = statistics.interference_tests
    with runtime.capture("again"):
        runtime.launch(MOVE, halo, b)
    assert statistics.interference_tests == again


def test_ended_users_are_forgotten(runtime: Runtime) -> None:
    x = Region((4,), "f4", "x")
    runtime.fill(x, 0)
    for _ in range(1100):
        runtime.launch(READ, x)
    runtime.wait()
    for _ in range(600):
        runtime.launch(READ, x)
    runtime.wait()
    (instance,) = runtime.analysis.state(x)
    assert len(instance.readers) < 1100


def test_a_transient_region_must_be_written_first(runtime: Runtime) -> None:
    x = Region((8,), "f4", "scratch", transient=True)
    with (
        pytest.raises(
            UnwrittenError, match=r"'reader' reads transient region 'scratch'.*\[4\]\.\.\[8\]"
        ),
        runtime.capture("bad"),
    ):
        runtime.launch(WRITE, Partition.of(x, [[0]], [[4]]))
        runtime.launch(READ, Partition.tiled(x, 2))
    with runtime.capture("good"):
        runtime.launch(WRITE, Partition.tiled(x, 2))
        runtime.launch(READ, x)


def test_one_memory_needs_no_copies_and_a_second_one_exactly_the_missing_tiles() -> None:
    x = Region((8,), "f4", "x")
    tiles = Partition.tiled(x, 2)
    with Runtime(Machine.local(2)) as runtime:
        runtime.launch(WRITE, tiles)
        runtime.launch(READ, Partition.halo(tiles, 1, 1))
        runtime.wait()
        assert runtime.statistics.copies == 0
    with Runtime(Machine.local(2, memories=2)) as runtime:
        runtime.launch(WRITE, tiles)
        runtime.launch(READ, Partition.halo(tiles, 1, 1))
        runtime.launch(READ, Partition.halo(tiles, 1, 1))
        runtime.wait()
        assert runtime.statistics.copies == 2
        assert runtime.statistics.bytes_copied == 8


def test_a_region_too_large_for_its_memory_is_named() -> None:
    with Runtime(Machine.local(1, memory_bytes=1 << 20)) as runtime:
        half = Region((1 << 17,), "f4", "half")
        runtime.fill(half, 0)
        big = Region((1 << 18,), "f4", "big")
        with pytest.raises(
            MemoryExhausted, match=r"'big' needs 1048576 bytes, \d+ of 1048576 .*largest.*half"
        ):
            runtime.fill(big, 0)


def test_memory_of_dead_regions_is_used_again() -> None:
    with Runtime(Machine.local(1, memory_bytes=1 << 20)) as runtime:
        for number in range(8):
            runtime.fill(Region((1 << 17,), "f4", f"r{number}"), 0)
        runtime.wait()
        assert runtime.memory.used(0) <= 1 << 20


def test_an_arena_too_large_for_its_memory_is_named() -> None:
    with Runtime(Machine.local(1, memory_bytes=1 << 16)) as runtime:
        big = Region((1 << 15,), "f4", "activations", transient=True)
        with (
            pytest.raises(MemoryExhausted, match=r"arena of trace 'step'.*activations"),
            runtime.capture("step"),
        ):
            runtime.fill(big, 0)


class Far(DefaultMapper):
    """Everything runs on the last processor; the first argument stays in the first memory."""

    def place(self, launch: Launch, point: int) -> int:
        return len(self.machine.processors) - 1

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        return self.machine.memories[0].name if argument == 0 else processor.memory


def test_a_mapper_places_arguments_in_memories() -> None:
    with Runtime(Machine.local(2, memories=2), Far()) as runtime:
        x, y = Region((4,), "f4", "x"), Region((4,), "f4", "y")
        runtime.launch(MOVE, x, y)
        runtime.wait()
        assert [i.storage.memory for i in runtime.analysis.state(x)] == [0]
        assert [i.storage.memory for i in runtime.analysis.state(y)] == [1]
        assert runtime.statistics.copies == 0


def test_channels_last_is_a_permuted_view() -> None:
    class Last(DefaultMapper):
        def order(self, region: Region) -> tuple[int, ...] | None:
            return (0, 2, 3, 1) if region.rank == 4 else None

    strides: list[tuple[int, ...]] = []

    def body(x: Any) -> None:
        strides.append(x.strides)
        x += 1

    with Runtime(Machine.local(1), Last()) as runtime:
        x = Region((2, 3, 4, 5), "f4", "image")
        data = np.arange(120, dtype="f4").reshape(x.shape)
        runtime.write(x, data)
        runtime.launch(Task("bump", (ReadWrite,), body), x)
        np.testing.assert_array_equal(runtime.read(x), data + 1)
        assert strides == [(240, 4, 60, 12)]
        assert runtime.array(x).strides == (240, 4, 60, 12)
