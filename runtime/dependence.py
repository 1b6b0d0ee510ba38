"""Dependence analysis: launches become operations, ordered by what they do to instances.

One index launch is analysed as one: its partition is compared with the partitions that used each
instance since the last write, all points at once. Operations that use different instances of a
region are not ordered; copies between the instances carry the values and the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from . import tiling as geometry
from .errors import MapperError, UnwrittenError
from .instance import READ, WRITE, Cells, Instance, Instances, Storage, minus, union
from .launch import Launch
from .machine import Machine
from .mapper import DefaultMapper, Mapper
from .partition import Partition
from .reduction import FoldPlan, plan
from .region import Region
from .statistics import Statistics
from .task import identity
from .tiling import Box, Tiling
from .transfer import COPY, FILL

Array = np.ndarray[Any, np.dtype[Any]]
_PLAN_LIMIT = 4096


class Use:
    """How one operation sees one argument: a box of a storage (None when the box is empty)."""

    __slots__ = ("box", "squeeze", "storage", "writes")

    def __init__(self, storage: Storage | None, box: Box, writes: bool, squeeze: bool) -> None:
        self.storage = storage
        self.box = box
        self.writes = writes
        self.squeeze = squeeze

    def view(self, dtype: np.dtype[Any]) -> Array:
        """The array of the box: the point's tile, without the slice axis of a reduce buffer."""
        if self.storage is None:
            shape = tuple(high - low for low, high in zip(*self.box))
            return np.zeros(shape, dtype=dtype)
        array = self.storage.view(self.box)
        if self.squeeze:
            array = array[0, ...]
        return array


class Operation:
    """One point task, copy, fill or fold, with its place and its arguments."""

    __slots__ = (
        "id",
        "launch",
        "order",
        "pending",
        "point",
        "priority",
        "processor",
        "successors",
        "uses",
        "variant",
    )

    def __init__(
        self,
        number: int,
        launch: Launch,
        point: int,
        processor: int,
        uses: list[Use],
        priority: int,
        variant: str | None,
    ) -> None:
        self.id = number
        self.launch = launch
        self.point = point
        self.processor = processor
        self.uses = uses
        self.priority = priority
        self.variant = variant
        self.pending = 0
        self.successors: list[Operation] = []

    @property
    def kind(self) -> str:
        """ "task", "copy", "fill" or "fold"."""
        return self.launch.task.kind

    @property
    def idle(self) -> bool:
        """Whether the point has something to write, and all of it is empty."""
        written = [use.box for use in self.uses if use.writes]
        return bool(written) and all(
            any(a == b for a, b in zip(*box)) for box in written
        )

    def arrays(self) -> list[Array]:
        """The arrays of the region arguments, in order; writeable."""
        return [
            use.view(partition.region.dtype)
            for use, partition in zip(self.uses, self.launch.partitions)
        ]


