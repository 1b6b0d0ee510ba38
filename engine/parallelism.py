"""Data parallelism, defined once for mappers, searches and "speedup over data parallelism".

Every operator that has samples is split over them, one block for each processor, and its parameters
are replicated (Jia, section 3.7.2). The `data_parallel` mapper begins with this and departs from it
where an operator moves fewer bytes otherwise (`mappers/plugins.py`); the initial strategies of a
search use the same `split` (`search/parallel/mcmc/initial.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import Configuration


def legal(graph: Graph, node: Node, degrees: Mapping[str, int]) -> bool:
    """Return whether a node can run at these degrees."""
    return graph.signature(node).allows(degrees, node.spec.lower is not None)


def split(
    graph: Graph, node: Node, name: str | None, devices: Sequence[int]
) -> Configuration | None:
    """Return one dim split over devices as far as its extent allows; None if it cannot be split."""
    dim = graph.signature(node).by_name.get(name or "")
    if dim is None or dim.kind is Kind.WHOLE:
        return None
    degree = min(len(devices), dim.extent)
    if degree < 2 or not legal(graph, node, {dim.name: degree}):
        return None
    return Configuration({dim.name: degree}, tuple(devices[:degree]))


def data_parallel(graph: Graph, devices: Sequence[int]) -> dict[str, Configuration]:
    """Return the configuration of each node that is split over its samples."""
    samples = graph.sample_dims
    configurations = {
        node.name: split(graph, node, samples.get(node.name), devices) for node in graph.nodes
    }
    return {name: item for name, item in configurations.items() if item is not None}


def in_blocks(points: int, devices: int) -> tuple[int, ...]:
    """Return the device of each point, in blocks of consecutive points."""
    return tuple(point * devices // points for point in range(points))
