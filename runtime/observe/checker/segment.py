"""What is judged at once: a replay of a trace, or what ran untraced between two moments of rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soapstone.runtime.observe.checker.records import Box, Launch, Operation, Trace


@dataclass
class Segment:
    """Operations by place, what launches they are of, and when they ran.

    clock_ns: by which that may be wrong.
    """

    operations: Sequence[Operation]
    instances: dict[int, int]  # of each launch, by its id
    launches: Sequence[Launch]
    runs: Sequence[tuple[int, int]]
    trace: Trace | None = None
    clock_ns: int = 0

    def in_turn(self) -> Iterator[tuple[int, bool]]:
        """The places in the order in which it happened, and whether that is possible.

        Each rank has a clock of its own, so ranks are put together by messages alone: what was
        received at the end of a receive had been sent by the start of its send. Where a message was
        never sent, its receive comes as late as may be. Where clocks may be wrong it is the order
        in which dependences point forward: that these are kept by the clock is looked at apart.
        """
        order = range(len(self.operations)) if self.trace is None else self.trace.order
        place = {number: turn for turn, number in enumerate(order if self.clock_ns else ())}
        ranks: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, (operation, run) in enumerate(zip(self.operations, self.runs)):
            at = run[1] if operation.what == "recv" else run[0]
            ranks[operation.rank].append((place.get(number, at), run[1], number))
        queues = [sorted(some, reverse=True) for _, some in sorted(ranks.items())]
        sent: set[int] = set()
        while any(queues):
            moved = False
            for queue in queues:
                while queue:
                    operation = self.operations[queue[-1][2]]
                    if operation.what == "recv" and not sent.issuperset(operation.messages):
                        break
                    if operation.what == "send":
                        sent.update(operation.messages)
                    moved = True
                    yield queue.pop()[2], True
            if not moved:
                yield next(queue for queue in queues if queue).pop()[2], False


def name_of(operation: Operation) -> str:
    """An operation in words."""
    return f"{operation.what} {operation.name!r}, point {operation.point}"


def box_text(box: Box | None) -> str:
    """A box in words."""
    return "nothing" if box is None else f"box {list(box[0])}..{list(box[1])}"
