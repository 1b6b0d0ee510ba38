"""Chains of element-wise operators: one launch, one pass over memory."""

from __future__ import annotations

from soapstone.engine.lower.rebuild import merged, substituted
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Configuration, Strategy


def fuse_elementwise(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with chains of element-wise operators merged into single nodes.

    A producer joins its consumer when it has no other reader, the same output shape, type and
    configuration, and when nothing but the merged node needs its value. Groups grow from consumers
    to producers, so a merged group has one output and no cycle can close.
    """
    group_of: dict[str, str] = {}
    members: dict[str, list[Node]] = {}
    keep = {*graph.outputs, *graph.updates.values()}
    fused = operator("fused_elementwise")

    def configuration(node: Node) -> Configuration:
        return strategy.configuration(graph, node)

    for node in reversed(graph.nodes):
        if not node.spec.elementwise or node.operator == fused.name:
            continue
        output = node.outputs[0]
        readers = graph.consumers[output]
        if len(readers) == 1 and output not in keep:
            reader = readers[0]
            root = group_of.get(reader.name)
            if (
                root is not None
                and graph.tensors[output] == graph.tensors[reader.outputs[0]]
                and configuration(node) == configuration(graph.by_name[root])
            ):
                group_of[node.name] = root
                members[root].append(node)
                continue
        group_of[node.name] = node.name
        members[node.name] = [node]
    groups = [nodes[::-1] for nodes in members.values() if len(nodes) > 1]
    instead: dict[str, tuple[Node, ...]] = {node.name: () for nodes in groups for node in nodes}
    return substituted(graph, instead | {nodes[-1].name: (_fused(nodes),) for nodes in groups})


def _fused(nodes: list[Node]) -> Node:
    """Return one fused node for a chain of nodes in order; the last makes the output."""
    inside = {node.outputs[0] for node in nodes}
    inputs = list(dict.fromkeys(i for node in nodes for i in node.inputs if i not in inside))
    number = {name: i for i, name in enumerate(inputs)}
    program = []
    for node in nodes:
        program.append((node.operator, tuple(number[i] for i in node.inputs), node.items))
        number[node.outputs[0]] = len(number)
    root = nodes[-1]
    items = tuple(
        sorted({"program": tuple(program), "results": (number[root.outputs[0]],)}.items())
    )
    return merged(nodes, root, operator="fused_elementwise", inputs=tuple(inputs), items=items)
