"""Partitions whose tiles are sets of elements rather than boxes.

A task sees such a tile densely packed: its elements in increasing order along the first axis.
`gather.py` moves them there and back, so that everything below a launch knows only boxes.
Such partitions come from fields, pointers and set operations: see `dependent.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.errors import BoundsError
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.tiling import Shape, Tiling, intern


class IndexSets:
    """Sets of indices into an index space, one a point; equal contents are one object.

    Make them with `intern_sets`. shape: of the index space, the first axes of a region. starts:
    int64 (points + 1,); the set of point p is `indices[starts[p]:starts[p + 1]]`, row-major
    numbers of elements, increasing. Both arrays are read-only.
    """

    __slots__ = (
        "__weakref__",
        "_bounds",
        "_complete",
        "_disjoint",
        "digest",
        "indices",
        "points",
        "shape",
        "starts",
        "tasks",
    )

    def __init__(self, shape: Shape, starts: Array, indices: Array, digest: bytes) -> None:
        self.shape = shape
        self.starts = starts
        self.indices = indices
        self.points = starts.size - 1
        self.digest = digest
        self.tasks: dict[Any, Any] = {}  # how to move them, kept as long as they are
        self._disjoint: bool | None = None
        self._complete: bool | None = None
        self._bounds: tuple[Array, Array] | None = None

    def tile(self, point: int) -> Array:
        """The indices of one point."""
        found: Array = self.indices[self.starts[point] : self.starts[point + 1]]
        return found

    @property
    def sizes(self) -> Array:
        """The number of indices of each point."""
        return np.diff(self.starts)

    @property
    def owners(self) -> Array:
        """The point that each of `indices` belongs to."""
        return np.repeat(np.arange(self.points, dtype=np.int64), self.sizes)

    @property
    def disjoint(self) -> bool:
        """Whether no index is in the sets of two points."""
        if self._disjoint is None:
            self._disjoint = np.unique(self.indices).size == self.indices.size
        return self._disjoint

    @property
    def complete(self) -> bool:
        """Whether every index is in some set."""
        if self._complete is None:
            self._complete = np.unique(self.indices).size == math.prod(self.shape)
        return self._complete

    def shared(self) -> tuple[int, int, int]:
        """Two points and an index that is in the sets of both; only where not disjoint."""
        order = np.argsort(self.indices, kind="stable")
        place = int(np.nonzero(np.diff(self.indices[order]) == 0)[0][0])
        first, second = self.owners[order[place : place + 2]].tolist()
        return int(first), int(second), int(self.indices[order[place]])

    def coordinates(self, indices: Array) -> tuple[Array, ...]:
        """Row-major numbers of elements as coordinates along each axis of the index space."""
        if len(self.shape) == 1:
            return (indices,)
        return tuple(np.unravel_index(indices, self.shape))

    def bounds(self) -> tuple[Array, Array]:
        """The smallest box around each set. Returns lo, hi: int64 (points, axes)."""
        if self._bounds is None:
            filled = np.nonzero(self.sizes)[0]
            lo = np.zeros((self.points, len(self.shape)), dtype=np.int64)
            hi = np.zeros_like(lo)
            for axis, coordinate in enumerate(self.coordinates(self.indices)):
                if filled.size:
                    lo[filled, axis] = np.minimum.reduceat(coordinate, self.starts[filled])
                    hi[filled, axis] = np.maximum.reduceat(coordinate, self.starts[filled]) + 1
            self._bounds = (lo, hi)
        return self._bounds

    def boxes(self, rest: Shape) -> Tiling:
        """The smallest boxes around the sets, in a region whose other axes are `rest`."""
        lo, hi = self.bounds()
        full = np.where(self.sizes[:, None] > 0, np.array(rest, dtype=np.int64)[None, :], 0)
        low = np.concatenate([lo, np.zeros_like(full)], axis=1)
        return intern(self.shape + rest, low, np.concatenate([hi, full], axis=1))

    def packed(self, rest: Shape) -> Tiling:
        """Where each point's elements lie when all sets are packed one after another."""
        lo = np.zeros((self.points, 1 + len(rest)), dtype=np.int64)
        hi = np.tile(np.array((0, *rest), dtype=np.int64), (self.points, 1))
        lo[:, 0], hi[:, 0] = self.starts[:-1], self.starts[1:]
        shape = (int(self.starts[-1]), *rest)
        return intern(shape, lo, hi).declare(disjoint=True, complete=True)


