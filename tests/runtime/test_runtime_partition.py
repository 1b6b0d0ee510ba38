"""Regions and partitions: tiles, halos, empties, equality, and errors that name the culprit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from soapstone.runtime import BoundsError, Partition, Region
from soapstone.runtime.model.tiling import covered_by, overlaps


def test_regions_are_equal_only_to_themselves_and_know_their_bytes() -> None:
    a, b = Region((3, 4), "f4", "a"), Region((3, 4), "f4", "a")
    assert a != b and a == a
    assert a.nbytes == 48 and a.size == 12 and a.rank == 2
    assert Region((), "f8").nbytes == 8
    assert Region(5, np.int64).shape == (5,)


@pytest.mark.parametrize("shape", [(-1,), (2, -3)])
def test_a_negative_extent_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BoundsError, match="negative extent"):
        Region(shape, "f4", "bad")


def test_object_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="Python objects"):
        Region((2,), object, "bad")


def test_tiled_is_row_major_uneven_and_exact() -> None:
    region = Region((5, 7), "f4", "r")
    partition = Partition.tiled(region, (2, 3))
    assert partition.grid == (2, 3) and partition.points == 6
    assert partition.disjoint and partition.complete
    hits = np.zeros(region.shape, dtype=int)
    for low, high in zip(partition.lo, partition.hi):
        hits[low[0] : high[0], low[1] : high[1]] += 1
    assert (hits == 1).all()
    assert partition.lo[1].tolist() == [0, 2] and partition.lo[3].tolist() == [2, 0]


def test_more_tiles_than_elements_gives_empty_tiles() -> None:
    partition = Partition.tiled(Region((2,), "f4"), 5)
    sizes = (partition.hi - partition.lo)[:, 0]
    assert sizes.sum() == 2 and (sizes == 0).sum() == 3
    assert partition.disjoint and partition.complete


def test_whole_shows_everything_to_every_point() -> None:
    region = Region((4, 2), "f4")
    partition = Partition.whole(region, (3,))
    assert partition.points == 3 and partition.complete and not partition.disjoint
    assert (partition.hi == [4, 2]).all() and (partition.lo == 0).all()
    assert Partition.whole(region).disjoint


def test_unequal_ranges() -> None:
    partition = Partition.ranges(Region((10,), "f4"), [[0, 1, 1, 10]])
    assert partition.lo[:, 0].tolist() == [0, 1, 1] and partition.hi[:, 0].tolist() == [1, 1, 10]
    assert partition.grid == (3,)


@pytest.mark.parametrize("cuts", [[[0, 5]], [[1, 10]], [[0, 7, 3, 10]], [[0]], [[0, 10], [0, 1]]])
def test_bad_ranges_are_refused(cuts: list[list[int]]) -> None:
    with pytest.raises(BoundsError, match="region 'r'"):
        Partition.ranges(Region((10,), "f4", "r"), cuts)


def test_halo_is_clipped_and_aliased() -> None:
    region = Region((10, 4), "f4")
    base = Partition.tiled(region, (3, 1))
    halo = Partition.halo(base, (1, 0), (2, 0))
    assert halo.lo[:, 0].tolist() == [0, 2, 5] and halo.hi[:, 0].tolist() == [5, 8, 10]
    assert not halo.disjoint and halo.complete and halo.grid == base.grid
    empty = Partition.halo(Partition.tiled(Region((2,), "f4"), 4), 1, 1)
    assert (empty.hi - empty.lo).tolist() == [[0], [2], [0], [2]]


def test_completeness_of_overlapping_tiles_is_exact() -> None:
    region = Region((4, 4), "f4")
    lo = [[0, 0], [1, 0], [0, 2]]
    full = Partition.of(region, lo, [[2, 3], [4, 4], [4, 4]])
    hole = Partition.of(region, lo, [[2, 3], [4, 4], [1, 3]])
    assert full.complete and not full.disjoint
    assert not hole.complete


def test_a_tile_outside_its_region_is_named() -> None:
    region = Region((4, 4), "f4", "weights")
    with pytest.raises(BoundsError, match=r"'weights': tile of point 1 is \[2, 0\]..\[5, 4\]"):
        Partition.of(region, [[0, 0], [2, 0]], [[2, 4], [5, 4]])
    with pytest.raises(BoundsError, match="reversed"):
        Partition.of(region, [[2, 0]], [[1, 4]])
    with pytest.raises(BoundsError, match=r"needed \(3, 2\)"):
        Partition.of(region, [[0, 0]], [[1, 1]], (3,))
    with pytest.raises(BoundsError, match="float64, int needed"):
        Partition.of(region, [[0.5, 0.0]], [[1.0, 1.0]])
    with pytest.raises(BoundsError, match="rank 2"):
        Partition.tiled(region, (2,))
    with pytest.raises(BoundsError, match="grid"):
        Partition.whole(region, (0,))
    with pytest.raises(BoundsError, match="numbers >= 0"):
        Partition.halo(Partition.tiled(region, (2, 2)), -1, 0)


def test_equal_content_is_one_partition() -> None:
    region, other = Region((8,), "f4"), Region((8,), "f8")
    a, b = Partition.tiled(region, 2), Partition.of(region, [[0], [4]], [[4], [8]])
    assert a == b and hash(a) == hash(b) and a.tiling is b.tiling
    assert a.tiling is Partition.tiled(other, 2).tiling
    assert a != Partition.tiled(other, 2) and a != Partition.tiled(region, 4)
    assert Partition.of(region, a.lo, a.hi, (2, 1)) != a


def test_scalars_have_one_tile() -> None:
    region = Region((), "f4")
    assert Partition.tiled(region, (1,)) == Partition.whole(region)
    assert Partition.whole(region, (4,)).tiling is not Partition.whole(region).tiling
    assert Partition.whole(region).disjoint and not Partition.whole(region, (4,)).disjoint


def test_tiles_cannot_be_changed() -> None:
    partition = Partition.tiled(Region((8,), "f4"), 2)
    with pytest.raises(ValueError):
        partition.lo[0] = 3


@pytest.mark.parametrize("points", [1, 5])
def test_overlaps_and_cover_agree_with_brute_force(points: int) -> None:
    rng = np.random.default_rng(0)
    region = Region((6, 5), "f4")

    def paint(partition: Partition, point: int) -> np.ndarray:
        cells = np.zeros(region.shape, dtype=bool)
        low, high = partition.lo[point], partition.hi[point]
        cells[low[0] : high[0], low[1] : high[1]] = True
        return cells

    for _ in range(30):
        a = Partition.tiled(region, tuple(rng.integers(1, 4, size=2)))
        keep = np.nonzero(rng.integers(0, 2, size=a.points))[0]
        a = Partition.of(region, a.lo[keep], a.hi[keep], (keep.size,)) if keep.size else a
        if points == 1:
            a = Partition.of(region, a.lo[:1], a.hi[:1], (1,))
        corners = np.sort(rng.integers(0, [7, 6], size=(2, points, 2)), axis=0)
        b = Partition.of(region, corners[0], corners[1])
        expected = {
            (i, j)
            for i in range(a.points)
            for j in range(b.points)
            if (paint(a, i) & paint(b, j)).any()
        }
        first, second = overlaps(a.tiling, b.tiling)
        assert set(zip(first.tolist(), second.tolist())) == expected
        union = np.logical_or.reduce([paint(a, i) for i in range(a.points)])
        inside = [bool((~paint(b, j) | union).all()) for j in range(b.points)]
        assert covered_by(a.tiling, b.tiling).tolist() == inside


def test_importing_the_runtime_imports_no_compiler() -> None:
    code = "import sys, soapstone.runtime; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
