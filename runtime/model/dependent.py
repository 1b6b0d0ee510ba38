"""Dependent partitions: computed from the contents of fields, or from other partitions.

Colourings, images and preimages follow "Dependent Partitioning" (Treichler, Sharma, Bauer, Lee and
Aiken, OOPSLA 2016). They are computed once, from what the field holds then, on the host: a field
that changes later does not change them. A step that traces itself knows its partitions by content,
so one computed anew with another content makes another trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.errors import BoundsError
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.sparse import IndexPartition, IndexSets, axes_of, from_pairs, sets_of

AnyPartition = Partition | IndexPartition


class Reader(Protocol):
    """A runtime, or the scope of a task that launches tasks."""

    def read(self, region: Region) -> Array: ...


def _integers(runtime: Reader, field: Region, what: str) -> Array:
    if field.dtype.kind not in "iu":
        raise BoundsError(f"{what} {field.name!r}: its dtype is {field.dtype}, integers needed")
    if not field.rank:
        raise BoundsError(f"{what} {field.name!r}: it has no axes, one or more needed")
    return runtime.read(field).reshape(-1).astype(np.int64)


def by_field(
    runtime: Reader, field: Region, colours: int | Sequence[int], region: Region | None = None
) -> IndexPartition:
    """The partition by colour: point c has the elements whose colour in `field` is c.

    field: integers; elements with other colours than 0..colours-1 are in no tile. colours: their
    number, or a grid of them. region: what is partitioned; its first axes are those of `field`,
    which is partitioned itself by default. runtime: what reads the field, after waiting for it.

    Raises: BoundsError; TaskError when a task failed; StoppedError inside a capture.
    """
    grid = (colours,) if isinstance(colours, int) else tuple(colours)
    if not grid or any(degree < 1 for degree in grid):
        raise BoundsError(f"colouring {field.name!r}: {colours!r} colours, one or more needed")
    found = _integers(runtime, field, "colouring")
    points = math.prod(grid)
    inside = np.nonzero((found >= 0) & (found < points))[0]
    sets = from_pairs(field.shape, points, found[inside], inside)
    return IndexPartition(field if region is None else region, sets, grid)


def _targets(pointers: Array, name: str, region: Region, axes: int) -> int:
    """The number of elements that pointers may name; negative pointers point nowhere."""
    size = math.prod(region.shape[:axes])
    if pointers.size and int(pointers.max()) >= size:
        place = int(np.argmax(pointers >= size))
        raise BoundsError(
            f"pointers {name!r}: element {place} points to {int(pointers[place])}, needed at most "
            f"{size - 1}, the last element of region {region.name!r}"
        )
    return size


def image(
    runtime: Reader, pointers: Region, source: AnyPartition, region: Region, axes: int = 1
) -> IndexPartition:
    """The partition of `region` whose point p has what the pointers in tile p of `source` name.

    pointers: integers, row-major numbers of elements over the first `axes` axes of `region`;
    negative ones point nowhere. source: a partition of the pointers. Tiles may overlap. runtime:
    what reads the pointers, after waiting for them.

    Raises: BoundsError for a pointer beyond the region; TaskError; StoppedError inside a capture.
    """
    if not 1 <= axes <= region.rank:
        raise BoundsError(
            f"image in region {region.name!r}: axes is {axes}, needed 1..{region.rank}"
        )
    found = _integers(runtime, pointers, "pointers")
    _targets(found, pointers.name, region, axes)
    tiles = _tiles_of(source, pointers)
    named = found[tiles.indices]
    inside = named >= 0
    sets = from_pairs(region.shape[:axes], tiles.points, tiles.owners[inside], named[inside])
    return IndexPartition(region, sets, source.grid)


def image_ranges(
    runtime: Reader, starts: Region, stops: Region, source: AnyPartition, region: Region
) -> IndexPartition:
    """The image of pointers to ranges: element i names elements starts[i] to stops[i] - 1.

    starts, stops: integers of one shape, for instance the row offsets of a sparse matrix, whose
    image is a partition of its entries. source: a partition of either. region: what is
    partitioned. runtime: what reads both, after waiting for them.

    Raises: BoundsError for a range outside the region or reversed; TaskError; StoppedError.
    """
    low, high = _integers(runtime, starts, "starts"), _integers(runtime, stops, "stops")
    if starts.shape != stops.shape or not region.rank:
        raise BoundsError(
            f"image in region {region.name!r}: starts {starts.shape} and stops {stops.shape} "
            "found, needed one shape and a region with axes"
        )
    wrong = (low < 0) | (high > region.shape[0]) | (low > high)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise BoundsError(
            f"image in region {region.name!r}: element {place} names {int(low[place])}.."
            f"{int(high[place])}, needed within 0..{region.shape[0]} and not reversed"
        )
    tiles = _tiles_of(source, starts)
    lengths = (high - low)[tiles.indices]
    total = int(lengths.sum())
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    named = np.repeat(low[tiles.indices], lengths) + np.arange(total) - before
    owners = np.repeat(tiles.owners, lengths)
    sets = from_pairs(region.shape[:1], tiles.points, owners, named)
    return IndexPartition(region, sets, source.grid)


def preimage(runtime: Reader, pointers: Region, target: AnyPartition) -> IndexPartition:
    """The partition of the pointers whose point p has those that name elements of target tile p.

    target: a partition of the region that the pointers name elements of. runtime: what reads the
    pointers, after waiting for them.

    Raises: BoundsError for a pointer beyond the region; TaskError; StoppedError inside a capture.
    """
    found = _integers(runtime, pointers, "pointers")
    tiles = sets_of(target)
    size = _targets(found, pointers.name, target.region, len(tiles.shape))
    order = np.argsort(tiles.indices, kind="stable")
    owners = tiles.owners[order]
    firsts = np.searchsorted(tiles.indices[order], np.arange(size + 1, dtype=np.int64))
    valid = np.nonzero(found >= 0)[0]
    begin = firsts[found[valid]]
    counts = firsts[found[valid] + 1] - begin
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    who = owners[np.repeat(begin, counts) + within]
    sets = from_pairs(pointers.shape, tiles.points, who, np.repeat(valid, counts))
    return IndexPartition(pointers, sets, target.grid)


def _tiles_of(source: AnyPartition, field: Region) -> IndexSets:
    """The tiles of a partition as sets of elements of a field of the same index space."""
    if source.region.shape[: field.rank] != field.shape:
        raise BoundsError(
            f"partition of region {source.region.name!r}, shape {source.region.shape}, is none of "
            f"{field.name!r}: shape {field.shape}"
        )
    return sets_of(source, field.rank)


# -- set operations, point by point


def union(first: AnyPartition, second: AnyPartition) -> IndexPartition:
    """The partition whose tiles have the elements of first or second.

    Both are of one region and over one grid. Elements are rows where both allow it, else indexed
    by as many axes as either needs; the tiles of the result may overlap.

    Raises: BoundsError.
    """
    one, two = _pair(first, second, "union")
    owners = np.concatenate([one.owners, two.owners])
    indices = np.concatenate([one.indices, two.indices])
    return _like(first, from_pairs(one.shape, one.points, owners, indices))


def intersection(first: AnyPartition, second: AnyPartition) -> IndexPartition:
    """The partition whose tiles have the elements of first and second; see `union`.

    Raises: BoundsError.
    """
    one, two = _pair(first, second, "intersection")
    return _like(first, _kept(one, two, True))


def difference(first: AnyPartition, second: AnyPartition) -> IndexPartition:
    """The partition whose tiles have the elements of the first that are not in the second.

    See `union`.

    Raises: BoundsError.
    """
    one, two = _pair(first, second, "difference")
    return _like(first, _kept(one, two, False))


def _kept(one: IndexSets, two: IndexSets, common: bool) -> IndexSets:
    size = max(1, math.prod(one.shape))
    found = np.isin(one.owners * size + one.indices, two.owners * size + two.indices)
    keep = found if common else ~found
    return from_pairs(one.shape, one.points, one.owners[keep], one.indices[keep])


def _like(first: AnyPartition, sets: IndexSets) -> IndexPartition:
    return IndexPartition(first.region, sets, first.grid)


def _pair(first: AnyPartition, second: AnyPartition, what: str) -> tuple[IndexSets, IndexSets]:
    if first.region is not second.region or first.grid != second.grid:
        raise BoundsError(
            f"{what}: partitions of region {first.region.name!r}, grid {first.grid}, and of region "
            f"{second.region.name!r}, grid {second.grid}; needed one region and one grid"
        )
    sparse = [p for p in (first, second) if isinstance(p, IndexPartition)]
    if sparse:
        axes = len(sparse[0].sets.shape)
    else:
        axes = max(axes_of(p) for p in (first, second) if isinstance(p, Partition))
    return sets_of(first, axes), sets_of(second, axes)
