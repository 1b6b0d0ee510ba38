"""List scheduling of a step's operations on ranks, which overlaps messages with computation.

A rank that reaches a receive in program order would idle until the message is there. Here it first
runs later operations that do not depend on the message: while a gradient is sent, the backward pass
goes on. No operation is delayed by more than `WINDOW` places, since what it reads stays in memory
as long as it waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.world import World
from soapstone.runtime.tracing.bucket import HEAVY_BYTES

LAG_BYTES = 2 * HEAVY_BYTES  # latency of a message: bytes that a rank touches meanwhile
WINDOW = 48  # places by which an operation may be delayed against the program's order
_FIRST = -1  # the place of what is sent at once


def list_schedule(
    operations: Sequence[Operation], order: Sequence[int], edges: Array, world: World
) -> list[int]:
    """The ids of all operations in the order in which they would begin.

    The unit of time is a byte: an operation takes as long as it touches bytes, and a message takes
    `LAG_BYTES`. A processor that is free takes, of the operations whose dependences are met, the
    first in program order; if there are none, the one whose dependences are met next. Sends, and
    light operations without dependences that a send waits for, come before all others.

    operations: of all processes, by id. order: ids, in program order. edges: int64 (edges, 2), with
    those of receives on their sends (`message.joined`).
    """
    before = [0] * len(operations)
    after: list[list[int]] = [[] for _ in operations]
    for source, target in edges.tolist():
        before[target] += 1
        after[source].append(target)
    place = [0] * len(operations)
    for position, number in enumerate(order):
        place[number] = position
    for number, operation in enumerate(operations):
        light = not before[number] and operation.touched_bytes <= HEAVY_BYTES
        if operation.kind == "send" or (
            light and any(operations[later].kind == "send" for later in after[number])
        ):
            place[number] = _FIRST
    queues = [_Queue() for _ in world.runs]
    time = [0] * len(operations)  # when each can begin
    for number in order:
        if not before[number]:
            queues[operations[number].processor].add(0, place[number], number)
    found: list[int] = []
    while len(found) < len(operations):
        queue = min(queues, key=lambda each: each.begins)
        number, end = queue.take(operations)
        found.append(number)
        there = end + (LAG_BYTES if operations[number].kind == "send" else 0)
        for later in after[number]:
            time[later] = max(time[later], there)
            before[later] -= 1
            if not before[later]:
                queue = queues[operations[later].processor]
                queue.add(time[later], place[later], later)
    return found


class _Queue:
    """The operations of one processor whose predecessors have all been scheduled.

    Each can begin at a known time, when the last of the messages that it waits for is there.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._ready: list[tuple[int, int]] = []  # places and ids
        self._early: list[tuple[int, int, int]] = []  # times, places and ids; and some that left
        self._oldest: list[tuple[int, int]] = []  # places and ids of the same
        self._left: set[int] = set()

    @property
    def begins(self) -> float:
        """When the processor begins its next operation; infinite if it has none."""
        if self._ready:
            return self._clock
        while self._early and self._early[0][2] in self._left:
            heapq.heappop(self._early)
        return max(self._clock, self._early[0][0]) if self._early else float("inf")

    def add(self, time: int, place: int, number: int) -> None:
        """Add operation `number`, at `place` in program order, which can begin at `time`."""
        if time <= self._clock:
            heapq.heappush(self._ready, (place, number))
        else:
            heapq.heappush(self._early, (time, place, number))
            heapq.heappush(self._oldest, (place, number))

    def take(self, operations: Sequence[Operation]) -> tuple[int, int]:
        """Remove the next operation; returns its id and when it ends."""
        self._clock = int(self.begins)
        while self._early and self._early[0][0] <= self._clock:
            _, place, number = heapq.heappop(self._early)
            if number not in self._left:
                self._left.add(number)
                heapq.heappush(self._ready, (place, number))
        while self._oldest and self._oldest[0][1] in self._left:
            heapq.heappop(self._oldest)
        if self._oldest and self._ready[0][0] - self._oldest[0][0] >= WINDOW:
            _, number = heapq.heappop(self._oldest)
            self._left.add(number)
        else:
            _, number = heapq.heappop(self._ready)
        operation = operations[number]
        self._clock += 1 + (0 if operation.kind == "send" else operation.touched_bytes)
        return number, self._clock
