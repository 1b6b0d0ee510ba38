"""A cost model for tests of the optimiser."""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.search.cost import Cost, CostModel
from soapstone.search.cost.cost import NO_LAYOUTS

VIEWS = ("concat", "split", "broadcast", "reshape")


class Launches(CostModel):
    """Prices without measuring: so many microseconds an operator and one a megaflop.

    What constants alone determine costs nothing, nor do the operators of `free`.
    """

    target = "launches"

    def __init__(self, us: float = 1.0, free: tuple[str, ...] = VIEWS) -> None:
        self.us, self.free = us, free

    def cost(
        self,
        graph: Graph,
        constants: Mapping[str, Array],
        layouts: Mapping[str, tuple[int, ...]] = NO_LAYOUTS,
    ) -> Cost:
        known = set(constants)
        count, flops = 0, 0.0
        for node in graph.nodes:
            if known.issuperset(node.inputs):
                known.update(node.outputs)
            elif node.operator not in self.free:
                count += 1
                flops += node.spec.flops(graph.signature(node))
        return Cost(self.us * count + flops / 1e6, flops, 0.0, count, 0)
