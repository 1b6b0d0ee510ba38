"""The steps at which values of a graph are touched, and the room that each node leaves.

Between two touches a value either stays in the fast memory, or leaves and is fetched again. A plan
only decides which of these `Gap`s are bridged (ROC; Jia, section 4.3): what is touched must be
present, and a dead value is freed without a copy. Space is counted in whole blocks of the arena
planner, copies in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from soapstone.ir.analysis.footprint import Footprint, Touch, Touches
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.runtime.tracing.arena import ALIGNMENT


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


class Price(NamedTuple):
    """The cost of letting a value leave during a gap.

    fetch: bytes that are copied back. dirty: bytes that copies out have moved by then since the
    value was last written as a whole, if it leaves now, whether or not it did before. version: the
    number of that writing.
    """

    fetch: int
    dirty: int
    version: int


@dataclass(frozen=True)
class Timeline:
    """The nodes of a graph in the order in which they run, in a memory of some capacity.

    margins: bytes of the capacity, by node, that are not available to values that stay; empty:
    none.

    Raises:
        GraphError: nodes that need more than the capacity; names the one that needs most, and how
            much is missing.
    """

    footprint: Footprint
    capacity_bytes: int
    margins: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        need = int(self.needs.max(initial=0))
        if need > self.capacity_bytes:
            node = self.order[int(self.needs.argmax())]
            raise GraphError(
                f"{node.label}: uses {need} bytes at once, {self.capacity_bytes} found in the "
                f"memory: {need - self.capacity_bytes} more needed"
            )

    @property
    def order(self) -> tuple[Touches, ...]:
        """The nodes, each after those that make what it reads."""
        return self.footprint.nodes

    def within(self, capacity_bytes: int) -> Timeline:
        """Return the same nodes in a memory of another capacity."""
        return replace(self, capacity_bytes=capacity_bytes)

    def holding_back(self, margins: Array) -> Timeline:
        """Return the same nodes and memory, with some bytes reserved for the nodes themselves.

        margins: int64 (nodes,).
        """
        return replace(self, margins=tuple(margins.tolist()))

    @property
    def nbytes(self) -> Mapping[str, int]:
        """The bytes of each value."""
        return self.footprint.sizes

    @cached_property
    def padded(self) -> dict[str, int]:
        """The bytes that each value takes in the arena."""
        return {name: aligned(nbytes) for name, nbytes in self.nbytes.items()}

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """The values that each step touches, without repeats."""
        return tuple(node.values for node in self.order)

    @cached_property
    def needs(self) -> Array:
        """The bytes that must be free for each node, int64 (nodes,)."""
        return np.array(
            [
                sum(self.padded[name] for name in node.values) + aligned(node.workspace)
                for node in self.order
            ],
            dtype=np.int64,
        )

    @property
    def room(self) -> Array:
        """The bytes free for values that stay during each node, int64 (nodes,)."""
        held = np.array(self.margins or 0, np.int64)
        return np.maximum(self.capacity_bytes - held - self.needs, 0)

    @cached_property
    def touches(self) -> dict[str, list[int]]:
        """The steps that touch each value."""
        found: dict[str, list[int]] = {}
        for step, names in enumerate(self.operands):
            for name in names:
                found.setdefault(name, []).append(step)
        return found

    @cached_property
    def uses(self) -> dict[str, list[Touch]]:
        """How each value is touched at those steps."""
        found: dict[str, list[Touch]] = {}
        for node in self.order:
            for touch in node.touches:
                found.setdefault(touch.value, []).append(touch)
        return found

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps, by the steps at which they begin."""
        found = [Gap(v, *ends) for v, steps in self.touches.items() for ends in pairwise(steps)]
        return tuple(sorted(found, key=lambda gap: (gap.first, gap.last)))

    def arrives(self, value: str, touch: Touch, filled: int) -> int:
        """Return the bytes copied in for a touch of a value that is not present.

        That is all of it that has contents, unless the node overwrites the whole value.
        """
        over = touch.written >= self.nbytes[value] and not touch.reads
        return 0 if over else filled

    @cached_property
    def _life(self) -> tuple[dict[Gap, Price], int]:
        """The price of each gap, and the bytes that every plan copies."""
        found: dict[Gap, Price] = {}
        least = 0
        for value, steps in self.touches.items():
            uses, size = self.uses[value], self.nbytes[value]
            filled = size if value in self.footprint.given else 0
            least += self.arrives(value, uses[0], filled)
            dirty = version = 0
            prices = []
            for touch, following in zip(uses, [*uses[1:], None]):
                if touch.written >= size and touch.written:
                    filled, dirty, version = size, size, version + 1
                elif touch.written:
                    filled, dirty = min(size, filled + touch.written), dirty + touch.written
                if following is not None:
                    prices.append(Price(self.arrives(value, following, filled), dirty, version))
            if value in self.footprint.results:
                least += min(dirty, size)  # whenever that is; the last writing is no choice
                prices = [p._replace(dirty=0) if p.version == version else p for p in prices]
            found.update(zip((Gap(value, *ends) for ends in pairwise(steps)), prices))
        return found, least

    @property
    def prices(self) -> Mapping[Gap, Price]:
        """The price of each gap; results that are copied out anyway cost nothing more."""
        return self._life[0]

    @property
    def least_bytes(self) -> int:
        """The bytes that every plan copies: each input that is read, and each result, once."""
        return self._life[1]

    @cached_property
    def working_set_bytes(self) -> int:
        """The capacity at which no value that is touched again has to leave."""
        return int((self.load(self.gaps) + self.needs).max(initial=0))

    def load(self, gaps: Iterable[Gap]) -> Array:
        """Return the bytes that gaps take between their touches, int64 (steps,)."""
        load = np.zeros(len(self.order) + 1, dtype=np.int64)
        for gap in gaps:
            load[gap.first + 1] += self.padded[gap.value]
            load[gap.last] -= self.padded[gap.value]
        total: Array = np.cumsum(load)[:-1]
        return total

    def spans(self, kept: Set[Gap]) -> list[Span]:
        """Return the spans of values if these gaps are bridged, and no others."""
        found = []
        for value, steps in self.touches.items():
            first = steps[0]
            for ends in pairwise(steps):
                if Gap(value, *ends) not in kept:
                    found.append(Span(value, first, ends[0]))
                    first = ends[1]
            found.append(Span(value, first, steps[-1]))
        return found

    def moved_bytes(self, kept: Set[Gap]) -> int:
        """Return the bytes copied if these gaps are bridged."""
        fetched = 0
        written: dict[tuple[str, int], int] = {}
        for gap, price in self.prices.items():
            if gap not in kept:
                fetched += price.fetch
                key = gap.value, price.version
                written[key] = max(written.get(key, 0), price.dirty)
        return self.least_bytes + fetched + sum(written.values())


def timeline(
    graph: Graph | Footprint,
    capacity_bytes: int,
    *,
    workspace: Mapping[str, int] | None = None,
) -> Timeline:
    """Return the timeline of a graph, or of its launches, in its order.

    workspace: bytes that nodes need besides their operands, by name.
    """
    return Timeline(Footprint.of(graph, workspace), capacity_bytes)


def aligned(nbytes: int) -> int:
    """Return bytes rounded up to whole blocks of the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