_interned: weakref.WeakValueDictionary[bytes, IndexSets] = weakref.WeakValueDictionary()


def intern_sets(shape: Shape, starts: Array, indices: Array) -> IndexSets:
    """The sets with this content; the same object as long as one is alive."""
    starts = np.ascontiguousarray(starts, dtype=np.int64)
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    digest = hashlib.blake2b(repr((shape, starts.size)).encode(), digest_size=16)
    digest.update(starts.tobytes())
    digest.update(indices.tobytes())
    key = digest.digest()
    found = _interned.get(key)
    if found is None:
        starts.flags.writeable = False
        indices.flags.writeable = False
        found = IndexSets(shape, starts, indices, key)
        _interned[key] = found
    return found


def from_pairs(shape: Shape, points: int, owners: Array, indices: Array) -> IndexSets:
    """The sets in which point `owners[i]` has `indices[i]`, given in any order, with repeats."""
    size = max(1, math.prod(shape))
    keys = np.unique(owners.astype(np.int64) * size + indices.astype(np.int64))
    starts = np.searchsorted(keys, np.arange(points + 1, dtype=np.int64) * size)
    return intern_sets(shape, starts, keys % size)


@dataclass(frozen=True, eq=False)
class IndexPartition:
    """A partition of a region whose tile at each point of `grid` is a set of elements.

    The sets index the first axes of the region; a task gets an array (elements, *other axes) with
    the elements of its point in increasing order. Sets may overlap, leave elements out, or be
    empty. Partitions of equal content are equal.

    Raises: BoundsError when sets, grid and region do not fit.
    """

    region: Region
    sets: IndexSets
    grid: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = len(self.sets.shape)
        if self.region.shape[:axes] != self.sets.shape or not axes:
            raise BoundsError(
                f"partition of region {self.region.name!r}, shape {self.region.shape}: its sets "
                f"index a space of shape {self.sets.shape}, needed the first axes of the region"
            )
        if math.prod(self.grid) != self.sets.points or not self.grid:
            raise BoundsError(
                f"partition of region {self.region.name!r}: {self.sets.points} sets for grid "
                f"{self.grid}"
            )

    @staticmethod
    def of(
        region: Region,
        tiles: Sequence[Any],
        axes: int = 1,
        grid: Sequence[int] | None = None,
    ) -> IndexPartition:
        """The partition with these sets. tiles: for each point, integers in any order.

        axes: how many of the region's first axes the numbers run over, in row-major order. grid:
        by default (tiles,).

        Raises: BoundsError for what is no integer or outside the region, naming point and value.
        """
        if not 1 <= axes <= region.rank:
            raise BoundsError(
                f"partition of region {region.name!r}: axes is {axes}, needed 1..{region.rank}"
            )
        shape = region.shape[:axes]
        size = math.prod(shape)
        found = []
        for point, tile in enumerate(tiles):
            array = np.asarray(tile).reshape(-1)
            if array.size == 0:
                array = array.astype(np.int64)
            if array.dtype.kind not in "iu":
                raise BoundsError(
                    f"partition of region {region.name!r}: tile of point {point} is "
                    f"{array.dtype}, integers needed"
                )
            wrong = (array < 0) | (array >= size)
            if wrong.any():
                raise BoundsError(
                    f"partition of region {region.name!r}: tile of point {point} has element "
                    f"{int(array[wrong][0])}, needed 0..{size - 1}"
                )
            found.append(array.astype(np.int64))
        none = np.zeros(0, dtype=np.int64)
        owners = [np.full(array.size, point, dtype=np.int64) for point, array in enumerate(found)]
        sets = from_pairs(
            shape, len(found), np.concatenate([none, *owners]), np.concatenate([none, *found])
        )
        return IndexPartition(region, sets, (len(found),) if grid is None else tuple(grid))

    @property
    def points(self) -> int:
        """The number of tiles."""
        return self.sets.points

    @property
    def disjoint(self) -> bool:
        """Whether no element lies in two tiles."""
        return self.sets.disjoint

    @property
    def complete(self) -> bool:
        """Whether every element of the region lies in some tile."""
        return self.sets.complete

    @property
    def rest(self) -> Shape:
        """The extents of the axes that are not indexed: each element has all of them."""
        return self.region.shape[len(self.sets.shape) :]

    def tile(self, point: int) -> Array:
        """The row-major numbers of the elements of one point. Returns int64 (elements,)."""
        return self.sets.tile(point).copy()

    def on(self, region: Region) -> IndexPartition:
        """The same tiles of another region with the same index space in front.

        Raises: BoundsError.
        """
        return IndexPartition(region, self.sets, self.grid)

    def __getitem__(self, field: str) -> IndexPartition:
        """The same tiles of one field of a region with several.

        Raises: BoundsError when the region has no such field.
        """
        if not isinstance(self.region, FieldRegion):
            raise BoundsError(f"partition of region {self.region.name!r}: it has no named fields")
        return self.on(self.region[field])

    def dense(self) -> Partition | None:
        """The same partition as boxes, where every tile is a range of the first axis."""
        if len(self.sets.shape) > 1:
            return None
        lo, hi = self.sets.bounds()
        if bool(((hi - lo)[:, 0] != self.sets.sizes).any()):
            return None
        boxes = self.sets.boxes(self.rest)
        return Partition(self.region, boxes.lo, boxes.hi, self.grid)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexPartition):
            return NotImplemented
        same = self.region is other.region and self.sets is other.sets
        return same and self.grid == other.grid

    def __hash__(self) -> int:
        return hash((id(self.region), self.sets.digest, self.grid))

    def __repr__(self) -> str:
        cut = "x".join(str(degree) for degree in self.grid)
        return f"IndexPartition({self.region.name or '?'}, grid {cut})"


