"""Work stealing: idle workers take ready operations from others that have more than they can run.

Only operations of launches that the mapper lets go are taken, whole slices at a time, and only by
processors of the same kind, threads and memory: no result depends on who ran what (after Blumofe
and Leiserson, 1999; the victim is the one with the longest queue, not a random one).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from soapstone.runtime.analysis.operation import ALONE, Operation
from soapstone.runtime.machines.machine import Machine

Queue = list[tuple[int, int, Operation]]  # a heap: (-priority, id, operation)


class Stealing:
    """What the idle processors of a machine may take; all methods are called under one lock."""

    def __init__(self, machine: Machine, processors: Sequence[int]) -> None:
        kinds = [(p.kind, p.threads, p.memory) for p in machine.processors]
        self._peers = {
            one: [other for other in processors if other != one and kinds[other] == kinds[one]]
            for one in processors
        }

    def idle_peer(self, processor: int, busy: Sequence[bool]) -> int | None:
        """A processor with nothing to do that may take over from another one."""
        for peer in self._peers[processor]:
            if not busy[peer]:
                return peer
        return None

    def take(self, thief: int, queues: Sequence[Queue]) -> bool:
        """Move ready operations into the queue of a processor; returns whether there were any."""
        victims = sorted(self._peers[thief], key=lambda peer: -len(queues[peer]))
        for victim in victims:
            taken = _take_slice(queues[victim])
            for item in taken:
                item[2].processor = thief
                heapq.heappush(queues[thief], item)
            if taken:
                return True
        return False


def _take_slice(queue: Queue) -> Queue:
    """Take one of the least urgent operations that may go, and the rest of its slice."""
    for place in reversed(range(len(queue))):
        head = queue[place][2].slice
        if head is None:
            continue
        if head == ALONE:
            item = queue[place]
            if place == len(queue) - 1:
                queue.pop()  # a leaf: what is left is a heap still
            else:
                queue[place] = queue.pop()
                heapq.heapify(queue)
            return [item]
        taken = [item for item in queue if item[2].slice == head]
        queue[:] = [item for item in queue if item[2].slice != head]
        heapq.heapify(queue)
        return taken
    return []
