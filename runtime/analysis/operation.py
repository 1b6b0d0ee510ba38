"""Operations: what an analysis turns launches into, one for each point, copy, fill and fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from soapstone.native.memory import Array
from soapstone.runtime.analysis.instance import Storage, Use
from soapstone.runtime.model.launch import Launch

ALONE = -1


class Operation:
    """One point task, copy, fill or fold, with its place and its arguments.

    idle: it has something to write, and all of it is empty: nothing needs to run. slice: the first
    operation of those that an idle processor takes with it (ALONE: none), or None if it stays.
    """

    __slots__ = (
        "id",
        "idle",
        "launch",
        "pending",
        "point",
        "priority",
        "processor",
        "slice",
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
        uses: tuple[Use, ...],
        priority: int,
        variant: str | None,
        idle: bool = False,
    ) -> None:
        self.id = number
        self.launch = launch
        self.point = point
        self.processor = processor
        self.uses = uses
        self.priority = priority
        self.variant = variant
        self.idle = idle
        self.slice: int | None = None
        self.pending = 0
        self.successors: list[Operation] = []

    @property
    def kind(self) -> str:
        """What it does: task, copy, fill, fold; of messages send, sent, recv, received."""
        return self.launch.task.kind

    @property
    def touched_bytes(self) -> int:
        """How many bytes it reads or writes."""
        return sum(
            math.prod(high - low for low, high in zip(*use.box)) * use.storage.dtype.itemsize
            for use in self.uses
            if use.storage is not None
        )

    def arrays(self) -> list[Array]:
        """The arrays of the region arguments, in order; writeable."""
        return [
            use.view(partition.region.dtype)
            for use, partition in zip(self.uses, self.launch.partitions)
        ]


class Sink(Protocol):
    """Where analysed operations go: to the workers, or into a trace.

    mine: which processors' operations it takes; None for all.
    """

    mine: Sequence[bool] | None

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations and the dependences (ids, int64) that end in them."""

    def allocate(self, storage: Storage) -> None:
        """Give a new storage its bytes, now or later."""
