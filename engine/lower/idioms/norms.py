"""Norms that are written as several operators, replaced by one.

Exporters write a root-mean-square norm as x * (1 / sqrt(mean(x^2) + epsilon)) * gamma, which is
four launches, and a group norm as an instance norm with groups as channels between two reshapes,
which are copies for channels-last images.
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
    """Return the value that a node divides by its root mean square, the epsilon, and the nodes."""
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
    """Return the nodes that make a square root, or its inverse, in order; or none."""
    power = site.only(value, "power")
    if power is not None and power.attributes["exponent"] == (-0.5 if inverse else 0.5):
        return [power]
    turned = site.only(value, "reciprocal") if inverse else None
    if inverse and turned is None:
        return []
    root = site.only(turned.inputs[0] if turned else value, "sqrt")
    return [] if root is None else [root, turned] if turned else [root]


def grouped(site: Site, node: Node) -> str | None:
    """Return the group norm that a node ends, or scales or shifts by channel, or None."""
    return _ended(site, node) if node.operator == "reshape" else _with_vector(site, node)


def _ended(site: Site, node: Node) -> str | None:
    """Return the group norm written as a reshape, an instance norm and a reshape back, or None."""
    norm = site.only(node.inputs[0], "instance_norm")
    apart = site.only(norm.inputs[0], "reshape") if norm is not None else None
    if norm is None or apart is None or not site.fixed.issuperset(norm.inputs[1:]):
        return None
    spec, parts = site.builder.spec(apart.inputs[0]), site.builder.spec(norm.inputs[0]).shape
    samples, groups = parts[:2]
    if spec.dtype != "float32" or not 3 <= spec.rank <= 5 or not groups:
        return None
    if node.attributes["shape"] != spec.shape or spec.shape[0] != samples or spec.shape[1] % groups:
        return None
    vectors = []
    for vector in norm.inputs[1:]:
        column = site.emit("reshape", vector, shape=(groups, 1))
        wide = site.emit("broadcast", column, shape=(groups, spec.shape[1] // groups))
        vectors.append(site.emit("reshape", wide, shape=(spec.shape[1],)))
    sources = tuple(name for part in (apart, norm, node) for name in part.work_of)
    at = {"num_groups": groups, "epsilon": norm.attributes["epsilon"]}
    return site.emit("group_norm", apart.inputs[0], *vectors, name=node.name, sources=sources, **at)


def _with_vector(site: Site, node: Node) -> str | None:
    """Return a group norm that includes a constant vector over its channels, or None."""
    for value, other in (node.inputs, node.inputs[::-1]):
        norm = site.only(value, "group_norm")
        if norm is None or not site.fixed.issuperset((other, *norm.inputs[1:])):
            continue
        vector = vector_over(site, other, site.builder.spec(value).shape, 1)
        if vector is None:
            continue
        x, gamma, beta = norm.inputs
        if node.operator == "mul":
            gamma = site.emit("mul", gamma, vector)
        beta = site.emit(node.operator, beta, vector)
        sources = (*norm.work_of, *node.work_of)
        at = norm.attributes
        return site.emit("group_norm", x, gamma, beta, name=node.name, sources=sources, **at)
    return None
