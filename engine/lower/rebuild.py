"""Rebuilding a graph with some nodes replaced, which is how every pass ends.

These functions keep `Node.sources`, which say whose work each node does; passes need not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.records import replace
from soapstone.turns import give_way

Emit = Callable[[GraphBuilder, Node], Sequence[str] | None]


def rebuild(graph: Graph, emit: Emit) -> Graph:
    """Return a graph of what `emit` adds to a builder for each node and returns as its outputs.

    The node that `emit` receives has the inputs of the new graph and the outputs of the old one; if
    `emit` returns None, the node is kept. Whatever it adds for a node does that node's work. A
    value that replaces another takes its name, so that what is stated by name, such as layouts,
    holds for both graphs.
    """
    tensors = {name: graph.tensors[name] for name in graph.roles}
    bare = replace(graph, nodes=(), outputs=(), updates={}, tensors=tensors)
    builder, renamed = GraphBuilder(base=bare), dict[str, str]()
    apart: set[str] = set()  # values
    for node in graph.nodes:
        give_way()
        inputs = tuple([renamed.get(name, name) for name in node.inputs])
        moved = node if inputs == node.inputs else replace(node, inputs=inputs)
        builder.sources, builder.late = node.work_of, node.late
        outputs = emit(builder, moved)
        if outputs is None:
            outputs = kept(builder, moved, graph)
        elif node.apart:
            apart.update(outputs)
        renamed.update(zip(node.outputs, outputs))
    builder.output(*(renamed.get(name, name) for name in graph.outputs))
    for name, value in graph.updates.items():
        builder.update(name, renamed.get(value, value))
    made = builder.build()
    if apart:
        nodes = (replace(n, apart=n.apart or not apart.isdisjoint(n.outputs)) for n in made.nodes)
        made = replace(made, nodes=tuple(nodes))
    old = {
        new: name
        for name, new in renamed.items()
        if not (builder.has(name) or new in graph.tensors)
    }
    return made.renamed(old)


def kept(builder: GraphBuilder, node: Node, graph: Graph) -> tuple[str, ...]:
    """Add a node of `graph` unchanged but for the names of its inputs."""
    same = node.inputs == graph.by_name[node.name].inputs
    made = [graph.tensors[name] for name in node.outputs] if same else []
    return node.outputs if same and builder.carry(node, made) else builder.add(node, made)


def substituted(
    graph: Graph,
    instead: Mapping[str, Sequence[Node]],
    made: Mapping[str, TensorSpec] = MappingProxyType({}),
) -> Graph:
    """Return the graph with some nodes, by name, replaced by others; values keep their names.

    made: the types of values that the graph did not have before.
    """
    nodes = (new for node in graph.nodes for new in instead.get(node.name, (node,)))
    return graph.with_nodes(nodes, made) if instead else graph


def merged(nodes: Sequence[Node], into: Node, **changes: Any) -> Node:
    """Return a node, with changes, that does the work of several; it is late if all of them are.

    Its results are those of the last of them, whose `apart` it takes.
    """
    sources = tuple(dict.fromkeys(name for node in nodes for name in node.work_of))
    late, apart = all(node.late for node in nodes), nodes[-1].apart
    return replace(into, sources=sources, late=late, apart=apart, **changes)


def copied(name: str, value: str, copy: str, spec: TensorSpec, of: Node | None = None) -> Node:
    """Return a node that copies a value, as part of the work of the node `of`."""
    sources = of.work_of if of is not None else ()
    items = (("shape", spec.shape),)
    return Node(name, "broadcast", (value,), (copy,), items, sources=sources)


def narrow(graph: Graph) -> Graph:
    """Return the graph with element-wise operators reading operands from before a broadcast.

    A bias that was broadcast over an image has one number a channel again.
    """

    def emit(builder: GraphBuilder, node: Node) -> tuple[str, ...]:
        inputs = list(node.inputs)
        for position, name in enumerate(node.inputs if node.spec.elementwise else ()):
            maker = builder.maker(name)
            if maker is not None and maker.operator == "broadcast":
                tried = [*inputs[:position], maker.inputs[0], *inputs[position + 1 :]]
                if _makes(builder, node, tried, inputs):
                    inputs = tried
        return builder.add(replace(node, inputs=tuple(inputs)))

    return rebuild(graph, emit).pruned()


def _makes(builder: GraphBuilder, node: Node, inputs: list[str], known: list[str]) -> bool:
    """Return whether a node's results have the same shapes with `inputs` as with `known`."""

    def made(names: list[str]) -> tuple[TensorSpec, ...]:
        return node.spec.bind([builder.spec(name) for name in names], node.attributes).output_specs

    try:
        return made(inputs) == made(known)
    except GraphError:
        return False


def called(graph: Graph, outputs: Sequence[str]) -> tuple[Graph, dict[str, str]]:
    """Return a graph with its outputs named so, and the new names of its values.

    Its nodes do only their own work: it is no longer a stage of another graph. Each output becomes
    a value that the graph computes: one that is a weight, an input or another output too is copied,
    except an input that is asked for by its own name.
    """
    names: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for position, (value, name) in enumerate(zip(graph.outputs, outputs)):
        role = graph.roles.get(value)
        if value == name and (role is Role.INPUT or value in graph.updates):
            continue
        if role is not None or value in graph.outputs[:position]:
            if name not in outputs[:position]:
                copies.append((value, name))
        elif value != name:
            names[value] = name
    for number, name in enumerate([*names.values(), *(name for _, name in copies)]):
        if name in graph.tensors and name not in names:
            names[name] = f"{name}.inside{number}"
    graph = graph.renamed(names)
    tensors, nodes = dict(graph.tensors), list(graph.nodes)
    for value, name in copies:
        source, label = names.get(value, value), name
        while label in graph.by_name:  # a node that made what is called otherwise now
            label += ".copy"
        tensors[name] = tensors[source]
        nodes.append(copied(label, source, name, tensors[source]))
    own = tuple(replace(node, sources=()) if node.sources else node for node in nodes)
    return replace(graph, tensors=tensors, nodes=own, outputs=tuple(outputs)), names
