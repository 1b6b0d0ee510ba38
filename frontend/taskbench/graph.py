"""Task graphs: which tasks there are at each step, and which of the step before each one reads."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskGraph:
    """A grid of tasks, `steps` high and `width` wide, whose edges follow a pattern.

    radix: predecessors of a task, for nearest, spread and random_nearest. period: dependence sets
    in turn, for spread and random_nearest. fraction: of the nearest tasks, those random_nearest
    reads, besides its own column. index: which of several graphs this is; it seeds the random
    choices.

    Raises: ValueError naming the field.
    """

    pattern: str = "stencil_1d"
    width: int = 4
    steps: int = 100
    radix: int = 3
    period: int = 3
    fraction: float = 0.25
    index: int = 0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"pattern {self.pattern!r} found; needed one of {', '.join(PATTERNS)}")
        for name, least in (("width", 1), ("steps", 1), ("radix", 0), ("period", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, needed at least {least}")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, needed between 0 and 1")
        if self.pattern == "dom" and self.steps < self.width:
            raise ValueError(
                f"pattern 'dom' of width {self.width} has {self.steps} steps, needed as many"
            )

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return sum(len(self.active(step)) for step in range(self.steps))

    @property
    def most_inputs(self) -> int:
        """The most predecessors that a task is looked at for."""
        if self.pattern == "all_to_all":
            return self.width
        return self.radix if self.pattern in ("nearest", "spread", "random_nearest") else 3

    def active(self, step: int) -> range:
        """The points that have a task at a step; none before the first."""
        if step < 0:
            return range(0)
        if self.pattern == "dom":  # a wave front enters at one corner and leaves at the other
            first = max(0, step + self.width - self.steps)
            return range(first, first + min(self.width, step + 1, self.steps - step))
        if self.pattern == "tree":
            return range(min(self.width, 1 << min(step, 62)))
        return range(self.width)

    def dependence_set(self, step: int) -> int:
        """Which of the pattern's dependence sets a step uses."""
        if self.pattern == "fft":
            levels = max(1, math.ceil(math.log2(self.width)))
            return (step - 1) % levels
        if self.pattern in ("spread", "random_nearest"):
            return step % self.period
        return 0

    def predecessors(self, step: int, point: int) -> list[int]:
        """The points of the step before whose outputs a task reads, rising."""
        before = self.active(step - 1)
        found = PATTERNS[self.pattern](self, self.dependence_set(step), point)
        return sorted({other for other in found if other in before})

    def ranges(self, step: int, point: int) -> list[tuple[int, int]]:
        """The predecessors of a point at a step as half-open ranges of neighbouring points."""
        found: list[tuple[int, int]] = []
        for other in self.predecessors(step, point):
            if found and found[-1][1] == other:
                found[-1] = (found[-1][0], other + 1)
            else:
                found.append((other, other + 1))
        return found


def uniform(*key: int) -> float:
    """A number in [0, 1) that depends on the key alone."""
    digest = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _nearest(graph: TaskGraph, point: int) -> range:
    if graph.radix == 0:
        return range(0)
    return range(point - graph.radix // 2, point + (graph.radix - 1) // 2 + 1)


def _periodic(graph: TaskGraph, dset: int, point: int) -> list[int]:
    return [(point + step) % graph.width for step in (-1, 0, 1)]


def _spread(graph: TaskGraph, dset: int, point: int) -> list[int]:
    width, radix = graph.width, graph.radix
    return [(point + i * width // radix + (dset if i else 0)) % width for i in range(radix)]


def _random_nearest(graph: TaskGraph, dset: int, point: int) -> list[int]:
    def chosen(other: int) -> bool:
        return other == point or uniform(graph.index, dset, other, point) < graph.fraction

    return [other for other in _nearest(graph, point) if chosen(other)]


# The points that a point depends on, of those there are, in one dependence set of a pattern.
PATTERNS: dict[str, Callable[[TaskGraph, int, int], Iterable[int]]] = {
    "trivial": lambda graph, dset, point: (),
    "no_comm": lambda graph, dset, point: (point,),
    "stencil_1d": lambda graph, dset, point: (point - 1, point, point + 1),
    "stencil_1d_periodic": _periodic,
    "dom": lambda graph, dset, point: (point - 1, point),
    "tree": lambda graph, dset, point: (point // 2,),
    "fft": lambda graph, dset, point: (point - (1 << dset), point, point + (1 << dset)),
    "all_to_all": lambda graph, dset, point: range(graph.width),
    "nearest": lambda graph, dset, point: _nearest(graph, point),
    "spread": _spread,
    "random_nearest": _random_nearest,
}
