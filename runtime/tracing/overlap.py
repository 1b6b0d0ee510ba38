"""The order in which the operations of several workers would begin, were they never held up.

Workers run their own operations in program order, but side by side. Lifetimes of instances taken in
program order alone would let one worker reuse bytes that another still needs, and so make it wait
where no dependence says so: two layers on two workers could not overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation


def overlapped(
    operations: Sequence[Operation], order: Sequence[int], edges: Array
) -> tuple[list[int], list[int]]:
    """The ids by when they would begin, and for each operation the position until which it lasts.

    An operation is taken to last as long as the bytes that it touches. Each worker's own order
    stays, and every dependence points forward.

    order: ids in the order of each worker. edges: int64 (edges, 2), dependences.
    """
    predecessors: list[list[int]] = [[] for _ in operations]
    for source, target in edges.tolist():
        predecessors[target].append(source)
    free: dict[int, int] = {}
    starts, ends = [0] * len(operations), [0] * len(operations)
    for number in order:
        operation = operations[number]
        begin = max((ends[source] for source in predecessors[number]), default=0)
        begin = max(begin, free.get(operation.processor, 0))
        starts[number] = begin
        ends[number] = free[operation.processor] = begin + 1 + operation.touched_bytes
    place = {number: position for position, number in enumerate(order)}
    found = sorted(order, key=lambda number: (starts[number], place[number]))
    begins = [starts[number] for number in found]
    return found, [bisect_left(begins, end) - 1 for end in ends]
