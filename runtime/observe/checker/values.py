"""Values: what ran is run again on symbols, and what each read found is what it should find."""

from __future__ import annotations

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.errors import ProfileError
from soapstone.runtime.observe.checker.cells import Grid, empty, part_boxes, tile_of
from soapstone.runtime.observe.checker.memory import Memory
from soapstone.runtime.observe.checker.records import Host, Operation, Records, Use
from soapstone.runtime.observe.checker.report import Report
from soapstone.runtime.observe.checker.segment import Segment, box_text, name_of
from soapstone.runtime.observe.checker.versions import Program, Versions


class Values:
    """The bytes of a run, in step with what its program says they should hold."""

    def __init__(
        self,
        records: Records,
        grids: dict[int, Grid],
        versions: Versions,
        program: Program,
        report: Report,
    ) -> None:
        self.records = records
        self.grids = grids
        self.versions = versions
        self.program = program
        self.report = report
        self.memory = Memory(records, grids, versions)
        self._sent: dict[int, Array] = {}  # what messages of this segment carry

    def run(self, segment: Segment) -> None:
        """Run a segment's operations."""
        self._sent = {}
        for number, possible in segment.in_turn():
            operation = segment.operations[number]
            if not possible:
                text = f"{name_of(operation)} ended before what it receives was sent"
                self.report.add("message", text)
            if operation.idle:
                continue
            if operation.what == "task":
                self._task(operation, segment)
            elif operation.what == "copy":
                source, target = operation.uses
                if source.storage is not None and target.storage is not None:
                    moved = self.memory.read(source.storage, source.box).copy()
                    self.memory.write(target.storage, target.box, moved, name_of(operation))
            elif operation.what == "fill":
                version = self.versions.of("value", operation.value)
                self._put(operation, operation.uses[0], version)
            elif operation.what == "fold":
                self._fold(operation)
            else:
                self._message(operation)

    def _put(self, operation: Operation, use: Use, version: Array | int) -> None:
        if use.storage is not None and not empty(use.box):
            self.memory.write(use.storage, use.box, version, name_of(operation))

    def _message(self, operation: Operation) -> None:
        """Start or end messages: bytes on their way must stay, and room for them be left alone."""
        for number, use in zip(operation.messages, operation.uses):
            if use.storage is None:
                continue
            if operation.what == "send":
                self._sent[number] = self.memory.read(use.storage, use.box).copy()
            elif operation.what == "sent":
                carried = self._sent.get(number)
                if carried is not None:
                    self._compare(f"{name_of(operation)} still reads", use, carried)
            elif operation.what == "post":
                self._put(operation, use, self.versions.of("coming", number))
            elif operation.what == "recv":
                carried = self._sent.get(number)
                if carried is None or carried.shape != self.memory.read(use.storage, use.box).shape:
                    self._put(operation, use, self.versions.of("coming", number))
                else:
                    self._put(operation, use, carried)
            else:
                raise ProfileError(f"log: {name_of(operation)} cannot be judged")

    def _task(self, operation: Operation, segment: Segment) -> None:
        instance = segment.instances.get(operation.launch or 0)
        if instance is None:
            return  # a violation already
        launch = self.versions.launches[instance]
        for number, (use, argument) in enumerate(zip(operation.uses, launch.arguments)):
            wanted = self.program.expected.get((instance, operation.point, number))
            if wanted is None or use.storage is None or argument.privilege not in ("r", "rw"):
                continue
            self.report.reads += 1
            self._compare(f"{name_of(operation)} reads", use, wanted)
        for number, (use, argument) in enumerate(zip(operation.uses, launch.arguments)):
            if argument.privilege in ("w", "rw"):
                version = self.versions.of("task", instance, number, operation.point)
                self._put(operation, use, version)
            elif argument.privilege == "reduce":
                version = self.versions.of("partial", instance, number, operation.point)
                self._put(operation, use, version)

    def _compare(self, who: str, use: Use, wanted: Array) -> None:
        if use.storage is None:
            return
        about, box = self.records.storages[use.storage], use.box
        region = self.records.regions[about.region]
        found = self.memory.read(about.id, box)
        if found.shape != wanted.shape:
            return  # the wrong tile: a violation already
        wrong = np.argwhere(found != wanted)
        if not len(wrong):
            return
        place = tuple(int(n) for n in wrong[0])
        cell = self.grids[region.id].box(place, box)
        self.report.add(
            "value",
            f"{who} region {region.name!r}, {box_text(cell)}, in memory "
            f"{self.records.memories[about.memory]!r}: found "
            f"{self.versions.text(int(found[place]))}, needed "
            f"{self.versions.text(int(wanted[place]))}",
        )

    def _fold(self, operation: Operation) -> None:
        """Fold partial results: each must be one whole partial result, and lie where it goes."""
        use = operation.uses[0]
        if use.storage is None or empty(use.box):
            return
        if operation.fresh is not None:
            self._put(operation, use, self.versions.of("value", operation.fresh))
        for part in operation.parts:
            source, target = part_boxes(operation, part)
            buffer = operation.uses[part.use].storage
            if buffer is None or empty(source) or empty(target):
                continue
            found = np.unique(self.memory.read(buffer, source)).tolist()
            key = self.versions.key(found[0])
            self.report.reads += 1
            if len(found) > 1 or key[0] != "partial":
                name = self.records.regions[self.records.storages[buffer].region].name
                said = ", ".join(self.versions.text(version) for version in found)
                self.report.add(
                    "value",
                    f"{name_of(operation)} reads region {name!r}, {box_text(source)}: found "
                    f"{said}, needed one partial result",
                )
                continue
            _, instance, argument, point = key
            launch = self.versions.launches[instance]
            tile = tile_of(launch, argument, point)
            base = () if tile is None else tile[0]
            place = tuple(tuple(at + first for at, first in zip(side[1:], base)) for side in source)
            if tile is None or place[0] != target[0]:
                self.report.add(
                    "value",
                    f"{name_of(operation)} folds {self.versions.text(found[0])}, "
                    f"{box_text(tile)}, into {box_text(target)}",
                )
                continue
            before = self.memory.read(use.storage, target)
            after = self.versions.added(before, instance, argument, point)
            self.memory.write(use.storage, target, after, name_of(operation))

    # -- Python

    def host(self, host: Host) -> None:
        """Do what Python did: each rank sees instances of its own."""
        region = self.records.regions[host.region]
        held = self.program.contents(host.region)
        grid = self.grids[host.region]
        if host.action != "write":
            owners, memories = self.records.owners, self.records.storages
            covered = {rank: np.zeros(held.shape, dtype=bool) for rank in owners}
            for storage, box in host.seen:
                covered[owners[memories[storage].memory]][grid.slices(box)] = True
                self.report.reads += 1
                seen = Use(storage, box, "r")
                self._compare(f"Python ({host.action}) sees", seen, held[grid.slices(box)])
            zero = self.versions.of("value", region.zero)
            for rank, mine in covered.items():
                if host.action == "read" and (held[~mine] != zero).any():
                    where = f" on rank {rank}" if len(covered) > 1 else ""
                    text = f"Python{where} reads only a part of region {region.name!r}"
                    self.report.add("value", text)
        if host.action != "read":
            version = self.program.host(host.region)
            for storage, box in host.seen:
                self.memory.write(storage, box, version, "Python")

    def kept(self) -> None:
        """Judge whether every region's last contents are somewhere."""
        spoiled = {"overwritten", "stale"}
        for region in self.records.regions.values():
            mine = [s for s in self.records.storages.values() if s.region == region.id]
            if region.transient or not mine or region.known:
                continue
            held = self.program.contents(region.id)
            grid = self.grids[region.id]
            zero = self.versions.of("value", region.zero)
            there = np.asarray(held == zero)  # where no instance is, nobody has written
            for storage in mine:
                there[grid.slices(storage.box)] = False
            lost = False
            for storage in mine:
                index = grid.slices(storage.box)
                found = self.memory.held(storage.id)
                there[index] |= found == held[index]
                kinds = {self.versions.key(int(version))[0] for version in np.unique(found)}
                lost |= bool(kinds & spoiled)  # the region itself may be gone
            if not lost and not there.all():
                place = tuple(int(n) for n in np.argwhere(~there)[0])
                whole = (tuple([0] * len(region.shape)), region.shape)
                self.report.add(
                    "value",
                    f"at the end no instance of region {region.name!r} holds "
                    f"{self.versions.text(int(held[place]))} in {box_text(grid.box(place, whole))}",
                )
