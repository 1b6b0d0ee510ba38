"""Which values a strategy may recompute."""

from __future__ import annotations

from soapstone.ir.backward import backward
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Keep


def check_kept(graph: Graph, value: str, keep: Keep) -> None:
    """Check that a value of a graph can be kept so.

    Raises:
        StrategyError: it is recomputed, and is an input, the next contents of one, or made by the
            backward pass, for which recomputation is.
    """
    if keep is not Keep.RECOMPUTE:
        return
    maker = graph.producers.get(value)
    found = f"tensors: recompute found for {value!r}"
    if maker is None:
        raise StrategyError(f"{found}, an input of the graph; keep or offload needed")
    old = maker.overwrites.get(value)
    if value in graph.updates.values() or old is not None:
        raise StrategyError(f"{found}, the next contents of {old or 'an input'!r}; keep needed")
    if maker.name in backward(graph):
        raise StrategyError(
            f"{found}, which the backward pass makes; a value of the forward pass needed"
        )


__all__ = ["check_kept"]
