"""Activations that exported models spell out, as one operator, which can join a product."""

from __future__ import annotations

import math
from collections.abc import Callable

from soapstone.ir.graph import Node

Maker = Callable[[str], Node | None]


def gelu_of(node: Node, maker: Maker) -> str | None:
    """Return x where a node makes GELU(x) = x / 2 * (1 + erf(x / sqrt(2))), or None.

    maker: the node that makes a value, or None.
    """
    scale, factors = _factors(node, maker)
    if not math.isclose(scale, 0.5, rel_tol=1e-5) or len(factors) != 2:
        return None
    for x, rest in (factors, factors[::-1]):
        outer = maker(rest)
        if outer is None or outer.operator != "affine":
            continue
        inner = maker(outer.inputs[0])
        if (outer.attributes["scale"], outer.attributes["shift"]) != (1.0, 1.0):
            continue
        if inner is not None and inner.operator == "erf":
            by, value = _scaled(inner.inputs[0], maker)
            if value == x and math.isclose(by, math.sqrt(0.5), rel_tol=1e-5):
                return x
    return None


def silu_of(node: Node, maker: Maker) -> str | None:
    """Return x where a node makes SiLU(x) = x * sigmoid(x), or None."""
    if node.operator != "mul":
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        gate = maker(other)
        if gate is not None and gate.operator == "sigmoid" and gate.inputs[0] == x:
            return x
    return None


def _scaled(value: str, maker: Maker) -> tuple[float, str]:
    """Return a value as a number times another value."""
    scale = 1.0
    node = maker(value)
    while node is not None and node.operator == "affine" and node.attributes["shift"] == 0:
        scale *= node.attributes["scale"]
        value = node.inputs[0]
        node = maker(value)
    return scale, value


def _factors(node: Node, maker: Maker) -> tuple[float, list[str]]:
    """Return what a node makes as a number times a product of two values, or of itself alone."""
    scale, product = 1.0, node
    while product.operator == "affine" and product.attributes["shift"] == 0:
        scale *= product.attributes["scale"]
        made = maker(product.inputs[0])
        if made is None:
            return scale, []
        product = made
    if product.operator != "mul":
        return scale, []
    factors = []
    for value in product.inputs:
        by, value = _scaled(value, maker)
        scale *= by
        factors.append(value)
    return scale, factors
