"""Orders of a graph's nodes that need less memory at once than the given one may."""

from __future__ import annotations

from soapstone.ir.graph import Graph, Node


def frees_early(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes in an order where those that free memory run as soon as they can.

    Of the nodes that are ready, the one runs that leaves fewest bytes alive, if that is fewer than
    now; else the first in the given order. Results count as gone: they may leave at once.
    """
    sizes = {name: spec.nbytes for name, spec in graph.tensors.items()}
    made, results = graph.producers, graph.results
    readers = {name: len(nodes) for name, nodes in graph.consumers.items()}
    waits = {n.name: sum(v in made for v in dict.fromkeys(n.inputs)) for n in graph.nodes}
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    ready = {node.name for node in graph.nodes if not waits[node.name]}
    touched: set[str] = set()

    def growth(node: Node) -> int:
        new = sum(sizes[v] for v in node.outputs if readers[v] and v not in results)
        old = sum(
            sizes[v]
            for v in dict.fromkeys(node.inputs)
            if readers[v] == 1 and (v in touched or (v in made and v not in results))
        )
        return new - old

    order: list[Node] = []
    while ready:
        chosen = min(ready, key=lambda name: (min(0, growth(graph.by_name[name])), place[name]))
        ready.remove(chosen)
        node = graph.by_name[chosen]
        order.append(node)
        for name in dict.fromkeys(node.inputs):
            readers[name] -= 1
            if name not in made:
                touched.add(name)
        for name in node.outputs:
            for reader in graph.consumers[name]:
                waits[reader.name] -= 1
                if not waits[reader.name]:
                    ready.add(reader.name)
    return tuple(order)