class Sink(Protocol):
    """Where analysed operations go: to the workers, or into a trace."""

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations and the dependences (ids, int64) that end in them."""

    def allocate(self, storage: Storage) -> None:
        """Give a new storage its bytes, now or later."""


@dataclass(frozen=True, eq=False, slots=True)
class _Group:
    """Some points of one argument that use one region through one tiling."""

    argument: int
    points: Array | None  # None: all, in order
    region: Region
    tiling: Tiling
    access: int
    squeeze: bool = False


class Analysis:
    """The state of one analysis: the instances of each region and who used them last."""

    def __init__(
        self, machine: Machine, mapper: Mapper, statistics: Statistics, sink: Sink
    ) -> None:
        self.machine = machine
        self.mapper = mapper
        self.statistics = statistics
        self.sink = sink
        self.regions: weakref.WeakKeyDictionary[Region, Instances] = weakref.WeakKeyDictionary()
        self.next_id = 0
        self.keep: list[Region] | None = None  # a capture keeps its regions alive
        self._memory_index = {memory.name: i for i, memory in enumerate(machine.memories)}
        self._homes = [self._memory_index[p.memory] for p in machine.processors]
        self._one_memory = len(machine.memories) == 1
        self._asks_memory = type(mapper).memory is not DefaultMapper.memory
        self._asks_variant = type(mapper).variant is not DefaultMapper.variant
        self._asks_priority = type(mapper).priority is not DefaultMapper.priority
        self._bandwidth = {
            (link.source, link.target): link.bytes_per_s for link in machine.links
        }
        self._plans: dict[tuple[Any, ...], FoldPlan] = {}
        self._buffers: weakref.WeakSet[Region] = weakref.WeakSet()

    # -- launches

    def launch(self, launch: Launch) -> None:
        """Analyse one launch, with the copies it needs and the folds that follow it."""
        self.statistics.launches += 1
        self.statistics.points += launch.points
        before = geometry.interference_tests
        processors = self._place(launch)
        groups: list[_Group] = []
        folds: list[tuple[int, FoldPlan, list[Region]]] = []
        for argument, (partition, privilege) in enumerate(
            zip(launch.partitions, launch.task.privileges)
        ):
            if privilege.reduction is None:
                access = READ * privilege.reads | WRITE * privilege.writes
                groups.append(
                    _Group(argument, None, partition.region, partition.tiling, access)
                )
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
                groups.append(
                    _Group(argument, bucket.points, buffer, bucket.tiling, WRITE, True)
                )
            folds.append((argument, found, buffers))
        self._issue(launch, processors, groups, partials=bool(folds))
        for argument, found, buffers in folds:
            self._fold(launch, argument, found, buffers)
        self.statistics.interference_tests += geometry.interference_tests - before

    def _place(self, launch: Launch) -> list[int]:
        answer = np.asarray(self.mapper.place_all(launch))
        count = len(self.machine.processors)
        if answer.shape != (launch.points,) or answer.dtype.kind not in "iu":
            raise MapperError(
                f"task {launch.name!r}: place_all returned {answer.dtype} {answer.shape}, "
                f"needed integers ({launch.points},)"
            )
        if answer.size and (int(answer.min()) < 0 or int(answer.max()) >= count):
            wrong = int(np.nonzero((answer < 0) | (answer >= count))[0][0])
            raise MapperError(
                f"task {launch.name!r}: place put point {wrong} on processor "
                f"{int(answer[wrong])}, needed 0..{count - 1}"
            )
        placed: list[int] = answer.tolist()
        return placed

    def _plan(self, launch: Launch, argument: int, processors: list[int]) -> FoldPlan:
        partition = launch.partitions[argument]
        reduction = launch.task.privileges[argument].reduction or ""
        memories = self._memories(launch, argument, processors)
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

    def _fold(
        self, launch: Launch, argument: int, found: FoldPlan, buffers: list[Region]
    ) -> None:
        region = launch.partitions[argument].region
        if found.fill_first:
            reduction = launch.task.privileges[argument].reduction or ""
            self.fill(region, identity(reduction, region.dtype))
        for fold in found.folds:
            # Reductions keep the mapper's answers for the argument they come from.
            partitions = [_internal_partition(region, fold.out)]
            partitions += [_internal_partition(buffers[b], tiles) for b, tiles in fold.reads]
            folding = Launch(
                fold.task,
                tuple(partitions),
                (),
                (True,) * len(partitions),
                (fold.out.points,),
                f"{launch.name}.fold",
                launch.tag,
            )
            access = READ | WRITE if found.reads_output else WRITE
            groups = [_Group(0, None, region, fold.out, access)]
            groups += [
                _Group(1 + slot, None, buffers[bucket], tiles, READ)
                for slot, (bucket, tiles) in enumerate(fold.reads)
            ]
            self.statistics.folds += fold.out.points
            self._issue(folding, fold.processors.tolist(), groups, origin=(launch, argument))

    def fill(self, region: Region, value: Any) -> None:
        """Issue a fill of a whole region, cut over the processors when it is large."""
        processors = self.machine.processors
        cut = len(processors) if region.nbytes > 1 << 20 else 1
        if region.rank and region.shape[0] >= cut > 1:
            partition = Partition.tiled(region, (cut,) + (1,) * (region.rank - 1))
        else:
            partition = Partition.whole(region)
        launch = Launch(
            FILL, (partition,), (value,), (False, True), partition.grid, f"fill {region.name}"
        )
        placed = self._place(launch)
        self._issue(launch, placed, [_Group(0, None, region, partition.tiling, WRITE)])

    def _issue(
        self,
        launch: Launch,
        processors: list[int],
        groups: list[_Group],
        origin: tuple[Launch, int] | None = None,
        partials: bool = False,
    ) -> None:
        """Make the operations of one launch and hand them on with their dependences."""
        points = len(processors)
        uses: list[list[Use]] = [[] for _ in range(points)]
        pieces: list[tuple[Instances, Instance, Tiling, Array | None, int]] = []
        slots: dict[int, dict[int, Use]] = {}
        for group in groups:
            asked = origin if origin is not None else (launch, group.argument)
            mine = self._locate(group, processors, asked, pieces)
            if partials:
                slots.setdefault(group.argument, {}).update(mine)
            else:
                for point in range(points):
                    uses[point].append(mine[point])
        if partials:
            for argument, partition in enumerate(launch.partitions):
                found = slots.get(argument, {})
                writes = launch.task.privileges[argument].writes
                for point in range(points):
                    use = found.get(point)
                    if use is None:  # an empty tile has no private buffer
                        use = Use(None, partition.tiling.boxes[point], writes, False)
                    uses[point].append(use)
        first = self.next_id
        self.next_id += points
        ids = np.arange(first, self.next_id, dtype=np.int64)
        edges: list[tuple[Array, Array]] = []
        for state, instance, tiling, chosen, access in pieces:
            who = ids if chosen is None else ids[chosen]
            edges += instance.depend(tiling, who, access)
            state.touched = True
        for state, instance, tiling, _, access in pieces:
            if access & WRITE:
                state.wrote(instance, tiling)
        if len(edges) == 1:
            sources, targets = edges[0]
        elif edges:
            sources = np.concatenate([source for source, _ in edges])
            targets = np.concatenate([target for _, target in edges])
        else:
            sources = targets = np.zeros(0, dtype=np.int64)
        self.statistics.edges += int(sources.size)
        priority = int(self.mapper.priority(launch)) if self._asks_priority else 0
        machine, mapper = self.machine.processors, self.mapper
        operations = [
            Operation(
                first + point,
                launch,
                point,
                processor,
                uses[point],
                priority,
                mapper.variant(launch, point, machine[processor]) if self._asks_variant else None,
            )
            for point, processor in enumerate(processors)
        ]
        self.sink.emit(operations, sources, targets)

    # -- instances

    def _memories(self, launch: Launch, argument: int, processors: list[int]) -> list[int]:
        """The memory index of each point's instance of one argument."""
        if self._one_memory:
            return [0] * len(processors)
        if not self._asks_memory:
            return [self._homes[processor] for processor in processors]
        answers: dict[int, int] = {}
        for processor in set(processors):
            name = self.mapper.memory(launch, argument, self.machine.processors[processor])
            if name not in self._memory_index:
                raise MapperError(
                    f"task {launch.name!r}: memory of argument {argument} on processor "
                    f"{self.machine.processors[processor].name!r} is {name!r}, "
                    f"needed one of {sorted(self._memory_index)}"
                )
            answers[processor] = self._memory_index[name]
        return [answers[processor] for processor in processors]

    def state(self, region: Region) -> Instances:
        """The instances of a region."""
        found = self.regions.get(region)
        if found is None:
            found = self._begin(region)
            self.regions[region] = found
            if self.keep is not None:
                self.keep.append(region)
        return found

    def _begin(self, region: Region) -> Instances:
        return Instances(region)

    def _whole(self, region: Region, memory: int, partials: bool) -> bool:
        if partials:
            return self._one_memory
        answer = self.mapper.whole_instances(region, self.machine.memories[memory].name)
        return bool(answer)

    def instance(self, region: Region, memory: int, box: Box | None = None) -> Instance:
        """The instance of a region in a memory, made if absent: whole, or of a tile's box."""
        state = self.state(region)
        whole = (tuple([0] * region.rank), region.shape)
        found = state.by_key.get((memory, None))
        if found is not None:
            return found
        if box is not None and box != whole:
            for (where, _), instance in state.by_key.items():
                if where == memory and _contains(instance.storage.box, box):
                    return instance
            key: tuple[int, Box | None] = (memory, box)
        else:
            box, key = whole, (memory, None)
        storage = self._storage(region, memory, box)
        fresh = not state.by_key and key[1] is None and not region.transient
        instance = Instance(storage, fresh, fresh)
        state.by_key[key] = instance
        return instance

    def _storage(self, region: Region, memory: int, box: Box) -> Storage:
        order = self.mapper.order(region)
        if order is not None and sorted(order) != list(range(region.rank)):
            raise MapperError(
                f"region {region.name!r}: order {order!r}, needed a permutation of its "
                f"{region.rank} axes or None"
            )
        if order is not None and tuple(order) == tuple(range(region.rank)):
            order = None
        storage = Storage(region, memory, box, None if order is None else tuple(order))
        self.sink.allocate(storage)
        return storage

    def _locate(
        self,
        group: _Group,
        processors: list[int],
        asked: tuple[Launch, int],
        pieces: list[tuple[Instances, Instance, Tiling, Array | None, int]],
    ) -> dict[int, Use]:
        """The instance each point uses, valid for what it reads. Returns uses by point."""
        region, tiling, access = group.region, group.tiling, group.access
        state = self.state(region)
        chosen = group.points
        everyone: Sequence[int] = range(len(processors)) if chosen is None else chosen.tolist()
        mine = processors if chosen is None else [processors[p] for p in everyone]
        memories = self._memories(asked[0], asked[1], mine)
        boxes = tiling.boxes
        writes = bool(access & WRITE)
        partials = region in self._buffers
        split: list[tuple[Instance, Array | None]] = []
        if memories.count(memories[0]) == len(memories) and self._whole(
            region, memories[0], partials
        ):
            split.append((self.instance(region, memories[0]), None))
        else:
            by_instance: dict[int, tuple[Instance, list[int]]] = {}
            whole = {memory: self._whole(region, memory, partials) for memory in set(memories)}
            for place, memory in enumerate(memories):
                if not tiling.volume[place]:
                    continue
                instance = self.instance(
                    region, memory, None if whole[memory] else boxes[place]
                )
                by_instance.setdefault(id(instance), (instance, []))[1].append(place)
            split += [
                (instance, np.array(places, dtype=np.int64))
                for instance, places in by_instance.values()
            ]
        uses: dict[int, Use] = {}
        for instance, places in split:
            part = tiling if places is None else tiling.subset(places)
            if access & READ:
                where = processors[everyone[0 if places is None else int(places[0])]]
                self._acquire(state, region, instance, part, where, asked[0])
            targets = chosen if places is None else places if chosen is None else chosen[places]
            pieces.append((state, instance, part, targets, access))
            storage = instance.storage
            inside = range(len(everyone)) if places is None else places.tolist()
            for place in inside:
                uses[everyone[place]] = Use(storage, boxes[place], writes, group.squeeze)
        if len(uses) < len(everyone):
            for place, point in enumerate(everyone):
                if point not in uses:
                    uses[point] = Use(None, boxes[place], writes, group.squeeze)
        return uses

    def _acquire(
        self,
        state: Instances,
        region: Region,
        instance: Instance,
        tiling: Tiling,
        processor: int,
        launch: Launch,
    ) -> None:
        """Make a tiling's union valid in an instance, by copies from wherever it is valid."""
        missing = state.missing(instance, tiling)
        if missing is not False:
            for box in dict.fromkeys(tiling.boxes):
                self._fetch(state, region, instance, box, processor, launch)
        state.read(instance, tiling)

    def _fetch(
        self,
        state: Instances,
        region: Region,
        instance: Instance,
        box: Box,
        processor: int,
        launch: Launch | None,
    ) -> None:
        """Copy what one box lacks; what nobody has was never written, and is zero."""
        tile = geometry.single(region.shape, *box)
        missing = state.missing(instance, tile)
        if missing is False:
            return
        others = sorted(
            (other for other in state if other is not instance), key=self._distance(instance)
        )
        for source in others:
            state.mask(tile)
            found = minus(missing, minus(missing, source.valid))
            if found is False:
                continue
            shared = state.cells(found).copy()
            for piece in list(state.boxes(shared, (0,) * shared.ndim)):
                self._copy(state, region, source, instance, piece, processor)
            missing = state.missing(instance, tile)
            if missing is False:
                return
        if region.transient and launch is not None:
            raise UnwrittenError(
                f"task {launch.name!r} reads transient region {region.name!r}, box "
                f"{list(box[0])}..{list(box[1])}, before this step has written all of it"
            )
        instance.valid = union(instance.valid, missing)
        instance.inherited = union(instance.inherited, missing)

    def _distance(self, target: Instance) -> Any:
        names = [memory.name for memory in self.machine.memories]

        def key(source: Instance) -> tuple[float, int]:
            if source.storage.memory == target.storage.memory:
                return (0.0, 0)
            link = (names[source.storage.memory], names[target.storage.memory])
            rate = self._bandwidth.get(link, 0.0)
            return (1.0 / rate if rate else 1e30, source.storage.memory)

        return key

    def _copy(
        self,
        state: Instances,
        region: Region,
        source: Instance,
        target: Instance,
        box: Box,
        processor: int,
    ) -> None:
        """Issue one copy of a box between two instances."""
        tile = geometry.single(region.shape, *box)
        number = self.next_id
        self.next_id += 1
        ids = np.array([number], dtype=np.int64)
        edges = source.depend(tile, ids, READ) + target.depend(tile, ids, WRITE)
        state.copied(source, target, tile)
        state.touched = True
        partition = _internal_partition(region, tile)
        launch = Launch(
            COPY, (partition, partition), (), (True, True), (1,), f"copy {region.name}"
        )
        uses = [Use(source.storage, box, False, False), Use(target.storage, box, True, False)]
        self.statistics.copies += 1
        self.statistics.bytes_copied += int(tile.volume[0]) * region.dtype.itemsize
        operation = Operation(number, launch, 0, processor, uses, 0, None)
        none = np.zeros(0, dtype=np.int64)
        sources = np.concatenate([none, *[a for a, _ in edges]])
        targets = np.concatenate([none, *[b for _, b in edges]])
        self.statistics.edges += int(sources.size)
        self.sink.emit([operation], sources, targets)

    def host_instance(self, region: Region) -> Instance:
        """The whole instance of a region in the host memory, made if absent."""
        return self.instance(region, 0)

    def complete(self, region: Region, instance: Instance, cells: Cells) -> None:
        """Issue the copies that make a set of cells valid in an instance."""
        state = self.state(region)
        lacking = minus(cells, instance.valid)
        if lacking is False:
            return
        homes = [p for p, home in enumerate(self._homes) if home == instance.storage.memory]
        work = state.cells(lacking).copy()
        for box in list(state.boxes(work, (0,) * work.ndim)):
            self._fetch(state, region, instance, box, homes[0] if homes else 0, None)


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= b for a, b in zip(outer[0], inner[0])) and all(
        a >= b for a, b in zip(outer[1], inner[1])
    )


def _internal_partition(region: Region, tiling: Tiling) -> Partition:
    """A partition with a tiling of the runtime's own making: nothing to check."""
    partition = object.__new__(Partition)
    for name, value in (
        ("region", region),
        ("lo", tiling.lo),
        ("hi", tiling.hi),
        ("grid", (tiling.points,)),
        ("tiling", tiling),
    ):
        object.__setattr__(partition, name, value)
    return partition

