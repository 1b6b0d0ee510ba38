"""Which dim of each operator runs over the samples of a batch, derived from the signatures.

FlexFlow (Jia, section 3.3) marks the sample dim of every operator by hand. Here the first axis of
every step input is a sample axis, and the interval maps carry it through the graph; where samples
are gathered for others of them, such as neighbours for vertices, those are the samples.
"""

from __future__ import annotations

from soapstone.ir.dims import Affine, Product, Whole
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role


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
            plain = isinstance(axis, Affine) and axis.stride == 1 and not axis.overlaps
            if plain or isinstance(axis, Product):
                dim = axis.dims[0]
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
