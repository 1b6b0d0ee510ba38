"""Dependence analysis: from launches to operations, ordered by their uses of instances.

An index launch is analysed as a whole: its partition is compared with the partitions that used each
instance since the last write, for all points at once. Operations on different instances of a region
are not ordered; copies between the instances carry both values and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis import eviction
from soapstone.runtime.analysis.coherence import Coherence, Group, Piece, internal_partition
from soapstone.runtime.analysis.instance import READ, WRITE, Use
from soapstone.runtime.analysis.operation import ALONE, Operation, Sink
from soapstone.runtime.analysis.policy import Ordered
from soapstone.runtime.analysis.reduction import FoldPlan, plan
from soapstone.runtime.analysis.transfer import FILL
from soapstone.runtime.errors import MemoryExhausted, RuntimeCoreError
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.world import World
from soapstone.runtime.model import tiling as geometry
from soapstone.runtime.model.launch import Launch, fill_name, fold_name, internal
from soapstone.runtime.model.mapper import Mapper
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import identity
from soapstone.runtime.observe.statistics import Statistics

if TYPE_CHECKING:
    from soapstone.runtime.observe.log_part import Part

_PLAN_LIMIT = 4096


class Analysis(Coherence):
    """The state of one analysis: the instances of each region, and their last users."""

    steals = True  # idle processors may take over operations

    def __init__(
        self, machine: Machine, mapper: Mapper, statistics: Statistics, sink: Sink, world: World
    ) -> None:
        super().__init__(machine, mapper, statistics, sink, world)
        self._plans: dict[tuple[Any, ...], FoldPlan] = {}
        self.log: Part | None = None

    # -- launches

    def launch(self, launch: Launch) -> None:
        """Analyse one launch, the copies that it needs, and the folds of its partial results."""
        if self.log is not None:
            self.log.launch(launch)
        self.statistics.launches += 1
        self.statistics.points += launch.points
        before = geometry.interference_tests
        self.policy.forget()
        processors = self.policy.processors(launch)
        groups: list[Group] = []
        folds: list[tuple[int, FoldPlan, list[Region]]] = []
        for argument, (partition, privilege) in enumerate(
            zip(launch.partitions, launch.task.privileges)
        ):
            if privilege.reduction is None:
                access = READ * privilege.reads | WRITE * privilege.writes
                groups.append(Group(argument, None, partition.region, partition.tiling, access))
                continue
            found = self._plan(launch, argument, processors)
            buffers = []
            for bucket in found.buckets:
                buffer = Region(
                    bucket.tiling.shape,
                    partition.region.dtype,
                    f"{partition.region.name}.partials",
                    transient=True,
                )
                buffers.append(buffer)
                self._buffers.add(buffer)
                groups.append(Group(argument, bucket.points, buffer, bucket.tiling, WRITE, True))
            folds.append((argument, found, buffers))
        self._issue(launch, processors, groups)
        try:
            for argument, found, buffers in folds:
                self._fold(launch, argument, found, buffers)
        except RuntimeCoreError as error:
            error.halfway = True
            raise
        if self.spaces:
            eviction.after(self, launch)
        self.policy.forget()
        if self.log is not None:
            self.log.launched()
        self.statistics.interference_tests += geometry.interference_tests - before

    def _plan(self, launch: Launch, argument: int, processors: list[int]) -> FoldPlan:
        partition = launch.partitions[argument]
        reduction = launch.task.privileges[argument].reduction or ""
        memories = self.policy.memories(launch, argument, processors)
        spread = len(set(memories)) > 1
        itemsize = partition.region.dtype.itemsize
        key = (
            partition.tiling.uid,
            itemsize,
            reduction,
            launch.initialise,
            tuple(processors),
            spread,
        )
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) > _PLAN_LIMIT:
                self._plans.clear()
            found = plan(
                partition.tiling, itemsize, reduction, launch.initialise, processors, spread
            )
            self._plans[key] = found
        return found

    def _fold(self, launch: Launch, argument: int, plan: FoldPlan, buffers: list[Region]) -> None:
        region = launch.partitions[argument].region
        if plan.fill_first:
            reduction = launch.task.privileges[argument].reduction or ""
            self._fill(region, identity(reduction, region.dtype))
        for fold in plan.folds:
            # Reductions keep the mapper's answers for the argument they come from.
            partitions = [internal_partition(region, fold.out)]
            partitions += [internal_partition(buffers[b], tiles) for b, tiles in fold.reads]
            folding = internal(fold.task, partitions, fold_name(launch.name), launch.tag)
            access = READ | WRITE if plan.reads_output else WRITE
            groups = [Group(0, None, region, fold.out, access)]
            groups += [
                Group(1 + slot, None, buffers[bucket], tiles, READ)
                for slot, (bucket, tiles) in enumerate(fold.reads)
            ]
            self.statistics.folds += fold.out.points
            self._issue(folding, fold.processors.tolist(), groups, origin=(launch, argument))

    def fill(self, region: Region, value: Any) -> None:
        """Issue a fill of a whole region, cut over the processors when it is large."""
        self.policy.forget()
        self._fill(region, value, self.log)

    def _fill(self, region: Region, value: Any, log: Part | None = None) -> None:
        processors = self.machine.workers
        cut = len(processors) if region.nbytes > 1 << 20 else 1
        if region.rank and region.shape[0] >= cut > 1:
            partition = Partition.tiled(region, (cut,) + (1,) * (region.rank - 1))
        else:
            partition = Partition.whole(region)
        launch = internal(FILL, (value, partition), fill_name(region.name))
        placed = self.policy.processors(launch)
        if log is not None:
            log.fill(region, value)
        self._issue(launch, placed, [Group(0, None, region, partition.tiling, WRITE)])

    def _issue(
        self,
        launch: Launch,
        processors: list[int],
        groups: list[Group],
        origin: tuple[Launch, int] | None = None,
    ) -> None:
        """Make the operations of one launch and emit them with their dependences."""
        points = len(processors)
        how = self.policy.ordered(launch, processors, self.steals, origin)
        try:
            columns, pieces = self._uses(launch, processors, groups, origin)
        except MemoryExhausted:
            if not eviction.leave_all(self):
                raise
            columns, pieces = self._uses(launch, processors, groups, origin)  # without any gaps
        uses = list(zip(*columns)) if columns else [()] * points
        ids = _numbers(points) + self.next_id
        edges: list[tuple[Array, Array]] = []
        for piece in pieces:
            who = ids if piece.points is None else ids[piece.points]
            edges += piece.instance.depend(piece.tiling, who, piece.access)
        for piece in pieces:
            if piece.access & WRITE:
                piece.state.wrote(piece.instance, piece.tiling)
        if len(edges) == 1:
            sources, targets = edges[0]
        elif edges:
            sources = np.concatenate([source for source, _ in edges])
            targets = np.concatenate([target for _, target in edges])
        else:
            sources = targets = np.zeros(0, dtype=np.int64)
        self.statistics.edges += int(sources.size)
        operations = self._operations(launch, processors, uses, how)
        if how.stealable:
            self._slice(operations, how.slices)
        if operations:
            self.sink.emit(operations, sources, targets)

    def _operations(
        self,
        launch: Launch,
        processors: list[int],
        uses: Sequence[tuple[Use, ...]],
        how: Ordered,
    ) -> list[Operation]:
        """The operations of one launch, of the points that run in this process."""
        first = self.next_id
        self.next_id += len(processors)
        variants = how.variants
        mine = self.sink.mine
        idle = _idle(launch) if any(p.tiling.empty for p in launch.partitions) else None
        return [
            Operation(
                first + point,
                launch,
                point,
                processor,
                uses[point],
                how.priority,
                None if variants is None else variants[point],
                idle is not None and bool(idle[point]),
            )
            for point, processor in enumerate(processors)
            if mine is None or mine[processor]
        ]

    def _uses(
        self,
        launch: Launch,
        processors: list[int],
        groups: list[Group],
        origin: tuple[Launch, int] | None,
    ) -> tuple[list[Sequence[Use]], list[Piece]]:
        """The instances that the points of a launch use, for each argument, made valid."""
        self.launching = launch
        self.pinned.clear()
        columns: list[Sequence[Use]] = [()] * len(launch.partitions)
        pieces: list[Piece] = []
        for group in groups:
            asked = origin if origin is not None else (launch, group.argument)
            found = self._locate(group, processors, asked, pieces)
            if group.points is None:
                columns[group.argument] = found
            else:
                column = list(columns[group.argument]) or self._empty(launch, group.argument)
                for point, use in zip(group.points.tolist(), found):
                    column[point] = use
                columns[group.argument] = column
        for argument, given in enumerate(columns):
            if not given:  # every tile is empty
                columns[argument] = self._empty(launch, argument)
        return columns, pieces

    @staticmethod
    def _slice(operations: Sequence[Operation], labels: Sequence[int] | None) -> None:
        """Mark operations that idle processors may take over, slice by slice."""
        heads: dict[int, int] = {}
        for operation in operations:
            operation.slice = ALONE
            if labels is not None:
                operation.slice = heads.setdefault(labels[operation.point], operation.id)

    @staticmethod
    def _empty(launch: Launch, argument: int) -> list[Use]:
        """Uses of nothing for all points: an empty tile has no private buffer."""
        boxes = launch.partitions[argument].tiling.boxes
        return [Use(None, box, True, False) for box in boxes]


@lru_cache(maxsize=256)
def _numbers(count: int) -> Array:
    """The numbers from 0. Returns int64 (count,).

    The result is kept: `arange` releases the interpreter lock, and reacquiring it means a sleep if
    a worker waits for it.
    """
    return np.arange(count, dtype=np.int64)


def _idle(launch: Launch) -> Array:
    """Which points write only empty tiles. Returns bool (points,)."""
    written = [
        partition.tiling.volume == 0
        for partition, privilege in zip(launch.partitions, launch.task.privileges)
        if privilege.writes
    ]
    if not written:
        return np.zeros(launch.points, dtype=bool)
    found: Array = np.logical_and.reduce(written)
    return found
