"""Shortest paths over the layouts of a value: resharding in several steps.

Cai et al., TensorOpt, section 4.2. A step moves a value from one layout, in which each element
occurs once, to another. It takes as long as its messages in the simulator, and a copy on each
device. The last step leads to the layout that the reader reads, whose tiles may overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.search.parallel.exact.tables import Choices, Pair, edges_of
from soapstone.search.parallel.frontier.meshes import configurations
from soapstone.search.parallel.problem.prepare import Model, prepare

FAR = 1 << 50  # a way that there is not
MOST_LAYOUTS = 256  # of one value: those on the most devices


class Paths:
    """The shortest paths between the layouts that meshes give to one value.

    Attributes:
        layouts: the layouts in which a step can end.
        ns: (layouts, layouts) int64, the time of the shortest path.
    """

    def __init__(self, model: Model, spec: TensorSpec) -> None:
        build = GraphBuilder("moving")
        value = build.input("value", spec.shape, spec.dtype)
        for name in ("before", "after"):
            (value,) = build.apply("broadcast", value, shape=spec.shape, name=name)
        build.output(value)
        graph = build.build()
        graph = graph.with_nodes([replace(node, apart=True) for node in graph.nodes], {})
        moving = prepare(graph, model.machine, routed=model.routes)
        (ends,) = edges_of(moving)
        choices = configurations(moving.problem, ends[0])
        most = np.argsort(-choices.degrees["points"], kind="stable")[:MOST_LAYOUTS]
        choices = Choices(choices.degrees[most].copy(), choices.placed[most].copy())
        dims = graph.signature(graph.nodes[0]).dims
        self.layouts = [
            Configuration(
                {dim.name: int(n) for dim, n in zip(dims, split["degrees"]) if n > 1},
                tuple(placed[: split["points"]].tolist()),
            )
            for split, placed in zip(choices.degrees, choices.placed)
        ]
        self._number = {_key(layout): i for i, layout in enumerate(self.layouts)}
        pair = Pair(moving, ends)
        each = copy_ns(model, spec.nbytes // choices.degrees["points"])
        self.ns = pair.moving(choices, choices) + each  # copied where it arrives
        count = len(self.layouts)
        self.ns[np.arange(count), np.arange(count)] = 0
        self._first = np.tile(np.arange(count), (count, 1))  # the first step of each way
        for via in range(count):  # Floyd and Warshall
            longer = self.ns[:, via, None] + self.ns[via]
            better = longer < self.ns
            self.ns[better] = longer[better]
            self._first[better] = np.broadcast_to(self._first[:, via, None], better.shape)[better]

    def number(self, layout: Configuration | None) -> int:
        """Return the number of a layout, or -1 if it is not among `layouts`."""
        return -1 if layout is None else self._number.get(_key(layout), -1)

    def steps(self, begin: int, end: int) -> list[Configuration]:
        """Return the layouts on the shortest path between two, without the first one."""
        found = []
        while begin != end:
            begin = int(self._first[begin, end])
            found.append(self.layouts[begin])
        return found


def _key(layout: Configuration) -> tuple[object, ...]:
    return tuple(sorted(layout.degrees.items())), layout.devices


def copy_ns(model: Model, nbytes: Any) -> Any:
    """Return the ns that copying `nbytes` (a number or an array) within a device's memory takes."""
    kind = model.problem.kinds[0]
    return np.asarray(kind["launch_ns"] + 2 * nbytes / kind["memory_rate"]).astype(np.int64)


@dataclass(frozen=True)
class Routed:
    """The fastest paths of an edge's value: (layouts of the maker, of the reader) if not said.

    Attributes:
        paths: the shortest paths of the value.
        numbers: (layouts of the maker,), their numbers in `paths`, -1 for those that it lacks.
        ahead, back: ns of the value forward, and of its gradient back.
        through, through_back: the layout from which the last step to the reader starts, and that in
            which its gradient arrives first; the maker's own where one step is fastest.
    """

    paths: Paths
    numbers: Array
    ahead: Array
    back: Array
    through: Array
    through_back: Array

    def forward(self, maker: int, reader: int) -> list[Configuration]:
        """Return the layouts on a value's path, without that in which it is made."""
        via = int(self.through[maker, reader])
        return self._steps(maker, via)

    def backward(self, maker: int, reader: int) -> list[Configuration]:
        """Return the layouts on its gradient's path, without those of the two ends."""
        via = int(self.through_back[maker, reader])
        if via == maker:
            return []
        begin = self.paths.layouts[self.numbers[via]]
        return [begin, *self._steps(via, maker)[:-1]]

    def _steps(self, begin: int, end: int) -> list[Configuration]:
        if begin == end:
            return []
        return self.paths.steps(int(self.numbers[begin]), int(self.numbers[end]))


def routed(
    paths: Paths,
    layouts: Sequence[Configuration | None],
    ahead: Array,
    back: Array,
    goes_back: bool,
) -> Routed | None:
    """Return the fastest paths of an edge's value; None if a single step is always fastest.

    Args:
        paths: the shortest paths of the value.
        layouts: those of the maker.
        ahead, back: (layouts of the maker, of the reader), ns of a single step.
        goes_back: whether the gradient can take several steps, too.
    """
    numbers = np.array([paths.number(layout) for layout in layouts], np.int64)
    there = numbers >= 0
    ns = np.where(there[:, None] & there, paths.ns[numbers[:, None], numbers], FAR)
    itself = np.arange(len(numbers))
    ns[itself, itself] = 0
    best, through = _nearest(ns, ahead)
    far = np.where(itself[:, None] == itself, 0, FAR)
    best_back, through_back = _nearest(ns.T if goes_back else far, back)
    if (best == ahead).all() and (best_back == back).all():
        return None
    return Routed(paths, numbers, best, best_back, through, through_back)


def _nearest(ns: Array, times: Array) -> tuple[Array, Array]:
    """Return the least ns[i, k] + times[k, j] over k, and that k: i itself unless it is shorter."""
    best, through = times.copy(), np.tile(np.arange(len(times))[:, None], (1, times.shape[1]))
    for via in range(len(times)):
        longer = ns[:, via, None] + times[via]
        better = longer < best
        best[better] = longer[better]
        through[better] = via
    return best, through
