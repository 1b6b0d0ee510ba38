"""The memory plan of a graph, by a method, beside what simpler plans move and what none goes below.

A plan is exact if it moves no more than the lower bound: of all plans that run each node once, in
the order that the plan has. Nothing is computed twice, and copies are counted in bytes, not in
time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soapstone.deadline import Deadline
from soapstone.ir.errors import GraphError
from soapstone.ir.footprint import Footprint, Touches
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.search.placement import baselines
from soapstone.search.placement.neighbourhood import improved
from soapstone.search.placement.optimal import WIDTHS, Kept, Progress, fewest_bytes
from soapstone.search.placement.orders import frees_early
from soapstone.search.placement.packing import Packed, packed
from soapstone.search.placement.timeline import Span, Timeline, timeline

METHODS = ("dp", "lru", "stream", "belady")


@dataclass(frozen=True)
class Found:
    """A plan and how good it is; bytes are those copied between the two memories.

    Attributes:
        plan: checked. method: what made it. reordered: whether its nodes run in another order than
            the graph's.
        lower_bound_bytes: what no plan of this order goes below. lru_bytes, streaming_bytes: what
            the baselines move, in the graph's order.
        margin_bytes: of the capacity, held back so that the plan packs.
        seconds: that were spent.
    """

    plan: MemoryPlan
    method: str
    reordered: bool
    lower_bound_bytes: int
    lru_bytes: int
    streaming_bytes: int
    margin_bytes: int
    seconds: float

    @property
    def transfer_bytes(self) -> int:
        """What the plan moves."""
        return self.plan.moved_bytes

    @property
    def exact(self) -> bool:
        """Whether no plan of this order moves less."""
        return self.transfer_bytes == self.lower_bound_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them."""
        return {
            "method": self.method,
            "capacity_bytes": self.plan.capacity_bytes,
            "transfer_bytes": self.transfer_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "lru_bytes": self.lru_bytes,
            "streaming_bytes": self.streaming_bytes,
            "peak_bytes": self.plan.peak_bytes,
            "margin_bytes": self.margin_bytes,
            "reordered": self.reordered,
            "exact": self.exact,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        bound = self.lower_bound_bytes
        best = (
            "no plan of this order moves less"
            if self.exact
            else (
                f"at most {self.transfer_bytes / bound - 1:.1%} above the lower bound"
                if bound
                else ""
            )
        )
        lines = [
            f"{self.method}: {self.transfer_bytes:,} bytes moved; {best}",
            f"LRU {self.lru_bytes:,}, streaming {self.streaming_bytes:,}, "
            f"lower bound {bound:,} bytes",
            f"fast memory: {self.plan.peak_bytes:,} of {self.plan.capacity_bytes:,} bytes, "
            f"{self.margin_bytes:,} held back to pack; {self.seconds:.1f} s",
        ]
        return "\n".join([*lines, "", table(self.plan)])


def table(plan: MemoryPlan) -> str:
    """Return a plan as text: for each node what comes before it, what leaves after it, and space.

    A value with `!` is copied from or to the backing memory; `resident` is while the node runs.
    """
    rows = [("step", "node", "comes", "leaves", "resident")]
    before: list[str] = []
    resident = 0
    for step in plan.steps:
        copied = "!" if step.copied else ""
        if step.action is Action.RUN:
            rows.append((str(len(rows)), step.name, " ".join(before), "", f"{resident:,}"))
            before = []
        elif step.action in (Action.ALLOCATE, Action.FETCH):
            before.append(step.name + copied)
            resident += step.nbytes
        else:
            number, node, comes, leaves, space = rows[-1]
            rows[-1] = (number, node, comes, f"{leaves} {step.name}{copied}".strip(), space)
            resident -= step.nbytes
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def memory_plan(
    graph: Graph | Footprint,
    capacity_bytes: int,
    method: str = "dp",
    *,
    workspace: Mapping[str, int] | None = None,
    widths: Sequence[int] = WIDTHS,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
) -> Found:
    """Return a checked memory plan of a graph.

    Args:
        graph: what is run, or its footprint; what no node makes is in the backing memory at first.
        capacity_bytes: of the fast memory.
        method: dp: the fewest bytes; lru, stream or belady: without a search.
        workspace: bytes that nodes need beside their operands, by name; 0 where none is given.
        widths: the most states of the search, tried in turn until it is exact.
        deadline: of the search; the best plan until then is returned.
        progress: told how far the search is.

    Raises:
        GraphError: an unknown method, or a node that needs more than the capacity; names it.
    """
    if method not in METHODS:
        raise GraphError(f"method {method!r} found; {', '.join(METHODS)} needed")
    began = time.perf_counter()
    deadline = deadline or Deadline()
    given = timeline(graph, capacity_bytes, workspace=workspace)
    lru, streamed = packed(given, baselines.recent), packed(given, baselines.streamed)
    reordered = False
    if method == "dp":
        early = Timeline(given.footprint.ordered(frees_early(given.footprint)), capacity_bytes)
        same = given.footprint.fixed or _names(early.order) == _names(given.order)
        tried = [given] if same else [given, early]
        parts = [deadline, deadline] if len(tried) == 1 else [deadline.part(0.5), deadline]
        both = [_fewest(each, widths, part, progress) for each, part in zip(tried, parts)]
        which = min(range(len(both)), key=lambda n: both[n][0].plan.moved_bytes)
        (result, bound), reordered = both[which], which == 1
    else:
        choose = {"lru": lru, "stream": streamed}
        result = choose.get(method) or packed(given, baselines.belady)
        bound = fewest_bytes(given, set(), widths=()).lower_bound_bytes
    return Found(
        result.plan,
        method,
        reordered,
        bound,
        lru.plan.moved_bytes,
        streamed.plan.moved_bytes,
        result.margin_bytes,
        time.perf_counter() - began,
    )


def _names(nodes: Sequence[Touches]) -> list[str]:
    return [node.name for node in nodes]


def _fewest(
    known: Timeline, widths: Sequence[int], deadline: Deadline, progress: Progress | None
) -> tuple[Packed, int]:
    """Return the plan of the fewest bytes that packs, and the bound for the whole capacity."""
    solved: list[Kept] = []

    def choose(part: Timeline) -> list[Span]:
        starts = [baselines.kept_by(part, rank) for rank in (baselines.latest, baselines.oldest)]
        start = min(starts, key=part.moved_bytes)
        share = deadline.part(0.5)  # what does not pack is searched for again, with less room
        both = share.part(0.5), share
        found = fewest_bytes(part, start, widths=widths, deadline=both[0], progress=progress)
        solved.append(found)
        lower = found.lower_bound_bytes
        near = improved(part, found.gaps, lower, deadline=both[1], progress=progress)
        return part.spans(near)

    plans = [
        packed(known, choose),
        packed(known, baselines.belady),
        packed(known, baselines.recent),
    ]
    return min(plans, key=lambda each: each.plan.moved_bytes), solved[0].lower_bound_bytes
