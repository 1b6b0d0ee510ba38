"""Which nodes of a training step are its backward pass, derived from what they are needed for."""

from __future__ import annotations

from collections.abc import Iterable

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role


def backward(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that only training needs.

    These are gradients and updates, of parameters and of what an optimizer, a loss scale or a step
    in parts keeps beside them. What the outputs need (the loss, metrics) is the forward pass, and
    so is what is needed only by the next contents of states that it reads, as running statistics.
    """
    forward = _needed(graph, graph.outputs)
    read = {value for node in graph.nodes if node.name in forward for value in node.inputs}
    trained = (
        value
        for name, value in graph.updates.items()
        if graph.roles[name] is Role.PARAMETER or name not in read
    )
    return _needed(graph, trained) - forward


def _needed(graph: Graph, values: Iterable[str]) -> frozenset[str]:
    """Return the names of the nodes that values depend on."""
    wanted, found = set(values), set[str]()
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            found.add(node.name)
            wanted.update(node.inputs)
    return frozenset(found)
