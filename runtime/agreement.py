"""The safe mode of replicated control: whatever one rank does is compared with what the others do.

Every rank of a run over MPI runs the same program and takes the same decisions, without asking
(Bauer et al., PPoPP 2021); like the checks of control determinism there this finds out whether it
does. With `SOAPSTONE_SAFE=1` the ranks exchange each *event* before they act on it: a launch with
its partitions and scalars, what a mapper answers, what the host wrote, a read, a replay, and the
operations of a captured step, which the mapper has placed. The first difference stops all ranks,
with one error for all.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import MachineError, ReplicationError
from soapstone.runtime.model.future import Future, FutureMap
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.sparse import IndexPartition
from soapstone.runtime.model.task import Task

Parts = Sequence[tuple[str, str]]  # of an event: what is compared, and what it is here
SAFE_VARIABLE = "SOAPSTONE_SAFE"
_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)


def safe_mode() -> bool:
    """Whether runs over ranks are to be compared.

    Raises: MachineError when the variable is neither 0 nor 1.
    """
    text = os.environ.get(SAFE_VARIABLE, "0") or "0"
    if text not in ("0", "1"):
        raise MachineError(f"variable {SAFE_VARIABLE} is {text!r}, 0 or 1 needed")
    return text == "1"


class Agreement:
    """Compares the events of one rank with those of the others, in the order of the program.

    exchange: gives all ranks a value, and returns what each has given, by rank; it raises when one
    fails or keeps silent. stop: stops this rank with an error.
    """

    def __init__(
        self, exchange: Callable[[Any], list[Any]], stop: Callable[[BaseException], None]
    ) -> None:
        self._exchange = exchange
        self._stop = stop
        self._events = 0
        self._numbers: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()
        self._unused = itertools.count()  # how many are left depends on when they are collected

    def launch(
        self, task: object, name: str, grid: object, initialise: bool, arguments: Sequence[object]
    ) -> None:
        """Compare a launch as the program asked for it.

        Raises: ReplicationError for a difference; PeerError.
        """
        name = name or (task.name if isinstance(task, Task) else repr(task))
        parts = [("the grid", repr(grid)), ("initialise", repr(initialise))]
        parts += [
            (f"argument {place}", self._text(argument)) for place, argument in enumerate(arguments)
        ]
        self.event(f"launch of task {name!r}", parts)

    def host(self, action: str, region: Region, contents: object = None) -> None:
        """Compare what the host does to a region: "read", "write", "fill", or "array".

        Raises: ReplicationError for a difference; PeerError.
        """
        parts = [("the region", self._text(region))]
        if contents is not None:
            parts.append(("the contents", self._text(contents)))
        self.event(f"{action} of region {region.name!r}", parts)

    def decided(self, operations: Sequence[Operation]) -> None:
        """Compare the operations of all ranks that a captured step has become.

        Raises: ReplicationError for a difference; PeerError.
        """
        self.event(
            "captured step",
            [
                (
                    f"{one.kind} {one.launch.name!r}, point {one.point}",
                    f"processor {one.processor}, variant {one.variant}, priority {one.priority}, "
                    + ", ".join(
                        f"memory {'-' if use.storage is None else use.storage.memory} "
                        f"box {list(use.box[0])}..{list(use.box[1])}"
                        for use in one.uses
                    ),
                )
                for one in operations
            ],
        )

    def answer(self, who: str, question: str, answer: object) -> None:
        """Compare what a mapper answers, outside of a capture.

        Raises: ReplicationError for a difference; PeerError.
        """
        self.event(f"{who}: {question}", [("the answer", self._text(answer))])

    def event(self, what: str, parts: Parts = ()) -> None:
        """Compare one event. parts: what makes it up, each compared by itself.

        Raises: ReplicationError for a difference, the same text on all ranks; PeerError.
        """
        self._events += 1
        first, *others = self._exchange([("", what), *parts])
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                error = ReplicationError(
                    f"step {self._events} of the program: {_difference(first, theirs, rank)}; "
                    "all ranks must do the same"
                )
                self._stop(error)
                raise error

    # -- what is compared

    def _text(self, value: object) -> str:
        """What a value is, the same text on every rank that has the same."""
        if isinstance(value, FieldRegion):
            return self._region(value) + ", ".join(map(self._text, value.fields.values()))
        if isinstance(value, Region):
            return self._region(value)
        if isinstance(value, Partition):
            tiling = value.tiling
            tiles = digest(tiling.lo, tiling.hi)
            return f"{self._text(value.region)} in {tiling.points} tiles {tiles} {value.grid}"
        if isinstance(value, IndexPartition):
            sets = digest(value.sets.starts, value.sets.indices)
            return f"{self._text(value.region)} in {value.sets.points} sets {sets} {value.grid}"
        if isinstance(value, Future | FutureMap):
            return f"{type(value).__name__} of {self._region(value.result.region)}"
        if isinstance(value, np.ndarray):
            if value.size <= 1:
                return f"{value.dtype} {value.shape} {value.tolist()!r}"
            return f"{value.dtype} {value.shape} with contents {digest(value)}"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Mapping):
            items = [f"{self._text(key)}: {self._text(item)}" for key, item in value.items()]
            return "{" + ", ".join(items) + "}"
        if isinstance(value, set | frozenset):
            return "{" + ", ".join(sorted(map(self._text, value))) + "}"
        if isinstance(value, Sequence):
            return f"{type(value).__name__}({', '.join(map(self._text, value))})"
        name = getattr(value, "__qualname__", type(value).__qualname__)
        if is_dataclass(value) and not isinstance(value, type):
            inside = [f"{f.name}={self._text(getattr(value, f.name))}" for f in fields(value)]
            return f"{name}({', '.join(inside)})"
        return str(name)  # of another object only its class is known to be the same

    def _region(self, region: Region) -> str:
        number = self._numbers.get(region)
        if number is None:
            number = self._numbers[region] = next(self._unused)
        return f"region {number} {region.name!r} {region.dtype} {region.shape}"


def digest(*arrays: Array) -> str:
    """Some digits that stand for the bits of arrays."""
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _difference(one: Parts, two: Parts, rank: int) -> str:
    """The first difference between an event of rank 0 and one of another rank, as text."""
    if one[0] != two[0]:
        return f"rank 0 has the {one[0][1]}, rank {rank} the {two[0][1]}"
    for a, b in zip(one[1:], two[1:]):
        if a[0] != b[0]:
            return f"{one[0][1]}: rank 0 has {a[0]}, rank {rank} has {b[0]}"
        if a[1] != b[1]:
            return f"{one[0][1]}, {a[0]}: rank 0 has {a[1]}, rank {rank} has {b[1]}"
    return f"{one[0][1]}: rank 0 has {len(one) - 1} parts, rank {rank} has {len(two) - 1}"
