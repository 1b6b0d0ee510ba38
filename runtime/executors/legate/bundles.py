"""Bundles: placed launches made into tasks with few, simple region arguments.

A task system that takes 100 us a task wants few of them. A bundle has lanes; a lane is what runs
as one task: the points of a launch one by one (`of_points`), or, in a captured step, all points
that several launches have on a processor (`fuse`). Each lane sees one box of each region. Where a
bundle writes a region, its lanes' boxes do not overlap, so that its lanes depend on no other.

Regions that live within one bundle need no place outside it: they are buffers of its lanes.

Source: Yadav et al., Composing Distributed Computations Through Task and Kernel Fusion, ASPLOS
2025, which fuses index tasks point by point. Here lanes are processors, since a processor runs one
task at a time, and a launch may pass others that it does not depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from soapstone.runtime.analysis.coherence import Group
from soapstone.runtime.analysis.instance import READ, WRITE, Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.arena import ArenaPlan, Block, plan

Orders = Callable[[Region], tuple[int, ...] | None]  # of the axes of regions
ARGUMENT_LIMIT = 256  # region arguments of a fused bundle
_PIECES_LIMIT = 64  # boxes a lane remembers as written


@dataclass(frozen=True, eq=False)
class Touch:
    """How a work uses a region: the box that holds all its points touch on each processor."""

    boxes: Mapping[int, Box]
    writes: bool


@dataclass(frozen=True, eq=False)
class Work:
    """A placed launch: one operation a point, and the region that each argument is taken from."""

    launch: Launch
    operations: Sequence[Operation]
    groups: Sequence[Group]

    @cached_property
    def touches(self) -> dict[Region, Touch]:
        """What this work does to each region that has elements."""
        placed = np.array([operation.processor for operation in self.operations], np.int64)
        boxes: dict[Region, dict[int, Box]] = {}
        writes: dict[Region, bool] = {}
        for group in self.groups:
            if not group.region.size:
                continue
            where = placed if group.points is None else placed[group.points]
            mine = boxes.setdefault(group.region, {})
            writes[group.region] = writes.get(group.region, False) or bool(group.access & WRITE)
            filled = group.tiling.volume > 0
            for processor in np.unique(where[filled]).tolist():
                rows = filled & (where == processor)
                low = tuple(group.tiling.lo[rows].min(axis=0).tolist())
                high = tuple(group.tiling.hi[rows].max(axis=0).tolist())
                mine[processor] = joined(mine.get(processor), (low, high))
        return {region: Touch(boxes[region], writes[region]) for region in boxes}

    @cached_property
    def columns(self) -> list[list[tuple[Region, Box, bool] | None]]:
        """For each argument and point: the region, the box in it, and whether it is a slice."""
        points = len(self.operations)
        found: list[list[tuple[Region, Box, bool] | None]] = [
            [None] * points for _ in self.launch.partitions
        ]
        for group in self.groups:
            column = found[group.argument]
            places = range(points) if group.points is None else group.points.tolist()
            for place, box, filled in zip(places, group.tiling.boxes, group.tiling.volume):
                if filled:
                    column[place] = (group.region, box, group.squeeze)
        return found


@dataclass(frozen=True)
class Slot:
    """Where an operation's argument is: a box of a region that the lane has, or nothing.

    argument: the number of the bundle's argument, or None for a buffer of the lane or of the host.
    """

    region: Region | None
    argument: int | None
    box: Box
    squeeze: bool


@dataclass(frozen=True)
class Private:
    """A region's box that is a buffer of a lane; the bytes from its first element to its last.

    It has the strides of the whole region, which kernels see on the local executor: with others
    they may be other variants, and give other last bits.
    """

    box: Box
    strides: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(region: Region, box: Box, order: tuple[int, ...] | None) -> Private:
        """The buffer of a box that has elements."""
        whole = Storage(region, 0, ((0,) * region.rank, region.shape), order)
        low, high = whole.span(box)
        return Private(box, whole.strides(), high - low)


@dataclass(eq=False)
class Lane:
    """The operations that one Legate task runs, in order.

    boxes: for each argument of the bundle the box that the task gets, or None. private: regions
    that no other task reads, kept in buffers of this one.
    """

    processor: int
    work: list[tuple[Operation, tuple[Slot, ...]]]
    boxes: list[Box | None]
    private: dict[Region, Private] = field(default_factory=dict)

    def operations(self) -> list[Operation]:
        """The operations, in the order in which they run."""
        return [operation for operation, _ in self.work]

    @cached_property
    def buffers(self) -> ArenaPlan:
        """Where the private regions' buffers lie, in their order; bytes are used again."""
        uses: dict[Region, list[int]] = {region: [] for region in self.private}
        for place, (_, slots) in enumerate(self.work):
            for slot in slots:
                if slot.region in uses:
                    uses[slot.region].append(place)
        return plan(
            [
                Block(private.nbytes, uses[region][0], uses[region][-1])
                for region, private in self.private.items()
            ]
        )


