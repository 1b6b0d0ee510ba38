"""What a mapper of graphs is: a strategy for a graph, and the runtime's policies that follow it.

A mapper plugin subclasses `GraphMapper` and overrides `configure`, or any policy of the runtime's
mapper. Plugins are found through the entry-point group `soapstone.mappers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Role
from soapstone.runtime import DefaultMapper, Launch, Machine, Region
from soapstone.runtime.expand import NodeLaunch

CHANNELS_LAST = (0, 2, 3, 1)
Array = np.ndarray[Any, np.dtype[Any]]


class GraphMapper(DefaultMapper):
    """A mapper that configures every operator of a graph, then places the points as configured."""

    name = "graph"

    def __init__(self) -> None:
        self._layouts: Mapping[str, tuple[int, ...]] = {}

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the configuration of each node; a node left out runs as one point task."""
        return {}

    def strategy(self, graph: Graph, machine: Machine) -> Strategy:
        """Return the whole strategy of a graph on a machine."""
        return Strategy(
            configurations=dict(self.configure(graph, machine)),
            layouts=channels_last(graph),
            model=graph.name,
            model_hash=graph.structural_hash,
            machine=machine.describe(),
            provenance={"mapper": self.name},
        )

    def adopt(self, strategy: Strategy) -> None:
        """Follow the layouts of a strategy in the launches that come next."""
        self._layouts = strategy.layouts

    def order(self, region: Region) -> tuple[int, ...] | None:
        """The strategy's layout of the value, or C order."""
        return self._layouts.get(region.name)

    def place(self, launch: Launch, point: int) -> int:
        """The configured device of a point, else blocks of consecutive points."""
        return int(self.place_all(launch)[point])

    def place_all(self, launch: Launch) -> Array:
        """The configured devices of all points, else blocks of consecutive points."""
        tag = launch.tag
        if isinstance(tag, NodeLaunch) and tag.configuration.devices:
            return np.asarray(tag.configuration.devices, np.int64)
        points = launch.points
        placed: Array = np.arange(points, dtype=np.int64) * len(self.machine.processors) // points
        return placed


def channels_last(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return the values kept channels-last: images between spatial operators.

    Convolutions and pools run fastest on them. A value is an image when its axes run over the
    samples, channels, rows and columns of an operator that slides a window; element-wise operators
    on images pass the layout on. Values that outlive a step keep plain order.
    """
    stored = {*graph.roles, *graph.updates.values(), *graph.outputs}
    chosen: set[str] = set()
    for node in graph.nodes:
        signature = graph.signature(node)
        if not {"n", "h", "w"} <= signature.by_name.keys():
            continue
        operands = (*signature.inputs, *signature.outputs)
        for name, operand in zip((*node.inputs, *node.outputs), operands):
            axes = operand.axes
            if len(axes) == 4 and [a.dims[:1] for a in (axes[0], *axes[2:])] == [
                ("n",),
                ("h",),
                ("w",),
            ]:
                chosen.add(name)
    pending = [*graph.nodes, *reversed(graph.nodes)]
    for node in pending:
        if not node.spec.elementwise:
            continue
        values = (*node.inputs, *node.outputs)
        if any(name in chosen for name in values):
            shape = graph.tensors[node.outputs[0]].shape
            chosen.update(n for n in values if graph.tensors[n].shape == shape)
    return {
        name: CHANNELS_LAST
        for name in graph.tensors
        if name in chosen and name not in stored and graph.tensors[name].rank == 4
    }


def blocked_dim(graph: Graph, node: Node, parts: int) -> str | None:
    """Return the first dim that splits an operator into final tiles of at least 16 indices each."""
    signature = graph.signature(node)
    first = signature.outputs[0]
    for axis in first.axes:
        if isinstance(axis, Affine) and axis.stride == 1 and not axis.overlaps:
            dim = signature.by_name[axis.dim]
            if dim.kind == "free" and dim.extent >= 16 * parts:
                return dim.name
    return None


def parameters_of(graph: Graph) -> frozenset[str]:
    """Return the values that are trained."""
    return frozenset(graph.inputs(Role.PARAMETER))
