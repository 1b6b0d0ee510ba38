"""Graphs of one model for several extents: whether they are alike, so that extents are all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role


def differs(one: Graph, other: Graph, weights: Mapping[str, Array]) -> str:
    """Return where two graphs of a model for inputs of other extents are not alike; "" for nowhere.

    They may differ in extents, and in how far weights go along such; not in numbers.

    weights: the contents of parameters, states and constants of both, by name.
    """
    if len(one.nodes) != len(other.nodes):
        return f"graph {one.name!r}, of {len(one.nodes)} and of {len(other.nodes)} operators,"
    names = {name: name for name in one.inputs(Role.INPUT)}
    for a, b in zip(one.nodes, other.nodes):
        same = a.operator == b.operator and len(a.inputs) == len(b.inputs)
        if not same or not _same_attributes(one, other, a, b):
            return a.label
        for x, y in zip(a.inputs, b.inputs):
            known = names.get(x) == y or (x == y and x in weights)
            if not known and not (
                x in weights and y in weights and _same_contents(weights[x], weights[y])
            ):
                return a.label
            names[x] = y
        names.update(zip(a.outputs, b.outputs))
    for x, y in zip(one.outputs, other.outputs):
        if names.get(x, x) != y:
            return f"output {x!r}"
    return ""


def _same_attributes(one: Graph, other: Graph, a: Node, b: Node) -> bool:
    if a.items == b.items:
        return True
    shaped = a.spec.view == "reshape" or a.operator == "broadcast"
    if a.operator == "slice":  # all of an axis, whatever its extent is
        whole = [
            node.attributes["stops"][axis] == graph.tensors[node.inputs[0]].shape[axis]
            for graph, node in ((one, a), (other, b))
            for axis, (p, q) in enumerate(zip(a.attributes["stops"], b.attributes["stops"]))
            if p != q
        ]
        rest = ("starts", "steps")
        return all(whole) and all(a.attributes[name] == b.attributes[name] for name in rest)
    return shaped and all(p == q for p, q in zip(a.items, b.items) if p[0] != "shape")


def _same_contents(a: Array, b: Array) -> bool:
    """Return whether weights are the same as far as both go."""
    if a is b:
        return True
    if a.ndim != b.ndim or a.dtype != b.dtype:
        return False
    cut = tuple(slice(min(extents)) for extents in zip(a.shape, b.shape))
    return bool(np.array_equal(a[cut], b[cut]))


__all__ = ["differs"]