@dataclass(eq=False)
class Argument:
    """A region argument of a bundle. reads: its contents from before are needed."""

    region: Region
    reads: bool
    writes: bool


@dataclass(eq=False)
class Bundle:
    """Lanes that are independent of each other, launched together, and their region arguments.

    grid: of lanes that are the points of a launch. apart: an argument's region is another's too,
    and one writes.
    """

    lanes: list[Lane]
    arguments: list[Argument]
    grid: tuple[int, ...]
    apart: bool = False

    @property
    def operations(self) -> list[Operation]:
        """All operations, lane by lane."""
        return [operation for lane in self.lanes for operation in lane.operations()]

    @property
    def private_bytes(self) -> int:
        """The bytes of the lanes' own buffers."""
        return sum(lane.buffers.peak_bytes for lane in self.lanes)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(b - a for a, b in zip(*box))


def joined(one: Box | None, two: Box) -> Box:
    """The smallest box that holds two."""
    if one is None:
        return two
    return tuple(map(min, one[0], two[0])), tuple(map(max, one[1], two[1]))


def _apart(boxes: Collection[Box]) -> bool:
    """Whether no two boxes overlap. A box of rank 0 overlaps any other."""
    found = list(boxes)
    return not any(
        all(a < d and c < b for a, b, c, d in zip(*one, *two))
        for place, one in enumerate(found)
        for two in found[:place]
    )


def of_points(work: Work, outside: Collection[Region] = ()) -> Bundle | None:
    """A launch as a bundle whose lanes are its points; None when no point has anything to do.

    outside: regions that are no arguments of it, as for `fuse`.
    """
    groups = [group for group in work.groups if group.region not in outside]
    arguments = [
        Argument(group.region, bool(group.access & READ), bool(group.access & WRITE))
        for group in groups
    ]
    by_point: list[dict[int, Box]] = []
    for group in groups:
        points = range(len(work.operations)) if group.points is None else group.points.tolist()
        filled = zip(points, group.tiling.boxes, group.tiling.volume)
        by_point.append({point: box for point, box, elements in filled if elements})
    place = {(group.region, group.argument): n for n, group in enumerate(groups)}
    lanes = []
    for operation in work.operations:
        if operation.idle:
            continue
        slots = _slots(work, operation, lambda region, argument: place.get((region, argument)))
        boxes = [boxes.get(operation.point) for boxes in by_point]
        lanes.append(Lane(operation.processor, [(operation, slots)], boxes))
    if not lanes:
        return None
    grid = work.launch.grid if len(lanes) == work.launch.points else (len(lanes),)
    seen: dict[int, bool] = {}
    apart = False
    for made in arguments:
        before = seen.get(id(made.region))
        apart |= before is not None and (before or made.writes)
        seen[id(made.region)] = bool(before) or made.writes
    return Bundle(lanes, arguments, grid, apart)


def _slots(
    work: Work, operation: Operation, place: Callable[[Region, int], int | None]
) -> tuple[Slot, ...]:
    """Where the arguments of an operation are. place: the bundle's argument of a region."""
    slots = []
    for argument, column in enumerate(work.columns):
        found = column[operation.point]
        if found is None:
            box = work.launch.partitions[argument].tiling.boxes[operation.point]
            slots.append(Slot(None, None, box, False))
        else:
            region, box, squeeze = found
            slots.append(Slot(region, place(region, argument), box, squeeze))
    return tuple(slots)


