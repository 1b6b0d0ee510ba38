"""The dim of each operator that runs over the samples of a batch, derived from the signatures.

FlexFlow (Jia, section 3.3) marks the sample dim of every operator by hand. Here the first axis of
every step input is a sample axis, and the interval maps carry it through the graph. Where samples
are gathered for other samples, such as neighbours for vertices, those others are the samples.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.ir.dims import Affine, Axis, Kind, Product, Signature, Whole
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role


def sample_dims(graph: Graph) -> dict[str, str]:
    """Return, for each node that sees samples, the name of its sample dim."""
    axis_of = {name: 0 for name in graph.inputs(Role.INPUT) if graph.tensors[name].rank}
    result: dict[str, str] = {}
    for node in graph.nodes:
        signature = graph.signature(node)
        dim = None
        for name, operand in zip(node.inputs, signature.inputs):
            position = axis_of.get(name)
            if position is None:
                continue
            axis = operand.axes[position]
            dim = _outermost(axis)
            if dim is not None:
                break
            if isinstance(axis, Whole) and axis.of:
                dim = axis.of
                break
        if dim is None:
            continue
        result[node.name] = dim
        for name, operand in zip(node.outputs, signature.outputs):
            for position, axis in enumerate(operand.axes):
                if axis.dims[:1] == (dim,):
                    axis_of[name] = position
                    break
    return result


def meeting_samples(graph: Graph, weights: Mapping[str, Array]) -> str:
    """Return where rows of outputs depend on other rows of the inputs than theirs; "" for nowhere.

    Rows are along the first axis of all inputs and outputs; the graph is for several rows. Where
    signatures leave it open, samples count as meeting.

    weights: the contents of parameters, states and constants, by name.
    """
    axis_of = dict.fromkeys(graph.inputs(Role.INPUT), 0)
    alike: dict[str, set[int]] = {}  # axes along which all rows of what is made of weights are one
    for node in graph.nodes:
        signature = graph.signature(node)
        where = f"{node.operator} {node.name!r}"
        seen = [name for name in node.inputs if name in axis_of]
        if not seen:
            alike.update(same_along(graph, node))
            continue
        dims = {
            aligned(operand.axes[axis_of[name]], signature)
            for name, operand in zip(node.inputs, signature.inputs)
            if name in axis_of
        }
        dim = dims.pop()
        if dims or dim is None or signature.by_name[dim].kind is not Kind.FREE:
            return where
        for name, operand in zip(node.inputs, signature.inputs):
            for position, axis in enumerate(operand.axes):
                other = dim in axis.dims and axis_of.get(name) != position
                if other and (name in axis_of or not same(name, position, alike, weights)):
                    return where
        for name, operand in zip(node.outputs, signature.outputs):
            found = [p for p, axis in enumerate(operand.axes) if aligned(axis, signature) == dim]
            if len(found) != 1:
                return where
            axis_of[name] = found[0]
    rows = {graph.tensors[name].shape[0] for name in graph.inputs(Role.INPUT)}
    for name in graph.outputs:
        if axis_of.get(name) != 0 or not rows.issuperset(graph.tensors[name].shape[:1]):
            return f"output {name!r}"
    return ""


def _outermost(axis: Axis) -> str | None:
    """Return the dim each of whose indices has consecutive elements of an axis for itself."""
    plain = isinstance(axis, Affine) and axis.stride == 1 and not axis.overlaps
    return axis.dims[0] if plain or isinstance(axis, Product) else None


def same_along(graph: Graph, node: Node) -> dict[str, set[int]]:
    """Return the axes of a node's results that no operand is indexed by: they repeat there."""
    signature = graph.signature(node)
    known = {dim for operand in signature.inputs for dim in operand.dims}
    return {
        name: {p for p, axis in enumerate(o.axes) if axis.dims and known.isdisjoint(axis.dims)}
        for name, o in zip(node.outputs, signature.outputs)
    }


def aligned(axis: Axis, signature: Signature) -> str | None:
    """Return the dim whose index i has the i-th of equal parts of an axis."""
    dim = _outermost(axis)
    if dim is None or (isinstance(axis, Affine) and axis.extent != signature.by_name[dim].extent):
        return None
    return dim


def same(name: str, axis: int, alike: Mapping[str, set[int]], weights: Mapping[str, Array]) -> bool:
    """Return whether a value that no sample determines has the same contents in all rows."""
    if name not in weights:
        return axis in alike.get(name, ())
    array = weights[name]
    return bool((array == array.take([0], axis)).all())
