"""Reductions: private buffers for the points of a launch, and the folds that combine them.

Partial results are combined in the order of points, whichever processors run them. Folds are
planned from boxes alone, and cutting a fold into blocks over processors changes neither the
operands of an element nor their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.native.walks import COMBINE, FIRST, IDENTITY
from soapstone.records import dataclass
from soapstone.runtime.analysis.transfer import FoldPart, fold_task
from soapstone.runtime.model import tiling as geometry
from soapstone.runtime.model.task import Task
from soapstone.runtime.model.tiling import Box, Shape, Tiling

BLOCK_BYTES = 1 << 16  # a fold that reads less than this is not cut over processors


@dataclass(frozen=True, eq=False)
class Bucket:
    """The private buffers of all points whose tiles have one shape: a region (points, *shape).

    points: the points of the launch, in the order of their slices. tiling: the slice of each of
    them.
    """

    shape: Shape
    points: Array
    tiling: Tiling


@dataclass(frozen=True, eq=False)
class FoldLaunch:
    """One index launch of folds. reads: (bucket, tiling over the folds) for each argument."""

    task: Task
    out: Tiling
    reads: tuple[tuple[int, Tiling], ...]
    processors: Array


@dataclass(frozen=True, eq=False)
class FoldPlan:
    """How the partial results of one reduction argument are stored and folded.

    fill_first: the folds do not reach some elements that a launch with `initialise` must reset.
    """

    buckets: tuple[Bucket, ...]
    folds: tuple[FoldLaunch, ...]
    fill_first: bool
    reads_output: bool


def _cut(box: Box, blocks: int) -> list[Box]:
    """A box cut into up to `blocks` blocks along its first axis that is long enough."""
    low, high = box
    for axis, (a, b) in enumerate(zip(low, high)):
        if b - a >= blocks > 1:
            faces = [a + (b - a) * i // blocks for i in range(blocks + 1)]
            return [
                ((*low[:axis], x, *low[axis + 1 :]), (*high[:axis], y, *high[axis + 1 :]))
                for x, y in itertools.pairwise(faces)
            ]
    return [box]


def _common(one: Box, two: Box) -> Box | None:
    low = tuple(map(max, one[0], two[0]))
    high = tuple(map(min, one[1], two[1]))
    return None if any(a >= b for a, b in zip(low, high)) else (low, high)


def _slices(box: Box, base: Shape) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(box[0], box[1], base))


@dataclass(frozen=True)
class Fold:
    """One fold: its result's box, the points whose partials it combines in order, its processor."""

    out: Box
    members: tuple[int, ...]
    processor: int


def plan(
    tiling: Tiling,
    itemsize: int,
    reduction: str,
    initialise: bool,
    processors: Sequence[int],
    spread: bool,
) -> FoldPlan:
    """The plan of one reduction argument.

    processors: of each point. If the points live in several memories, each fold names the slices
    that it reads one by one, so that only those are copied.
    """
    members, groups = _groups(tiling)
    distinct = _tiling(tiling.shape, groups)
    disjoint = distinct.disjoint
    buckets, place = _buckets(members)
    found = folds(tiling, itemsize, processors)
    mode = COMBINE if not initialise else FIRST if disjoint else IDENTITY
    launches = _launches(tiling, buckets, place, found, reduction, mode, disjoint, spread)
    complete = not disjoint or distinct.complete
    return FoldPlan(tuple(buckets), tuple(launches), initialise and not complete, mode == COMBINE)


def folds(tiling: Tiling, itemsize: int, processors: Sequence[int]) -> list[Fold]:
    """The boxes to fold, the points whose partials each takes, and its processor.

    A large box is divided over all processors of its points. processors: of each point.
    """
    members, groups = _groups(tiling)
    if _tiling(tiling.shape, groups).disjoint:
        work = [(box, tuple(members[box])) for box in groups]
    else:
        everyone = tuple(sorted(point for box in groups for point in members[box]))
        work = [((tuple([0] * len(tiling.shape)), tiling.shape), everyone)]
    found: list[Fold] = []
    for box, who in work:
        workers = sorted({processors[point] for point in who})
        nbytes = int(tiling.volume[list(who)].sum()) * itemsize
        boxes = _cut(box, len(workers)) if nbytes > BLOCK_BYTES else [box]
        owners = [processors[who[0]]] if len(boxes) == 1 else workers
        found += [Fold(part, who, owner) for part, owner in zip(boxes, owners)]
    return found


