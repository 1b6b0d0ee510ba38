"""The geometry of partitions: arrays of boxes, interned on content, with memoised interference.

A tiling knows no region, so equal shapes cut equally share one analysis: the interference of two
tilings is computed once, vectorised over all pairs of points, whichever regions they cut.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import numpy as np

from soapstone.native.memory import Array

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]

_PAIR_LIMIT = 1 << 20  # pairs of one block of the overlap test
_MEMO_LIMIT = 1 << 16  # remembered interferences before the memo is emptied


class Tiling:
    """Boxes `[lo[p], hi[p])` inside `shape`, one a point; equal contents are one object.

    Make one with `intern`. lo, hi: int64 (points, rank), read-only.
    """

    __slots__ = (
        "__weakref__",
        "_boxes",
        "_complete",
        "_disjoint",
        "_subsets",
        "empty",
        "hi",
        "lo",
        "points",
        "shape",
        "uid",
        "volume",
    )

    def __init__(self, shape: Shape, lo: Array, hi: Array, uid: int) -> None:
        self.shape = shape
        self.lo = lo
        self.hi = hi
        self.uid = uid
        self.points = lo.shape[0]
        self.volume: Array = np.prod(hi - lo, axis=1, dtype=np.int64)
        self.empty: bool = bool((self.volume == 0).any())
        self._disjoint: bool | None = None
        self._complete: bool | None = None
        self._subsets: dict[bytes, Tiling] = {}
        self._boxes: list[Box] | None = None

    @property
    def boxes(self) -> list[Box]:
        """Each point's box as two tuples of ints."""
        if self._boxes is None:
            lows, highs = self.lo.tolist(), self.hi.tolist()
            self._boxes = [(tuple(low), tuple(high)) for low, high in zip(lows, highs)]
        return self._boxes

    @property
    def disjoint(self) -> bool:
        """Whether no element lies in the boxes of two points."""
        if self.points == 1:
            return True
        if self._disjoint is None:
            first, _ = overlaps(self, self)
            self._disjoint = bool(first.size == np.count_nonzero(self.volume))
        return self._disjoint

    @property
    def complete(self) -> bool:
        """Whether every element of the shape lies in some box."""
        if self._complete is None:
            self._complete = self._is_complete()
        return self._complete

    def declare(self, disjoint: bool, complete: bool) -> Tiling:
        """This tiling, with properties its constructor knows and need not be computed."""
        self._disjoint = disjoint
        self._complete = complete
        return self

    def _is_complete(self) -> bool:
        total = math.prod(self.shape)
        if total == 0:
            return True
        if bool((self.volume == total).any()):
            return True
        if self.disjoint:
            return int(self.volume.sum()) == total
        cuts = [
            np.unique(np.concatenate([[0, extent], self.lo[:, axis], self.hi[:, axis]]))
            for axis, extent in enumerate(self.shape)
        ]
        covered = np.zeros([cut.size - 1 for cut in cuts], dtype=bool)
        for low, high in self.boxes:
            covered[cells_of(cuts, low, high)] = True
        return bool(covered.all())

    def subset(self, points: Array) -> Tiling:
        """The tiling of some of the points, in the order given. points: int64 (n,)."""
        if points.size == self.points and bool((points == np.arange(self.points)).all()):
            return self
        key = points.tobytes()
        subset = self._subsets.get(key)
        if subset is None:
            subset = intern(self.shape, self.lo[points], self.hi[points])
            if self._disjoint:
                subset._disjoint = True
            self._subsets[key] = subset
        return subset


_interned: weakref.WeakValueDictionary[tuple[Shape, int, bytes, bytes], Tiling]
_FEW = 256  # pairs of boxes that are tested all with all: a search costs more
_interned = weakref.WeakValueDictionary()
_uids = itertools.count(1)
_NONE, _FIRST = np.zeros(0, np.int64), np.zeros(1, np.int64)  # numbers of points
_pairs: dict[tuple[int, int], tuple[Array, Array]] = {}
_covers: dict[tuple[int, int], Array] = {}
interference_tests = 0


def intern(shape: Shape, lo: Array, hi: Array) -> Tiling:
    """The tiling with this content; the same object as long as one is alive."""
    lo = np.ascontiguousarray(lo, dtype=np.int64)
    hi = np.ascontiguousarray(hi, dtype=np.int64)
    key = (shape, lo.shape[0], lo.tobytes(), hi.tobytes())
    tiling = _interned.get(key)
    if tiling is None:
        lo.flags.writeable = False
        hi.flags.writeable = False
        tiling = Tiling(shape, lo, hi, next(_uids))
        _interned[key] = tiling
    return tiling


def single(shape: Shape, low: Sequence[int], high: Sequence[int]) -> Tiling:
    """The tiling of one box."""
    rank = len(shape)
    lo = np.array(low, dtype=np.int64).reshape(1, rank)
    hi = np.array(high, dtype=np.int64).reshape(1, rank)
    return intern(shape, lo, hi)


def cells_of(cuts: Sequence[Array], low: Shape, high: Shape) -> tuple[slice, ...]:
    """The cells of a grid of cuts that make up a box whose faces lie on cuts."""
    return tuple(
        slice(int(np.searchsorted(cut, a)), int(np.searchsorted(cut, b)) if b > a else 0)
        for cut, a, b in zip(cuts, low, high)
    )


