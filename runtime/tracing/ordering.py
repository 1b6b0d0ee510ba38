"""A captured step in the order in which a process runs its part, and the memory that this takes.

Nothing is allocated or bound here: a trace goes on from it (`trace.py`), and whoever wants to know
beforehand what a step holds needs no more (`dry_run.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from soapstone.native.memory import Array
from soapstone.runtime.analysis.message import joined, split
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.world import World
from soapstone.runtime.tracing.bucket import buckets
from soapstone.runtime.tracing.lifetime import ArenaLayout, lay_out


class Part:
    """What a process runs of a captured step.

    Args:
        operations: those of all processes, by id. edges: int64 (edges, 2), their dependences.

    operations: this process' own, by id. edges: their dependences. order: ids in the order in which
    workers run theirs.
    """

    def __init__(self, operations: Sequence[Operation], edges: Array, world: World) -> None:
        self._world = world
        # Offsets that the analysis decided hold in program order.
        self._placed = any(
            use.storage is not None and use.storage.offset is not None
            for operation in operations
            for use in operation.uses
        )
        several = world.size > 1
        if several:
            edges = joined(operations, edges)
        order = list(range(len(operations))) if self._placed else _order(operations, edges)
        if several:
            together: dict[int, int] = {}
            if not self._placed:
                from soapstone.runtime.tracing.list_scheduling import list_schedule

                order = list_schedule(operations, order, edges, world)
                order, together = buckets(operations, edges, order)
            operations, edges, order = split(operations, edges, order, world, together)
        self.operations, self.edges, self.order = operations, edges, order

    def lay_out(self, free: Sequence[int]) -> ArenaLayout:
        """The arenas; where memory allows it no worker waits for bytes that another still uses.

        free: bytes that are not in use in each memory.
        """
        workers = {operation.processor for operation in self.operations}
        if not self._placed and self._world.size == 1 and len(workers) > 1:
            from soapstone.runtime.tracing.overlap import overlapped

            order, lasts = overlapped(self.operations, self.order, self.edges)
            found = lay_out(self.operations, order, len(free), lasts)
            if all(plan.peak_bytes <= room for plan, room in zip(found.plans, free)):
                self.order = order
                return found
        return lay_out(self.operations, self.order, len(free))


def _order(operations: Sequence[Operation], edges: Array) -> list[int]:
    """Program order, or an order by priority among the operations that are ready."""
    if len({operation.priority for operation in operations}) < 2:
        return list(range(len(operations)))
    successors: list[list[int]] = [[] for _ in operations]
    need = [0] * len(operations)
    for source, target in edges.tolist():
        successors[source].append(target)
        need[target] += 1
    ready = [(-o.priority, o.id) for o in operations if need[o.id] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for after in successors[number]:
            need[after] -= 1
            if need[after] == 0:
                heapq.heappush(ready, (-operations[after].priority, after))
    return order
