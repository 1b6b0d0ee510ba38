"""Memory plans without a search: streaming, least recently used, and Belady's choice.

Each brings to a bounded memory what a node uses, from a backing memory that holds everything.
Streaming lets it all leave again after each node; LRU lets values stay until their space is needed,
and sends away the one unused for longest; Belady's rule the one that is used again latest. They are
the baselines of optimal plans (ROC, section 4.4 of Jia's thesis).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise

from soapstone.ir.footprint import Footprint
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.search.placement.packing import packed
from soapstone.search.placement.timeline import Gap, Span, Timeline, timeline


def stream(graph: Graph | Footprint, capacity_bytes: int) -> MemoryPlan:
    """Return the plan that keeps nothing between two nodes; it is checked.

    graph: what is run, node after node, or its footprint. capacity_bytes: of the memory that nodes
    work in.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return packed(timeline(graph, capacity_bytes), streamed).plan


def least_recently_used(
    graph: Graph | Footprint, capacity_bytes: int, *, liveness: bool = True
) -> MemoryPlan:
    """Return the plan that sends away what was not used for longest; it is checked.

    graph and capacity_bytes are as of `stream`. liveness: whether values that nothing reads any
    more leave for free; else they stay until their turn comes, and are copied out.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    choose = recent if liveness else recent_without_liveness
    return packed(timeline(graph, capacity_bytes), choose, liveness=liveness).plan


def furthest_use(graph: Graph | Footprint, capacity_bytes: int) -> MemoryPlan:
    """Return the plan that sends away what is used again latest (Belady); it is checked.

    graph and capacity_bytes are as of `stream`.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return packed(timeline(graph, capacity_bytes), belady).plan


def oldest(used: int, following: int) -> int:
    """Rank a value by its last use: LRU."""
    return used


def latest(used: int, following: int) -> int:
    """Rank a value by its next use, the latest first: Belady."""
    return -following


def streamed(known: Timeline) -> list[Span]:
    """Return the spans of values that leave after each node."""
    return known.spans(set())


def recent(known: Timeline) -> list[Span]:
    """Return the spans of LRU, where dead values leave at once."""
    return known.spans(kept_by(known, oldest))


def belady(known: Timeline) -> list[Span]:
    """Return the spans of Belady's rule."""
    return known.spans(kept_by(known, latest))


def recent_without_liveness(known: Timeline) -> list[Span]:
    """Return the spans of LRU, where dead values stay until their space is needed."""
    return _cached(known, oldest, liveness=False)


def kept_by(known: Timeline, rank: Callable[[int, int], int]) -> set[Gap]:
    """Return the gaps over which values stay when that of the lowest rank leaves first.

    rank: of a value last used at one step, and next at another.
    """
    bridged: set[Gap] = set()
    for span in _cached(known, rank, liveness=True):
        steps = known.touches[span.value]
        first, last = bisect_left(steps, span.first), bisect_right(steps, span.last)
        bridged.update(Gap(span.value, *ends) for ends in pairwise(steps[first:last]))
    return bridged


def _cached(known: Timeline, rank: Callable[[int, int], int], liveness: bool) -> list[Span]:
    """Run a cache over the touches; returns what was in it when."""
    spans: list[Span] = []
    held: dict[str, int] = {}  # since which step
    used: dict[str, int] = {}
    following: dict[str, int] = {}  # the next touch after the last
    never, free = len(known.order), known.room
    number = dict.fromkeys(known.touches, 0)
    taken = 0

    for step, names in enumerate(known.operands):
        room = int(free[step])
        room -= taken - sum(known.padded[value] for value in names if value in held)
        if room < 0:
            leaving = [value for value in held if value not in names]
            leaving.sort(key=lambda value: (rank(used[value], following[value]), value))
            for value in leaving:
                if room >= 0:
                    break
                room += known.padded[value]
                taken -= known.padded[value]
                spans.append(Span(value, held.pop(value), step - 1))
        for value in names:
            if value not in held:
                held[value] = step
                taken += known.padded[value]
            used[value] = step
            number[value] += 1
            steps = known.touches[value]
            following[value] = steps[number[value]] if number[value] < len(steps) else never
            if liveness and following[value] == never:
                spans.append(Span(value, held.pop(value), step))
                taken -= known.padded[value]
    return spans + [Span(value, first, never - 1) for value, first in held.items()]
