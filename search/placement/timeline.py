"""When the values of a graph are touched, node after node, and the room that each node leaves.

Between two touches a value either stays in the fast memory, or leaves and is fetched again. All
that a plan decides is which of these `Gap`s are bridged (ROC; Jia, section 4.3): what is touched
must be there, and a value that nothing reads any more leaves for free. Space is counted in whole
blocks of the arena planner, and copies in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.runtime.tracing.arena import ALIGNMENT

Array = np.ndarray[Any, np.dtype[Any]]


class Gap(NamedTuple):
    """A value between the touch at step `first` and its next at step `last`."""

    value: str
    first: int
    last: int


class Span(NamedTuple):
    """A value in the fast memory from step `first` to step `last`, both included."""

    value: str
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """The nodes of a graph in the order in which they run, in a memory of a capacity.

    Attributes:
        graph: whose values these are. order: its nodes, each after those that it reads from.
        capacity_bytes: of the fast memory.
        workspace: bytes that a node needs beside its operands while it runs; 0 where none is named.

    Raises:
        GraphError: a node that needs more than the capacity; names it, and how much is missing.
    """

    graph: Graph
    order: tuple[Node, ...]
    capacity_bytes: int
    workspace: Mapping[str, int]

    def __post_init__(self) -> None:
        for node, need in zip(self.order, self.needs.tolist()):
            if need > self.capacity_bytes:
                raise GraphError(
                    f"{node.label}: uses {need} bytes at once, {self.capacity_bytes} found in the "
                    f"memory: {need - self.capacity_bytes} more needed"
                )

    def within(self, capacity_bytes: int) -> Timeline:
        """Return the same nodes in a memory of another size."""
        return Timeline(self.graph, self.order, capacity_bytes, self.workspace)

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """The bytes of each value."""
        return {name: spec.nbytes for name, spec in self.graph.tensors.items()}

    @cached_property
    def padded(self) -> dict[str, int]:
        """The bytes that each value takes in the arena."""
        return {name: aligned(nbytes) for name, nbytes in self.nbytes.items()}

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """The values that each step touches, each once."""
        return tuple(tuple(dict.fromkeys((*n.inputs, *n.outputs))) for n in self.order)

    @cached_property
    def needs(self) -> Array:
        """What must be free for each node. Returns int64 (nodes,) bytes."""
        return np.array(
            [
                sum(self.padded[name] for name in names) + aligned(self.workspace.get(node.name, 0))
                for node, names in zip(self.order, self.operands)
            ],
            dtype=np.int64,
        )

    @cached_property
    def touches(self) -> dict[str, list[int]]:
        """The steps that touch each value."""
        found: dict[str, list[int]] = {}
        for step, names in enumerate(self.operands):
            for name in names:
                found.setdefault(name, []).append(step)
        return found

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps, by the step that they begin at."""
        found = [Gap(v, *ends) for v, steps in self.touches.items() for ends in pairwise(steps)]
        return tuple(sorted(found, key=lambda gap: (gap.first, gap.last)))

    def dirty(self, value: str) -> bool:
        """Whether a value must be copied out when it leaves for the first time, and only then.

        What no node makes is in the backing memory; results are copied there once in any plan.
        """
        return value in self.graph.producers and value not in self.graph.results

    @cached_property
    def least_bytes(self) -> int:
        """What every plan moves: each input that is read, once, and each result that is made."""
        made, kept = self.graph.producers, self.graph.results
        return sum(n for v, n in self.nbytes.items() if v in self.touches and v not in made) + sum(
            self.nbytes[value] for value in kept if value in made
        )

    @cached_property
    def working_set_bytes(self) -> int:
        """The space in which nothing that is touched again has to leave."""
        alive = np.zeros(len(self.order) + 1, dtype=np.int64)
        for gap in self.gaps:
            alive[gap.first + 1] += self.padded[gap.value]
            alive[gap.last] -= self.padded[gap.value]
        return int((np.cumsum(alive)[:-1] + self.needs).max(initial=0))

    def spans(self, kept: set[Gap]) -> list[Span]:
        """Return where values are when they stay over these gaps, and over no others."""
        found = []
        for value, steps in self.touches.items():
            first = steps[0]
            for ends in pairwise(steps):
                if Gap(value, *ends) not in kept:
                    found.append(Span(value, first, ends[0]))
                    first = ends[1]
            found.append(Span(value, first, steps[-1]))
        return found

    def moved_bytes(self, kept: set[Gap]) -> int:
        """Return what is copied when values stay over these gaps."""
        written = {gap.value for gap in self.gaps if gap not in kept and self.dirty(gap.value)}
        fetched = sum(self.nbytes[gap.value] for gap in self.gaps if gap not in kept)
        return self.least_bytes + fetched + sum(self.nbytes[value] for value in written)


def timeline(
    graph: Graph,
    capacity_bytes: int,
    *,
    order: Sequence[Node] | None = None,
    workspace: Mapping[str, int] | None = None,
) -> Timeline:
    """Return the timeline of a graph, in the order of its nodes or in another."""
    return Timeline(
        graph, graph.nodes if order is None else tuple(order), capacity_bytes, workspace or {}
    )


def aligned(nbytes: int) -> int:
    """Return bytes rounded up to whole blocks of the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
