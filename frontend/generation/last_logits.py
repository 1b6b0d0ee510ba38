"""Logits of the last tokens alone, so that the largest product of a decoder has one row."""

from __future__ import annotations

from dataclasses import replace

from soapstone.engine.lower.rebuild import called
from soapstone.errors import DataError
from soapstone.ir.analysis.samples import aligned
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph, Node

LAST = "generation.last"  # an input (samples, 1, 2): the number of each sample, and of its token


def of_last(graph: Graph, logits: str, extent: int) -> Graph:
    """Return the graph with logits (samples, 1, words) of the tokens that input `LAST` names.

    logits: a value (samples, tokens, words). extent: the number of tokens.

    Raises:
        DataError: logits of another shape.
    """
    shape = graph.tensors[logits].shape
    if len(shape) != 3 or shape[1] != extent:
        raise DataError(f"output {logits!r} has shape {shape}; (samples, {extent}, words) needed")
    path: list[tuple[Node, str]] = []  # what follows tokens one by one, and of what
    value = logits
    while (found := _only_tokens(graph, value)) is not None:
        path.append(found)
        value = found[1]
    builder = GraphBuilder(base=graph)
    builder.input(LAST, (shape[0], 1, 2), "int64")
    (made,) = builder.apply("gather_nd", value, LAST)
    for node, source in reversed(path):
        inputs = tuple(made if name == source else name for name in node.inputs)
        (made,) = builder.add(replace(node, inputs=inputs))
    outputs = tuple(made if name == logits else name for name in graph.outputs)
    return called(replace(builder.build(), outputs=outputs).pruned(), graph.outputs)[0]


def _only_tokens(graph: Graph, value: str) -> tuple[Node, str] | None:
    """Return the node that makes a value token by token, and its one such input, or None."""
    node = graph.producers.get(value)
    if node is None or len(node.outputs) != 1 or node.spec.view or node.spec.localize:
        return None
    signature = graph.signature(node)
    dim = aligned(signature.outputs[0].axes[1], signature)
    if dim is None or signature.by_name[dim].kind is not Kind.FREE:
        return None
    found = [n for n, o in zip(node.inputs, signature.inputs) if dim in o.dims]
    if len(found) != 1 or node.inputs.count(found[0]) != 1:
        return None
    operand = signature.inputs[node.inputs.index(found[0])]
    fits = len(operand.axes) == 3 and aligned(operand.axes[1], signature) == dim
    return (node, found[0]) if fits else None
