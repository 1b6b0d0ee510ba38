"""Concatenations without a launch: their parts are written where the result has them.

A part qualifies if all its other readers take rows that lie apart in memory, as element-wise
operators do; other parts are copied. A concatenation that begins with the parts of an earlier one
reads that one instead, so the growing stack of a dense block is one value, written once.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.engine.lower.readers import takes_rows, takes_strides
from soapstone.engine.lower.rebuild import copied, substituted
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy

Places = dict[str, tuple[str, tuple[int, ...]]]  # by value: the whole it is part of, first index


def place_parts(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph in which concatenations take only parts that can be written in place.

    Other parts are copied, where at least half of a concatenation's bytes can be written in place.
    """
    graph = _nested(graph)
    copies: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.spec.view != "concat" or strategy.configuration(graph, node).degrees:
            continue
        good = {name for name in node.inputs if _qualifies(graph, strategy, node, name)}
        sizes = {name: graph.tensors[name].nbytes for name in node.inputs}
        bad = set(node.inputs) - good
        if bad and 2 * sum(sizes[name] for name in good) >= sum(sizes.values()):
            copies[node.name] = bad
    builder = GraphBuilder(base=graph)
    instead: dict[str, tuple[Node, ...]] = {}
    for name, bad in copies.items():
        node = graph.by_name[name]
        parts, inputs = list[Node](), list[str]()
        for value in node.inputs:
            if value in bad:
                part = builder.unique(f"{value}.part")
                parts.append(copied(part, value, part, graph.tensors[value], node))
                (value,) = builder.add(parts[-1])
            inputs.append(value)
        instead[name] = (*parts, replace(node, inputs=tuple(inputs)))
    made = {
        part.outputs[0]: graph.tensors[part.inputs[0]]
        for *some, _ in instead.values()
        for part in some
    }
    return substituted(graph, instead, made)


def places(graph: Graph, strategy: Strategy) -> Places:
    """Return where each part of a concatenation that needs no launch is written."""
    found: Places = {}
    for node in reversed(graph.nodes):
        if node.spec.view != "concat" or strategy.configuration(graph, node).degrees:
            continue
        if not all(_qualifies(graph, strategy, node, name) for name in node.inputs):
            continue
        output = node.outputs[0]
        rank = graph.tensors[output].rank
        root, first = found.get(output, (output, (0,) * rank))
        axis = node.attributes["axis"]
        offset = first[axis]
        for name in node.inputs:
            found[name] = (root, (*first[:axis], offset, *first[axis + 1 :]))
            offset += graph.tensors[name].shape[axis]
    return found


def _qualifies(graph: Graph, strategy: Strategy, node: Node, value: str) -> bool:
    """Return whether a part of a concatenation may be written in place."""
    maker = graph.producers.get(value)
    output = node.outputs[0]
    if (
        maker is None
        or maker.spec.view not in (None, "concat")
        or maker.spec.updates
        or strategy.configuration(graph, maker).degrees
        or node.inputs.count(value) > 1
        or value in graph.outputs
        or value in graph.updates.values()
        or graph.tensors[value].size == 0
        or not (takes_strides(maker) or strategy.layouts.get(value) == strategy.layouts.get(output))
    ):
        return False
    readers = [reader for reader in graph.consumers[value] if reader.name != node.name]
    return all(
        (reader.spec.view in ("split", "slice") or takes_rows(graph, reader, value))
        and not strategy.configuration(graph, reader).degrees
        for reader in readers
    )


def _nested(graph: Graph) -> Graph:
    """Return the graph with concatenations that read an earlier one in place of its parts."""
    known: dict[tuple[str, ...], tuple[int, str]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.spec.view == "concat":
            axis = node.attributes["axis"]
            for count in range(len(node.inputs) - 1, 1, -1):
                prior = known.get(node.inputs[:count])
                if prior is not None and prior[0] == axis:
                    known[node.inputs] = (axis, node.outputs[0])
                    node = replace(node, inputs=(prior[1], *node.inputs[count:]))
                    break
            else:
                known[node.inputs] = (axis, node.outputs[0])
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
