"""Operations, which launches are analysed into: one for each point, copy, fill and fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from soapstone.native.memory import Array
from soapstone.runtime.analysis.instance import Storage, Use
from soapstone.runtime.model.launch import Launch

ALONE = -1


class Operation:
    """One point task, copy, fill or fold, with its processor and its arguments.

    idle: all that it writes is empty, so it need not run. slice: the first operation of those that
    an idle processor takes over together with it; ALONE: there are no others; None: it cannot be
    taken.
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
        """Its kind: task, copy, fill or fold; of messages send, sent, recv or received."""
        return self.launch.task.kind

    @property
    def touched_bytes(self) -> int:
        """The number of bytes that it reads or writes."""
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
    """The receiver of analysed operations: the workers, or a trace.

    mine: the processors whose operations it takes; None for all.
    """

    mine: Sequence[bool] | None

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations, and the dependences (int64 ids) that end in them."""

    def allocate(self, storage: Storage) -> None:
        """Give a new storage its bytes, now or later."""
