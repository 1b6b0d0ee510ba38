"""Whether a graph's results depend on the order of elements along an axis, derived from signatures.

Attention is a sum over keys, in whichever order they lie, as long as the mask lies alike. That is
what allows a decoder to keep keys in a buffer where it likes (`frontend/generation`), and it is
looked for here rather than believed of files. An operator carries an order on where all operands
that are indexed by the dim have it and each result is indexed by the dim, and loses it where it
sums over the dim. Composites that sum mid-way are asked as their primitives, and an operator whose
tiles differ by their place, such as one that hides later keys, depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from soapstone.ir.analysis.samples import aligned, same, same_along
from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.dims import Ints, Kind, Operand, Signature
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import Tile
from soapstone.ir.tensor import Array

Axes = dict[str, int]  # of values, the axis along which their elements have the order


class _Ordered(Exception):
    """An operator depends on the order, or does not say that it does not."""


def where_order_matters(graph: Graph, axes: Mapping[str, int], weights: Mapping[str, Array]) -> str:
    """Return where an output depends on an order of elements; "" where none does.

    What signatures do not tell counts as a place where it matters.

    Args:
        axes: of inputs, or of values that nodes make: the axis along which their elements are
            reordered, all alike.
        weights: the contents of parameters, states and constants, by name.
    """
    try:
        found = _followed(graph, axes, weights)
    except _Ordered as error:
        return str(error)
    return next((f"output {name!r}" for name in graph.outputs if name in found), "")


def _followed(graph: Graph, axes: Mapping[str, int], weights: Mapping[str, Array]) -> Axes:
    """Return the axes of all values that have the order."""
    found = dict(axes)
    alike: dict[str, set[int]] = {}
    seen_in: dict[str, str] = {}  # of what was reshaped in vain, what it was: another may follow
    for node in graph.nodes:
        if node.outputs[0] in axes:
            continue
        if node.spec.view == "reshape" and node.inputs[0] in seen_in:
            node = replace(node, name=node.outputs[0], inputs=(seen_in[node.inputs[0]],))
        lost = next((name for name in node.inputs if name in seen_in), None)
        if lost is not None:
            raise _Ordered(f"reshape {lost!r}")
        if not any(name in found for name in node.inputs):
            alike.update(same_along(graph, node))
            continue
        try:
            found.update(_after(graph, node, found, weights, alike))
        except _Ordered:
            if node.spec.view != "reshape":
                raise
            seen_in[node.outputs[0]] = node.inputs[0]
    lost = next((name for name in graph.outputs if name in seen_in), None)
    if lost is not None:
        raise _Ordered(f"reshape {lost!r}")
    return found


def _after(
    graph: Graph,
    node: Node,
    axes: Axes,
    weights: Mapping[str, Array],
    alike: Mapping[str, set[int]],
) -> Axes:
    """Return the axes of those results of a node that have the order."""
    specs = [graph.tensors[name] for name in node.inputs]
    signature = node.spec.bind(specs, node.attributes)
    where = f"{node.operator} {node.name!r}"
    operands = list(zip(node.inputs, signature.inputs))
    dims = {aligned(o.axes[axes[name]], signature) for name, o in operands if name in axes}
    dim = dims.pop()
    if dims or dim is None:
        raise _Ordered(where)
    kind = signature.by_name[dim].kind
    if kind is Kind.LOWERED:
        return _lowered(graph, node, axes, weights)
    if kind is Kind.WHOLE or differs_by_place(node, signature, dim):
        raise _Ordered(where)
    for name, operand in operands:
        for position, axis in enumerate(operand.axes):
            other = dim in axis.dims and axes.get(name) != position
            if other and (name in axes or not same(name, position, alike, weights)):
                raise _Ordered(where)
    made = {}
    for name, operand in zip(node.outputs, signature.outputs):
        found = [p for p, axis in enumerate(operand.axes) if aligned(axis, signature) == dim]
        if len(found) > 1 or (not found and dim in operand.dims):
            raise _Ordered(where)
        if found:
            made[name] = found[0]
    return made


def differs_by_place(node: Node, signature: Signature, dim: str) -> bool:
    """Return whether what an operator does to an index of a dim depends on which it is."""
    if node.spec.localize is None or not signature.by_name[dim].extent:
        return False
    found = []
    for index in (0, signature.by_name[dim].extent - 1):
        lo = {each.name: np.zeros(1, np.int64) for each in signature.dims}
        hi = {each.name: np.array([each.extent]) for each in signature.dims}
        lo[dim], hi[dim] = np.array([index]), np.array([index + 1])

        def boxes(
            operands: tuple[Operand, ...],
            lo: dict[str, Ints] = lo,
            hi: dict[str, Ints] = hi,
        ) -> tuple[tuple[Ints, Ints], ...]:
            tiles = (operand.tiles(lo, hi, 1) for operand in operands)
            return tuple((first[0], last[0]) for first, last in tiles)

        tile = Tile(
            {each.name: (int(lo[each.name][0]), int(hi[each.name][0])) for each in signature.dims},
            boxes(signature.inputs),
            boxes(signature.outputs),
            tuple(operand.shape for operand in signature.inputs),
            tuple(operand.shape for operand in signature.outputs),
        )
        found.append(dict(node.spec.localize(node.attributes, tile)))
    return found[0] != found[1]


def _lowered(graph: Graph, node: Node, axes: Axes, weights: Mapping[str, Array]) -> Axes:
    """Return the same of a composite, of what its primitives make."""
    assert node.spec.lower is not None
    builder = GraphBuilder(node.name)
    for name in dict.fromkeys(node.inputs):
        spec = graph.tensors[name]
        builder.input(name, spec.shape, spec.dtype)
    made = node.spec.lower(Emitter(builder, node, ""), node)
    given = {name: axes[name] for name in node.inputs if name in axes}
    try:
        found = _followed(builder.build(), given, weights)
    except _Ordered as error:
        raise _Ordered(f"{node.operator} {node.name!r} ({error})") from None
    return {name: found[value] for name, value in zip(node.outputs, made) if value in found}
