"""A lower bound of a step by traffic: the bytes that must cross between groups of devices.

A product iterates over an index space, of which group c of the devices computes a share f_c. If
each dim indexes two of the three operands, a part of the space needs at least so many elements of
the three that the product of their counts is the square of the part's size (Loomis and Whitney
1949; for distributed products: Irony, Toledo and Tiskin 2004), and at least its share of each.
Elements that several groups need cross between them: as a value in one direction, and as a gradient
in the other. They leave a group over its links.

The larger the share that one group computes, the less traffic crosses, but the longer a chain of
operators takes. The time of any strategy's step is at least each of these two times, hence at least
their mean with weights w and 1 - w. The minimum of such a mean is the sum of the minima for each
operator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.ir.dims import Kind, Operand, Whole
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role
from soapstone.runtime import Machine
from soapstone.search.parallel.problem.prepare import Model

SHARES = np.geomspace(1e-6, 1.0, 600)
WEIGHTS = np.linspace(0.0, 1.0, 51)


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of devices: their number, the largest size, and bytes a ns that leave all."""

    count: int
    devices: int
    bytes_per_ns: float


def groups_of(machine: Machine) -> list[Groups]:
    """Return the devices grouped by computer, and by memory, where links lie between groups."""
    ways: dict[str, dict[str, float]] = {}
    for link in machine.links:
        ways.setdefault(link.source, {})[link.target] = link.bytes_per_s / 1e9
        ways.setdefault(link.target, {})
    memories = {memory.name for memory in machine.memories}
    found = []
    for names in (
        [processor.node for processor in machine.processors],
        [processor.memory for processor in machine.processors],
    ):
        members = Counter(names)
        homes: dict[str, set[str]] = {}
        for name, processor in zip(names, machine.processors):
            homes.setdefault(name, set()).add(processor.memory)
        if len(members) < 2 or sum(map(len, homes.values())) > len(set().union(*homes.values())):
            continue
        leaving = sum(_leaving(ways, own, memories) for own in homes.values())
        found.append(Groups(len(members), max(members.values()), leaving))
    return found


def _leaving(ways: Mapping[str, Mapping[str, float]], own: set[str], memories: set[str]) -> float:
    """Return an upper bound of the bytes a ns that can leave some memories for others.

    It is the capacity of the narrowest of a few cuts: around the memories, and around them with the
    switches that are one link away, two links away and so on.
    """
    around, narrowest = set(own), math.inf
    while True:
        edge = {
            (place, other)
            for place in around
            for other in ways.get(place, {})
            if other not in around
        }
        narrowest = min(narrowest, sum(ways[place][other] for place, other in edge))
        grown = {other for _, other in edge if other not in memories}
        if not grown:
            return narrowest
        around |= grown


@dataclass(frozen=True)
class Product:
    """The index space of a product, with operands x, w and y.

    Attributes:
        indices: for each operand, the number of points of its dims.
        nbytes: for each operand, the bytes that cross in a step for each point that one more group
            needs.
    """

    indices: tuple[float, ...]
    nbytes: tuple[float, ...]

    def crossing(self) -> Array:
        """Return the vertices of a convex curve: mean share, least bytes that cross. (n, 2)."""
        each = np.array([self._repeated(share) for share in SHARES])
        # Between two shares at least as much is repeated as for the upper.
        return _lower_hull(np.stack([[0.0, *SHARES], [*each, 0.0]], axis=1))

    def _repeated(self, share: float) -> float:
        """Return the least bytes that groups with this share of the space have more than once.

        A group has its share of each operand times a factor of at least 1, and by the inequality
        the factors multiply to 1 / share; where an operand is free, its factor is all that.
        """
        costs = sorted(n * each for n, each in zip(self.indices, self.nbytes))
        for count in (3, 2, 1):
            level: float = (math.prod(costs[:count]) / share) ** (1 / count)
            if level >= costs[count - 1]:
                break
        return count * level - sum(costs[:count])