def _groups(tiling: Tiling) -> tuple[dict[Box, list[int]], list[Box]]:
    """The points with each distinct, non-empty box, boxes in the order of their first points."""
    members: dict[Box, list[int]] = {}
    for point, box in enumerate(tiling.boxes):
        if tiling.volume[point]:
            members.setdefault(box, []).append(point)
    return members, list(members)


def _buckets(
    members: dict[Box, list[int]],
) -> tuple[list[Bucket], dict[int, tuple[int, int]]]:
    """One bucket for each tile shape, slices ordered by box, then point; each point's slice."""
    by_shape: dict[Shape, list[int]] = {}
    for box, who in members.items():
        shape = tuple(b - a for a, b in zip(*box))
        by_shape.setdefault(shape, []).extend(who)
    buckets, place = [], {}
    for number, (shape, points) in enumerate(by_shape.items()):
        n = len(points)
        lo = np.zeros((n, 1 + len(shape)), dtype=np.int64)
        lo[:, 0] = np.arange(n)
        hi = np.tile(np.array((0, *shape), dtype=np.int64), (n, 1))
        hi[:, 0] = np.arange(1, n + 1)
        tiles = geometry.intern((n, *shape), lo, hi).declare(disjoint=True, complete=True)
        buckets.append(Bucket(shape, np.array(points, dtype=np.int64), tiles))
        place.update({point: (number, index) for index, point in enumerate(points)})
    return buckets, place


def _launches(
    tiling: Tiling,
    buckets: Sequence[Bucket],
    place: dict[int, tuple[int, int]],
    folds: Sequence[Fold],
    reduction: str,
    mode: int,
    disjoint: bool,
    spread: bool,
) -> list[FoldLaunch]:
    """The folds as index launches, one for all folds whose arguments have the same form."""
    forms: dict[tuple[int, ...], list[Fold]] = {}
    for fold in folds:
        if disjoint:
            form = (place[fold.members[0]][0],) * (len(fold.members) if spread else 1)
        elif spread:
            form = tuple(place[point][0] for point in fold.members)
        else:
            form = tuple(range(len(buckets)))
        forms.setdefault(form, []).append(fold)
    launches = []
    for form, some in forms.items():
        arguments: list[list[Box]] = [[] for _ in form]
        parts: list[list[FoldPart]] = []
        for fold in some:
            mine: list[FoldPart] = []
            for slot, point in enumerate(fold.members):
                bucket, index = place[point]
                box = tiling.boxes[point]
                shared = _common(fold.out, box)
                low, high = shared if shared else (box[0], box[0])
                source = _slices((low, high), box[0])
                rows = (tuple(s.start for s in source), tuple(s.stop for s in source))
                if spread:
                    arguments[slot].append(((index, *rows[0]), (index + 1, *rows[1])))
                if shared is None:
                    continue
                target = None if disjoint else _slices(shared, fold.out[0])
                if spread:
                    mine.append(FoldPart(1 + slot, 0, target, None))
                elif disjoint:
                    first = place[fold.members[0]][1]
                    mine.append(FoldPart(1, index - first, target, None))
                else:
                    mine.append(FoldPart(1 + bucket, index, target, source))
            if not spread and disjoint:
                begin, end = place[fold.members[0]][1], place[fold.members[-1]][1] + 1
                source = _slices(fold.out, tiling.boxes[fold.members[0]][0])
                arguments[0].append(
                    (
                        (begin, *(s.start for s in source)),
                        (end, *(s.stop for s in source)),
                    )
                )
            elif not spread:
                for slot, bucket in enumerate(form):
                    shape = buckets[bucket].tiling.shape
                    arguments[slot].append((tuple([0] * len(shape)), shape))
            parts.append(mine)
        launches.append(
            FoldLaunch(
                fold_task(reduction, mode, len(form), parts),
                _tiling(tiling.shape, [fold.out for fold in some]),
                tuple(
                    (bucket, _tiling(buckets[bucket].tiling.shape, boxes))
                    for bucket, boxes in zip(form, arguments)
                ),
                np.array([fold.processor for fold in some], dtype=np.int64),
            )
        )
    return launches


def _tiling(shape: Shape, boxes: Sequence[Box]) -> Tiling:
    rank = len(shape)
    lo = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), rank)
    hi = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), rank)
    return geometry.intern(shape, lo, hi)
