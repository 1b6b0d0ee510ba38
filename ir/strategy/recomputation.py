"""Which values a strategy may recompute."""

from __future__ import annotations

from collections.abc import Set

from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.training.backward import backward


def check_recomputation(graph: Graph, value: str, keep: Keep) -> None:
    """Check that a value of a graph can be kept so.

    Raises:
        StrategyError: it is recomputed, and is an input, the next contents of one, or made by the
            backward pass, for which recomputation is.
    """
    if keep is not Keep.RECOMPUTE:
        return
    fault = _fault(graph, value, backward(graph))
    if fault is not None:
        raise StrategyError(f"tensors: recompute found for {value!r}, {fault}")


def _fault(graph: Graph, value: str, late: Set[str]) -> str | None:
    """Return why a value cannot be recomputed, or None. late: the nodes of the backward pass."""
    maker = graph.producers.get(value)
    if maker is None:
        return "an input of the graph; keep or offload needed"
    old = maker.overwrites.get(value)
    if value in graph.updates.values() or old is not None:
        return f"the next contents of {old or 'an input'!r}; keep needed"
    if maker.name in late:
        return "which the backward pass makes; a value of the forward pass needed"
    return None


def recomputable(graph: Graph) -> tuple[str, ...]:
    """Return the values that the backward pass of a graph reads and may recompute, in order."""
    late = backward(graph)
    read = {value for node in graph.nodes if node.name in late for value in node.inputs}
    found = []
    for node in graph.nodes:
        for value in node.outputs:
            if value in read and _fault(graph, value, late) is None:
                found.append(value)
    return tuple(found)
