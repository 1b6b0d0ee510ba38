"""What a mapper of graphs is: a strategy for a graph, and the runtime's policies that follow it.

A mapper plugin subclasses `GraphMapper` and overrides `configure`, or any policy of the runtime's
mapper. Plugins are found through the entry-point group `soapstone.mappers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.ir.dims import Kind
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.runtime import DefaultMapper, Launch, Machine, Region
from soapstone.runtime.expand import NodeLaunch
from soapstone.runtime.lower import channels_last

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
            configurations={DEFAULT: Configuration(), **self.configure(graph, machine)},
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


def touched_bytes(graph: Graph, node: Node, degrees: Mapping[str, int]) -> int:
    """Return the bytes that all point tasks of a node touch; partial results count twice."""
    signature = graph.signature(node)
    _, lo, hi = signature.points(degrees)
    points = math.prod(degrees.values())
    total = 0
    names = (*node.inputs, *node.outputs)
    for position, (name, operand) in enumerate(zip(names, (*signature.inputs, *signature.outputs))):
        starts, stops = operand.tiles(lo, hi, points)
        elements = int((stops - starts).prod(axis=1).sum())
        output = position - len(node.inputs)
        partial = output >= 0 and signature.monoid(output, degrees) is not None
        total += elements * np.dtype(graph.tensors[name].dtype).itemsize * (2 if partial else 1)
    return total


def row_dims(graph: Graph, node: Node, parts: int, least: int = 16) -> list[str]:
    """Return the dims but samples that cut a node into final tiles of at least `least` indices."""
    signature = graph.signature(node)
    found = []
    for dim in signature.dims:
        degrees = {dim.name: parts}
        if dim.kind is not Kind.FREE or dim.extent < least * parts or signature.lowers(degrees):
            continue
        try:
            signature.check(degrees)
        except StrategyError:
            continue
        if all(signature.monoid(i, degrees) is None for i in range(len(signature.outputs))):
            found.append(dim.name)
    return found
