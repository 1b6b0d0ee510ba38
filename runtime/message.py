"""Messages: a copy between memories of two processes is a send in one and a receive in the other.

Every process makes both operations, with the same numbers, and runs the one that is its own. In a
trace each is split in two (`split`): a start, as early as its place in the program, and an end, as
late as the first operation that needs it, so that bytes move while tasks run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .instance import Storage
from .launch import Launch
from .operation import Operation
from .partition import Partition
from .task import Read, Task, Write
from .world import World

Array = np.ndarray[Any, np.dtype[Any]]
_NUMBERS = itertools.count()


def _body(*arguments: object) -> None:
    raise RuntimeError("a message is carried out by an executor, not by a task body")


SEND = Task("send", (Read,), body=_body, parameters=(Read, None), kind="send")
RECEIVE = Task("receive", (Write,), body=_body, parameters=(Write, None), kind="receive")
SENT = Task("sent", (Read,), body=_body, parameters=(Read, None), kind="sent")
RECEIVED = Task("received", (Write,), body=_body, parameters=(Write, None), kind="received")
STARTS, ENDS = ("send", "receive"), ("sent", "received")
_ENDS = {"send": SENT, "receive": RECEIVED}


@dataclass(frozen=True)
class Message:
    """Bytes of one region on their way: between which processes, and which of all messages."""

    number: int
    source: int
    target: int
    region: str
    nbytes: int

    def __str__(self) -> str:
        return (
            f"message {self.number} ({self.nbytes} bytes of region {self.region!r} from process "
            f"{self.source} to process {self.target})"
        )


def message_of(operation: Operation) -> Message:
    """The message an operation starts or ends."""
    (found,) = operation.launch.scalars
    assert isinstance(found, Message)
    return found


def is_message(operation: Operation) -> bool:
    """Whether an operation starts or ends a message."""
    return operation.kind in STARTS or operation.kind in ENDS


def launches(
    partition: Partition, world: World, source: Storage, target: Storage
) -> tuple[Launch, Launch]:
    """The send and the receive of one box of a region between two storages."""
    region = partition.region
    found = Message(
        next(_NUMBERS),
        world.owners[source.memory],
        world.owners[target.memory],
        region.name,
        int(partition.tiling.volume[0]) * region.dtype.itemsize,
    )
    send, receive = (
        Launch(task, (partition,), (found,), (True, False), (1,), f"{task.name} {region.name}")
        for task in (SEND, RECEIVE)
    )
    return send, receive


def joined(operations: Sequence[Operation], edges: Array) -> Array:
    """The dependences of a whole program, and those of receives on their sends."""
    sends = {
        message_of(operation).number: operation.id
        for operation in operations
        if operation.kind == "send"
    }
    pairs = [
        (sends[message_of(operation).number], operation.id)
        for operation in operations
        if operation.kind == "receive"
    ]
    if not pairs:
        return edges
    found: Array = np.concatenate([edges, np.array(pairs, dtype=np.int64)])
    return found


def split(
    operations: Sequence[Operation], edges: Array, order: Sequence[int], world: World
) -> tuple[list[Operation], Array, list[int]]:
    """This process' part of a captured program: its operations, dependences and order.

    Starts stay where they are in the order, which is the same in all processes, and the end of a
    message comes just before the first operation that depends on it. So nothing can wait in a
    circle: of all ends that wait, the first in the order has both its starts before it.

    operations: those of all processes, by id. edges: int64 (edges, 2). Returns the same of this
    process, with new ids.
    """
    mine = [op for op in operations if world.runs[op.processor] == world.rank]
    found: list[Operation] = []
    enter: dict[int, int] = {}
    leave: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for operation in mine:
        enter[operation.id] = leave[operation.id] = len(found)
        found.append(_renumbered(operation, len(found), operation.launch))
        if operation.kind in STARTS:
            launch = operation.launch
            end = _ENDS[operation.kind]
            ending = Launch(
                end,
                launch.partitions,
                launch.scalars,
                launch.layout,
                launch.grid,
                f"{end.name} {launch.partitions[0].region.name}",
            )
            leave[operation.id] = len(found)
            pairs.append((enter[operation.id], len(found)))
            found.append(_renumbered(operation, len(found), ending))
    pairs += [(leave[a], enter[b]) for a, b in edges.tolist() if a in leave and b in enter]
    first: dict[int, int] = {}
    place = {
        enter[number]: position
        for position, number in enumerate(number for number in order if number in enter)
    }
    for source, target in pairs:
        if target in place:
            first[source] = min(first.get(source, len(order)), place[target])
    keys = {number: (position, 1) for number, position in place.items()}
    for operation in found:
        if operation.kind in ENDS:
            keys[operation.id] = (first.get(operation.id, len(order)), 0)
    local = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return found, local, sorted(keys, key=lambda number: (*keys[number], number))


def _renumbered(operation: Operation, number: int, launch: Launch) -> Operation:
    return Operation(
        number,
        launch,
        operation.point,
        operation.processor,
        operation.uses,
        operation.priority,
        operation.variant,
        operation.idle,
    )
