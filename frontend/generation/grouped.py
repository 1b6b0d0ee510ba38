"""Grouped queries: those that share keys become rows of one product, and keys are not repeated.

Files repeat each head of keys and values for all heads of queries that share it, which copies the
whole past at every token. For one token, those queries are adjacent rows. The product, scale, mask,
softmax and product that files write are attention, whose kernel reads keys and values in place, and
only those in use (`kernels/cpu/attention/few.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soapstone.engine.lower.idioms.attention_parts import (
    before_swap,
    unguarded,
    unrepeated,
    unscaled,
)
from soapstone.engine.lower.rebuild import called, rebuild
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.products.attention import scale_of
from soapstone.ir.tensor import Array

_OF_ALL_HEADS = ((), (1,), (1, 1))  # the last extents of a mask but that of keys
_BY_TIME = (0, 2, 1, 3)  # heads and positions in each other's place


def grouped(graph: Graph, weights: Mapping[str, Array]) -> Graph:
    """Return the graph with products of one row by repeated heads as products of several rows.

    weights: the contents of parameters, states and constants, by name.
    """

    def emit(builder: GraphBuilder, node: Node) -> tuple[str, ...] | None:
        if node.operator == "attention" and not node.attributes["causal"]:
            return _few_heads(builder, node)
        if node.operator != "matmul" or any(node.attributes.values()):
            return None
        return _attention(builder, node, weights) or _product(builder, node)

    return called(rebuild(graph, emit).pruned(), graph.outputs)[0]


def _attention(
    builder: GraphBuilder, node: Node, weights: Mapping[str, Array]
) -> tuple[str, ...] | None:
    """Return attention with one query for each head, if a product ends one that is written out."""
    shares, values = node.inputs
    shares, empty = unguarded(builder, shares, weights)
    maker = builder.maker(shares)
    if maker is None or maker.operator != "softmax" or maker.attributes["axis"] != 3:
        return None
    added = builder.maker(maker.inputs[0])
    if added is None or added.operator != "add":
        return None
    shape = builder.spec(maker.inputs[0]).shape
    if len(shape) != 4 or shape[1] == 1 or shape[2] != 1:
        return None
    samples, heads = shape[:2]
    masks = [n for n in added.inputs if builder.spec(n).shape[:-1][-2:] in _OF_ALL_HEADS]
    if len(masks) != 1:
        return None
    rest = next(name for name in added.inputs if name != masks[0])
    scores, scale, _ = unscaled(builder, rest, weights)
    first = builder.maker(scores)
    if first is not None and first.spec.view == "reshape":  # of queries that share keys
        first = builder.maker(first.inputs[0])
    if first is None or first.operator != "matmul" or any(first.attributes.values()):
        return None
    turned, once, _ = unscaled(builder, first.inputs[1], weights)
    keys, twice, _ = unscaled(builder, before_swap(builder, turned) or "", weights)
    if not keys:
        return None
    held = builder.spec(keys).shape
    if builder.spec(values).shape[:3] != held[:3]:
        values = unrepeated(builder, values, 1) or values
    if len(held) != 4 or held[0] != samples or builder.spec(values).shape[:3] != held[:3]:
        return None
    if heads % held[1] or builder.spec(first.inputs[0]).size != samples * heads * held[3]:
        return None
    scale *= once * twice
    k, v = (builder.apply("transpose", each, permutation=_BY_TIME)[0] for each in (keys, values))
    y = _attended(builder, first.inputs[0], k, v, masks[0], heads, scale=scale, empty=empty)
    return (_reshaped(builder, y, (samples, heads, 1, builder.spec(y).shape[3])),)


def _attended(
    builder: GraphBuilder, q: str, k: str, v: str, mask: str, heads: int, **attributes: Any
) -> str:
    """Return attention (b, few, heads / few, d) of a query a head over keys (b, t, few, d)."""
    samples, _, few, depth = builder.spec(k).shape
    asked = _reshaped(builder, q, (samples, few, heads // few, depth))
    (asked,) = builder.apply("transpose", asked, permutation=_BY_TIME)
    y, _ = builder.apply("attention", asked, k, v, mask, **attributes)
    return builder.apply("transpose", y, permutation=_BY_TIME)[0]


def _few_heads(builder: GraphBuilder, node: Node) -> tuple[str, ...] | None:
    """Return attention with one query a head as that of queries that share keys, or None."""
    q, *held, mask = node.inputs
    samples, rows, heads, depth = builder.spec(q).shape
    if len(held) != 2 or rows != 1 or builder.spec(mask).shape[:-1][-2:] not in _OF_ALL_HEADS:
        return None
    few = held
    if builder.spec(held[0]).shape[2] == heads:
        few = [unrepeated(builder, value, 2) or "" for value in held]
    if "" in few or len({builder.spec(value).shape[2] for value in few}) > 1:
        return None
    attributes = {**node.attributes, "scale": scale_of(node.attributes, depth)}
    y = _attended(builder, q, few[0], few[1], mask, heads, **attributes)
    y = _reshaped(builder, y, (samples, 1, heads, builder.spec(y).shape[3]))
    return (y,)  # the sums, which only gradients read, are made no more


def _product(builder: GraphBuilder, node: Node) -> tuple[str, ...] | None:
    a, b = node.inputs
    shape, other = builder.spec(a).shape, builder.spec(b).shape
    if len(shape) != 4 or shape[2] != 1 or shape[:2] != other[:2]:
        return None
    least = unrepeated(builder, b, 1)
    if least is None:
        return None
    samples, heads, _, depth = shape
    few = builder.spec(least).shape[1]
    rows = _reshaped(builder, a, (samples, few, heads // few, depth))
    (y,) = builder.apply("matmul", rows, least)
    return (_reshaped(builder, y, (samples, heads, 1, other[3])),)


def _reshaped(builder: GraphBuilder, value: str, shape: tuple[int, ...]) -> str:
    return builder.apply("reshape", value, shape=shape)[0]
