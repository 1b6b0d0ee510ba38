"""Memory plans without a search: streaming, least recently used, and Belady's rule.

Each copies what a node uses to a bounded memory, from a backing memory that holds everything.
Streaming evicts everything after each node. LRU evicts, when space is needed, the value that has
been unused for longest; Belady's rule the one whose next use is latest. They are the baselines of
optimal plans (ROC, section 4.4 of Jia's thesis).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise

from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.search.placement.packing import packed
from soapstone.search.placement.timeline import Gap, Span, Timeline, timeline


def stream(graph: Graph | Footprint, capacity_bytes: int) -> MemoryPlan:
    """Return the checked plan that keeps nothing between two nodes.

    graph: the graph that is run in its order, or its footprint. capacity_bytes: of the memory in
    which nodes run.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return packed(timeline(graph, capacity_bytes), streamed).plan


def least_recently_used(
    graph: Graph | Footprint, capacity_bytes: int, *, liveness: bool = True
) -> MemoryPlan:
    """Return the checked plan that evicts the value that has been unused for longest.

    graph and capacity_bytes are as of `stream`. liveness: whether dead values are freed without a
    copy; otherwise they stay until they are evicted, and are copied out.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    choose = recent if liveness else recent_without_liveness
    return packed(timeline(graph, capacity_bytes), choose, liveness=liveness).plan


def furthest_use(graph: Graph | Footprint, capacity_bytes: int) -> MemoryPlan:
    """Return the checked plan that evicts the value whose next use is latest (Belady).

    graph and capacity_bytes are as of `stream`.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return packed(timeline(graph, capacity_bytes), belady).plan


def oldest(used: int, following: int) -> int:
    """Rank a value by its last use (LRU)."""
    return used


def latest(used: int, following: int) -> int:
    """Rank a value by its next use, the latest first (Belady)."""
    return -following


def streamed(known: Timeline) -> list[Span]:
    """Return the spans of streaming: all values leave after each node."""
    return known.spans(set())


def recent(known: Timeline) -> list[Span]:
    """Return the spans of LRU where dead values are freed at once."""
    return known.spans(kept_by(known, oldest))


def belady(known: Timeline) -> list[Span]:
    """Return the spans of Belady's rule."""
    return known.spans(kept_by(known, latest))


def recent_without_liveness(known: Timeline) -> list[Span]:
    """Return the spans of LRU where dead values stay until their space is needed."""
    return _cached(known, oldest, liveness=False)


def kept_by(known: Timeline, rank: Callable[[int, int], int]) -> set[Gap]:
    """Return the gaps that are bridged if the value of the lowest rank is evicted first.

    rank: of a value, from the step of its last use and that of its next.
    """
    bridged: set[Gap] = set()
    for span in _cached(known, rank, liveness=True):
        steps = known.touches[span.value]
        first, last = bisect_left(steps, span.first), bisect_right(steps, span.last)
        bridged.update(Gap(span.value, *ends) for ends in pairwise(steps[first:last]))
    return bridged


def _cached(known: Timeline, rank: Callable[[int, int], int], liveness: bool) -> list[Span]:
    """Simulate a cache over the touches; return what it held when."""
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
