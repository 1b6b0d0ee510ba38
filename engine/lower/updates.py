"""Updates of parameters and states: in place where an operator allows it, and as early as possible.

A gradient lives only until its update, so gradients share memory.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.engine.lower.rebuild import merged, substituted
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.training.update import MOST_STORED
from soapstone.ir.strategy import Strategy


def in_place(graph: Graph) -> dict[str, str]:
    """Return, for each value that an update operator writes over an old value, that old value."""
    result = {}
    for name, value in graph.updates.items():
        node = graph.producers.get(value)
        if node is not None and node.overwrites.get(value) == name:
            result[value] = name
    return result


def store_updates(graph: Graph) -> Graph:
    """Return the graph with a copy for each next value that is not written in place."""
    written = in_place(graph)
    rest = {name: value for name, value in graph.updates.items() if value not in written}
    if not rest:
        return graph
    builder = GraphBuilder(base=graph)
    for name, value in rest.items():
        maker = graph.producers.get(value)
        builder.sources = maker.work_of if maker is not None else ()
        builder.update(name, builder.apply("store", value, name, name=f"{name}.next")[0])
    return builder.build()


def merge_stores(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with the guarded stores that are in one place merged into one launch.

    Stores that are split stay separate: their tiles are where the values are made.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Node]] = {}
    for node in graph.nodes:
        if node.operator == "store" and len(node.inputs) == 3:
            configuration = strategy.configuration(graph, node)
            if configuration.points == 1:
                groups.setdefault((node.inputs[2], configuration.devices), []).append(node)
    instead: dict[str, tuple[Node, ...]] = {}
    for (flag, _), stores in groups.items():
        for first in range(0, len(stores), MOST_STORED):
            some = stores[first : first + MOST_STORED]
            if len(some) == 1:
                continue
            pairs = tuple(name for node in some for name in node.inputs[:2])
            outputs = tuple(node.outputs[0] for node in some)
            instead |= dict.fromkeys((node.name for node in some), ())
            instead[some[-1].name] = (
                merged(some, some[-1], inputs=(*pairs, flag), outputs=outputs),
            )
    return substituted(graph, instead)


def hoist_updates(graph: Graph) -> Graph:
    """Return the graph with each update right after its operands and the readers of the old value.

    A gradient then lives only until its update, so gradients share memory. A reader of a view of
    the old value counts as a reader of it.
    """
    position = graph.positions
    keyed: list[tuple[int, bool, int, Node]] = []  # a node that moves comes after who was there
    for index, node in enumerate(graph.nodes):
        place = index
        if node.spec.updates and not any(graph.consumers[o] for o in node.outputs):
            before = [
                position[reader.name]
                for name in node.overwrites.values()
                for reader in readers_of(graph, name)
                if reader is not node
            ]
            made = [
                position[graph.producers[name].name]
                for name in node.inputs
                if name in graph.producers
            ]
            place = max([*before, *made], default=index)
        keyed.append((place, place != index, index, node))
    keyed.sort(key=lambda item: item[:3])
    return replace(graph, nodes=tuple(node for *_, node in keyed))


def readers_of(graph: Graph, value: str) -> list[Node]:
    """Return the nodes that read a value, or a value that may be a view of it."""
    found: list[Node] = []
    pending = [value]
    while pending:
        for reader in graph.consumers[pending.pop()]:
            found.append(reader)
            if reader.spec.view not in (None, "concat"):
                pending += reader.outputs
    return found
