"""Which integers an input may hold where operators read them as indices, as of a table's rows."""

from __future__ import annotations

from soapstone.ir.graph import Graph, Node

_WHOLE = ("reshape", "transpose")  # views of all elements of what they read


def index_range(graph: Graph, name: str, parts: bool = False) -> tuple[range, Node] | None:
    """Return what an integer input may hold, and the operator that takes least.

    None where no operator that reads it, as it is or through views and casts, declares
    `OpSpec.indices` of it.

    parts: whether ranges of what reads a part of it, a slice, are of all of it.
    """
    views = (*_WHOLE, "slice") if parts else _WHOLE
    pending, found = [name], list[tuple[range, Node]]()
    while pending:
        value = pending.pop()
        for node in graph.consumers[value]:
            if node.spec.indices is not None:
                inputs = [graph.tensors[each] for each in node.inputs]
                ranges = node.spec.indices(inputs, node.attributes)
                found += [(r, node) for at, r in ranges.items() if node.inputs[at] == value]
            elif node.spec.view in views or node.operator == "cast":
                pending += node.outputs
    if not found:
        return None
    least, node = min(found, key=lambda each: (each[0].stop, each[1].name))
    return range(max(each.start for each, _ in found), least.stop), node
