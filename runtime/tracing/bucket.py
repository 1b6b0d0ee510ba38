"""Buckets: small messages of a trace that are not urgent travel together, late.

A message costs microseconds however short it is, and a model has hundreds of short gradients. A
small one that only light operations wait for (the fold and the update of a bias) is put off to the
end of the step, with those operations; what then stands side by side between two memories becomes
one message (the gradient buckets of Li et al., PyTorch Distributed, VLDB 2020, found from the
dependences).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.native.memory import Array
from soapstone.runtime.analysis.message import MESSAGES, message_of
from soapstone.runtime.analysis.operation import Operation

SMALL_BYTES = 1 << 16  # of a message that may wait
HEAVY_BYTES = 1 << 20  # touched by an operation that must not
_SWEEPS = 10


def buckets(
    operations: Sequence[Operation], edges: Array, order: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """A new order with small messages put off, and the first of its bucket for each of those.

    operations: of all processes, by id. edges: int64 (edges, 2), with those of receives on their
    sends. order: ids; every process must give the same. Returns ids, and ids by id.
    """
    after: list[list[int]] = [[] for _ in operations]
    before: list[list[int]] = [[] for _ in operations]
    for source, target in edges.tolist():
        after[source].append(target)
        before[target].append(source)
    urgent = [heavy(operation) for operation in operations]
    for number in reversed(order):
        urgent[number] = urgent[number] or any(urgent[later] for later in after[number])
    numbers = {
        number: message_of(operation).number
        for number, operation in enumerate(operations)
        if operation.kind in MESSAGES
    }
    held = {message for number, message in numbers.items() if urgent[number]}
    may_wait = [number in numbers and numbers[number] not in held for number in range(len(urgent))]
    level = _levels(order, before, numbers, may_wait)
    if level is None:
        return list(order), {}
    place = {number: position for position, number in enumerate(order)}
    put_off = [number for number in order if level[number] >= 0]
    # Both ends of a bucket list its messages in one order, that of their numbers.
    put_off.sort(key=lambda n: (level[n], n in numbers, numbers.get(n, place[n]), place[n]))
    groups: dict[tuple[int, str, tuple[int, int]], int] = {}
    found_buckets = {}
    for number in put_off:
        operation = operations[number]
        if number in numbers:
            key_of = (level[number], operation.kind, message_of(operation).memories)
            found_buckets[number] = groups.setdefault(key_of, number)
    return [number for number in order if level[number] < 0] + put_off, found_buckets


def _levels(
    order: Sequence[int],
    before: Sequence[Sequence[int]],
    numbers: Mapping[int, int],
    may_wait: Sequence[bool],
) -> list[int] | None:
    """How many messages are on the longest way to each operation that is put off; -1: it is not.

    Both ends of a message are at one level. numbers: of the messages' operations. may_wait: which
    of those begin to be put off. Returns None where messages wait for each other in a circle.
    """
    floor: dict[int, int] = {}
    for _ in range(_SWEEPS):
        level = [-1] * len(before)
        for number in order:
            mine = numbers.get(number)
            found = floor.get(mine, 0) if mine is not None and may_wait[number] else -1
            for source in before[number]:
                if level[source] >= 0:
                    other = numbers.get(source)
                    found = max(found, level[source] + (other is not None and other != mine))
            level[number] = found
        highest: dict[int, int] = {}
        for number, message in numbers.items():
            highest[message] = max(highest.get(message, -1), level[number])
        if all(level[number] == highest[message] for number, message in numbers.items()):
            return level
        floor = highest
    return None


def heavy(operation: Operation) -> bool:
    """Whether an operation is one that nothing should keep waiting."""
    if operation.kind in MESSAGES:
        return message_of(operation).nbytes > SMALL_BYTES
    return operation.touched_bytes > HEAVY_BYTES
