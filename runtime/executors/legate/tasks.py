"""Bundles as Legate tasks: one index launch where tiles are regular, else one task a lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.executors.legate.bundles import Bundle, volume
from soapstone.runtime.executors.legate.lanes import Faults, LaneProgram, Record
from soapstone.runtime.executors.legate.start import Legate
from soapstone.runtime.executors.legate.stores import Held
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box

if TYPE_CHECKING:
    from soapstone.runtime.machines.machine import Machine


@dataclass(frozen=True)
class Form:
    """A regular cut: a box in tiles of one shape; `dims` says which dim of a launch picks one."""

    box: Box
    tile: tuple[int, ...]
    dims: tuple[int, ...]


def form_of(boxes: Sequence[Box | None], grid: tuple[int, ...]) -> Form | None:
    """The regular cut that gives each point of a grid its box, or None when there is none.

    Along each axis all points must see the same range, or consecutive ranges of one extent (the
    last may be shorter) that follow one dim of the grid.
    """
    filled = [box for box in boxes if box is not None]
    if len(filled) < len(boxes):
        return None
    rank = len(filled[0][0])
    low, high, tile, dims = [], [], [], []
    for axis in range(rank):
        starts = np.array([box[0][axis] for box in filled]).reshape(grid)
        ends = np.array([box[1][axis] for box in filled]).reshape(grid)
        varying = [
            dim
            for dim in range(len(grid))
            if (starts != starts.take([0], dim)).any() or (ends != ends.take([0], dim)).any()
        ]
        if len(varying) > 1:
            return None
        first, last = int(starts.min()), int(ends.max())
        if not varying:
            step, dim = last - first, -1
        else:
            dim = varying[0]
            line = tuple(slice(None) if d == dim else 0 for d in range(len(grid)))
            step = int(ends[line][0]) - first
            wanted = first + step * np.arange(grid[dim])
            if (starts[line] != wanted).any():
                return None
            if (ends[line] != np.minimum(wanted + step, last)).any():
                return None
        low.append(first)
        high.append(last)
        tile.append(step)
        dims.append(dim)
    return Form((tuple(low), tuple(high)), tuple(tile), tuple(dims))


class Running:
    """A bundle that Legate runs, once or again and again: its call's number and bound lanes.

    shared: arrays of regions the host holds. loops: native entries are run by compiled loops.
    """

    def __init__(
        self,
        legate: Legate,
        machine: Machine,
        bundle: Bundle,
        faults: Faults,
        shared: Mapping[Region, Array],
        *,
        held: Callable[[Region], Held],
        loops: bool,
    ) -> None:
        self.legate = legate
        self.bundle = bundle
        self.record: Record | None = None
        self.forms = _forms(bundle, legate, machine)
        self.whole = len(machine.processors) == len(legate.cpus)
        self.processors = len(machine.processors)
        self._find = held
        self._held: list[Held] = []
        self._programs = [
            LaneProgram(lane, machine, faults, shared, loops) for lane in bundle.lanes
        ]
        self._ranks = [argument.region.rank for argument in bundle.arguments]
        self._replaced = [_replaced(bundle, number) for number in range(len(bundle.arguments))]
        self.number = legate.add(self.call)

    def call(self, context: Any) -> Callable[[], None]:
        """What runs the lane that this task of Legate is; it raises nothing."""
        if self.forms is not None:
            lane = int(np.ravel_multi_index(tuple(context.task_index), self.bundle.grid))
        else:
            lane = int(context.scalars[1].value())
        inputs, outputs = iter(context.inputs), iter(context.outputs)
        arrays: list[Array | None] = []
        boxes = self.bundle.lanes[lane].boxes
        for argument, held, rank, box in zip(self.bundle.arguments, self._held, self._ranks, boxes):
            if box is None:
                arrays.append(None)
                continue
            given = next(inputs) if argument.reads else None
            if argument.writes:
                given = next(outputs)
            arrays.append(held.seen(given, rank))
        return partial(self._programs[lane].run, arrays, self.record)

    def issue(self) -> None:
        """Launch the bundle's tasks."""
        self.legate.begin()
        self._held = [self._find(argument.region) for argument in self.bundle.arguments]
        for held, replaced in zip(self._held, self._replaced):
            held.define(replaced)
        if self.forms is not None:
            with self._scope(None):
                task = self.legate.task_of(self.number, self.bundle.grid)
                for argument, held, form in zip(self.bundle.arguments, self._held, self.forms):
                    handle, projection = held.tiles(form.box, form.tile, form.dims)
                    if argument.reads:
                        task.add_input(handle, projection)
                    if argument.writes:
                        task.add_output(handle, projection)
                task.execute()
        else:
            for number, lane in enumerate(self.bundle.lanes):
                with self._scope(lane.processor):
                    task = self.legate.task_of(self.number, (1,))
                    for argument, held, box in zip(self.bundle.arguments, self._held, lane.boxes):
                        if box is None:
                            continue
                        handle = held.box(box)
                        if argument.reads:
                            task.add_input(handle)
                        if argument.writes:
                            task.add_output(handle)
                    task.add_scalar_arg(number, self.legate.core.int64)
                    task.execute()

    def _scope(self, processor: int | None) -> AbstractContextManager[None]:
        """The scope of one processor, or of all that are the machine's."""
        priority = max(operation.priority for operation in self.bundle.lanes[0].operations())
        wanted: dict[str, Any] = {"priority": priority} if priority else {}
        if processor is not None and (processor or priority):
            wanted["machine"] = self.legate.cpus[processor]
        elif processor is None and not self.whole:
            wanted["machine"] = self.legate.machine[: self.processors]
        scope: AbstractContextManager[None] = (
            self.legate.core.Scope(**wanted) if wanted else nullcontext()
        )
        return scope


def _forms(bundle: Bundle, legate: Legate, machine: Machine) -> list[Form] | None:
    """The regular cut of each argument, when one index launch puts each lane where it belongs."""
    count, processors = len(bundle.lanes), len(machine.processors)
    if bundle.apart or len(bundle.grid) > legate.core.LEGATE_MAX_DIM or count < processors:
        return None
    if count == 1 or [lane.processor for lane in bundle.lanes] != [
        lane * processors // count for lane in range(count)
    ]:
        return None
    found = []
    for number in range(len(bundle.arguments)):
        form = form_of([lane.boxes[number] for lane in bundle.lanes], bundle.grid)
        if form is None:
            return None
        found.append(form)
    return found


def _replaced(bundle: Bundle, number: int) -> bool:
    """Whether a bundle writes every element of an argument's region, and needs none of them."""
    argument = bundle.arguments[number]
    if argument.reads or not argument.writes:
        return False
    boxes = [box for lane in bundle.lanes if (box := lane.boxes[number]) is not None]
    return sum(volume(box) for box in boxes) == argument.region.size
