"""A decoder's step as a graph that keeps keys and values where they are.

Files write it with keys and values of the past as inputs, which are joined with the new ones and
given back: every token is another shape, and a copy of all there is. Here the past is a buffer of
more rows than are used. The graph is that of a past one row short of the buffer, in which each join
becomes a write into a row of the buffer. So a token is new only when the buffer is full.

That is the same where three things hold, and each is looked for: results do not depend on the order
of keys and their mask (`ir/order.py`), lengths of the past matter only as extents (`differs`), and
rows that the mask hides have no effect (which is tried: `decoder.py`). Where a file writes new keys
into rows itself (GroupQueryAttention), their order is its own, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from soapstone.ir.extents import differs as differs_elsewhere
from soapstone.ir.graph import Graph, Node
from soapstone.ir.order import where_order_matters
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, Role, TensorSpec

STARTS = "generation.starts"  # an input: the row that each sample's new key and value is written to


@dataclass(frozen=True)
class Pair:
    """An input with the past of a layer's keys or values, and the output that is it and the new.

    Attributes:
        past, present: their names. axis: along which they are joined.
        joined: whether the new ones come after the past, and not to a row that the file says.
    """

    past: str
    present: str
    axis: int
    joined: bool = True


def pairs(graph: Graph) -> tuple[Pair, ...]:
    """Return the inputs of a graph that an output continues."""
    found = []
    for value in graph.outputs:
        node = graph.producers.get(value)
        joined = node is not None and node.operator == "concat"
        if node is not None and node.operator == "write_at":  # into the past, made longer
            node = graph.producers.get(node.inputs[0])
        if node is None or node.operator != "concat" or len(node.inputs) != 2:
            continue
        if graph.roles.get(node.inputs[0]) is Role.INPUT and node.attributes["axis"] > 0:
            found.append(Pair(node.inputs[0], value, node.attributes["axis"], joined))
    return tuple(found)


def keeping(graph: Graph, past: tuple[Pair, ...], logits: str) -> Graph:
    """Return the graph of one token that writes its keys and values into buffers.

    graph: of one token after a past one row short of the buffers, which take the inputs' names.
    """
    tensors, roles, updates = dict(graph.tensors), dict(graph.roles), dict(graph.updates)
    samples = tensors[past[0].past].shape[0]
    tensors[STARTS], roles[STARTS] = TensorSpec((samples,), "int64"), Role.INPUT
    written: dict[str, Node] = {}
    for pair in past:
        node = graph.producers[pair.present]
        tensors[pair.past] = tensors[pair.present]
        updates[pair.past] = pair.present
        items = tuple(sorted(operator("write_at").normalise({"axis": pair.axis}).items()))
        rest = (node.inputs[1], STARTS) if pair.joined else node.inputs[1:]
        inputs = (pair.past, *rest)
        written[node.name] = replace(node, operator="write_at", inputs=inputs, items=items)
    nodes = tuple(written.get(node.name, node) for node in graph.nodes)
    changed = replace(
        graph, tensors=tensors, roles=roles, nodes=nodes, outputs=(logits,), updates=updates
    )
    return changed.pruned()


def unfit(
    graph: Graph,
    past: tuple[Pair, ...],
    logits: str,
    mask: str,
    weights: Mapping[str, Array],
) -> str:
    """Return what keeps the past of a graph from being a buffer; "" for nothing."""
    joined = {pair.present: pair.axis for pair in past if pair.joined}
    for pair in past:
        readers = graph.consumers[pair.past]
        if not pair.joined:
            readers = tuple(node for each in readers for node in graph.consumers[each.outputs[0]])
        if [node.outputs for node in readers] != [(pair.present,)]:
            return f"input {pair.past!r} is read by more than what joins it with the new"
    if not joined:
        return ""
    least = replace(graph, outputs=(logits,)).pruned()
    where = where_order_matters(least, {**joined, mask: 1}, weights)
    return f"{where} depends on the order of the past" if where else ""


def differs(one: Graph, other: Graph, weights: Mapping[str, Array], logits: str) -> str:
    """Return where graphs of a file for two lengths of the past are not alike; "" for nowhere."""
    one, other = (replace(graph, outputs=(logits,)).pruned() for graph in (one, other))
    return differs_elsewhere(one, other, weights)
