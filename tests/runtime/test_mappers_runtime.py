"""Mappers of the runtime core: legal answers change no result, and say where points run."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.runtime.programs import ContraryMapper, Program, random_program

from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.mappers.locality import LocalityMapper
from soapstone.mappers.stealing import WorkStealingMapper
from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Layout,
    Machine,
    Mapper,
    MemoryExhausted,
    Partition,
    Profile,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
    task,
)
from soapstone.runtime.analysis.operation import ALONE, Operation
from soapstone.runtime.executors.stealing import Stealing
from soapstone.runtime.model.launch import prepare
from soapstone.runtime.observe.profile import Event


@task
def double(x: Read, y: Write) -> None:
    y[...] = 2 * x


@task
def bump(x: ReadWrite) -> None:
    x += 1


def _run(program: Program, seed: int, machine: Machine, mapper: Mapper) -> Runtime:
    """Run a program untraced, traced and mixed, and compare with its sequential meaning."""
    rng = np.random.default_rng(seed)
    arrays = {r: rng.integers(0, 9, size=r.shape).astype(r.dtype) for r in program.persistent}
    with Runtime(machine, mapper) as runtime:

        def same(when: str) -> None:
            for region in program.persistent:
                found, wanted = runtime.read(region), arrays[region]
                np.testing.assert_array_equal(found, wanted, err_msg=f"{region.name} {when}")

        for region, array in arrays.items():
            runtime.write(region, array)
        for _ in range(2):
            program.launch(runtime)
            program.run(arrays)
        same("untraced")
        trace = runtime.capture(lambda: program.launch(runtime))
        for _ in range(2):
            trace.replay()
            program.run(arrays)
            same("replayed")
        program.launch(runtime)
        program.run(arrays)
        same("untraced again")
        trace.replay()
        program.run(arrays)
        same("replayed again")
    return runtime


def _largest_launch(program: Program) -> int:
    """More than the bytes that any launch of a program uses at once, with its partial results."""
    return max(
        sum(p.region.nbytes + 256 for p in (*step.inputs, *(o.partition for o in step.outputs)))
        + sum(o.partition.points * (o.partition.region.nbytes + 64) for o in step.outputs)
        for step in program.steps
    )


@pytest.mark.parametrize("seed", range(16))
def test_layouts_and_sources_of_every_argument_change_no_result(seed: int) -> None:
    machine = Machine.local(1 + seed % 3, memories=1 + seed // 3 % 3)
    _run(random_program(seed), seed, machine, ContraryMapper(seed))


class Tiles(DefaultMapper):
    """An instance for each tile, and none of a whole region."""

    def layout(self, launch: Launch, argument: int, memory: str) -> Layout:
        return Layout(None, whole=False)


@task
def ones(r: Reduce("sum")) -> None:  # type: ignore[valid-type]
    r[...] = 1


@pytest.mark.parametrize("how", ["captured", "recorded", "untraced"])
def test_a_reduction_into_a_tile_of_a_region_nobody_has_written_is_kept(how: str) -> None:
    x = Region((5,), np.int64, "x")
    tile = Partition.of(x, [[0]], [[4]])
    with Runtime(Machine.local(cpus=1), Tiles()) as runtime:
        trace = runtime.capture(lambda: runtime.launch(ones, tile)) if how == "captured" else None
        for turn in range(1, 4):
            if trace is not None:
                trace.replay()
            else:
                with runtime.trace() if how == "recorded" else contextlib.nullcontext():
                    runtime.launch(ones, tile)
            np.testing.assert_array_equal(runtime.read(x), [turn] * 4 + [0])


def test_a_step_on_tiles_is_captured_after_the_host_got_its_array() -> None:
    x = Region((5,), np.int64, "x")
    tile = Partition.of(x, [[0]], [[4]])
    with Runtime(Machine.local(cpus=1), Tiles()) as runtime:
        runtime.launch(bump, tile)
        array = runtime.array(x)
        array += 7
        trace = runtime.capture(lambda: runtime.launch(bump, tile))
        for turn in range(3):
            trace.replay()
            np.testing.assert_array_equal(array, [9 + 11 * turn] * 4 + [7 + 10 * turn])
            array += 10


@pytest.mark.parametrize("seed", range(16))
def test_programs_whose_memory_fits_no_more_than_one_launch(seed: int) -> None:
    program = random_program(seed)
    machine = Machine.local(1 + seed % 3).bounded(_largest_launch(program))
    _run(program, seed, machine, BoundedMemoryMapper())


@pytest.mark.parametrize("seed", range(8))
def test_programs_of_little_memory_under_contrary_answers(seed: int) -> None:
    program = random_program(seed)
    machine = Machine.local(1 + seed % 3).bounded(3 * _largest_launch(program))
    _run(program, seed, machine, ContraryMapper(seed))


@pytest.mark.parametrize("seed", range(6))
def test_plugins_change_no_result(seed: int) -> None:
    for kind in (LocalityMapper, WorkStealingMapper):
        _run(random_program(seed), seed, Machine.local(3, memories=1 + seed % 3), kind())


def _chain(runtime: Runtime, regions: list[Region]) -> None:
    for before, after in itertools.pairwise(regions):
        tiles = [Partition.tiled(region, (2,)) for region in (before, after)]
        runtime.launch(double, *tiles, name=f"double {after.name}")


def test_repeats_are_traced_by_themselves_in_a_memory_smaller_than_the_program() -> None:
    count = 512
    regions = [Region((count,), np.int64, f"r{i}") for i in range(6)]
    machine = Machine.local(cpus=2).bounded(3 * 8 * count)
    with Runtime(machine, BoundedMemoryMapper(), automatic=True) as runtime:
        runtime.write(regions[0], np.arange(count))
        for turn in range(1, 25):
            runtime.launch(bump, Partition.tiled(regions[0], (2,)))
            _chain(runtime, regions)
            if turn % 8 == 0:
                for power, region in enumerate(regions):
                    wanted = 2**power * (np.arange(count) + turn)
                    np.testing.assert_array_equal(runtime.read(region), wanted)
        assert runtime.statistics.launches_traced > 0
        # All six values are alive and three fit: what makes room is never a region that died.
        assert runtime.statistics.evictions > 0


def test_least_recently_used_leaves_first_and_unread_values_are_not_copied_back() -> None:
    nbytes = 1 << 12
    machine = Machine.local(cpus=2).bounded(3 * nbytes)
    first, *middle, last = [
        Region((nbytes // 8,), np.float64, f"r{i}", transient=0 < i < 7) for i in range(8)
    ]
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        runtime.write(first, np.arange(nbytes // 8, dtype=np.float64))
        trace = runtime.capture(lambda: _chain(runtime, [first, *middle, last]))
        # Of eight values three fit; all but the last are dead when they leave. The two tiles of the
        # first are copied in, and the last is copied back.
        assert runtime.statistics.evictions >= 5
        assert trace.describe()["operations"] == {"task": 14, "copy": 3}
        trace.replay()
        np.testing.assert_array_equal(runtime.read(last), 128.0 * np.arange(nbytes // 8))
        assert trace.describe()["memories"]["system.bounded"]["peak_bytes"] <= 3 * nbytes


def test_a_launch_larger_than_its_memory_is_an_error_that_names_it() -> None:
    machine = Machine.local(cpus=1).bounded(3 << 10)
    x, y = (Region((256,), np.float64, name) for name in "xy")
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        with pytest.raises(MemoryExhausted, match=r"region 'y' for task 'double' needs 2048 bytes"):
            runtime.launch(double, x, y)
        small = Region((16,), np.float64, "small")
        runtime.launch(bump, small)
        np.testing.assert_array_equal(runtime.read(small), np.ones(16))


def test_dead_regions_make_room() -> None:
    machine = Machine.local(cpus=1).bounded(4 << 10)
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        for _ in range(20):
            runtime.launch(bump, Region((384,), np.float64))
            runtime.wait()
        assert runtime.statistics.bytes_copied <= 20 * 384 * 8
        assert runtime.statistics.evictions == 0


def test_a_place_below_place_all_is_asked() -> None:
    class Last(LocalityMapper):
        def place(self, launch: Launch, point: int) -> int:
            assert 0 <= super().place(launch, point) < 2
            return 1

    class First(Last):
        def place_all(self, launch: Launch) -> np.ndarray:
            return np.zeros(launch.points, np.int64)

    x = Region((4,), np.float64, "x")
    for kind, wanted in ((Last, 1), (First, 0)):
        with Runtime(Machine.local(cpus=2), kind()) as runtime:
            trace = runtime.capture(lambda: runtime.launch(bump, Partition.tiled(x, 4)))
            assert {operation.processor for operation in trace.operations} == {wanted}


# Where points run


@task
def hold(count: ReadWrite, x: Read, y: Write) -> None:
    for _ in range(int(x[0])):
        np.sort(np.arange(2000.0)[::-1])
    count += 1
    y[...] = x + 1


def _who_ran(mapper: Mapper, machine: Machine, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The processor of every point of one untraced launch, and what it computed."""
    n = len(work)
    count, x, y = (Region((n,), np.float64, name) for name in ("count", "x", "y"))
    with Runtime(machine, mapper) as runtime:
        runtime.write(x, work)
        with runtime.profile() as profile:
            runtime.launch(hold, *(Partition.tiled(region, (n,)) for region in (count, x, y)))
        np.testing.assert_array_equal(runtime.read(count), np.ones(n))
        tasks = [event for event in profile.events if event.category == "task"]
        placed = {event.point: event.processor for event in tasks}
        return np.array([placed[point] for point in range(n)]), runtime.read(y)


