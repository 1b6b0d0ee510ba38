"""Recognition of the parts of attention as ONNX files write it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Node
from soapstone.ir.tensor import Array


def number(weights: Mapping[str, Array], name: str) -> float | None:
    """Return a constant of one number, or None."""
    found = weights.get(name)
    return float(found.reshape(())) if found is not None and found.size == 1 else None


def unscaled(
    builder: GraphBuilder, value: str, weights: Mapping[str, Array]
) -> tuple[str, float, list[Node]]:
    """Return a value before constant factors, the product of these, and the nodes."""
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
    """Return the softmax behind shares, and attention's `empty`: "zeros" if they replace NaN."""
    guarded = builder.maker(shares)
    if guarded is None or guarded.operator != "where" or number(weights, guarded.inputs[1]) != 0:
        return shares, "nan"
    guard = builder.maker(guarded.inputs[0])
    if guard is None or (guard.operator, guard.inputs) != ("is_nan", guarded.inputs[2:]):
        return shares, "nan"
    return guarded.inputs[2], "zeros"


def before_swap(builder: GraphBuilder, value: str) -> str | None:
    """Return the value (…, x, y) of which a value is the transpose of the last two axes."""
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


def unrepeated(builder: GraphBuilder, value: str, axis: int) -> str | None:
    """Return a value before each index of an axis was repeated, what follows done to it; or None.

    Files repeat each head of keys and values so for all heads of queries that share it.
    """
    node = builder.maker(value)
    if node is None:
        return None
    shape = builder.spec(value).shape
    if node.operator == "transpose":
        order = node.attributes["permutation"]
        least = unrepeated(builder, node.inputs[0], order[axis])
        return None if least is None else _done(builder, node, least)
    if node.spec.elementwise and len(node.outputs) == 1:
        whole = [name for name in node.inputs if builder.spec(name).size > 1]
        if len(whole) != 1 or builder.spec(whole[0]).shape != shape:
            return None
        least = unrepeated(builder, whole[0], axis)
        return None if least is None else _done(builder, node, least, whole[0])
    swapped = before_swap(builder, value)
    if swapped is not None and axis < len(shape) - 2:
        least, order = unrepeated(builder, swapped, axis), [*range(len(shape))]
        order[-2:] = order[:-3:-1]
        return least and builder.apply("transpose", least, permutation=tuple(order))[0]
    if node.spec.view != "reshape":
        return None
    many = builder.spec(node.inputs[0]).shape
    least = _once(builder, node.inputs[0], axis + 1)
    joined = (*many[:axis], math.prod(many[axis : axis + 2]), *many[axis + 2 :])
    if least is None or shape != joined:
        return None
    return builder.apply("reshape", least, shape=(*many[: axis + 1], *many[axis + 2 :]))[0]


def _once(builder: GraphBuilder, value: str, axis: int) -> str | None:
    """Return what a value is several times along an axis, or None."""
    maker, many = builder.maker(value), builder.spec(value).shape
    if maker is None or axis >= len(many):
        return None
    one = (*many[:axis], 1, *many[axis + 1 :])
    repeats = maker.operator == "broadcast" or (
        maker.operator == "concat" and len({*maker.inputs}) == 1
    )
    return maker.inputs[0] if repeats and builder.spec(maker.inputs[0]).shape == one else None


def _done(builder: GraphBuilder, node: Node, to: str, instead: str | None = None) -> str:
    """Return what a node makes of another value, which stands in the place of its one operand."""
    inputs = (to if name == (instead or name) else name for name in node.inputs)
    return builder.apply(node.operator, *inputs, **node.attributes)[0]
