"""Partitions: a region cut into tiles, one a point of a grid (Legion's partitions, dense boxes)."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.errors import BoundsError
from soapstone.runtime.model import tiling as geometry
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.tiling import Shape, Tiling


def _indices(values: Sequence[int] | int, what: str) -> tuple[int, ...]:
    raw = (values,) if isinstance(values, int) else tuple(values)
    try:
        return tuple(operator.index(value) for value in raw)
    except TypeError as error:
        raise BoundsError(f"{what}: found {values!r}, integers needed") from error


@lru_cache(maxsize=1024)
def _is_grid(grid: tuple[int, ...]) -> bool:
    return bool(grid) and all(type(degree) is int and degree >= 1 for degree in grid)


def _grid(region: Region, grid: Sequence[int] | int) -> tuple[int, ...]:
    if type(grid) is tuple and _is_grid(grid):
        return grid
    found = _indices(grid, f"region {region.name!r}: grid")
    if not found or any(degree < 1 for degree in found):
        raise BoundsError(
            f"region {region.name!r}: grid {found} needs at least one axis, each of extent >= 1"
        )
    return found


@lru_cache(maxsize=1024)
def _whole(shape: Shape, points: int) -> Tiling:
    """The tiling whose every point has all of a shape."""
    lo = np.zeros((points, len(shape)), dtype=np.int64)
    hi = np.tile(np.array(shape, dtype=np.int64), (points, 1))
    disjoint = points == 1 or math.prod(shape) == 0
    return geometry.intern(shape, lo, hi).declare(disjoint=disjoint, complete=True)


@dataclass(frozen=True, eq=False)
class Partition:
    """Tiles of a region: the box `[lo[p], hi[p])` for each point p of `grid`, in row-major order.

    lo, hi: int64 (points, rank). Tiles may overlap, leave elements out, or be empty. Partitions
    of equal content are equal, and the analysis treats them as one.

    Raises: BoundsError for a tile outside the region, naming region, tile and bounds.
    """

    region: Region
    lo: Array
    hi: Array
    grid: tuple[int, ...]
    tiling: Tiling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        region, grid = self.region, _grid(self.region, self.grid)
        points = math.prod(grid)
        bounds = []
        for name, found in (("lo", self.lo), ("hi", self.hi)):
            array = np.asarray(found)
            if array.size and array.dtype.kind not in "iu":
                raise BoundsError(
                    f"partition of region {region.name!r}: {name} is {array.dtype}, int needed"
                )
            if array.shape != (points, region.rank):
                raise BoundsError(
                    f"partition of region {region.name!r}: {name} has shape {array.shape}, "
                    f"needed ({points}, {region.rank}) for grid {grid}"
                )
            bounds.append(array.astype(np.int64))
        lo, hi = bounds
        extents = np.array(region.shape, dtype=np.int64)
        wrong = ((lo < 0) | (hi > extents) | (lo > hi)).any(axis=1)
        if wrong.any():
            point = int(np.nonzero(wrong)[0][0])
            raise BoundsError(
                f"partition of region {region.name!r}: tile of point {point} is "
                f"{lo[point].tolist()}..{hi[point].tolist()}, needed within "
                f"{[0] * region.rank}..{list(region.shape)} and not reversed"
            )
        tiles = geometry.intern(region.shape, lo, hi)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "tiling", tiles)
        object.__setattr__(self, "lo", tiles.lo)
        object.__setattr__(self, "hi", tiles.hi)

    @property
    def points(self) -> int:
        """The number of tiles."""
        return int(self.tiling.points)

    @property
    def disjoint(self) -> bool:
        """Whether no element lies in two tiles."""
        return self.tiling.disjoint

    @property
    def complete(self) -> bool:
        """Whether every element of the region lies in some tile."""
        return self.tiling.complete

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        same = self.region is other.region and self.tiling is other.tiling
        return same and self.grid == other.grid

    def __hash__(self) -> int:
        return hash((id(self.region), self.tiling.uid, self.grid))

    def __repr__(self) -> str:
        cut = "x".join(str(degree) for degree in self.grid)
        return f"Partition({self.region.name or '?'}, grid {cut})"

    def on(self, region: Region) -> Partition:
        """The same tiles of another region of the same shape.

        Raises: BoundsError for another shape.
        """
        if region.shape != self.region.shape:
            raise BoundsError(
                f"partition of region {self.region.name!r}, shape {self.region.shape}, cannot be "
                f"one of region {region.name!r}: shape {region.shape}"
            )
        return Partition.cut(region, self.tiling, self.grid)

    def __getitem__(self, field: str) -> Partition:
        """The same tiles of one field of a region with several.

        Raises: BoundsError when the region has no such field.
        """
        if not isinstance(self.region, FieldRegion):
            raise BoundsError(f"partition of region {self.region.name!r}: it has no named fields")
        return self.on(self.region[field])

    @staticmethod
    def cut(region: Region, tiling: Tiling, grid: tuple[int, ...]) -> Partition:
        """The partition with a tiling that is known to fit region and grid: nothing is checked."""
        found = object.__new__(Partition)
        found.__dict__.update(region=region, lo=tiling.lo, hi=tiling.hi, grid=grid, tiling=tiling)
        return found

    @staticmethod
    def of(region: Region, lo: Any, hi: Any, grid: Sequence[int] | int | None = None) -> Partition:
        """The partition of a region with these tiles.

        lo, hi: int (points, rank), where tiles begin and where they have ended. grid: by default
        (points,).

        Raises: BoundsError.
        """
        low, high = np.asarray(lo), np.asarray(hi)
        if grid is None:
            grid = (low.shape[0],) if low.ndim else (1,)
        return Partition(region, low, high, _grid(region, grid))

    @staticmethod
    def whole(region: Region, grid: Sequence[int] | int = (1,)) -> Partition:
        """The partition whose every point of the grid sees the whole region."""
        cut = _grid(region, grid)
        return Partition.cut(region, _whole(region.shape, math.prod(cut)), cut)

    @staticmethod
    def tiled(region: Region, degrees: Sequence[int] | int) -> Partition:
        """The region cut into `degrees[axis]` nearly equal ranges along each axis.

        Range i of an axis of extent n is `[i * n // degree, (i + 1) * n // degree)`; the grid is
        `degrees`. A rank-0 region takes degrees (1,).

        Raises: BoundsError when degrees do not fit the region's rank.
        """
        cut = _grid(region, degrees)
        if region.rank == 0 and cut == (1,):
            return Partition.whole(region)
        if len(cut) != region.rank:
            raise BoundsError(
                f"partition of region {region.name!r}: degrees {cut} for rank {region.rank}"
            )
        boundaries = [
            [step * extent // degree for step in range(degree + 1)]
            for extent, degree in zip(region.shape, cut)
        ]
        return Partition.ranges(region, boundaries)

    @staticmethod
    def ranges(region: Region, boundaries: Sequence[Sequence[int]]) -> Partition:
        """The region cut at given boundaries: `boundaries[axis]` rises from 0 to the extent.

        Raises: BoundsError when a list is too short, falls, or misses an end of its axis.
        """
        cuts = [_indices(cut, f"partition of region {region.name!r}: cut") for cut in boundaries]
        if len(cuts) != region.rank or region.rank == 0:
            raise BoundsError(
                f"partition of region {region.name!r}: {len(cuts)} boundary lists "
                f"for rank {region.rank} (rank 1 or more needed)"
            )
        for axis, (cut, extent) in enumerate(zip(cuts, region.shape)):
            rising = all(a <= b for a, b in itertools.pairwise(cut))
            if len(cut) < 2 or cut[0] != 0 or cut[-1] != extent or not rising:
                raise BoundsError(
                    f"partition of region {region.name!r}: boundaries {list(cut)} of axis {axis} "
                    f"must rise from 0 to {extent}"
                )
        grid = tuple(len(cut) - 1 for cut in cuts)
        lows = np.meshgrid(*[np.array(cut[:-1], dtype=np.int64) for cut in cuts], indexing="ij")
        highs = np.meshgrid(*[np.array(cut[1:], dtype=np.int64) for cut in cuts], indexing="ij")
        lo = np.stack([low.reshape(-1) for low in lows], axis=1)
        hi = np.stack([high.reshape(-1) for high in highs], axis=1)
        partition = Partition(region, lo, hi, grid)
        partition.tiling.declare(disjoint=True, complete=True)
        return partition

    @staticmethod
    def halo(base: Partition, before: Sequence[int] | int, after: Sequence[int] | int) -> Partition:
        """The tiles of `base` grown by `before` and `after` elements, clipped to the region.

        before, after: one number for all axes, or one an axis. Empty tiles stay empty.
        """
        region = base.region
        grow = []
        for name, found in (("before", before), ("after", after)):
            values = _indices(found, f"halo of region {region.name!r}: {name}")
            if len(values) == 1:
                values = values * region.rank
            if len(values) != region.rank or any(value < 0 for value in values):
                raise BoundsError(
                    f"halo of region {region.name!r}: {name} is {values}, "
                    f"needed {region.rank} numbers >= 0"
                )
            grow.append(np.array(values, dtype=np.int64))
        filled = (base.tiling.volume > 0)[:, None]
        extents = np.array(region.shape, dtype=np.int64)
        lo = np.where(filled, np.maximum(base.lo - grow[0], 0), base.lo)
        hi = np.where(filled, np.minimum(base.hi + grow[1], extents), base.hi)
        return Partition(region, lo, hi, base.grid)
