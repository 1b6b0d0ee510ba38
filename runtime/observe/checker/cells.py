"""Regions cut into cells, so fine that every box of a log is made up of whole cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.observe.checker.records import Box, Launch, Operation, Part, Records


class Grid:
    """The cells of one region: the coarsest grid of which every given box is made up.

    One symbol for a cell does for all its elements, since no box of the log divides it.

    Args:
        shape: of the region. boxes: all that occur in the log. Methods take these only.

    Attributes:
        cuts: for each axis the indices at which cells begin, ascending, and the extent.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self.cuts: list[Array] = [
            np.unique([0, extent, *(side[axis] for box in boxes for side in box)])
            for axis, extent in enumerate(shape)
        ]
        self._at = [{int(face): place for place, face in enumerate(cut)} for cut in self.cuts]

    def slices(self, box: Box, base: Box | None = None) -> tuple[Any, ...]:
        """Slices of a box's cells in an array of all cells, or of those of box `base`."""
        found: list[Any] = []
        for axis, at in enumerate(self._at):
            low, high = box[0][axis], box[1][axis]
            first = 0 if base is None else at[base[0][axis]]
            found.append(slice(at[low] - first, at[max(low, high)] - first))
        return (*found, ...)

    def full(self, box: Box, value: int) -> Array:
        """An int64 array with an element for each cell of a box, all of one value."""
        index = self.slices(box)[:-1]
        return np.full([part.stop - part.start for part in index], value, dtype=np.int64)

    def box(self, place: Sequence[int], base: Box) -> Box:
        """The box of one cell, given its place among those of box `base`."""
        first = [at[low] for at, low in zip(self._at, base[0])]
        return (
            tuple(int(cut[f + i]) for cut, f, i in zip(self.cuts, first, place)),
            tuple(int(cut[f + i + 1]) for cut, f, i in zip(self.cuts, first, place)),
        )


def grids(records: Records) -> dict[int, Grid]:
    """The grid of each region of a log, by the region's number."""
    boxes: dict[int, set[Box]] = {region: set() for region in records.regions}
    for launch in records.launches.values():
        for argument in launch.arguments:
            for tile in argument.tiles:
                boxes[argument.region].update(tile)
    for storage in records.storages.values():
        boxes[storage.region].update([storage.box, *(storage.valid or ())])
    for operation in _operations(records):
        for use in operation.uses:
            if use.storage is not None:
                boxes[records.storages[use.storage].region].add(use.box)
        for part in operation.parts:
            source, target = part_boxes(operation, part)
            for use, box in ((operation.uses[part.use], source), (operation.uses[0], target)):
                if use.storage is not None:
                    boxes[records.storages[use.storage].region].add(box)
    for item in records.items:
        for number, box in getattr(item, "seen", ()):
            boxes[records.storages[number].region].add(box)
    return {
        number: Grid(region.shape, sorted(boxes[number]))
        for number, region in records.regions.items()
    }


def _operations(records: Records) -> Iterator[Operation]:
    for item in records.items:
        if isinstance(item, Operation):
            yield item
    for trace in records.traces.values():
        yield from trace.operations


def part_boxes(operation: Operation, part: Part) -> tuple[Box, Box]:
    """Where a part of a fold comes from, in the buffer's elements, and where it goes."""
    (low, high), out = operation.uses[part.use].box, operation.uses[0].box
    inner = part.source or tuple((0, b - a) for a, b in zip(low[1:], high[1:]))
    source = (
        (low[0] + part.place, *(a + first for a, (first, _) in zip(low[1:], inner))),
        (low[0] + part.place + 1, *(a + last for a, (_, last) in zip(low[1:], inner))),
    )
    if part.target is None:
        return source, out
    target = (
        tuple(a + first for a, (first, _) in zip(out[0], part.target)),
        tuple(a + last for a, (_, last) in zip(out[0], part.target)),
    )
    return source, target


def empty(box: Box) -> bool:
    """Whether a box has no element."""
    return any(low >= high for low, high in zip(*box))


def tile_of(launch: Launch, argument: int, point: int) -> Box | None:
    """The one box of a point's tile; None where there is none, or it is empty."""
    tile = [box for box in launch.arguments[argument].tiles[point] if not empty(box)]
    return tile[0] if len(tile) == 1 else None
