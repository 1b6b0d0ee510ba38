"""Symbolic contents of elements: who wrote them last, or which partial results were folded in.

A checker cannot compare numbers, which a log does not have. It compares symbols: an element holds
"what point 3 of launch 7 wrote to its argument 1", whatever number that was. `Program` executes the
launches of a log sequentially on such symbols, each point on the regions as they were before its
launch. The result is what every read of the parallel run should have found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.observe.checker.cells import Grid, empty
from soapstone.runtime.observe.checker.records import Argument, Box, Fill, Launch, Records


class Versions:
    """A table of symbolic contents: equal contents have equal numbers.

    A content is a tuple, whose first element is its kind:

    - ("task", instance, argument, point): what a point task wrote;
    - ("partial", instance, argument, point): its partial result, before it is folded;
    - ("add", before, instance, argument, point): content number `before` with that folded in;
    - ("value", scalar): what a fill wrote, or what a region begins with;
    - ("host", access): what Python wrote;
    - ("known", region), ("stale",), ("junk",): what was there when the log began: up to date, out
      of date, or undefined;
    - ("overwritten", who), ("coming", message): bytes whose memory another instance has used since,
      or for which a message is under way. No read should find these.

    Attributes:
        launches: by instance number; the n-th launch that was executed is instance n.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._keys: list[tuple[Any, ...]] = []
        self.launches: list[Launch] = []

    def of(self, *key: Any) -> int:
        """The number of a content, given its kind and its other elements."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return found

    def key(self, number: int) -> tuple[Any, ...]:
        """The content of a number, as it was given to `of`."""
        return self._keys[number]

    def added(self, before: Array, instance: int, argument: int, point: int) -> Array:
        """Contents (int64, of any shape) with the partial result of one point folded in.

        before: the contents so far, of the same shape. instance, argument, point: whose result.
        """
        old, inverse = np.unique(before, return_inverse=True)
        new = [self.of("add", int(o), instance, argument, point) for o in old]
        found: Array = np.array(new, dtype=np.int64)[inverse].reshape(before.shape)
        return found

    def writers(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields (instance, point) of each task whose result is in a content, the last first."""
        key = self._keys[number]
        while key[0] == "add":
            yield key[2], key[4]
            key = self._keys[key[1]]
        if key[0] == "task":
            yield key[1], key[3]

    def text(self, number: int) -> str:
        """A content as an error message names it."""
        key = self._keys[number]
        if key[0] == "task":
            return f"what point {key[3]} of {self.launch(key[1])} wrote"
        if key[0] == "partial":
            return f"the partial result of point {key[3]} of {self.launch(key[1])}"
        if key[0] == "add":
            points = [key[4]]
            base = self._keys[key[1]]
            while base[0] == "add" and base[2:4] == key[2:4]:
                points.append(base[4])
                base = self._keys[base[1]]
            these = ", ".join(map(str, points[::-1]))
            return f"the reduction of points {these} of {self.launch(key[2])}"
        if key[0] == "value":
            return f"the value {key[1]} everywhere"
        if key[0] == "host":
            return f"what Python wrote (its access {key[1]})"
        if key[0] == "overwritten":
            return f"bytes that {key[1]} overwrote"
        if key[0] == "coming":
            return f"room for message {key[1]}, which is still to come"
        return {
            "known": "what was there when the log began",
            "stale": "what was out of date when the log began",
            "junk": "nothing that this run has written",
        }[key[0]]

    def launch(self, instance: int) -> str:
        """A launch as an error message names it."""
        return f"{self.launches[instance].name!r} (launch {instance})"


class Program:
    """The launches of a log, executed sequentially on symbolic contents.

    Attributes:
        expected: by (instance, point, argument), the contents that this read should find: int64,
            one for each cell of its tile.
        flows: the true dependences, as (instance and point of a writer, instance and point of a
            reader). Both are of what was executed since the last `forget`.
    """

    def __init__(self, records: Records, grids: dict[int, Grid], versions: Versions) -> None:
        self._records = records
        self._grids = grids
        self._versions = versions
        self._contents: dict[int, Array] = {}
        self._hosts = 0
        self.expected: dict[tuple[int, int, int], Array] = {}
        self.flows: set[tuple[int, int, int, int]] = set()

    def contents(self, region: int) -> Array:
        """What a region's cells should hold now: int64, one content for each cell of its grid."""
        found = self._contents.get(region)
        if found is None:
            about = self._records.regions[region]
            start: tuple[Any, ...] = ("junk",) if about.transient else ("value", about.zero)
            if about.known:
                start = ("known", region)
            whole = (tuple([0] * len(about.shape)), about.shape)
            found = self._grids[region].full(whole, self._versions.of(*start))
            self._contents[region] = found
        return found

    def forget(self) -> None:
        """Clear `expected` and `flows`, once the reads so far have been checked."""
        self.expected.clear()
        self.flows.clear()

    def launch(self, launch: Launch) -> int:
        """Execute a launch: reads, then writes, then reductions. Returns its instance number."""
        instance = len(self._versions.launches)
        self._versions.launches.append(launch)
        for number, argument in enumerate(launch.arguments):
            if argument.privilege in ("r", "rw"):
                self._read(instance, number, argument)
        for number, argument in enumerate(launch.arguments):
            if argument.privilege in ("w", "rw"):
                for point, tile in enumerate(argument.tiles):
                    for box in tile:
                        version = self._versions.of("task", instance, number, point)
                        self.contents(argument.region)[self._index(argument, box)] = version
        for number, argument in enumerate(launch.arguments):
            if argument.privilege == "reduce":
                self._reduce(launch, instance, number, argument)
        return instance

    def _index(self, argument: Argument, box: Box) -> tuple[Any, ...]:
        return self._grids[argument.region].slices(box)

    def _read(self, instance: int, number: int, argument: Argument) -> None:
        held = self.contents(argument.region)
        for point, tile in enumerate(argument.tiles):
            boxes = [box for box in tile if not empty(box)]
            if len(boxes) != 1:
                continue
            found = held[self._index(argument, boxes[0])].copy()
            self.expected[instance, point, number] = found
            for version in np.unique(found).tolist():
                for writer in self._versions.writers(version):
                    self.flows.add((*writer, instance, point))

    def _reduce(self, launch: Launch, instance: int, number: int, argument: Argument) -> None:
        held = self.contents(argument.region)
        if launch.initialise:
            held[...] = self._versions.of("value", argument.identity)
        for point, tile in enumerate(argument.tiles):
            for box in tile:
                if not empty(box):
                    index = self._index(argument, box)
                    held[index] = self._versions.added(held[index], instance, number, point)

    def fill(self, fill: Fill) -> None:
        """Execute a fill."""
        self.contents(fill.region)[...] = self._versions.of("value", fill.value)

    def host(self, region: int) -> int:
        """Execute a write of a whole region by Python; returns the number of its content."""
        version = self._versions.of("host", self._hosts)
        self._hosts += 1
        self.contents(region)[...] = version
        return version
