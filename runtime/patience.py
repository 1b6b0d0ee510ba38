"""The order of a step over ranks in which nobody waits for a message that has only just been sent.

Ranks are never quite in step. Where the program would have one take a message at once, what does
not depend on it comes first: while a gradient travels, the backward pass goes on; a bounded number
of operations, so that what waits does not hold memory for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bucket import heavy
from .message import message_of
from .operation import Operation
from .world import World

Array = np.ndarray[Any, np.dtype[Any]]
LAG = 2  # heavy operations that a rank runs while a message travels
WINDOW = 48  # places of the order that one who waits may fall behind


def patient(
    operations: Sequence[Operation], order: Sequence[int], edges: Array, world: World
) -> list[int]:
    """The ids in an order in which receives, and what depends on them, are put off a little.

    What depends on nothing and is sent goes first, and messages as soon as there is what they
    carry. operations: of all processes, by id. order: ids.
    edges: int64 (edges, 2), with those of receives on their sends (`message.joined`).
    """
    before: list[list[int]] = [[] for _ in operations]
    after: list[list[int]] = [[] for _ in operations]
    for source, target in edges.tolist():
        before[target].append(source)
        after[source].append(target)
    large = [heavy(operation) for operation in operations]
    rank = [world.runs[operation.processor] for operation in operations]
    done = [0] * world.size  # heavy operations of each rank so far
    sent: dict[int, int] = {}  # of each message, what its receiver had done by then
    found: list[int] = []
    begun: set[int] = set()
    aside: dict[int, int] = {}  # operations that wait, in order, and their places in it

    def emit(number: int) -> None:
        operation = operations[number]
        found.append(number)
        begun.add(number)
        if operation.kind == "send":
            message = message_of(operation)
            sent[message.number] = done[message.target]
        elif operation.kind == "task":
            done[rank[number]] += large[number]
        for later in after[number]:
            ready = operations[later].kind == "send" and begun.issuperset(before[later])
            if ready and later not in begun:
                emit(later)

    def depends(number: int) -> bool:
        return any(source in aside for source in before[number])

    def waits(number: int) -> bool:
        operation = operations[number]
        if depends(number):
            return True
        if operation.kind != "recv":
            return False
        return done[rank[number]] < sent[message_of(operation).number] + LAG

    first = [
        number
        for number in order
        if not before[number]
        and not large[number]
        and "send" in (operations[number].kind, *(operations[n].kind for n in after[number]))
    ]
    for number in first:
        emit(number)
    for place, number in enumerate(order):
        if number in begun:
            continue
        if waits(number):
            aside[number] = place
        else:
            emit(number)
        for held, since in list(aside.items()):
            late = place - since >= WINDOW and not depends(held)
            if held in begun:
                del aside[held]
            elif late or not waits(held):
                del aside[held]
                emit(held)
    for number in aside:
        if number not in begun:
            emit(number)
    return found
