"""Results that several devices compute: copies, one behind the other in one region.

TensorOpt, section 2.1, allows "redundant computation of the same tensor on different devices". Each
copy is complete, and each point of a reader reads one copy: that of which its processor has a part,
or the nearest by processor number. So every element of a region is written once, executors see
ordinary launches, and sums over readers count nothing twice.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.dims import Ints, Signature
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.records import dataclass


@dataclass(frozen=True)
class Replicas:
    """The copies of an operator's results: `devices`, int64 (copies, parts), compute them."""

    devices: Ints

    def moved(
        self,
        boxes: tuple[Ints, Ints],
        extent: int,
        item: Configuration,
        written: Signature | None = None,
    ) -> tuple[Ints, Ints]:
        """Return boxes of a value as boxes of its region, in which copies follow along axis 0.

        Args:
            boxes: two (points, rank) arrays. extent: of axis 0 of the value.
            item: the configuration of the operator whose points read or write them.
            written: the signature of the operator if it writes them.
        """
        lo, hi = (each.copy() for each in boxes)
        number = self._read(item) if written is None else numbered(written, item)
        for each in (lo, hi):
            each[:, 0] += number * extent
        return lo, hi

    def _read(self, item: Configuration) -> Ints:
        """Return which copy each point of an operator reads."""
        if not item.devices:  # where mappers place blocks
            return np.arange(item.points) * len(self.devices) // item.points
        away = np.abs(np.array(item.devices)[:, None, None] - self.devices)
        found: Ints = away.min(-1).argmin(-1)
        return found


def numbered(signature: Signature, item: Configuration) -> Ints:
    """Return the copy that each point of an operator writes: its index along replicated dims."""
    grid = tuple(item.degrees.get(dim.name, 1) for dim in signature.dims)
    number = np.zeros(item.points, np.int64)
    for dim, degree, index in zip(signature.dims, grid, np.indices(grid)):
        if dim.name in item.replicated:
            number = number * degree + index.ravel()
    return number


def replicas_of(graph: Graph, strategy: Strategy) -> dict[str, Replicas]:
    """Return the copies of each value of a lowered graph that has several."""
    found = {}
    for name in strategy.copies(graph):
        node = graph.producers[name]
        item = strategy.configuration(graph, node)
        number = numbered(graph.signature(node), item)
        order = np.argsort(number, kind="stable")
        found[name] = Replicas(np.array(item.devices)[order].reshape(item.copies, -1))
    return found
