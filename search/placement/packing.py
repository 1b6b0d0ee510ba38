"""From spans of values to a memory plan: offsets by the arena planner, then the steps.

Values do not move within the fast memory, so spans whose sum fits may still not fit side by side.
Then less memory is used for the choice, during the nodes at which some block ends too high, until
the plan packs into all of it; the bytes held back are the margin. The operands of the node itself
are not affected, so a plan that keeps nothing between nodes always packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from soapstone.ir.plan import Action, MemoryPlan, Step
from soapstone.runtime.tracing import arena
from soapstone.search.placement.timeline import Span, Timeline, aligned

_LEAST, _MOST = 1 / 256, 1 / 16  # of the capacity: what more is held back at once


@dataclass(frozen=True)
class Packed:
    """A checked plan, and the most bytes that were held back during a node so that it packs."""

    plan: MemoryPlan
    margin_bytes: int


def packed(
    timeline: Timeline,
    choose: Callable[[Timeline], Sequence[Span]],
    *,
    liveness: bool = True,
    lead: int = 0,
) -> Packed:
    """Return the plan of the spans chosen for a capacity, or for slightly less.

    choose: returns spans for a timeline with some capacity. liveness: whether dead values are freed
    without a copy; otherwise they are copied out. lead: for how many nodes before its arrival a
    value's bytes are reserved, where there is room, so that its copy can overlap with them.
    """
    capacity, margins = timeline.capacity_bytes, np.zeros(len(timeline.order), np.int64)
    for around in count():  # nodes before and after, where it did not help to hold back less
        spans = choose(timeline.holding_back(margins))
        steps, beyond = _steps(timeline, spans, liveness, lead)
        if not beyond:
            break
        if (margins == capacity).all():
            steps, _ = _steps(timeline, timeline.spans(set()), liveness)
            break
        more = np.zeros_like(margins)
        for nbytes, start, end in beyond:
            near = slice(max(0, start - around), end + 1 + around)
            held = max(_LEAST * capacity, min(nbytes, _MOST * capacity))
            more[near] = np.maximum(more[near], int(held) + 1)
        margins = np.minimum(margins + more, capacity)
    plan = MemoryPlan(capacity, steps)
    plan.check(timeline.footprint)
    return Packed(plan, int(margins.max(initial=0)))


def unpacked_bytes(timeline: Timeline, spans: Sequence[Span], *, liveness: bool = True) -> int:
    """Return the bytes that spans copy, ignoring fragmentation; a plan of them may not exist."""
    return MemoryPlan(timeline.capacity_bytes, _steps(timeline, spans, liveness)[0]).moved_bytes


def _blocks(timeline: Timeline, spans: Sequence[Span], lead: int) -> list[arena.Block]:
    """Return the blocks of spans in an arena, reserved `lead` steps earlier if all still fit."""
    blocks = [arena.Block(timeline.padded[value], first, last) for value, first, last in spans]
    if not lead:
        return blocks
    room = np.full(len(timeline.order), timeline.capacity_bytes, np.int64)
    room -= [aligned(node.workspace) for node in timeline.order]
    for nbytes, start, end in blocks:
        room[start : end + 1] -= nbytes
    for number in sorted(range(len(blocks)), key=lambda n: blocks[n].start):
        nbytes, start, end = blocks[number]
        while start > max(0, blocks[number].start - lead) and room[start - 1] >= nbytes:
            start -= 1
            room[start] -= nbytes
        blocks[number] = arena.Block(nbytes, start, end)
    return blocks


def _steps(
    timeline: Timeline, spans: Sequence[Span], liveness: bool, lead: int = 0
) -> tuple[tuple[Step, ...], list[arena.Block]]:
    """Return the steps of a plan, and where and by how many bytes blocks exceed the capacity."""
    sizes = timeline.nbytes
    blocks = _blocks(timeline, spans, lead)
    blocks += [arena.Block(node.workspace, step, step) for step, node in enumerate(timeline.order)]
    found = arena.plan(blocks, timeline.capacity_bytes)
    begin: list[list[int]] = [[] for _ in timeline.order]
    end: list[list[int]] = [[] for _ in timeline.order]
    for number, (_, first, last) in enumerate(spans):
        begin[first].append(number)
        end[last].append(number)
    results = timeline.footprint.results
    filled = {value: sizes[value] for value in timeline.footprint.given}
    dirty: dict[str, int] = {}  # bytes that the backing memory does not have
    steps: list[Step] = []

    def add(action: Action, number: int, copied: int = 0) -> None:
        value = spans[number].value
        moves = action in (Action.FETCH, Action.EVICT)
        clean = sizes[value] - copied if moves else 0
        steps.append(Step(action, value, sizes[value], int(found.offsets[number]), clean))

    for step, node in enumerate(timeline.order):
        uses = {touch.value: touch for touch in node.touches}
        for number in begin[step]:
            value = spans[number].value
            copied = timeline.arrives(value, uses[value], filled.get(value, 0))
            add(Action.FETCH if copied else Action.ALLOCATE, number, copied)
        place = int(found.offsets[len(spans) + step]) if node.workspace else 0
        steps.append(Step(Action.RUN, node.name, node.workspace, place))
        for value, touch in uses.items():
            if touch.written:
                filled[value] = min(sizes[value], filled.get(value, 0) + touch.written)
                dirty[value] = min(sizes[value], dirty.get(value, 0) + touch.written)
        for number in end[step]:
            value = spans[number].value
            needed = value in results or timeline.touches[value][-1] > step
            needed = needed or (not liveness and step < len(timeline.order) - 1)
            copied = dirty.pop(value, 0) if needed else 0
            add(Action.EVICT if copied else Action.FREE, number, copied)
    tops = found.offsets + [aligned(block.nbytes) for block in blocks] - timeline.capacity_bytes
    beyond = [b._replace(nbytes=int(top)) for b, top in zip(blocks, tops) if top > 0 and b.nbytes]
    return tuple(steps), beyond