def test_an_idle_processor_takes_points_of_a_busy_one() -> None:
    work = np.where(np.arange(40) < 20, 200.0, 1.0)
    stayed, wanted = _who_ran(DefaultMapper(), Machine.local(cpus=2), work)
    np.testing.assert_array_equal(stayed, np.arange(40) // 20)
    for points in (1, 5):
        moved, found = _who_ran(WorkStealingMapper(points), Machine.local(cpus=2), work)
        np.testing.assert_array_equal(found, wanted)
        assert (moved[:20] == 1).any()


def test_ready_points_of_a_slice_are_taken_together_and_others_stay() -> None:
    machine = Machine.local(cpus=3)
    x = Region((9,), np.float64, "x")
    launch = prepare(bump, (Partition.tiled(x, (9,)),))
    queues: list[list[tuple[int, int, Operation]]] = [[], [], []]
    for point, head in enumerate([None, 1, 1, 3, 3, ALONE, None, None, None]):
        operation = Operation(point, launch, point, point // 6, (), 0, None)
        operation.slice = head
        heapq.heappush(queues[point // 6], (-(point % 2), point, operation))
    stealing = Stealing(machine, range(3))
    taken = []
    while stealing.take(2, queues):
        taken.append(sorted(number for _, number, _ in queues[2]))
        assert all(operation.processor == 2 for _, _, operation in queues[2])
        queues[2].clear()
    assert sorted(taken) == [[1, 2], [3, 4], [5]]
    assert [number for _, number, _ in queues[0]] == [0]
    assert sorted(number for _, number, _ in queues[1]) == [6, 7, 8]


def test_points_are_not_taken_into_another_memory() -> None:
    work = np.where(np.arange(20) < 10, 100.0, 1.0)
    placed, _ = _who_ran(WorkStealingMapper(), Machine.local(cpus=2, memories=2), work)
    np.testing.assert_array_equal(placed, np.arange(20) // 10)


def _placed(runtime: Runtime, *launches: Callable[[], None]) -> list[dict[int, int]]:
    """The processor of each point of captured launches."""
    found = []
    for launch in launches:
        trace = runtime.capture(launch)
        found.append({o.point: o.processor for o in trace.operations if o.kind == "task"})
    return found


def test_traces_are_placed_longest_first_by_measured_loads() -> None:
    mapper = WorkStealingMapper()
    work = np.array([700.0, 10, 10, 10, 400, 400, 300, 10])
    regions = [Region((8,), np.float64, name) for name in ("count", "x", "y")]
    with Runtime(Machine.local(cpus=2), mapper) as runtime:
        runtime.write(regions[1], work)

        def launch() -> None:
            runtime.launch(hold, *(Partition.tiled(region, (8,)) for region in regions))

        profile = Profile(runtime.machine, "measured")
        profile.put(
            Event("hold", "task", 0, point, start_ns=0, end_ns=int(1000 * us))
            for point, us in enumerate(work)
        )
        mapper.learn(profile)
        (placed,) = _placed(runtime, launch)
    loads = np.zeros(2)
    for point, processor in placed.items():
        loads[processor] += work[point]
    shares = [
        sum(work[list(some)]) for n in range(9) for some in itertools.combinations(range(8), n)
    ]
    best = min(max(share, work.sum() - share) for share in shares)
    assert loads.max() <= best * (4 / 3 - 1 / 6)  # Graham's bound for two processors
    assert loads.max() < work[4:].sum()  # of blocks of consecutive points


def test_points_run_where_most_of_their_bytes_are_valid() -> None:
    machine = Machine.local(cpus=2, memories=2)
    n = 8
    first, second = (Region((n, 512), np.float64, name) for name in ("first", "second"))
    partitions = [Partition.tiled(region, (n, 1)) for region in (first, second)]
    # The same tiles in the other order: default placement would move all of them.
    turned = [Partition.of(p.region, p.lo[::-1], p.hi[::-1], (n,)) for p in partitions]
    moved = {}
    for mapper in (DefaultMapper(), LocalityMapper()):
        with Runtime(machine, mapper) as runtime:
            runtime.launch(bump, partitions[0])
            before = runtime.statistics.bytes_copied
            runtime.launch(double, *turned)
            runtime.launch(bump, partitions[1])
            moved[type(mapper)] = runtime.statistics.bytes_copied - before
            np.testing.assert_array_equal(runtime.read(second), np.full((n, 512), 3.0))
    assert moved[DefaultMapper] == 2 * first.nbytes
    assert moved[LocalityMapper] == 0


def test_the_view_counts_valid_bytes_by_brute_force() -> None:
    rng = np.random.default_rng(5)
    mapper = DefaultMapper()
    region = Region((7, 9), np.float64, "r")
    where: np.ndarray = np.zeros(region.shape, dtype=np.int64)  # the memory of each element
    with Runtime(Machine.local(cpus=3, memories=3), mapper) as runtime:
        runtime.write(region, np.zeros(region.shape))
        for _ in range(6):
            low = rng.integers(0, region.shape)
            high = low + 1 + rng.integers(0, np.array(region.shape) - low)
            processor = int(rng.integers(0, 3))
            mapper.place_all = lambda launch, p=processor: np.full(launch.points, p)  # type: ignore
            runtime.launch(
                Task("set", (Write,), lambda a: None), Partition.of(region, [low], [high])
            )
            where[low[0] : high[0], low[1] : high[1]] = processor
            lo = rng.integers(0, region.shape, size=(5, 2))
            hi = lo + rng.integers(0, np.array(region.shape) - lo + 1)
            found = mapper.view.valid_bytes(Partition.of(region, lo, hi, (5,)))
            for point in range(5):
                tile = where[lo[point, 0] : hi[point, 0], lo[point, 1] : hi[point, 1]]
                wanted = [8 * int((tile == memory).sum()) for memory in range(3)]
                assert found[point].tolist() == wanted


def test_a_region_may_die_while_others_leave() -> None:
    held = [Region((128,), np.float64, name) for name in "ab"]

    class Forgets(BoundedMemoryMapper):
        def evict(self, *asked: Any) -> int:
            held.clear()  # one leaves, and the other is no more before it is asked for
            return super().evict(*asked)

    with Runtime(Machine.local(cpus=1).bounded(3 << 10), Forgets()) as runtime:
        for number in range(2):
            runtime.launch(bump, held[number])
        runtime.wait()
        large = Region((384,), np.float64, "large")
        runtime.launch(bump, large)
        np.testing.assert_array_equal(runtime.read(large), np.ones(384))
        assert runtime.statistics.evictions == 1
