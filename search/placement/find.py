"""The memory plan of a graph by a method, with those of simpler methods and a lower bound.

A plan is exact if it moves no more than the lower bound, which holds for all plans that run each
node once in the plan's order. The objective is bytes, or the time of a step (`timing.py`). Which
values are recomputed instead of copied is decided outside (`recomputation.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soapstone.deadline import Deadline
from soapstone.ir.analysis.footprint import Footprint, Touches
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.search.placement import baselines
from soapstone.search.placement.neighbourhood import improved
from soapstone.search.placement.optimal import Kept, Progress, fewest_bytes
from soapstone.search.placement.orders import frees_early
from soapstone.search.placement.packing import Packed, packed
from soapstone.search.placement.timeline import Span, Timeline, timeline
from soapstone.search.placement.timing import Times, step_us
from soapstone.text_table import lines_of

METHODS = ("dp", "lru", "stream", "belady")
BYTES, TIME = GOALS = ("bytes", "time")
LEADS = (0, 1, 2, 4, 8)  # nodes during which bytes wait for a copy, where copies overlap with nodes


@dataclass(frozen=True)
class Found:
    """A plan and its quality; bytes are those copied between the two memories.

    Attributes:
        plan: checked. method: that made it. reordered: whether its nodes run in another order than
            the graph's.
        minimize: the objective: bytes or time.
        lower_bound_bytes: for all plans in this order. lru_bytes, streaming_bytes: of the
            baselines, in the graph's order.
        margin_bytes: the most of the capacity held back during a node so that the plan packs.
        seconds: of the search.
        step_us: the time of a step by `timing.step_us`. least_us: a lower bound of it for these
            nodes and the lower bound's bytes. None: the times of nodes are not known.
        sets: the number of sets of values to recompute that were considered. all_sets: whether
            there are no others.
        without_bytes, without_us: of the plan that recomputes nothing.
    """

    plan: MemoryPlan
    method: str
    reordered: bool
    lower_bound_bytes: int
    lru_bytes: int
    streaming_bytes: int
    margin_bytes: int
    seconds: float
    minimize: str = BYTES
    step_us: float | None = None
    least_us: float | None = None
    sets: int = 1
    all_sets: bool = False
    without_bytes: int | None = None
    without_us: float | None = None

    @property
    def score(self) -> float:
        """The value of the objective."""
        return (
            self.transfer_bytes if self.step_us is None or self.minimize == BYTES else self.step_us
        )

    @property
    def transfer_bytes(self) -> int:
        """The bytes that the plan copies."""
        return self.plan.moved_bytes

    @property
    def exact(self) -> bool:
        """Whether no plan in this order copies less."""
        return self.transfer_bytes == self.lower_bound_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
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
            "minimize": self.minimize,
            "step_us": self.step_us,
            "least_us": self.least_us,
            "recomputed": list(self.plan.recomputed),
            "sets": self.sets,
            "all_sets": self.all_sets,
            "without_bytes": self.without_bytes,
            "without_us": self.without_us,
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
        if self.step_us is not None and self.least_us is not None:
            lines.append(f"{self.step_us:,.0f} us a step, at least {self.least_us:,.0f}")
        if self.without_bytes is not None:
            count = len(self.plan.recomputed)
            took = "" if self.without_us is None else f" and {self.without_us:,.0f} us"
            lines.append(
                f"{count} values recomputed, of {'all ' * self.all_sets}{self.sets} sets looked"
                f" at; {self.without_bytes:,} bytes{took} without"
            )
        return "\n".join([*lines, "", table(self.plan)])


def table(plan: MemoryPlan) -> str:
    """Return a plan as text: for each node what arrives before it, what leaves after it, and space.

    A value with `!` is copied from or to the backing memory; `resident` is during the node.
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
    return "\n".join(lines_of(rows))


