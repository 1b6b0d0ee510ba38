"""Queries that share keys are rows of one product: keys and values need not be repeated for them.

Files repeat each head of keys and values for all heads of queries that share it, which copies all
that a decoder remembers at every token. Of one token, those queries are rows beside each other.
"""

from __future__ import annotations

from soapstone.engine.lower.rebuild import called, rebuild
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node

_SWAP = (0, 1, 3, 2)


def grouped(graph: Graph) -> Graph:
    """Return the graph with products of one row by repeated heads as products of several rows."""
    return called(rebuild(graph, _product).pruned(), graph.outputs)[0]


def _product(builder: GraphBuilder, node: Node) -> tuple[str, ...] | None:
    if node.operator != "matmul" or any(node.attributes.values()):
        return None
    a, b = node.inputs
    shape, other = builder.spec(a).shape, builder.spec(b).shape
    if len(shape) != 4 or shape[2] != 1 or shape[:2] != other[:2]:
        return None
    least = _unrepeated(builder, b)
    if least is None:
        return None
    samples, heads, _, depth = shape
    few = builder.spec(least).shape[1]
    rows = _reshaped(builder, a, (samples, few, heads // few, depth))
    (y,) = builder.apply("matmul", rows, least)
    return (_reshaped(builder, y, (samples, heads, 1, other[3])),)


def _unrepeated(builder: GraphBuilder, value: str) -> str | None:
    """Return a value (b, heads, …) before its heads were repeated, what follows done to it."""
    node = builder.maker(value)
    if node is None:
        return None
    shape, source = builder.spec(value).shape, node.inputs[0]
    if node.operator == "transpose" and node.attributes["permutation"] == _SWAP:
        least = _unrepeated(builder, source)
        return None if least is None else builder.apply("transpose", least, permutation=_SWAP)[0]
    if node.spec.elementwise and len(node.outputs) == 1:
        whole = [name for name in node.inputs if builder.spec(name).size > 1]
        if len(whole) != 1 or builder.spec(whole[0]).shape != shape:
            return None
        least = _unrepeated(builder, whole[0])
        if least is None:
            return None
        inputs = (least if name == whole[0] else name for name in node.inputs)
        return builder.apply(node.operator, *inputs, **node.attributes)[0]
    if node.spec.view != "reshape":
        return None
    maker = builder.maker(source)
    if maker is None:
        return None
    if maker.operator == "transpose" and maker.attributes["permutation"] == (0, 2, 1):
        # Matrices of all samples and heads in one row, for a while.
        joined = builder.maker(maker.inputs[0])
        if joined is None or joined.spec.view != "reshape":
            return None
        before = builder.spec(joined.inputs[0]).shape
        if before != (*shape[:2], shape[3], shape[2]):
            return None
        least = _unrepeated(builder, joined.inputs[0])
        return None if least is None else builder.apply("transpose", least, permutation=_SWAP)[0]
    if maker.operator != "broadcast":
        return None
    few, many = builder.spec(maker.inputs[0]).shape, builder.spec(source).shape
    fits = len(few) == len(many) == 5 and few[2] == 1 and few == (*many[:2], 1, *many[3:])
    if not fits or shape != (many[0], many[1] * many[2], *many[3:]):
        return None
    return _reshaped(builder, maker.inputs[0], (*few[:2], *few[3:]))


def _reshaped(builder: GraphBuilder, value: str, shape: tuple[int, ...]) -> str:
    return builder.apply("reshape", value, shape=shape)[0]