class _Open:
    """A bundle being filled: works, and the box of each region on each processor."""

    def __init__(self, outside: Collection[Region]) -> None:
        self.works: list[Work] = []
        self.boxes: dict[Region, dict[int, Box]] = {}
        self.writes: set[Region] = set()
        self._outside = outside

    def take(self, work: Work) -> bool:
        """Add a work, unless lanes would then depend on each other."""
        merged: dict[Region, dict[int, Box]] = {}
        for region, touch in work.touches.items():
            if region in self._outside:
                continue
            boxes = dict(self.boxes.get(region, {}))
            for processor, box in touch.boxes.items():
                boxes[processor] = joined(boxes.get(processor), box)
            if (touch.writes or region in self.writes) and not _apart(boxes.values()):
                return False
            merged[region] = boxes
        if self.works and len(self.boxes | merged) > ARGUMENT_LIMIT:
            return False
        self.boxes |= merged
        self.writes |= {region for region, touch in work.touches.items() if touch.writes}
        self.works.append(work)
        return True

    def close(self, private: Collection[Region], order: Orders) -> Bundle | None:
        """The bundle of what was taken; regions in `private` become buffers of its lanes."""
        lanes: dict[int, Lane] = {}
        regions = [region for region in self.boxes if region not in private]
        place = {region: number for number, region in enumerate(regions)}
        for work in self.works:
            for operation in work.operations:
                if operation.idle:
                    continue
                lane = lanes.setdefault(operation.processor, Lane(operation.processor, [], []))
                slots = _slots(work, operation, lambda region, _: place.get(region))
                lane.work.append((operation, slots))
        if not lanes:
            return None
        ordered = [lanes[processor] for processor in sorted(lanes)]
        for lane in ordered:
            lane.boxes = [self.boxes[region].get(lane.processor) for region in regions]
            lane.private = {
                region: Private.of(region, boxes[lane.processor], order(region))
                for region, boxes in self.boxes.items()
                if region in private and lane.processor in boxes
            }
        arguments = [
            Argument(region, self._reads(region), region in self.writes) for region in regions
        ]
        return Bundle(ordered, arguments, (len(ordered),))

    def _reads(self, region: Region) -> bool:
        """Whether any lane needs what the region held before: it reads it, or leaves some of it."""
        if region not in self.writes:
            return True
        written: dict[int, list[Box]] = {processor: [] for processor in self.boxes[region]}
        for work in self.works:
            for group in work.groups:
                if group.region is not region:
                    continue
                if group.access & READ and not all(
                    _within(box, written[processor])
                    for processor, box in work.touches[region].boxes.items()
                ):
                    return True
            for group in work.groups:
                if group.region is region and group.access & WRITE:
                    _note(work, group, written)
        return not all(
            _within(box, written[processor]) for processor, box in self.boxes[region].items()
        )


def _note(work: Work, group: Group, written: dict[int, list[Box]]) -> None:
    """Add what a group writes on each processor: one box where its tiles fill it."""
    points = range(len(work.operations)) if group.points is None else group.points.tolist()
    tiles: dict[int, list[tuple[Box, int]]] = {}
    for point, box, elements in zip(points, group.tiling.boxes, group.tiling.volume.tolist()):
        if elements:
            tiles.setdefault(work.operations[point].processor, []).append((box, elements))
    for processor, some in tiles.items():
        whole: Box | None = None
        for box, _ in some:
            whole = joined(whole, box)
        assert whole is not None
        full = volume(whole) == sum(elements for _, elements in some)
        pieces = [whole] if full else [box for box, _ in some]
        written[processor] = [*written[processor], *pieces][-_PIECES_LIMIT:]


def _within(box: Box, boxes: Iterable[Box]) -> bool:
    """Whether a box lies in one of several."""
    return any(all(a <= c and d <= b for a, b, c, d in zip(*other, *box)) for other in boxes)


def _passes(work: Work, left: Mapping[Region, bool]) -> bool:
    """Whether a work depends on none left behind. left: regions, and whether they are written."""
    return not any(
        region in left and (left[region] or touch.writes) for region, touch in work.touches.items()
    )


def fuse(works: Sequence[Work], outside: Collection[Region], order: Orders) -> list[Bundle]:
    """The bundles of a step, in a sequence that keeps every dependence.

    outside: regions that are nobody's arguments: the host has them, and no work writes them.
    """
    opened: list[_Open | Work] = []
    waiting = list(works)
    while waiting:
        current = _Open(outside)
        left: list[Work] = []
        held: dict[Region, bool] = {}
        for place, work in enumerate(waiting):
            if _passes(work, held) and current.take(work):
                continue
            if not current.works:  # its points on one processor do not make boxes
                opened.append(work)
                left = waiting[place + 1 :]
                break
            left.append(work)
            for region, touch in work.touches.items():
                held[region] = held.get(region, False) or touch.writes
        if current.works:
            opened.append(current)
        waiting = left
    users: dict[Region, int] = {}
    for item in opened:
        for region in item.touches if isinstance(item, Work) else item.boxes:
            users[region] = users.get(region, 0) + (2 if isinstance(item, Work) else 1)
    private = {region for region, count in users.items() if region.transient and count == 1}
    made = [
        of_points(item, outside) if isinstance(item, Work) else item.close(private, order)
        for item in opened
    ]
    return [bundle for bundle in made if bundle is not None]
