"""Partitions of index sets: by field, image, preimage, set operations; every privilege, everywhere.

The oracle of a partition is a Python loop over elements; of a program, its sequential run in NumPy.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers.runtime.programs import ShuffledMapper
from helpers.runtime.sparse_programs import Cases

from soapstone.runtime import (
    BoundsError,
    DefaultMapper,
    FieldRegion,
    IndexPartition,
    LaunchError,
    Machine,
    Partition,
    PrivilegeError,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    StoppedError,
    Task,
    UnwrittenError,
    Write,
    by_field,
    difference,
    image,
    image_ranges,
    intersection,
    preimage,
    task,
    union,
)
from soapstone.runtime.observe.checker import check_log

Sets = list[set[int]]


def _sets(partition: Partition | IndexPartition) -> Sets:
    """The tiles as Python sets of row-major element numbers over the axes they index."""
    if isinstance(partition, IndexPartition):
        return [set(partition.tile(p).tolist()) for p in range(partition.points)]
    shape = partition.region.shape
    return [
        {
            int(np.ravel_multi_index(index, shape))
            for index in itertools.product(*[range(a, b) for a, b in zip(low, high)])
        }
        for low, high in partition.tiling.boxes
    ]


@pytest.mark.parametrize("seed", range(12))
def test_dependent_partitions_equal_loops_over_elements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, m, points = int(rng.integers(1, 30)), int(rng.integers(1, 30)), int(rng.integers(1, 6))
    colours, pointers = Region((n,), "i4", "colours"), Region((n,), "i8", "pointers")
    starts, stops = Region((n,), "i4", "starts"), Region((n,), "i4", "stops")
    target = Region((m, 2), "f4", "target")
    with Runtime(Machine.local(1)) as runtime:
        colour = rng.integers(-1, points + 1, n).astype("i4")
        pointer = rng.integers(-1, m, n)
        low = rng.integers(0, m + 1, n).astype("i4")
        high = np.minimum(low + rng.integers(0, 4, n), m).astype("i4")
        data = ((colours, colour), (pointers, pointer), (starts, low), (stops, high))
        for region, array in data:
            runtime.write(region, array)
        mine = by_field(runtime, colours, points)
        want = [{i for i in range(n) if colour[i] == c} for c in range(points)]
        assert _sets(mine) == want
        assert mine.disjoint and mine.complete == (set().union(*want) == set(range(n)))
        aliased = IndexPartition.of(
            colours, [rng.integers(0, n, int(rng.integers(0, 6))) for _ in range(points)]
        )
        boxes = Partition.tiled(colours, points)
        for source in (mine, aliased, boxes):
            tiles = _sets(source)
            found = image(runtime, pointers, source, target)
            assert _sets(found) == [{int(pointer[i]) for i in t if pointer[i] >= 0} for t in tiles]
            ranges = image_ranges(runtime, starts, stops, source, target)
            assert _sets(ranges) == [{k for i in t for k in range(low[i], high[i])} for t in tiles]
            for back in (found, ranges):
                inside = _sets(preimage(runtime, pointers, back))
                named = _sets(back)
                assert inside == [{i for i in range(n) if int(pointer[i]) in t} for t in named]
                count = sum(len(t) for t in named)
                assert back.disjoint == (len(set().union(*named)) == count)
        halo = Partition.halo(boxes, 1, 2)
        for one, two in itertools.product((mine, aliased, boxes, halo), repeat=2):
            both = list(zip(_sets(one), _sets(two)))
            assert _sets(union(one, two)) == [a | b for a, b in both]
            assert _sets(intersection(one, two)) == [a & b for a, b in both]
            assert _sets(difference(one, two)) == [a - b for a, b in both]


def test_grids_of_elements_are_coloured_and_pointed_at() -> None:
    colours, data = Region((3, 4), "i2", "colours"), Region((3, 4, 2), "f4", "data")
    colour = np.arange(12).reshape(3, 4) % 5
    with Runtime(Machine.local(1)) as runtime:
        runtime.write(colours, colour.astype("i2"))
        mine = by_field(runtime, colours, (2, 2), data)
        assert mine.grid == (2, 2) and mine.rest == (2,)
        assert _sets(mine) == [set(np.flatnonzero(colour == c).tolist()) for c in range(4)]
        assert not mine.complete and mine == by_field(runtime, colours, (2, 2), data)
        back = image(runtime, colours, Partition.tiled(colours, (2, 2)), data, axes=2)
        assert back.sets.shape == (3, 4)
        quarters = Partition.tiled(colours, (2, 2))
        edges = difference(Partition.halo(quarters, 1, 1), quarters)
        assert edges.sets.shape == (3, 4) and all(
            a == b - c
            for a, b, c in zip(_sets(edges), _sets(Partition.halo(quarters, 1, 1)), _sets(quarters))
        )
        rows = union(Partition.tiled(colours, (3, 1)), Partition.tiled(colours, (3, 1)))
        assert rows.sets.shape == (3,) and rows.dense() == Partition.tiled(colours, (3, 1))


# -- programs


@pytest.mark.parametrize("seed", range(30))
def test_random_sparse_programs_equal_the_sequential_run(seed: int) -> None:
    cases = Cases(seed)
    cpus, memories = 1 + seed % 3, 1 + seed // 3 % 3
    mapper = DefaultMapper() if seed % 4 == 0 else ShuffledMapper(seed, memories=seed % 5 > 0)
    with Runtime(Machine.local(cpus, memories=memories), mapper) as runtime:
        for region, array in cases.arrays.items():
            runtime.write(region, array)
        cases.launch(runtime)
        cases.run()
        cases.same(runtime)
        trace = runtime.capture(lambda: cases.launch(runtime))
        cases.same(runtime)
        for _ in range(2):
            trace.replay()
            cases.run()
        cases.same(runtime)
        for _ in range(2):
            with runtime.trace("all"):
                cases.launch(runtime)
            cases.run()
        cases.same(runtime)
        assert runtime.statistics.captures == 2


@pytest.mark.parametrize("seed", [200, 201, 202])
def test_the_checker_accepts_logs_of_sparse_programs(seed: int, tmp_path: Path) -> None:
    cases = Cases(seed)
    with Runtime(Machine.local(2, memories=1 + seed % 2), ShuffledMapper(seed)) as runtime:
        for region, array in cases.arrays.items():
            runtime.write(region, array)
        with runtime.log(tmp_path / "log"):
            cases.launch(runtime)
            cases.run()
            for _ in range(2):
                with runtime.trace("all"):
                    cases.launch(runtime)
                cases.run()
            cases.same(runtime)
    report = check_log(tmp_path / "log")
    assert not report.violations, str(report)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i1", "u2", "i8", "c8", "?"])
def test_packed_rows_of_any_dtype_and_layout_are_moved_by_native_entries(dtype: str) -> None:
    class Transposed(DefaultMapper):
        def order(self, region: Region) -> tuple[int, ...]:
            return tuple(reversed(range(region.rank)))

    rng = np.random.default_rng(3)
    data = rng.integers(0, 2 if dtype == "?" else 100, (9, 2, 3)).astype(dtype)
    tiles = [[8, 1, 3], [0], [], [7, 2, 6, 5]]
    reverse = Task("reverse", (ReadWrite,), lambda x: np.copyto(x, x[:, ::-1].copy()))
    for mapper in (DefaultMapper(), Transposed()):
        x = Region((9, 2, 3), dtype, "x")
        want = data.copy()
        with Runtime(Machine.local(2), mapper) as runtime:
            runtime.write(x, data)
            part = IndexPartition.of(x, tiles)
            trace = runtime.capture(lambda part=part: runtime.launch(reverse, part))
            kinds = trace.describe()
            assert kinds["operations"] == {"gather": 4, "task": 4, "scatter": 1}
            assert kinds["python_entries"] == 3  # the tasks' own bodies, one of them on nothing
            trace.replay()
            want[[8, 1, 3, 0, 7, 2, 6, 5]] = want[[8, 1, 3, 0, 7, 2, 6, 5]][:, ::-1]
            np.testing.assert_array_equal(runtime.read(x), want)


def test_a_sum_into_aliased_tiles_has_the_bits_of_the_order_of_points() -> None:
    rng = np.random.default_rng(5)
    n, points = 5000, 7
    tiles = [rng.permutation(n)[:3000] for _ in range(points)]
    parts = [rng.standard_normal(3000).astype("f4") for _ in range(points)]
    want = np.ones(n, dtype="f4")
    for tile, part in zip(tiles, parts):
        want[np.sort(tile)] += part
    x = Region((n,), "f4", "x")
    put = Task("put", (Reduce("sum"),), lambda c, out: np.copyto(out, parts[c.point]), context=True)
    for cpus in (1, 3):
        with Runtime(Machine.local(cpus)) as runtime:
            aliased = IndexPartition.of(x, tiles)
            runtime.fill(x, 1)
            runtime.launch(put, aliased)
            np.testing.assert_array_equal(runtime.read(x), want)
            trace = runtime.capture(lambda aliased=aliased: runtime.launch(put, aliased))
            assert trace.describe()["operations"]["scatter"] == cpus
            runtime.fill(x, 1)
            trace.replay()
            np.testing.assert_array_equal(runtime.read(x), want)


def test_scatters_of_separate_sets_depend_point_by_point() -> None:
    x = Region((40,), "i8", "x")
    add = Task("add", (ReadWrite,), lambda x: np.add(x, 1, out=x))
    apart = IndexPartition.of(x, [np.arange(10 * p, 10 * p + 9, 2) for p in range(4)])
    with Runtime(Machine.local(2)) as runtime:
        trace = runtime.capture(lambda: runtime.launch(add, apart))
        assert trace.describe()["operations"] == {"gather": 4, "task": 4, "scatter": 4}
        assert {(a % 4, b % 4) for a, b in trace.edges.tolist()} == {(p, p) for p in range(4)}


def test_sparse_tiles_of_fields_and_tiles_that_are_ranges() -> None:
    graph = FieldRegion((8,), {"value": "f4", "owner": "i4"}, "graph")

    @task
    def twice(p: ReadWrite) -> None:
        p.value *= 2
        p.owner += 1

    @task
    def on_boxes(x: ReadWrite) -> None:
        x += 1

    with Runtime(Machine.local(2)) as runtime:
        owner = np.array([0, 1, 0, 1, 2, 2, 0, 1], dtype="i4")
        runtime.write(graph, {"value": np.arange(8, dtype="f4"), "owner": owner})
        mine = by_field(runtime, graph["owner"], 2, graph)
        runtime.launch(twice, mine)
        found = runtime.read(graph)
        np.testing.assert_array_equal(found["value"], np.arange(8) * np.where(owner < 2, 2, 1))
        np.testing.assert_array_equal(found["owner"], owner + (owner < 2))
        np.testing.assert_array_equal(_sets(mine["value"])[0], _sets(mine)[0])
        runtime.write(graph["owner"], np.sort(owner))
        sorted_ = by_field(runtime, graph["owner"], 3)
        assert isinstance(sorted_.dense(), Partition)
        trace = runtime.capture(lambda: runtime.launch(on_boxes, sorted_))
        assert trace.describe()["operations"] == {"task": 3}


def test_a_partition_computed_anew_makes_a_new_trace_only_when_it_is_another() -> None:
    colours, x = Region((6,), "i4", "colours"), Region((6,), "i8", "x")
    add = Task("add", (ReadWrite,), lambda c, x: np.add(x, c.point + 1, out=x), context=True)
    want = np.zeros(6, dtype=np.int64)
    with Runtime(Machine.local(2)) as runtime:
        for number, colour in enumerate(
            [[0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 1, 0]]
        ):
            runtime.write(colours, np.array(colour, dtype="i4"))
            mine = by_field(runtime, colours, 2, x)
            with runtime.trace("step"):
                runtime.launch(add, mine)
                if number == 0:
                    with pytest.raises(StoppedError, match="during a capture"):
                        by_field(runtime, colours, 2, x)
            want += np.array(colour) + 1
            np.testing.assert_array_equal(runtime.read(x), want)
        assert runtime.statistics.captures == 2


def test_bad_sparse_partitions_are_refused() -> None:
    n, f = Region((4,), "i4", "n"), Region((4,), "f4", "f")
    wide = Region((4, 3), "f4", "wide")
    with Runtime(Machine.local(1)) as runtime:
        runtime.write(n, np.array([0, 3, 9, -1], dtype="i4"))
        with pytest.raises(BoundsError, match="'f': its dtype is float32"):
            by_field(runtime, f, 2)
        with pytest.raises(BoundsError, match="0 colours"):
            by_field(runtime, n, 0)
        with pytest.raises(BoundsError, match="element 2 points to 9, needed at most 3"):
            image(runtime, n, Partition.tiled(n, 2), f)
        with pytest.raises(BoundsError, match="element 2 points to 9"):
            preimage(runtime, n, Partition.tiled(f, 2))
        with pytest.raises(BoundsError, match=r"axes is 3, needed 1\.\.2"):
            image(runtime, n, Partition.tiled(n, 2), wide, axes=3)
        with pytest.raises(BoundsError, match=r"element 2 names 9\.\.9"):
            image_ranges(runtime, n, n, Partition.tiled(n, 2), f)
        with pytest.raises(BoundsError, match="is none of 'n'"):
            image(runtime, n, Partition.tiled(Region((5,), "i4", "m"), 2), Region((10,), "f4", "g"))
        with pytest.raises(BoundsError, match="one region and one grid"):
            union(Partition.tiled(n, 2), Partition.tiled(n, 4))
        with pytest.raises(BoundsError, match=r"cut 2 of 2 axes"):
            union(Partition.tiled(wide, (2, 2)), IndexPartition.of(wide, [[0]] * 4, grid=(2, 2)))
    with pytest.raises(BoundsError, match=r"tile of point 1 has element 4, needed 0\.\.3"):
        IndexPartition.of(n, [[0], [4]])
    with pytest.raises(BoundsError, match="float64, integers needed"):
        IndexPartition.of(n, [[0.5]])
    with pytest.raises(BoundsError, match="1 sets for grid"):
        IndexPartition.of(n, [[0]], grid=(2,))
    with pytest.raises(BoundsError, match="first axes of the region"):
        IndexPartition.of(n, [[0]]).on(Region((5,), "i4", "m"))


def test_bad_sparse_launches_are_refused() -> None:
    x = Region((6,), "i8", "x")
    shared = IndexPartition.of(x, [[0, 2, 4], [1, 4]])
    apart = IndexPartition.of(x, [[0, 2], [1, 5]])
    others = IndexPartition.of(x, [[3], []])
    noop = lambda *arrays: None  # noqa: E731
    with Runtime(Machine.local(1)) as runtime:
        with pytest.raises(PrivilegeError, match=r"points 0 and 1 both have Write .* element 4"):
            runtime.launch(Task("w", (Write,), noop), shared)
        two = Task("two", (ReadWrite, Read), noop)
        with pytest.raises(PrivilegeError, match=r"argument 0 .* argument 1 .*element \[1\]"):
            runtime.launch(two, apart, Partition.of(x, [[3], [1]], [[4], [2]]))
        runtime.launch(two, apart, others)
        sums = Task("sums", (Reduce("sum"), Reduce("sum")), noop)
        runtime.launch(sums, apart, shared)
        with pytest.raises(PrivilegeError, match="use two launches"):
            runtime.launch(sums, apart, shared, initialise=True)
        with pytest.raises(PrivilegeError, match="argument 1 with Reduce"):
            runtime.launch(Task("r", (Reduce("sum"), Reduce("max")), noop), apart, shared)
        with pytest.raises(LaunchError, match=r"has grid \(2,\), needed \(3,\)"):
            runtime.launch(two, Partition.tiled(x, 3), apart)
        with pytest.raises(LaunchError, match="no such reduction"):
            flags = Region((6,), "?", "flags")
            runtime.launch(Task("s", (Reduce("sum"),), noop), apart.on(flags))
        with pytest.raises(UnwrittenError, match=r"two\.gather.*'t'"):
            t = Region((6,), "i8", "t", transient=True)
            runtime.launch(two, apart.on(t), others)
        runtime.wait()