def axes_of(partition: Partition) -> int:
    """How many first axes the boxes of a partition cut: they span all the others.

    Elements of the tiles are then indexed by these axes (at least one).
    """
    tiling, shape = partition.tiling, partition.region.shape
    filled = tiling.volume > 0
    axes = len(shape)
    while axes > 1:
        axis = axes - 1
        spans = (tiling.lo[:, axis] == 0) & (tiling.hi[:, axis] == shape[axis])
        if not bool(spans[filled].all()):
            break
        axes -= 1
    return axes


def sets_of(partition: Partition | IndexPartition, axes: int | None = None) -> IndexSets:
    """The tiles of any partition as sets of indices over its first `axes` axes.

    axes: by default as few as its boxes allow.

    Raises: BoundsError when its tiles cannot be written over that many axes.
    """
    name = partition.region.name
    if isinstance(partition, IndexPartition):
        if axes is not None and len(partition.sets.shape) != axes:
            raise BoundsError(
                f"partition of region {name!r}: its sets index {len(partition.sets.shape)} axes, "
                f"needed {axes}"
            )
        return partition.sets
    least = axes_of(partition)
    axes = least if axes is None else axes
    if not least <= axes <= partition.region.rank:
        raise BoundsError(
            f"partition of region {name!r}: its boxes cut {least} of {partition.region.rank} axes, "
            f"so its tiles are no sets over the first {axes}"
        )
    shape = partition.region.shape[:axes]
    tiles = []
    for (low, high), volume in zip(partition.tiling.boxes, partition.tiling.volume.tolist()):
        ranges = [np.arange(a, b) if volume else np.arange(0) for a, b in zip(low, high)][:axes]
        grids = np.meshgrid(*ranges, indexing="ij")
        tiles.append(np.ravel_multi_index([grid.reshape(-1) for grid in grids], shape))
    starts = np.array([0, *itertools.accumulate(tile.size for tile in tiles)], dtype=np.int64)
    return intern_sets(shape, starts, np.concatenate([np.zeros(0, dtype=np.int64), *tiles]))
