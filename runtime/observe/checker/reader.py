"""Logs read and checked: every record has the fields it must have, and names what exists.

A record of a kind that is not known here is an error: what it stands for could not be judged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from soapstone.files import NO_TEXT
from soapstone.json_text import parse as parse_json, shown, wrong
from soapstone.runtime.errors import ProfileError
from soapstone.runtime.observe.checker.records import (
    MESSAGES,
    WHAT,
    Argument,
    Box,
    Fill,
    Host,
    Launch,
    Operation,
    Part,
    Records,
    Region,
    Replay,
    Scope,
    Storage,
    Trace,
    Use,
    Wait,
)

FORMAT, VERSION = "soapstone log", 2


def load(path: str | os.PathLike[str]) -> list[Records]:
    """The records of a log file: of every rank, if there are several (`path.1` is rank 1's).

    Raises: ProfileError naming the line and the field that are wrong; OSError.
    """
    found: list[Records] = []
    ranks = 1
    while len(found) < ranks:
        place = f"{os.fspath(path)}.{len(found)}" if found else os.fspath(path)
        if found and not Path(place).exists():
            raise ProfileError(
                f"log {os.fspath(path)!r}: a run of {ranks} ranks, and {place!r}, the log of rank "
                f"{len(found)}, is not there"
            )
        with Path(place).open(encoding="utf-8") as stream:
            found.append(parse(stream, f"log {place!r}"))
        ranks = found[0].ranks
    return found


def parse(lines: Iterable[str], what: str = "log") -> Records:
    """The records of a log's lines.

    Raises: ProfileError naming the line and the field that are wrong.
    """
    reader = _Reader(what)
    try:
        for number, line in enumerate(lines, 1):
            reader.read(number, line)
    except UnicodeDecodeError:
        raise ProfileError(f"{what}: {NO_TEXT}") from None
    reader.end()
    return reader.records


class _Reader:
    def __init__(self, what: str) -> None:
        self.records = Records()
        self._what = what
        self._where = what
        self._tilings: dict[int, tuple[tuple[Box, ...], ...]] = {}
        self._operations: set[int] = set()
        self._ended = False
        self._begun = False
        self._begin: Mapping[str, Any] | None = None  # the header of the part of a task
        self._scopes: dict[int, _Reader] = {}
        self._kinds: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "header": self._header,
            "region": self._region,
            "tiling": self._tiling,
            "storage": self._storage,
            "launch": lambda f: self.records.items.append(self._launch(f)),
            "fill": lambda f: self.records.items.append(self._fill(f)),
            "operation": self._untraced,
            "run": self._run,
            "trace": self._trace,
            "replay": self._replay,
            "host": self._host,
            "wait": lambda f: self.records.items.append(Wait(self._int(f, "at"))),
            "failed": self._failed,
            "end": self._end,
        }

    def read(self, number: int, line: str) -> None:
        """Take one line, of the runtime itself or of one of its scopes."""
        self._where = f"{self._what}: line {number}"
        found = parse_json(line, self._where, ProfileError)
        if not isinstance(found, dict):
            raise self._error(f"{shown(found)} found, an object needed")
        if "traceEvents" in found:
            raise self._error("a timeline found, for `profile show`; a runtime's log needed")
        if "scope" in found and not self._ended:
            scope = self._scopes.setdefault(self._int(found, "scope"), _Reader(self._what))
            scope.take(self._where, found)
        else:
            self.take(self._where, found)

    def take(self, where: str, record: Mapping[str, Any]) -> None:
        """Take one record of this part."""
        self._where = where
        kind = record.get("kind")
        if not isinstance(kind, str) or kind not in self._kinds:
            known = f"one of {', '.join(self._kinds)}"
            raise self._error(
                f"{wrong(record, 'kind', known)}: what this checker does not know it cannot judge"
            )
        if self._begun == (kind == "header"):
            raise self._error("the header must come first, and once")
        if self._ended:
            raise self._error(f"a record of kind {kind!r} after the end")
        self._kinds[kind](record)

    def end(self) -> None:
        self._where = self._what
        if not self._ended:
            raise self._error("no end: the run did not end its log, or the file was cut short")
        for item in self.records.items:
            if isinstance(item, Operation) and item.id not in self.records.stamps:
                raise self._error(f"operation {item.id} ({item.name}) never ran")
        for scope in self._scopes.values():
            scope.end()
            self.records.scopes.append(scope.records)

    # -- kinds

    def _header(self, record: Mapping[str, Any]) -> None:
        if record.get("format") != FORMAT:
            raise self._wrong(record, "format", repr(FORMAT))
        if record.get("version") != VERSION:
            raise self._wrong(record, "version", str(VERSION))
        records = self.records
        records.rank, records.ranks = self._int(record, "rank"), self._int(record, "ranks")
        if records.rank >= records.ranks:
            raise self._error(f"rank {records.rank} of {records.ranks} ranks")
        records.processors = self._texts(record, "processors")
        records.memories = self._texts(record, "memories")
        records.runs = self._ranks(record, "runs", len(records.processors))
        records.owners = self._ranks(record, "owners", len(records.memories))
        records.first = self._int(record, "first")
        records.clock_ns = self._int(record, "clock_ns") if "clock_ns" in record else 0
        self._begin = record if "begin" in record else None
        self._begun = True

    def _region(self, record: Mapping[str, Any]) -> None:
        region = Region(
            self._int(record, "id"),
            self._text(record, "name"),
            self._ints(record, "shape"),
            self._text(record, "zero"),
            self._flag(record, "transient"),
            self._flag(record, "known"),
            None if record.get("held") is None else self._text(record, "held"),
        )
        self._new(self.records.regions, region.id, region, "region")

    def _tiling(self, record: Mapping[str, Any]) -> None:
        tiles = tuple(
            tuple(self._box(box) for box in self._is_list(tile, "tiles"))
            for tile in self._list(record, "tiles")
        )
        self._new(self._tilings, self._int(record, "id"), tiles, "tiling")

    def _storage(self, record: Mapping[str, Any]) -> None:
        region = self._known(self.records.regions, self._int(record, "region"), "region")
        valid = record.get("valid")
        storage = Storage(
            self._int(record, "id"),
            region.id,
            self._index(record, "memory", len(self.records.memories)),
            self._inside(self._box(record.get("box")), region.shape, "box"),
            self._int(record, "address"),
            self._ints(record, "strides"),
            self._int(record, "itemsize"),
            None
            if valid is None
            else tuple(
                self._inside(self._box(box), region.shape, "valid")
                for box in self._is_list(valid, "valid")
            ),
        )
        if len(storage.strides) != len(region.shape) or min(storage.strides, default=0) < 0:
            raise self._error(f"field 'strides' is {list(storage.strides)}, one >= 0 an axis")
        self._new(self.records.storages, storage.id, storage, "storage")

    def _launch(self, record: Mapping[str, Any]) -> Launch:
        points = self._int(record, "points")
        arguments = []
        for item in self._list(record, "arguments"):
            given = self._is_object(item, "arguments")
            region = self._known(self.records.regions, self._int(given, "region"), "region")
            tiles = self._known(self._tilings, self._int(given, "tiling"), "tiling")
            if len(tiles) != points:
                raise self._error(f"{len(tiles)} tiles of region {region.name!r}, {points} needed")
            for tile in tiles:
                for box in tile:
                    self._inside(box, region.shape, "tiles")
            privilege = self._text(given, "privilege")
            if privilege not in ("r", "w", "rw", "reduce"):
                raise self._error(f"privilege {privilege!r} found; r, w, rw or reduce needed")
            reduction, identity = given.get("reduction"), given.get("identity")
            reduces = isinstance(reduction, str) and isinstance(identity, str)
            if (privilege == "reduce") != reduces:
                raise self._error(f"privilege {privilege!r} with reduction {reduction!r}")
            arguments.append(Argument(region.id, privilege, reduction, identity, tiles))
        launch = Launch(
            self._int(record, "id"),
            self._text(record, "name"),
            points,
            self._flag(record, "initialise"),
            tuple(arguments),
        )
        self._new(self.records.launches, launch.id, launch, "launch")
        return launch

    def _fill(self, record: Mapping[str, Any]) -> Fill:
        region = self._known(self.records.regions, self._int(record, "region"), "region")
        return Fill(region.id, self._text(record, "value"))

    def _operation(self, record: Mapping[str, Any], issued: int) -> Operation:
        what = self._text(record, "what")
        if what not in WHAT:
            raise self._error(
                f"an operation that is a {what!r} found; known: {', '.join(WHAT)}. "
                "What this checker does not know it cannot judge"
            )
        uses = []
        for item in self._list(record, "uses"):
            if not isinstance(item, list) or len(item) != 4 or item[3] not in ("r", "w", "rw"):
                raise self._error(f"use {item!r} found; storage, low, high and access needed")
            box = self._box(item[1:3])
            if item[0] is not None:
                storage = self._known(self.records.storages, item[0], "storage")
                low, high = storage.box
                fits = len(box[0]) == len(low) and all(
                    a <= b <= c <= d for a, b, c, d in zip(low, box[0], box[1], high)
                )
                if not fits:
                    raise self._error(f"use of box {box} of storage {item[0]} of box {storage.box}")
            uses.append(Use(item[0], box, item[3]))
        launch = record.get("launch")
        if launch is not None:
            given = self._known(self.records.launches, launch, "launch")
            if not 0 <= self._int(record, "point") < given.points:
                raise self._error(f"point {record['point']}, 0..{given.points - 1} needed")
            if len(uses) != len(given.arguments):
                raise self._error(f"{len(uses)} uses, {len(given.arguments)} needed")
        elif what == "task":
            raise self._error("a task of no launch")
        value, fresh = record.get("value"), record.get("fresh")
        if (what == "fill") != isinstance(value, str):
            raise self._error(f"field 'value' is {value!r} of a {what}")
        if what in ("copy", "fill", "fold") and len(uses) < 1 + (what == "copy"):
            raise self._error(f"{len(uses)} uses of a {what}")
        messages = self._ints(record, "messages") if what in MESSAGES else ()
        if what in MESSAGES and not 0 < len(messages) == len(uses):
            raise self._error(f"{len(messages)} messages and {len(uses)} uses of a {what}")
        return Operation(
            id=self._int(record, "id"),
            what=what,
            name=self._text(record, "name"),
            launch=launch,
            point=self._int(record, "point"),
            processor=self._index(record, "processor", len(self.records.processors)),
            idle=self._flag(record, "idle"),
            uses=tuple(uses),
            after=self._ints(record, "after"),
            issued=issued,
            value=value,
            fresh=fresh,
            parts=tuple(self._part(item, len(uses)) for item in record.get("parts", [])),
            messages=messages,
            rank=self.records.rank,
        )

    def _part(self, found: object, uses: int) -> Part:
        if not isinstance(found, list) or len(found) != 4:
            raise self._error(f"part {found!r} found; use, place, target and source needed")
        if found[0] not in range(1, uses) or not _whole(found[1]):
            raise self._error(f"part of use {found[0]!r}, slice {found[1]!r}")

        def spans(given: object) -> tuple[tuple[int, int], ...] | None:
            if given is None:
                return None
            rows = self._is_list(given, "parts")
            if not all(isinstance(r, list) and len(r) == 2 and all(map(_whole, r)) for r in rows):
                raise self._error(f"part's slices are {given!r}")
            return tuple((low, high) for low, high in rows)

        return Part(found[0], found[1], spans(found[2]), spans(found[3]))

    def _untraced(self, record: Mapping[str, Any]) -> None:
        operation = self._operation(record, self._int(record, "issued"))
        if operation.id in self._operations:
            raise self._error(f"two operations are number {operation.id}")
        self._operations.add(operation.id)
        self.records.items.append(operation)

    def _run(self, record: Mapping[str, Any]) -> None:
        number = self._int(record, "operation")
        if number in self._operations:
            times = self._times([self._int(record, "start"), self._int(record, "end")])
            self._new(self.records.stamps, number, times, "run of operation")
        elif number >= self.records.first:
            raise self._error(f"operation {number} ran, and was never issued")

    def _trace(self, record: Mapping[str, Any]) -> None:
        launches: list[Launch | Fill] = []
        for item in self._list(record, "launches"):
            given = self._is_object(item, "launches")
            launches.append(self._fill(given) if "value" in given else self._launch(given))
        operations = [
            self._operation(self._is_object(item, "operations"), 0)
            for item in self._list(record, "operations")
        ]
        names = sorted(operation.id for operation in operations)
        order = self._ints(record, "order")
        if names != list(range(len(names))) or sorted(order) != names:
            raise self._error("operations and order must have the numbers from 0, each once")
        for operation in operations:
            if any(n not in range(len(names)) for n in operation.after):
                raise self._error(f"operation {operation.id} depends on what does not exist")
        trace = Trace(
            self._int(record, "id"),
            self._text(record, "name"),
            tuple(launches),
            tuple(sorted(operations, key=lambda operation: operation.id)),
            order,
        )
        self._new(self.records.traces, trace.id, trace, "trace")

    def _replay(self, record: Mapping[str, Any]) -> None:
        trace = self._known(self.records.traces, self._int(record, "trace"), "trace")
        runs: dict[int, tuple[int, int]] = {}
        for item in self._list(record, "runs"):
            if not isinstance(item, list) or len(item) != 3 or not all(map(_whole, item)):
                raise self._error(f"run {item!r} found; operation, start and end needed")
            self._new(runs, item[0], self._times(item[1:]), "run of operation")
        if sorted(runs) != list(range(len(trace.operations))):
            raise self._error(
                f"{len(runs)} runs of trace {trace.name!r}, one of each of its "
                f"{len(trace.operations)} operations needed"
            )
        self.records.items.append(Replay(trace.id, runs))

    def _host(self, record: Mapping[str, Any]) -> None:
        action = record.get("action")
        if action not in ("read", "write", "claim"):
            raise self._wrong(record, "action", "read, write or claim")
        region = self._known(self.records.regions, self._int(record, "region"), "region")
        seen = []
        for item in self._list(record, "seen"):
            if not isinstance(item, list) or len(item) != 3:
                raise self._error(f"{item!r} seen; storage, low and high needed")
            storage = self._known(self.records.storages, item[0], "storage")
            seen.append((storage.id, self._inside(self._box(item[1:]), region.shape, "seen")))
        self.records.items.append(Host(action, region.id, tuple(seen), self._int(record, "at")))

    def _failed(self, record: Mapping[str, Any]) -> None:
        raise self._error(
            f"{self._text(record, 'name')!r} failed: what regions hold after that is not known, "
            "and only whole runs are checked"
        )

    def _end(self, record: Mapping[str, Any]) -> None:
        if not self._flag(record, "whole"):
            raise self._error("the run was stopped by an error; only whole runs are checked")
        if self._begin is not None:
            begin, end = self._times([self._int(self._begin, "begin"), self._int(record, "at")])
            depth = self._int(self._begin, "depth")
            name, point = self._text(self._begin, "task"), self._int(self._begin, "point")
            self.records.scope = Scope(name, point, depth, begin, end)
        self._ended = True

    # -- fields

    def _error(self, text: str) -> ProfileError:
        return ProfileError(f"{self._where}: {text}")

    def _wrong(self, record: Mapping[str, Any], key: str, needed: str) -> ProfileError:
        return self._error(wrong(record, key, needed))

    def _new(self, table: dict[int, Any], number: int, value: object, what: str) -> None:
        if number in table:
            raise self._error(f"{what} {number} is there already")
        table[number] = value

    def _known(self, table: Mapping[int, Any], number: object, what: str) -> Any:
        if not _whole(number) or number not in table:
            raise self._error(f"{what} {number!r} is not known")
        return table[number]  # type: ignore[index]

    def _int(self, record: Mapping[str, Any], key: str) -> int:
        value = record.get(key)
        if not _whole(value):
            raise self._wrong(record, key, "an integer >= 0")
        return value  # type: ignore[return-value]

    def _index(self, record: Mapping[str, Any], key: str, count: int) -> int:
        value = self._int(record, key)
        if value >= count:
            raise self._wrong(record, key, f"0..{count - 1}")
        return value

    def _text(self, record: Mapping[str, Any], key: str) -> str:
        value = record.get(key)
        if not isinstance(value, str):
            raise self._wrong(record, key, "a string")
        return value

    def _flag(self, record: Mapping[str, Any], key: str) -> bool:
        value = record.get(key)
        if not isinstance(value, bool):
            raise self._wrong(record, key, "true or false")
        return value

    def _list(self, record: Mapping[str, Any], key: str) -> list[Any]:
        if not isinstance(record.get(key), list):
            raise self._wrong(record, key, "a list")
        return list(record[key])

    def _is_list(self, value: object, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(f"field {key!r}: {shown(value)} found in it, a list needed")
        return value

    def _is_object(self, value: object, key: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._error(f"field {key!r}: {shown(value)} found in it, an object needed")
        return value

    def _ints(self, record: Mapping[str, Any], key: str) -> tuple[int, ...]:
        values = self._list(record, key)
        if not all(map(_whole, values)):
            raise self._wrong(record, key, "integers >= 0")
        return tuple(values)

    def _texts(self, record: Mapping[str, Any], key: str) -> tuple[str, ...]:
        values = self._list(record, key)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(record, key, "strings")
        return tuple(values)

    def _ranks(self, record: Mapping[str, Any], key: str, count: int) -> tuple[int, ...]:
        values = self._ints(record, key)
        if len(values) != count or any(value >= self.records.ranks for value in values):
            raise self._wrong(record, key, f"{count} ranks")
        return values

    def _times(self, found: list[int]) -> tuple[int, int]:
        if found[1] < found[0]:
            raise self._error(f"a run that ends at {found[1]} before it starts at {found[0]}")
        return found[0], found[1]

    def _box(self, found: object) -> Box:
        if isinstance(found, list) and len(found) == 2:
            low, high = found
            sides = isinstance(low, list) and isinstance(high, list) and len(low) == len(high)
            if sides and all(map(_whole, [*low, *high])):
                return tuple(low), tuple(high)
        raise self._error(f"box {found!r} found; lists of low and of high faces needed")

    def _inside(self, box: Box, shape: tuple[int, ...], key: str) -> Box:
        if len(box[0]) != len(shape) or any(
            high > extent or low > high for low, high, extent in zip(*box, shape)
        ):
            raise self._error(f"field {key!r}: box {box} in a region of shape {list(shape)}")
        return box


def _whole(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0
