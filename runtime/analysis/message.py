"""Messages: a copy between memories of two processes is a send in one and a receive in the other.

Every process makes both operations, with the same numbers, and runs the one that is its own. In a
trace each is split in two (`split`): a start, as early as its place in the program, and an end, as
late as the first operation that needs it, so that bytes move while tasks run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass, replace
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.launch import Launch, internal
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.task import Read, Task, Write

_NUMBERS = itertools.count()


def _body(*arguments: object) -> None:
    raise RuntimeError("a message is carried out by an executor, not by a task body")


SEND = Task("send", (Read,), body=_body, kind="send")
RECEIVE = Task("receive", (Write,), body=_body, kind="recv")
SENT = Task("sent", (Read,), body=_body, kind="sent")
POST = Task("post", (Write,), body=_body, kind="post")
MESSAGES = ("send", "recv")
STARTS, ENDS = ("send", "post"), ("sent", "recv")  # of a message in a trace
BEHIND = 16  # places that who receives may be behind before who sends waits for the end
_SPLIT = {"send": (SEND, SENT), "recv": (POST, RECEIVE)}


@dataclass(frozen=True)
class Message:
    """Bytes of one region on their way: between which processes, and which of all messages.

    memories: from which, and to which.
    """

    number: int
    source: int
    target: int
    region: str
    nbytes: int
    memories: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"message {self.number} ({self.nbytes} bytes of region {self.region!r} from process "
            f"{self.source} to process {self.target})"
        )


def message_of(operation: Operation) -> Message:
    """The message an operation starts or ends; of a bucket the first one's, with all bytes."""
    messages: Sequence[Message] = operation.launch.scalars
    first = messages[0]
    if len(messages) == 1:
        return first
    nbytes = sum(message.nbytes for message in messages)
    return replace(first, region=f"{first.region} and {len(messages) - 1}", nbytes=nbytes)


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
        (source.memory, target.memory),
    )
    return (
        internal(SEND, (partition, found), f"send {region.name}"),
        internal(RECEIVE, (partition, found), f"receive {region.name}"),
    )


def joined(operations: Sequence[Operation], edges: Array) -> Array:
    """The dependences of a whole program: also of receives on their sends, and of what follows.

    Whoever may change what is sent waits until it has been received, in whichever process.
    """
    sends = {message_of(op).number: op.id for op in operations if op.kind == "send"}
    receives = {sends[message_of(op).number]: op.id for op in operations if op.kind == "recv"}
    if not receives:
        return edges
    later = [(receives[a], b) for a, b in edges.tolist() if a in receives]
    found: Array = np.concatenate([edges, np.array([*receives.items(), *later], dtype=np.int64)])
    return found


def split(
    operations: Sequence[Operation],
    edges: Array,
    order: Sequence[int],
    world: World,
    buckets: Mapping[int, int],
) -> tuple[list[Operation], Array, list[int]]:
    """This process' part of a captured program: its operations, dependences and order.

    Starts stay where they are in the order, which is the same in all processes, and the end of a
    message comes just before the first operation that depends on it: a receive before what reads
    it or, in the process that sends, overwrites it. What is sent and not overwritten is held until
    a little after it has been received. Everything that waits, waits for what is earlier in that
    order; so nothing can wait in a circle, even where bytes move only once the receiver comes to
    the end.

    operations: those of all processes, by id. edges: int64 (edges, 2), `joined`. buckets: of sends
    and receives that share one message, the id of the first (`bucket.buckets`). Returns the same
    of this process, with new ids.
    """
    owner = [world.runs[operation.processor] for operation in operations]
    place: dict[int, int] = {}  # of each operation, or of the first of its bucket
    members: dict[int, list[Operation]] = {}
    for position, number in enumerate(order):
        first = buckets.get(number, number)
        place.setdefault(first, position)
        if owner[number] == world.rank:
            members.setdefault(first, []).append(operations[number])
    needed: dict[int, int] = {}  # the place of the first operation that depends on a message
    for source, target in edges.tolist():
        kind = operations[source].kind
        if kind == "recv" or (kind == "send" and owner[source] == owner[target]):
            group = buckets.get(source, source)
            at = place[buckets.get(target, target)]
            needed[group] = min(needed.get(group, len(order)), at)
    received = {
        message_of(op).number: needed.get(buckets.get(op.id, op.id), len(order))
        for op in operations
        if op.kind == "recv"
    }
    for first, group_of in members.items():
        if group_of[0].kind == "send":
            behind = BEHIND + max(received[message_of(op).number] for op in group_of)
            needed[first] = min(needed.get(first, len(order)), behind)
    found: list[Operation] = []
    keys: list[tuple[int, int]] = []
    enter: dict[int, int] = {}
    leave: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for number, group_of in members.items():
        first = len(found)
        for operation in group_of:
            enter[operation.id] = leave[operation.id] = first
        if group_of[0].kind in _SPLIT:
            start, end = _SPLIT[group_of[0].kind]
            found += [_message(start, group_of, first), _message(end, group_of, first + 1)]
            keys += [(place[number], 2), (needed.get(number, len(order)), end is SENT)]
            leave.update((operation.id, first + 1) for operation in group_of)
            pairs.append((first, first + 1))
        else:
            (operation,) = group_of
            found.append(_renumbered(operation, first, operation.launch, operation.uses))
            keys.append((place[number], 2))
    pairs += [
        (leave[a], enter[b])
        for a, b in edges.tolist()
        if a in leave and b in enter and leave[a] != enter[b]
    ]
    local = np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0)
    return found, local, sorted(range(len(found)), key=lambda number: (*keys[number], number))


def _message(task: Task, group: Sequence[Operation], number: int) -> Operation:
    """One end or start of a message for the sends, or the receives, of a bucket."""
    partitions = tuple(partition for op in group for partition in op.launch.partitions)
    messages = tuple(message for op in group for message in op.launch.scalars)
    what = messages[0].region + (f" and {len(group) - 1}" if len(group) > 1 else "")
    uses = tuple(use for op in group for use in op.uses)
    launch = internal(task, (*partitions, *messages), f"{task.name} {what}")
    return _renumbered(group[0], number, launch, uses)


def _renumbered(
    operation: Operation, number: int, launch: Launch, uses: tuple[Any, ...]
) -> Operation:
    return Operation(
        number,
        launch,
        operation.point,
        operation.processor,
        uses,
        operation.priority,
        operation.variant,
        operation.idle,
    )
