"""Rebuilding a graph node by node, some of them as something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from soapstone.ir.graph import Graph, GraphBuilder, Node


def shell(graph: Graph) -> GraphBuilder:
    """Return a builder with the graph's inputs and nothing else."""
    tensors = {name: graph.tensors[name] for name in graph.roles}
    return GraphBuilder(base=replace(graph, nodes=(), outputs=(), updates={}, tensors=tensors))


def again(builder: GraphBuilder, node: Node) -> tuple[str, ...]:
    """Add a node as it is and return its outputs."""
    return builder.add(node)


def rebuild(graph: Graph, builder: GraphBuilder, emit: Callable[[Node], Sequence[str]]) -> Graph:
    """Return the graph of what `emit` adds to a shell for each node, and returns as its outputs.

    The nodes that `emit` is given have the inputs of the new graph and the outputs of the old.
    """
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple([renamed.get(name, name) for name in node.inputs])
        moved = node if inputs == node.inputs else replace(node, inputs=inputs)
        renamed.update(zip(node.outputs, emit(moved)))
    builder.output(*(renamed.get(name, name) for name in graph.outputs))
    for name, value in graph.updates.items():
        builder.update(name, renamed.get(value, value))
    return builder.build()


def names_for(graph: Graph, outputs: Sequence[str]) -> dict[str, str]:
    """Return the new names under which the outputs of a graph are called so."""
    names = {new: old for new, old in zip(graph.outputs, outputs) if new != old}
    for number, name in enumerate(tuple(names.values())):
        if name in graph.tensors and name not in names:
            names[name] = f"{name}.inside{number}"
    return names


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Return a graph with other names for some of its values."""
    if not names:
        return graph

    def new(values: Sequence[str]) -> tuple[str, ...]:
        return tuple(names.get(value, value) for value in values)

    return replace(
        graph,
        nodes=tuple(replace(n, inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes),
        tensors={names.get(name, name): spec for name, spec in graph.tensors.items()},
        roles={names.get(name, name): role for name, role in graph.roles.items()},
        outputs=new(graph.outputs),
        updates={name: names.get(value, value) for name, value in graph.updates.items()},
    )
