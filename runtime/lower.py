"""Passes from a graph and a strategy to the graph whose nodes are launched one by one.

These passes decide how a graph runs and never what it computes: composites whose configuration
splits a dim that they reduce mid-way become primitives, chains of element-wise operators become one
launch, and updates move up to where their gradient is fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Emitter, Graph, GraphBuilder, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Configuration, Strategy


def lower(graph: Graph, strategy: Strategy, *, fuse: bool = True) -> Graph:
    """Return the graph as it is launched under a strategy."""
    graph = store_updates(lower_composites(graph, strategy))
    if fuse:
        graph = fuse_elementwise(graph, strategy)
    return hoist_updates(graph)


def in_place(graph: Graph) -> dict[str, str]:
    """Return, for each value that an update operator writes over its old value, that old value."""
    result = {}
    for name, value in graph.updates.items():
        node = graph.producers.get(value)
        if node is not None and node.overwrites.get(value) == name:
            result[value] = name
    return result


def store_updates(graph: Graph) -> Graph:
    """Return the graph with a copy for each next value that no operator writes in place."""
    written = in_place(graph)
    rest = {name: value for name, value in graph.updates.items() if value not in written}
    if not rest:
        return graph
    builder = GraphBuilder(base=graph)
    for name, value in rest.items():
        builder.update(name, builder.apply("store", value, name, name=f"{name}.next")[0])
    return builder.build()


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


def hoist_updates(graph: Graph) -> Graph:
    """Return the graph with each update right after its operands and the old value's readers.

    A gradient then lives only until its update, so gradients share memory.
    """
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    keyed: list[tuple[int, int, Node]] = []
    for index, node in enumerate(graph.nodes):
        place = index
        if node.spec.updates and not any(graph.consumers[o] for o in node.outputs):
            before = [
                position[reader.name]
                for name in node.overwrites.values()
                for reader in graph.consumers[name]
                if reader is not node
            ]
            made = [
                position[graph.producers[name].name]
                for name in node.inputs
                if name in graph.producers
            ]
            place = max([*before, *made], default=index)
        keyed.append((place, index, node))
    keyed.sort(key=lambda item: item[:2])
    return replace(graph, nodes=tuple(node for _, _, node in keyed))


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
    merged = {root: _merge(graph, nodes[::-1]) for root, nodes in members.items() if len(nodes) > 1}
    gone = {node.name for root in merged for node in members[root]}
    nodes = [
        merged.get(node.name, node)
        for node in graph.nodes
        if node.name in merged or node.name not in gone
    ]
    made = {*graph.roles, *(output for node in nodes for output in node.outputs)}
    tensors = {name: spec for name, spec in graph.tensors.items() if name in made}
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _merge(graph: Graph, nodes: list[Node]) -> Node:
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
    return replace(root, operator="fused_elementwise", inputs=tuple(inputs), items=items)