def overlaps(first: Tiling, second: Tiling) -> tuple[Array, Array]:
    """The pairs of points (i of `first`, j of `second`) whose boxes share an element.

    Vectorised over all pairs, once for each pair of tilings. Returns two int64 arrays (pairs,).
    """
    global interference_tests
    key = (first.uid, second.uid)
    pairs = _pairs.get(key)
    if pairs is not None:
        return pairs
    interference_tests += 1
    if len(_pairs) > _MEMO_LIMIT:
        _pairs.clear()
        _covers.clear()
    few = first.points * second.points <= _FEW
    pairs = _pairs[key] = _of_few(first, second) if few else _overlapping(first, second)
    return pairs


def _intersections(first: Tiling, second: Tiling) -> tuple[Array, Array]:
    """Low and high faces of each box of `first` cut with each of `second`, (points, points, rank).

    Where two boxes share no element, an axis has its high face not above its low one.
    """
    low = np.maximum(first.lo[:, None], second.lo)
    return low, np.minimum(first.hi[:, None], second.hi)


def _of_few(first: Tiling, second: Tiling) -> tuple[Array, Array]:
    """The overlapping pairs, in row-major order, by testing all."""
    if first.points == second.points == 1:
        sides = zip(*first.boxes[0], *second.boxes[0])
        meet = all(max(a, c) < min(b, d) for a, b, c, d in sides)
        return (_FIRST, _FIRST) if meet else (_NONE, _NONE)
    low, high = _intersections(first, second)
    rows, columns = np.nonzero((low < high).all(axis=2))
    return rows, columns


def _overlapping(first: Tiling, second: Tiling) -> tuple[Array, Array]:
    """The overlapping pairs, in row-major order: candidates along one axis, tested on all.

    Along an axis the boxes of `second` are sorted by their low faces; those that may meet a box
    of `first` are then one range, which ends at its high face and starts where the highest face
    so far passes its low one. The axis with the fewest candidates is taken.
    """
    rank = len(first.shape)
    mine, theirs = np.flatnonzero(first.volume), np.flatnonzero(second.volume)
    if not (mine.size and theirs.size):
        return _NONE, _NONE
    order, start = theirs, np.zeros(mine.size, np.int64)
    count = np.full(mine.size, theirs.size)
    for axis in range(rank):
        sort = theirs[np.argsort(second.lo[theirs, axis], kind="stable")]
        reached = np.maximum.accumulate(second.hi[sort, axis])
        begin = np.searchsorted(reached, first.lo[mine, axis], side="right")
        end = np.searchsorted(second.lo[sort, axis], first.hi[mine, axis], side="left")
        length = np.maximum(end - begin, 0)
        if length.sum() < count.sum():
            order, start, count = sort, begin, length
    in_order = bool((order[1:] > order[:-1]).all())
    parts: list[tuple[Array, Array]] = []
    ends = np.cumsum(count)
    low = 0
    while low < mine.size:
        past = ends[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(ends, past + _PAIR_LIMIT, side="right")))
        each = count[low:high]
        rows = np.repeat(mine[low:high], each)
        steps = np.arange(rows.size) - np.repeat(np.cumsum(each) - each, each)
        columns = order[np.repeat(start[low:high], each) + steps]
        hit = np.ones(rows.size, dtype=bool)
        for axis in range(rank):
            hit &= first.lo[rows, axis] < second.hi[columns, axis]
            hit &= second.lo[columns, axis] < first.hi[rows, axis]
        rows, columns = rows[hit], columns[hit]
        parts.append((rows, columns) if in_order else _sorted(rows, columns))
        low = high
    return np.concatenate([rows for rows, _ in parts]), np.concatenate([c for _, c in parts])


def _sorted(rows: Array, columns: Array) -> tuple[Array, Array]:
    """Pairs in row-major order."""
    order = np.lexsort((columns, rows))
    return rows[order], columns[order]


def contains(outer: Box, inner: Box) -> bool:
    """Whether a box lies inside another."""
    return all(a <= b for a, b in zip(outer[0], inner[0])) and all(
        a >= b for a, b in zip(outer[1], inner[1])
    )


def covered_by(writer: Tiling, user: Tiling) -> Array:
    """Which boxes of `user` lie inside the union of the boxes of a disjoint `writer`.

    Returns bool (user.points,).
    """
    key = (writer.uid, user.uid)
    covered = _covers.get(key)
    if covered is None:
        if writer.complete:
            covered = np.ones(user.points, dtype=bool)
        elif writer.points == user.points == 1:
            covered = np.array([user.empty or contains(writer.boxes[0], user.boxes[0])])
        elif writer.points * user.points <= _FEW:
            low, high = _intersections(writer, user)
            covered = (high - low).clip(0).prod(axis=2).sum(axis=0) == user.volume
        else:
            rows, columns = overlaps(writer, user)
            low = np.maximum(writer.lo[rows], user.lo[columns])
            high = np.minimum(writer.hi[rows], user.hi[columns])
            shared = np.zeros(user.points, dtype=np.int64)
            np.add.at(shared, columns, np.prod(high - low, axis=1, dtype=np.int64))
            covered = shared == user.volume
        _covers[key] = covered
    return covered
