"""Root-mean-square norms that a graph spells out as arithmetic, as one operator.

Exporters write x * (1 / sqrt(mean(x^2) + epsilon)) * gamma, which is four launches.
"""

from __future__ import annotations

from soapstone.engine.lower.constant_vectors import vector_over
from soapstone.engine.lower.fold import Site
from soapstone.ir.graph import Node


def named(site: Site, node: Node) -> str | None:
    """Return the norm that ends in a product with a constant vector, or None."""
    for value, gamma in (node.inputs, node.inputs[::-1]):
        scaled = site.only(value, "mul", "div")
        shape = site.builder.spec(value).shape
        if scaled is None or gamma not in site.fixed or len(shape) < 2:
            continue
        vector = vector_over(site, gamma, shape, len(shape) - 1)
        found = _normalised(site, scaled) if vector is not None else None
        if vector is not None and found is not None:
            x, epsilon, parts = found
            sources = tuple(name for part in (*parts, scaled, node) for name in part.work_of)
            return site.emit(
                "rms_norm", x, vector, name=node.name, sources=sources, epsilon=epsilon
            )
    return None


def _normalised(site: Site, node: Node) -> tuple[str, float, list[Node]] | None:
    """Return what a node divides by its root mean square, the epsilon, and what makes that."""
    sides = (node.inputs,) if node.operator == "div" else (node.inputs, node.inputs[::-1])
    for x, factor in sides:
        parts = _root(site, factor, inverse=node.operator == "mul")
        shift = site.only(parts[0].inputs[0], "affine") if parts else None
        mean = site.only(shift.inputs[0], "reduce_mean") if shift else None
        if shift is None or mean is None or shift.attributes["scale"] != 1:
            continue
        spec, square = site.builder.spec(x), site.only(mean.inputs[0], "power", "mul")
        if square is None or {*square.inputs} != {x} or spec.dtype != "float32":
            continue
        rows = mean.attributes["axes"] == (spec.rank - 1,) and mean.attributes["keepdims"]
        twice = square.operator == "mul" or square.attributes["exponent"] == 2
        if rows and twice and shift.attributes["shift"] > 0:
            return x, shift.attributes["shift"], [square, mean, shift, *parts]
    return None


def _root(site: Site, value: str, inverse: bool) -> list[Node]:
    """Return what makes the root of something, or its inverse, in order; empty: it is none."""
    power = site.only(value, "power")
    if power is not None and power.attributes["exponent"] == (-0.5 if inverse else 0.5):
        return [power]
    turned = site.only(value, "reciprocal") if inverse else None
    if inverse and turned is None:
        return []
    root = site.only(turned.inputs[0] if turned else value, "sqrt")
    return [] if root is None else [root, turned] if turned else [root]
