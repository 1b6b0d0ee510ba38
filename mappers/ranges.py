"""Samples cut at given places: consecutive vertices of a graph, each range where it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.engine.parallelism import in_blocks, legal, split
from soapstone.ir.dims import Kind
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Configuration
from soapstone.ir.strategy.configuration import check_configuration
from soapstone.mappers.plugins import DataParallelMapper
from soapstone.runtime import Machine


class RangesMapper(DataParallelMapper):
    """Every operator that sees all samples is cut at the same places; updates are split by rows.

    Each worker so has its range of vertices in every layer, dense ones too, and only what an
    operator gathers from neighbours is moved. Operators over edges are cut into equal parts. The
    ranges are in blocks where there are more of them than processors.

    Attributes:
        cuts: from 0 to the number of samples; they may be replaced before a graph is bound again.
        settled: whether they stay; else memory plans, soon made again, are not searched for.
    """

    name = "ranges"

    def __init__(self, cuts: Sequence[int], settled: bool = True) -> None:
        super().__init__()
        self.cuts, self.settled = tuple(cuts), settled

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the ranges of each operator that sees the samples, and the rows of updates.

        Raises:
            StrategyError: the cuts are not those of an operator's samples; names it.
        """
        parts, processors = len(self.cuts) - 1, range(len(machine.workers))
        devices = in_blocks(parts, len(processors))
        shared = len({processor.memory for processor in machine.workers}) == 1
        found: dict[str, Configuration] = {}
        extents = {
            node.name: graph.signature(node).by_name[graph.sample_dims[node.name]].extent
            for node in graph.nodes
            if node.name in graph.sample_dims
        }
        vertices = self.cuts[-1] in extents.values()
        for node in graph.nodes:
            name = graph.sample_dims.get(node.name)
            if name is not None and vertices and extents[node.name] != self.cuts[-1]:
                item = split(graph, node, name, devices)  # of edges, which are not vertices
            elif name is not None:
                item = self._ranges(graph, node, name, devices)
            else:
                item = self._rows(graph, node, processors, shared) if processors[1:] else None
            if item is not None:
                found[node.name] = item
        return found

    def _ranges(
        self, graph: Graph, node: Node, name: str, devices: tuple[int, ...]
    ) -> Configuration | None:
        signature, degrees = graph.signature(node), {name: len(devices)}
        if len(devices) == 1 or signature.by_name[name].kind is Kind.WHOLE:
            return None
        if signature.by_name[name].extent == self.cuts[-1] and not legal(graph, node, degrees):
            return None
        item = Configuration(degrees, devices, {name: self.cuts})
        try:
            check_configuration(node, signature, item)
        except StrategyError as error:
            raise StrategyError(f"{node.label}: {error}") from None
        return item
