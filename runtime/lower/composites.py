"""Composite operators whose configuration splits a dim that they reduce mid-way: primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Emitter, Graph, GraphBuilder, Node
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
    shell = replace(
        graph, nodes=(), outputs=(), updates={}, tensors={n: graph.tensors[n] for n in graph.roles}
    )
    builder = GraphBuilder(base=shell)
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(renamed.get(name, name) for name in node.inputs)
        if node.name not in names:
            outputs = builder.apply(
                node.operator,
                *inputs,
                name=node.name,
                origin=node.origin,
                rename=dict(node.rename),
                **node.attributes,
            )
        else:
            # The primitives follow whichever configuration the composite followed.
            own = node.name in strategy.configurations
            emit = Emitter(builder, replace(node, origin=None, rename=()) if own else node, "")
            outputs = tuple(_lowering(node)(emit, replace(node, inputs=inputs)))
        renamed.update(zip(node.outputs, outputs))
    builder.output(*(renamed.get(name, name) for name in graph.outputs))
    for name, value in graph.updates.items():
        builder.update(name, renamed.get(value, value))
    return builder.build()


def _lowering(node: Node) -> Callable[[Emitter, Node], Sequence[str]]:
    if node.spec.lower is None:
        raise GraphError(f"{node.label}: the operator has no lowering")
    return node.spec.lower
