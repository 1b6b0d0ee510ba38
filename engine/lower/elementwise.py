"""Fusion of element-wise chains: one launch, one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.dtypes import BYTES, HALVES
from soapstone.engine.lower.rebuild import merged, substituted
from soapstone.ir.graph import Graph, Items, Node
from soapstone.ir.strategy import Strategy

FUSED = "fused_elementwise"
Program = tuple[tuple[str, tuple[int, ...], Items], ...]  # operator, operands, attributes


def fuse_elementwise(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with chains of element-wise operators merged into single nodes.

    A producer joins its readers if all of them are in one group, their outputs `follow` its own,
    all have the same configuration, and no other node needs its value. Groups grow from consumers
    to producers, so a merged group has one output and no cycle can arise.
    """
    group_of: dict[str, str] = {}
    members: dict[str, list[Node]] = {}
    for node in reversed(graph.nodes):
        if not node.spec.elementwise or node.operator == FUSED:
            continue
        (output, *_), root = node.outputs, node.name
        readers = graph.only_readers(output)
        near = {group_of.get(reader.name) for reader in readers}
        if len(near) == 1 and all(follows(graph, output, each.outputs[0]) for each in readers):
            (group,) = near
            own = strategy.configuration(graph, node)
            if group is not None and own == strategy.configuration(graph, graph.by_name[group]):
                root = group
        group_of[node.name] = root
        members.setdefault(root, []).append(node)
    groups = [nodes[::-1] for nodes in members.values() if len(nodes) > 1]
    instead: dict[str, tuple[Node, ...]] = {node.name: () for nodes in groups for node in nodes}
    return substituted(graph, instead | {nodes[-1].name: (_fused(nodes),) for nodes in groups})


def follows(graph: Graph, before: str, after: str) -> bool:
    """Return whether one pass over memory may make one value from the other.

    They have the same shape and type, or one is in single precision and the other in bytes or
    halves.
    """
    first, second = graph.tensors[before], graph.tensors[after]
    kinds = {first.dtype, second.dtype}
    narrowed = "float32" in kinds and not kinds.isdisjoint((*BYTES, *HALVES))
    return first == second or (first.shape == second.shape and narrowed)


def _fused(nodes: list[Node]) -> Node:
    """Return one fused node for a chain of nodes in order; the last one makes the output."""
    inside = {node.outputs[0] for node in nodes}
    inputs = list(dict.fromkeys(i for node in nodes for i in node.inputs if i not in inside))
    number = {name: i for i, name in enumerate(inputs)}
    items = ("program", program_of(nodes, number)), ("results", (len(number) - 1,))
    changes = {"operator": FUSED, "inputs": tuple(inputs), "items": items}
    return merged(nodes, nodes[-1], **changes)


def program_of(nodes: Sequence[Node], number: dict[str, int]) -> Program:
    """Return element-wise nodes as the steps of a program, in order.

    number: of each operand among the program's values; results are numbered after them.
    """
    program = []
    for node in nodes:
        program.append((node.operator, tuple(number[i] for i in node.inputs), node.items))
        number[node.outputs[0]] = len(number)
    return tuple(program)
