"""The built-in mappers: sequential, data-parallel (the default), round-robin, and by a strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from soapstone.engine.mapper import GraphMapper, row_dims, summed_dims, touched_bytes
from soapstone.engine.parallelism import data_parallel, split
from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.mappers.separate_memories import configure_apart
from soapstone.native.memory import Array
from soapstone.runtime import Launch, Machine


class SequentialMapper(GraphMapper):
    """Every operator is one point task on the first processor."""

    name = "sequential"

    def place_all(self, launch: Launch) -> Array:
        """The first processor."""
        return np.zeros(launch.points, np.int64)


class DataParallelMapper(GraphMapper):
    """Every operator is split over its samples, one block for each processor; updates by rows.

    This begins with data parallelism (`engine.parallelism`). If all processors share a memory,
    splitting another dim moves nothing, so an operator with larger weights than samples is split by
    rows or columns where that accesses clearly fewer bytes: a wide linear layer then reads its
    weights once, and a weight's gradient needs no partial sums (the hybrid of Krizhevsky 2014,
    decided for each operator). Reductions of a large gradient to a number, such as the norm that
    clips it, are split too. With separate memories the bytes that are moved decide
    (`mappers.apart`).
    """

    name = "data_parallel"
    preference = 0.9  # other dims must touch fewer bytes than this share of what samples touch

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the configurations: one block of samples, or of rows, for each processor."""
        parts = range(len(machine.workers))
        if len(parts) == 1:
            return {}
        shared = len({processor.memory for processor in machine.workers}) == 1
        configurations = data_parallel(graph, parts)
        for node in graph.nodes:
            rows = self._rows(graph, node, parts, shared)
            if rows is not None:
                configurations[node.name] = rows
        if not shared:
            configurations |= configure_apart(graph, graph.sample_dims, len(parts))
        return {
            node.name: configurations[node.name]
            for node in graph.nodes
            if node.name in configurations
        }

    def _rows(self, graph: Graph, node: Node, parts: range, shared: bool) -> Configuration | None:
        """Return a node split by rows, if it has no samples or rows access fewer bytes."""
        name = graph.sample_dims.get(node.name)
        if name is None:
            rows = row_dims(graph, node, len(parts))
            if shared:  # else partial results are messages
                rows = rows or summed_dims(graph, node, len(parts))
            return split(graph, node, rows[0], parts) if rows else None
        sample = graph.signature(node).by_name[name]
        if sample.kind is Kind.WHOLE or not shared or sample.extent < len(parts):
            return None
        best, best_bytes = None, math.inf  # samples reduced mid-way would need primitives
        if sample.kind is not Kind.LOWERED:
            best_bytes = self.preference * touched_bytes(graph, node, {name: len(parts)})
        for dim in row_dims(graph, node, len(parts)):
            if dim == name:
                continue
            touched = touched_bytes(graph, node, {dim: len(parts)})
            if touched < best_bytes:
                best, best_bytes = dim, touched
        return split(graph, node, best, parts)


class RoundRobinMapper(DataParallelMapper):
    """As data-parallel, with whole operators assigned to the processors in turn."""

    name = "round_robin"

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the data-parallel degrees, each operator's first point on the next processor."""
        parts = len(machine.workers)
        split = super().configure(graph, machine)
        result = {}
        for index, node in enumerate(graph.nodes):
            degrees = split[node.name].degrees if node.name in split else {}
            points = int(np.prod(list(degrees.values()), dtype=np.int64))
            devices = tuple((index + point) % parts for point in range(points))
            result[node.name] = Configuration(degrees, devices)
        return result


class StrategyMapper(GraphMapper):
    """Follows a strategy, given as such or as the path of its file."""

    name = "strategy"

    def __init__(self, strategy: Strategy | str | Path) -> None:
        super().__init__()
        self._strategy = (
            strategy if isinstance(strategy, Strategy) else Strategy.load(Path(strategy))
        )

    def strategy(self, graph: Graph, machine: Machine) -> Strategy:
        """Return the strategy it was given."""
        return self._strategy