def memory_plan(
    graph: Graph | Footprint,
    capacity_bytes: int,
    method: str = "dp",
    *,
    workspace: Mapping[str, int] | None = None,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    minimize: str = BYTES,
    times: Times | None = None,
) -> Found:
    """Return a checked memory plan of a graph.

    Args:
        graph: the graph, or its footprint. Values that no node makes begin in the backing memory.
        capacity_bytes: of the fast memory.
        method: dp: the fewest bytes; lru, stream or belady: without a search.
        workspace: bytes that nodes need besides their operands, by name; 0 where none are given.
        deadline: of the search; the best plan so far is returned.
        progress: receives the progress of the search.
        minimize: bytes, or time, which `dp` minimises by how early copies begin; it needs times.
        times: of nodes and copies.

    Raises:
        GraphError: an unknown method or objective, or a node that needs more than the capacity;
            names it.
    """
    if method not in METHODS:
        raise GraphError(f"method {method!r} found; {', '.join(METHODS)} needed")
    if minimize not in GOALS or (minimize == TIME and times is None):
        raise GraphError(f"minimize {minimize!r} found; bytes, or time and times of nodes, needed")
    began = time.perf_counter()
    deadline = deadline or Deadline()
    given = timeline(graph, capacity_bytes, workspace=workspace)
    lru, streamed = packed(given, baselines.recent), packed(given, baselines.streamed)
    reordered = False

    def score(plan: MemoryPlan) -> float:
        if minimize == BYTES or times is None:
            return plan.moved_bytes
        return step_us(plan, times)

    if method == "dp":
        tried = orders(given)
        leads = LEADS if minimize == TIME and times is not None and times.overlapped else (0,)
        found = []
        for number, each in enumerate(tried):
            part = deadline.part(1 / (len(tried) - number))
            plans, bound = _fewest(each, part, progress, leads)
            found.append((min(plans, key=lambda made: score(made.plan)), bound))
        which = min(range(len(tried)), key=lambda n: score(found[n][0].plan))
        (result, bound), reordered = found[which], which == 1
    else:
        choose = {"lru": lru, "stream": streamed}
        result = choose.get(method) or packed(given, baselines.belady)
        bound = fewest_bytes(given, set(), widths=()).lower_bound_bytes
    return Found(
        plan=result.plan,
        method=method,
        reordered=reordered,
        lower_bound_bytes=bound,
        lru_bytes=lru.plan.moved_bytes,
        streaming_bytes=streamed.plan.moved_bytes,
        margin_bytes=result.margin_bytes,
        seconds=time.perf_counter() - began,
        minimize=minimize,
        step_us=None if times is None else step_us(result.plan, times),
        least_us=None if times is None else times.least_us(bound),
    )


def orders(given: Timeline) -> list[Timeline]:
    """Return a timeline, and one in an order that frees memory early if that differs."""
    footprint = given.footprint
    if footprint.fixed:
        return [given]
    early = given.footprint.ordered(frees_early(footprint))
    if _names(early.nodes) == _names(given.order):
        return [given]
    return [given, Timeline(early, given.capacity_bytes)]


def _names(nodes: Sequence[Touches]) -> list[str]:
    return [node.name for node in nodes]


def _fewest(
    known: Timeline,
    deadline: Deadline,
    progress: Progress | None,
    leads: Sequence[int],
) -> tuple[list[Packed], int]:
    """Return plans of few bytes that pack, one for each lead, and the whole capacity's bound."""
    solved: list[Kept] = []
    chosen: dict[tuple[int, ...], list[Span]] = {}  # by margins: leads ask for the same

    def choose(part: Timeline) -> list[Span]:
        if part.margins in chosen:
            return chosen[part.margins]
        starts = [baselines.kept_by(part, rank) for rank in (baselines.latest, baselines.oldest)]
        start = min(starts, key=part.moved_bytes)
        share = deadline.part(0.5)  # what does not pack is searched for again, with less room
        both = share.part(0.5), share
        found = fewest_bytes(part, start, deadline=both[0], progress=progress)
        solved.append(found)
        lower = found.lower_bound_bytes
        near = improved(part, found.gaps, lower, deadline=both[1], progress=progress)
        chosen[part.margins] = part.spans(near)
        return chosen[part.margins]

    ways = choose, baselines.belady, baselines.recent
    plans = [packed(known, way, lead=lead) for lead in leads for way in ways]
    return plans, solved[0].lower_bound_bytes
