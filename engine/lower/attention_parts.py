"""Parts of attention as files spell it out, for whoever makes one operator of them."""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Node
from soapstone.ir.tensor import Array


def number(weights: Mapping[str, Array], name: str) -> float | None:
    """Return a constant that is one number, or None."""
    found = weights.get(name)
    return float(found.reshape(())) if found is not None and found.size == 1 else None


def unscaled(
    builder: GraphBuilder, value: str, weights: Mapping[str, Array]
) -> tuple[str, float, list[Node]]:
    """Return a value before it was multiplied by constant numbers, these, and who multiplies."""
    scale, steps = 1.0, list[Node]()
    while (node := builder.maker(value)) is not None:
        if node.operator == "affine" and node.attributes["shift"] == 0:
            factor: float | None = node.attributes["scale"]
            source = node.inputs[0]
        elif node.operator in ("mul", "div"):
            source, other = node.inputs
            if node.operator == "mul" and number(weights, other) is None:
                source, other = other, source
            factor = number(weights, other)
            if factor and node.operator == "div":
                factor = 1 / factor
        else:
            break
        if not factor:
            break
        value, scale = source, scale * factor
        steps.append(node)
    return value, scale, steps


def unguarded(builder: GraphBuilder, shares: str, weights: Mapping[str, Array]) -> tuple[str, str]:
    """Return the softmax behind shares, and attention's `empty`, by whether NaN is made zero."""
    guarded = builder.maker(shares)
    if guarded is None or guarded.operator != "where" or number(weights, guarded.inputs[1]) != 0:
        return shares, "nan"
    guard = builder.maker(guarded.inputs[0])
    if guard is None or (guard.operator, guard.inputs) != ("is_nan", guarded.inputs[2:]):
        return shares, "nan"
    return guarded.inputs[2], "zeros"


def before_swap(builder: GraphBuilder, value: str) -> str | None:
    """Return what a value (…, x, y) is with its last axes in each other's place."""
    node, rank = builder.maker(value), builder.spec(value).rank
    if node is None:
        return None
    swap = (*range(rank - 2), rank - 1, rank - 2)
    if node.operator == "transpose" and node.attributes["permutation"] == swap:
        return node.inputs[0]
    turned = builder.maker(node.inputs[0]) if node.spec.view == "reshape" else None
    if turned is None or turned.operator != "transpose":
        return None
    joined = builder.maker(turned.inputs[0])  # matrices of all samples and heads in one row
    if turned.attributes["permutation"] != (0, 2, 1) or joined is None:
        return None
    shape = builder.spec(value).shape
    before, rows = (builder.spec(node.inputs[0]).shape for node in (joined, turned))
    fits = joined.spec.view == "reshape" and before == (*shape[:2], *rows[1:])
    return joined.inputs[0] if fits else None
