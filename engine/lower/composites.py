"""Composite operators whose configuration splits a dim that they reduce mid-way: primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from soapstone.engine.lower.rebuild import again, rebuild, shell
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Emitter, Graph, Node
from soapstone.ir.strategy import Strategy


def lower_composites(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with each composite that is split mid-way replaced by its primitives."""
    while True:
        split = {
            node.name
            for node in graph.nodes
            if node.spec.lower is not None
            and graph.signature(node).lowers(strategy.configuration(graph, node).degrees)
        }
        if not split:
            return graph
        graph = _replace_composites(graph, split, strategy)


def _replace_composites(graph: Graph, names: set[str], strategy: Strategy) -> Graph:
    builder = shell(graph)

    def emit(node: Node) -> Sequence[str]:
        if node.name not in names:
            return again(builder, node)
        # The primitives follow whichever configuration the composite followed.
        own = node.name in strategy.configurations
        emitter = Emitter(builder, replace(node, origin=None, rename=()) if own else node, "")
        return _lowering(node)(emitter, node)

    return rebuild(graph, builder, emit)


def _lowering(node: Node) -> Callable[[Emitter, Node], Sequence[str]]:
    if node.spec.lower is None:
        raise GraphError(f"{node.label}: the operator has no lowering")
    return node.spec.lower
