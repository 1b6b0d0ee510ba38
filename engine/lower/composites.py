"""Composite operators, replaced by primitives if their configuration splits a lowered dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soapstone.engine.lower.rebuild import rebuild
from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy


def lower_composites(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with each composite that has a lowered dim split replaced by primitives."""
    while True:
        split = {
            node.name
            for node in graph.nodes
            if node.spec.lower is not None
            and graph.signature(node).lowers(strategy.configuration(graph, node).parts)
        }
        if not split:
            return graph
        graph = _replaced(graph, split, strategy)


def _replaced(graph: Graph, names: set[str], strategy: Strategy) -> Graph:
    def emit(builder: GraphBuilder, node: Node) -> Sequence[str] | None:
        if node.name not in names or node.spec.lower is None:
            return None
        return node.spec.lower(following(builder, node, strategy), node)

    return rebuild(graph, emit)


def following(builder: GraphBuilder, node: Node, strategy: Strategy) -> Emitter:
    """Return an emitter of nodes that follow the same configuration as a node."""
    own = node.name in strategy.configurations
    return Emitter(builder, replace(node, origin=None, rename=()) if own else node, "")
