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

from soapstone.ir.analysis.samples import aligned, differs_by_place
from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph, Node
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
            alike.update(_same_along(graph, node))
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
            if other and (name in axes or not _same(name, position, alike, weights)):
                raise _Ordered(where)
    made = {}
    for name, operand in zip(node.outputs, signature.outputs):
        found = [p for p, axis in enumerate(operand.axes) if aligned(axis, signature) == dim]
        if len(found) > 1 or (not found and dim in operand.dims):
            raise _Ordered(where)
        if found:
            made[name] = found[0]
    return made


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


def _same_along(graph: Graph, node: Node) -> dict[str, set[int]]:
    """Return the axes of a node's results that no operand is indexed by: they repeat there."""
    signature = graph.signature(node)
    known = {dim for operand in signature.inputs for dim in operand.dims}
    return {
        name: {p for p, axis in enumerate(o.axes) if axis.dims and known.isdisjoint(axis.dims)}
        for name, o in zip(node.outputs, signature.outputs)
    }


def _same(
    name: str, axis: int, alike: Mapping[str, set[int]], weights: Mapping[str, Array]
) -> bool:
    """Return whether a value that no sample determines has the same contents in all rows."""
    if name not in weights:
        return axis in alike.get(name, ())
    array = weights[name]
    return bool((array == array.take([0], axis)).all())
