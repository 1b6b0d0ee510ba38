"""Coherence: the instance that each point uses, and the copies that make it valid.

A write makes other instances stale. A read of elements that are not valid in an instance copies
them from the nearest instance where they are valid. Validity is tracked per region and element.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.analysis import eviction, message
from soapstone.runtime.analysis.instance import (
    READ,
    WRITE,
    Cells,
    Instance,
    InstanceKey,
    Instances,
    Storage,
    Use,
    both,
    minus,
    union,
)
from soapstone.runtime.analysis.operation import Operation, Sink
from soapstone.runtime.analysis.policy import Policy
from soapstone.runtime.analysis.transfer import COPY
from soapstone.runtime.errors import UnwrittenError
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.space import Space
from soapstone.runtime.machines.world import World
from soapstone.runtime.model import tiling as geometry
from soapstone.runtime.model.launch import Launch, internal
from soapstone.runtime.model.mapper import Layout, Mapper, Order
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box, Tiling, contains
from soapstone.runtime.observe.statistics import Statistics

_CUT_BYTES = 1 << 18  # larger copies are shared by several processors


@dataclass(eq=False, slots=True)
class Group:
    """The points of one argument that use one region through one tiling."""

    argument: int
    points: Array | None  # None: all, in order
    region: Region
    tiling: Tiling
    access: int
    squeeze: bool = False


@dataclass(eq=False, slots=True)
class Piece:
    """The points of a launch that use one instance through one tiling; None: all, in order."""

    state: Instances
    instance: Instance
    tiling: Tiling
    points: Array | None
    access: int


class Coherence:
    """The instances of each region: found or made where the mapper wants them, and kept valid."""

    def __init__(
        self, machine: Machine, mapper: Mapper, statistics: Statistics, sink: Sink, world: World
    ) -> None:
        self.machine = machine
        self.world = world
        self.mapper = mapper
        self.statistics = statistics
        self.sink = sink
        self.regions: weakref.WeakKeyDictionary[Region, Instances] = weakref.WeakKeyDictionary()
        self.next_id = 0
        self.keep: list[Region] | None = None  # a capture keeps its regions alive
        self.policy = Policy(machine, mapper, world)
        self._copiers: dict[int, list[int]] = {}  # by memory: to it, and from it
        for number in range(len(machine.workers), len(machine.processors)):
            self._copiers.setdefault(self.policy.homes[number], []).append(number)
        self._bandwidth = {(link.source, link.target): link.bytes_per_s for link in machine.links}
        self.launching: Launch | None = None  # the launch being analysed
        self.pinned: set[int] = set()  # its storages
        self.spaces = {  # of the memories that instances leave to make room
            memory: Space(machine.memories[memory].capacity_bytes)
            for memory, backing in enumerate(self.policy.backing)
            if backing is not None
        }
        self.placed: list[tuple[Callable[[], Region | None], Instance]] = []  # in those memories
        self._buffers: weakref.WeakSet[Region] = weakref.WeakSet()
        self.lent: weakref.WeakKeyDictionary[Region, Array] = weakref.WeakKeyDictionary()

    # -- instances

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

    def forget(self, below: int | None = None) -> None:
        """Forget the users of all instances that have ended; see `Instance.forget`."""
        for state in list(self.regions.values()):
            for instance in state:
                instance.forget(below)

    def _layout(
        self, asked: tuple[Launch, int], region: Region, memory: int
    ) -> tuple[bool, Layout | None]:
        """Whether an argument's instance is of the whole region, and the layout it needs."""
        if region in self._buffers:
            return len(set(self.policy.homes)) == 1, None
        found = self.policy.layout(*asked, region, memory)
        return (
            self.policy.whole(region, memory, asked[0]) if found is None else found.whole
        ), found

    def instance(
        self,
        region: Region,
        memory: int,
        box: Box | None = None,
        layout: Layout | None = None,
        exact: bool = False,
    ) -> Instance:
        """The instance of a region in a memory, of the whole or of a tile's box; made if absent.

        layout: the axis order that is needed; None: any. exact: of this box, and no larger one.
        """
        state = self.state(region)
        whole = (tuple([0] * region.rank), region.shape)
        if box == whole:
            box = None
        inside: Instance | None = None
        for (where, part, lies), instance in state.by_key.items():
            if where == memory and (layout is None or lies == layout.order):
                if part is None if not exact else part == box:
                    return instance
                if exact or box is None or part is None:
                    continue
                if inside is None and contains(part, box):
                    inside = instance
        if inside is not None:
            return inside
        order = self.policy.order(region, self.launching) if layout is None else layout.order
        key: InstanceKey = (memory, box, order)
        storage = self._storage(region, memory, whole if box is None else box, order, exact)
        fresh = not state.by_key and box is None and not region.transient
        instance = Instance(storage, fresh, fresh)
        state.by_key[key] = instance
        if memory in self.spaces:
            self.placed.append((eviction.holder(self, region), instance))
        return instance

    def _storage(
        self, region: Region, memory: int, box: Box, order: Order, exact: bool = False
    ) -> Storage:
        storage = Storage(region, memory, box, order)
        if memory in self.spaces:
            if not region.transient:
                eviction.home(self, region, memory)  # what nobody has written is zero there
            eviction.place(self, region, storage)
        elif memory == self.world.home and order is None and region in self.lent:
            storage.attach(self.lent[region].reshape(-1).view(np.uint8))
            return storage
        self.sink.allocate(storage)
        return storage

    def _locate(
        self,
        group: Group,
        processors: list[int],
        asked: tuple[Launch, int],
        pieces: list[Piece],
    ) -> Sequence[Use]:
        """The instance that each point of a group uses, made valid for what it reads.

        Returns the use of each point, in the group's order; appends what to depend on to `pieces`.
        """
        region, tiling, access = group.region, group.tiling, group.access
        state = self.state(region)
        chosen = group.points
        mine = processors if chosen is None else [processors[p] for p in chosen.tolist()]
        memories = self.policy.memories(*asked, mine)
        boxes = tiling.boxes
        writes = bool(access & WRITE)
        layouts = {memory: self._layout(asked, region, memory) for memory in sorted(set(memories))}
        if len(layouts) == 1 and layouts[memories[0]][0]:
            instance = self._pin(self.instance(region, memories[0], None, layouts[memories[0]][1]))
            if instance.storage.chosen and (access & READ or not tiling.complete):
                self.complete(region, instance, state.elsewhere(instance))
            if access & READ:
                self._acquire(state, region, instance, tiling, mine, asked[0])
            pieces.append(Piece(state, instance, tiling, chosen, access))
            return instance.uses(tiling, writes, group.squeeze)
        by_instance: dict[int, tuple[Instance, list[int]]] = {}
        for place, memory in enumerate(memories):
            if tiling.volume[place]:
                whole, layout = layouts[memory]
                box = None if whole else _extended(boxes[place], layout)
                found = self.instance(region, memory, box, layout)
                instance = self._pin(found)
                by_instance.setdefault(id(instance), (instance, []))[1].append(place)
        uses: list[Use | None] = [None] * len(mine)
        for instance, inside in by_instance.values():
            places = np.array(inside, dtype=np.int64)
            part = tiling.subset(places)
            if access & READ:
                self._acquire(state, region, instance, part, [mine[i] for i in inside], asked[0])
            targets = places if chosen is None else chosen[places]
            pieces.append(Piece(state, instance, part, targets, access))
            for place in inside:
                uses[place] = Use(instance.storage, boxes[place], writes, group.squeeze)
        return [
            use if use is not None else Use(None, boxes[place], writes, group.squeeze)
            for place, use in enumerate(uses)
        ]

    def _pin(self, instance: Instance) -> Instance:
        """Mark an instance as used by the launch under analysis."""
        self.pinned.add(id(instance.storage))
        instance.used = self.next_id
        return instance

    def _acquire(
        self,
        state: Instances,
        region: Region,
        instance: Instance,
        tiling: Tiling,
        processors: list[int],
        launch: Launch,
    ) -> None:
        """Make the union of a tiling valid in an instance, by copies from where it is valid.

        The processor of a tile's first point copies it; what several tiles share is divided
        equally.
        """
        missing = state.missing(instance, tiling)
        if missing is not False:
            tiles = dict(zip(reversed(tiling.boxes), reversed(processors)))
            sharing = list(dict.fromkeys(processors))
            for box in dict.fromkeys(tiling.boxes):
                parts = [(box, tiles[box])] if len(tiles) > 1 else self._parts(region, box, sharing)
                for part, processor in parts:
                    self._fetch(state, region, instance, part, processor, launch)
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
        """Copy what is missing of one box; elements that were never written are zero."""
        if any(low >= high for low, high in zip(*box)):
            return
        tile = geometry.single(region.shape, *box)
        missing = state.missing(instance, tile)
        if missing is False:
            return
        others = sorted(
            (other for other in state if other is not instance), key=self._distance(instance)
        )
        while others:
            state.mask(tile)
            others = [o for o in others if both(missing, o.valid) is not False]
            if not others:
                break
            chosen = self.policy.copy_source(launch, region, instance, others)
            source = others.pop(chosen or 0)
            found = both(missing, source.valid)
            shared = state.cells(found).copy()
            for piece in list(state.boxes(shared, (0,) * shared.ndim)):
                self._copy(state, region, source, instance, piece, processor)
            missing = state.missing(instance, tile)
            if missing is False:
                return
        if instance.storage.offset is not None and not region.transient:
            home = eviction.home(self, region, instance.storage.memory)
            home.valid = union(home.valid, missing)
            home.inherited = union(home.inherited, missing)
            self._fetch(state, region, instance, box, processor, launch)
            return
        if region.transient and launch is not None:
            raise UnwrittenError(
                f"task {launch.name!r} reads transient region {region.name!r}, box "
                f"{list(box[0])}..{list(box[1])}, before this step has written all of it"
            )
        instance.valid = union(instance.valid, missing)
        instance.inherited = union(instance.inherited, missing)

    def _distance(self, target: Instance) -> Any:
        """The order in which to try sources: fastest link first, then the earliest to be free.

        If every copy occupies its source and its target for one turn, contents that one instance
        has and all others want spread along a binomial tree.
        """
        names = [memory.name for memory in self.machine.memories]

        def key(source: Instance) -> tuple[float, int, int]:
            if source.storage.memory == target.storage.memory:
                return (0.0, 0, 0)
            link = (names[source.storage.memory], names[target.storage.memory])
            rate = self._bandwidth.get(link, 0.0)
            return (1.0 / rate if rate else 1e30, source.turns, source.storage.memory)

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
        """Issue one copy of a box between two instances.

        Between processes, what a message cannot take where it is goes through another instance.
        """
        tile = geometry.single(region.shape, *box)
        if self.world.apart(source.storage.memory, target.storage.memory):
            for end in (target, source):
                staged = self._staged(region, end, box)
                if staged is not None:
                    if state.missing(staged, tile) is not False:
                        self._copy(state, region, source, staged, box, processor)
                    self._copy(state, region, staged, target, box, processor)
                    return
        read = Use(source.storage, box, False, False)
        written = Use(target.storage, box, True, False)
        partition = internal_partition(region, tile)
        self.statistics.copies += 1
        self.statistics.bytes_copied += int(tile.volume[0]) * region.dtype.itemsize
        if self.world.apart(source.storage.memory, target.storage.memory):
            first = self._near(source.storage.memory)[0]
            launches = message.launches(partition, self.world, source.storage, target.storage)
            sides = [
                (launches[0], first, (read,), source, READ),
                (launches[1], processor, (written,), target, WRITE),
            ]
            for launch, place, uses, instance, access in sides:
                self._emit(launch, place, uses, instance.depend(tile, self._next(), access))
        else:
            launch = internal(COPY, (partition, partition), f"copy {region.name}")
            ids = self._next()
            edges = source.depend(tile, ids, READ) + target.depend(tile, ids, WRITE)
            ways = source.storage.memory, target.storage.memory
            self._emit(launch, self._copier(*ways, processor), (read, written), edges)
        source.turns = target.turns = source.turns + 1
        state.copied(source, target, tile)

    def _staged(self, region: Region, end: Instance, box: Box) -> Instance | None:
        """The instance that a message takes a box from, or brings it to, for one on a GPU.

        None: it is that one itself. It is in the memory of the host where messages reach no other,
        and beside it where they do, but would find the box in many pieces.
        """
        memory = end.storage.memory
        if memory not in self.machine.devices or (self.world.direct and end.storage.in_row(box)):
            return None
        if not self.world.direct or memory in self.spaces:
            return self.instance(region, self.world.hosts[self.world.owners[memory]], box)
        return self.instance(region, memory, box, Layout(), exact=True)

    def _copier(self, source: int, target: int, processor: int) -> int:
        """The processor that copies between two memories: a copier of either, or the one given."""
        if target in self._copiers:
            return self._copiers[target][0]
        return self._copiers[source][1] if source in self._copiers else processor

    def _next(self) -> Array:
        """The id of the next operation, for `_emit`. Returns int64 (1,)."""
        return np.array([self.next_id], dtype=np.int64)

    def _emit(
        self,
        launch: Launch,
        processor: int,
        uses: tuple[Use, ...],
        edges: Sequence[tuple[Array, Array]],
    ) -> None:
        """Issue one operation that the runtime adds by itself."""
        operation = Operation(self.next_id, launch, 0, processor, uses, 0, None)
        self.next_id += 1
        none = np.zeros(0, dtype=np.int64)
        sources = np.concatenate([none, *[a for a, _ in edges]])
        targets = np.concatenate([none, *[b for _, b in edges]])
        self.statistics.edges += int(sources.size)
        self.sink.emit([operation], sources, targets)

    def host_instance(self, region: Region) -> Instance:
        """The whole instance of a region in this process' host memory, made if absent."""
        return self.host_instances(region)[self.world.rank]

    def host_instances(self, region: Region) -> list[Instance]:
        """The whole instance in each process' host memory; elements never written are zero."""
        fresh = not self.state(region).by_key
        found = [self.instance(region, memory) for memory in self.world.hosts]
        if fresh:
            for instance in found:
                instance.valid = instance.inherited = found[0].valid
        return found

    def complete(self, region: Region, instance: Instance, cells: Cells) -> None:
        """Issue the copies that make a set of cells valid in an instance."""
        state = self.state(region)
        lacking = minus(cells, instance.valid)
        if lacking is False:
            return
        near = self._near(instance.storage.memory)
        work = state.cells(lacking).copy()
        for box in list(state.boxes(work, (0,) * work.ndim)):
            for part, processor in self._parts(region, box, near):
                self._fetch(state, region, instance, part, processor, None)

    def _near(self, memory: int) -> list[int]:
        """The processors that work in a memory, or if there are none, those of the same process."""
        homes = self.policy.homes[: len(self.machine.workers)]
        near = [p for p, home in enumerate(homes) if home == memory]
        return near or [p for p, home in enumerate(homes) if not self.world.apart(home, memory)]

    def _parts(self, region: Region, box: Box, processors: Sequence[int]) -> list[tuple[Box, int]]:
        """A box, cut along its longest axis over the processors that copy it if it is large."""
        extents = [high - low for low, high in zip(*box)]
        count = len(processors)
        if math.prod(extents) * region.dtype.itemsize <= _CUT_BYTES or max(extents) < count:
            return [(box, processors[0])]
        axis = extents.index(max(extents))
        low, high = box
        cuts = [low[axis] + extents[axis] * part // count for part in range(count + 1)]
        return [
            ((_at(low, axis, begin), _at(high, axis, end)), processor)
            for begin, end, processor in zip(cuts, cuts[1:], processors)
        ]


def _at(corner: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*corner[:axis], value, *corner[axis + 1 :])


def _extended(tile: Box, layout: Layout | None) -> Box:
    """The box of a tile's instance."""
    extent = None if layout is None else layout.extent
    return extent if extent is not None and contains(extent, tile) else tile


def internal_partition(region: Region, tiling: Tiling) -> Partition:
    """A partition with a tiling that the runtime made itself, which needs no check."""
    return Partition.cut(region, tiling, (tiling.points,))
