"""The order of a step over ranks in which nobody waits who has something to do.

Ranks are never quite in step. Where the program would have one wait for a message, what does not
depend on it comes first: while a gradient travels, the backward pass goes on; but nothing falls
behind by more than a bounded number of places, so that what waits does not hold memory for long.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.world import World
from soapstone.runtime.tracing.bucket import HEAVY_BYTES

LAG_BYTES = 2 * HEAVY_BYTES  # what a rank touches while a message travels
WINDOW = 48  # places of the order that one who waits may fall behind
_FIRST = -1  # the place of what is sent at once


def list_schedule(
    operations: Sequence[Operation], order: Sequence[int], edges: Array, world: World
) -> list[int]:
    """The ids by when they would begin, if each lasted as long as the bytes that it touches.

    A processor that is free takes the first in program order of those that can begin, else the one
    that can begin next (list scheduling). A message leaves as soon as there is what it carries.

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
    """Operations of a processor that wait only for messages under way, or for the processor."""

    def __init__(self) -> None:
        self._clock = 0
        self._ready: list[tuple[int, int]] = []  # places and ids
        self._early: list[tuple[int, int, int]] = []  # times, places and ids; and some that left
        self._oldest: list[tuple[int, int]] = []  # places and ids of the same
        self._left: set[int] = set()

    @property
    def begins(self) -> float:
        """When the next one begins."""
        if self._ready:
            return self._clock
        while self._early and self._early[0][2] in self._left:
            heapq.heappop(self._early)
        return max(self._clock, self._early[0][0]) if self._early else float("inf")

    def add(self, time: int, place: int, number: int) -> None:
        """Take an operation that can begin at a time."""
        if time <= self._clock:
            heapq.heappush(self._ready, (place, number))
        else:
            heapq.heappush(self._early, (time, place, number))
            heapq.heappush(self._oldest, (place, number))

    def take(self, operations: Sequence[Operation]) -> tuple[int, int]:
        """The next operation, and when it ends."""
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
