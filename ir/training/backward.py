"""Which nodes of a training step are its backward pass, derived from what they are needed for."""

from __future__ import annotations

from collections.abc import Iterable

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role


def backward(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that only the next contents of parameters need.

    These are gradients and updates. What the outputs need (the loss, metrics) is the forward pass,
    and so is what only other states need, such as running statistics.
    """
    trained = [
        value for name, value in graph.updates.items() if graph.roles[name] is Role.PARAMETER
    ]
    rest = [value for value in graph.results if value not in trained]
    states = {
        value
        for value in rest
        if value in graph.producers and _updates_parameter(graph, graph.producers[value].name)
    }
    return _needed(graph, trained) - _needed(graph, set(rest) - states)


def _updates_parameter(graph: Graph, name: str) -> bool:
    """Return whether a node makes the next contents of a parameter too, as of its momentum."""
    old = graph.by_name[name].overwrites.values()
    return any(graph.roles.get(value) is Role.PARAMETER for value in old)


def _needed(graph: Graph, values: Iterable[str]) -> frozenset[str]:
    """Return the names of the nodes that values depend on."""
    wanted, found = set(values), set[str]()
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            found.add(node.name)
            wanted.update(node.inputs)
    return frozenset(found)
