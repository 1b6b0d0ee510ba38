"""A decoder's step as a graph that keeps keys and values in buffers.

Files take past keys and values as inputs, concatenate the new ones, and return the result, so every
token has another shape and copies the whole past. Here the past is a buffer with more rows than are
in use. The graph is that for a past one row shorter than the buffer, with each concatenation
replaced by a write to a row of the buffer. So a new graph is needed only when the buffer is full.

This is equivalent under three conditions, each of which is checked: results do not depend on the
order of keys and their mask (`ir/analysis/order.py`), lengths of the past matter only as extents
(`differs`), and rows that the mask hides have no effect (which is tested by a run: `decoder.py`).
If a file writes new keys to rows itself (GroupQueryAttention), their order is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from soapstone.ir.analysis.order import where_order_matters
from soapstone.ir.extents import differs as differs_elsewhere
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, Role, TensorSpec

STARTS = "generation.starts"  # an input: the row that each sample's new key and value is written to


@dataclass(frozen=True)
class Pair:
    """An input with the past keys or values of a layer, and the output that extends it.

    Attributes:
        past, present: their names. axis: along which they are concatenated.
        joined: whether the new ones follow the past, and are not written to a row that the file
            names.
    """

    past: str
    present: str
    axis: int
    joined: bool = True


def pairs(graph: Graph) -> tuple[Pair, ...]:
    """Return the inputs of a graph that an output extends."""
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
    """Return the graph for one token that writes its keys and values to buffers.

    graph: for one token after a past one row shorter than the buffers, which take the inputs'
    names.
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
    """Return why the past of a graph cannot be a buffer; "" if it can."""
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
