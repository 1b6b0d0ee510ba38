"""The first mappers: sequential, data-parallel (the default), round-robin, and a strategy's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph
from soapstone.ir.samples import sample_dims
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.mappers.base import Array, GraphMapper, blocked_dim
from soapstone.runtime import Launch, Machine


class SequentialMapper(GraphMapper):
    """Every operator is one point task on the first processor."""

    name = "sequential"

    def place_all(self, launch: Launch) -> Array:
        """The first processor."""
        return np.zeros(launch.points, np.int64)


class DataParallelMapper(GraphMapper):
    """Every operator is split over its samples, one block a processor.

    Updates are split by rows. Where all processors share a memory, an operator that only sums over
    its samples (a weight's gradient) is split by rows too: its operands are in reach, and rows need
    no partial sums. Operators that see no samples run as one point task.
    """

    name = "data_parallel"

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return one block of samples, or of rows, a processor."""
        parts = len(machine.processors)
        if parts == 1:
            return {}
        shared = len({processor.memory for processor in machine.processors}) == 1
        samples = sample_dims(graph)
        result = {}
        for node in graph.nodes:
            signature = graph.signature(node)
            dim = samples.get(node.name)
            if dim is None:
                if node.spec.updates or node.origin is not None:
                    dim = blocked_dim(graph, node, parts)
            elif shared and all(dim not in operand.dims for operand in signature.outputs):
                dim = blocked_dim(graph, node, parts) or dim
            if dim is None or signature.by_name[dim].kind is Kind.WHOLE:
                continue
            degree = min(parts, signature.by_name[dim].extent)
            if degree > 1:
                result[node.name] = Configuration({dim: degree}, tuple(range(degree)))
        return result


class RoundRobinMapper(DataParallelMapper):
    """As data-parallel, with whole operators dealt out to the processors in turn."""

    name = "round_robin"

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the data-parallel degrees, each operator's first point on the next processor."""
        parts = len(machine.processors)
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