def _lower_hull(points: Array) -> Array:
    """Return the lower convex hull of points in order of their first coordinate."""
    hull: list[Array] = []
    for point in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (point[0] - x0) < (point[1] - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(point)
    return np.array(hull)


def product_of(graph: Graph, node: Node) -> Product | None:
    """Return a node as a `Product`, or None if it is none.

    A value that several nodes read crosses once for all of them, so each is charged a part.
    """
    signature = graph.signature(node)
    if len(signature.inputs) < 2 or not signature.outputs:
        return None
    extents = {d.name: d.extent for d in signature.dims if d.kind is not Kind.WHOLE}
    operands = (*signature.inputs[:2], signature.outputs[0])
    names = (*node.inputs[:2], node.outputs[0])
    pairs = all(sum(name in operand.dims for operand in operands) == 2 for name in extents)
    lowered = {dim.name for dim in signature.dims if dim.kind is Kind.LOWERED}
    if not pairs or lowered & operands[2].dims:
        return None
    indices, nbytes = [], []
    for operand, name in zip(operands, names):
        points = math.prod(extents[dim] for dim in operand.dims if dim in extents)
        gathered = any(isinstance(axis, Whole) and axis.gathered for axis in operand.axes)
        each = 0.0 if gathered else _elements(operand, extents) / points
        indices.append(float(points))
        itemsize = np.dtype(graph.tensors[name].dtype).itemsize
        nbytes.append(each * itemsize * _crossings(graph, node, name))
    return Product(tuple(indices), tuple(nbytes))


def _elements(operand: Operand, extents: Mapping[str, int]) -> int:
    """Return how many elements of an operand different points of its dims have for themselves."""
    return math.prod(
        min(axis.extent, math.prod(extents[dim] for dim in axis.dims if dim in extents))
        if any(dim in extents for dim in axis.dims)
        else axis.extent
        for axis in operand.axes
    )


def _crossings(graph: Graph, node: Node, name: str) -> float:
    """Return how often an element crosses in a step for each further group that needs it."""
    trained = any(other.origin == node.name for other in graph.nodes)
    readers = [
        item for item in graph.consumers[name] if item.origin is None and not item.overwrites
    ]
    if name in node.outputs:
        return 2.0 if trained else 1.0  # partial results come together, their gradient is dealt out
    if graph.roles.get(name) is Role.PARAMETER:
        return 2.0 / len(readers) if trained else 0.0  # gradients, and what they update
    if name not in graph.producers or not graph.producers[name].inputs:
        return 0.0
    maker = graph.producers[name].name
    back = any(other.origin == maker for other in graph.nodes)
    return (1.0 + (trained and back)) / len(readers)


def cut_ns(model: Model, path: Sequence[int], launches_ns: Array, uncut_ns: Array) -> float:
    """Return a lower bound, in ns, of every strategy's step; 0 if no links lie between groups.

    Args:
        path: the tasks of a chain, each of which reads a result of the one before it.
        launches_ns: (tasks,), the time of each task's launches.
        uncut_ns: (tasks,), the time of each task's arithmetic in one piece on the fastest device.
    """
    products = {}
    for number, item in enumerate(model.operators):
        found = product_of(model.graph, item.node) if item.source is None else None
        if found is not None:
            products[number] = found.crossing()
    best = 0.0
    for groups in groups_of(model.machine):
        along = dict.fromkeys(products, 0.0)
        rest = 0.0
        for task in path:
            operator = model.tasks[task][0]
            rest += launches_ns[task]
            if operator in along:
                along[operator] += uncut_ns[task] / groups.devices
            else:
                rest += uncut_ns[task] / len(model.machine.processors)
        total = WEIGHTS * rest
        for number, hull in products.items():
            shares = np.unique(np.clip(hull[:, 0], 1 / groups.count, 1.0))
            crosses = np.interp(shares, hull[:, 0], hull[:, 1]) / groups.bytes_per_ns
            means = np.outer(WEIGHTS, along[number] * shares) + np.outer(1 - WEIGHTS, crosses)
            total += means.min(axis=1)
        best = max(best, float(total.max()))
    return best
