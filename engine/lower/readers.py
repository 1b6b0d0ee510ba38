"""What a node's kernels take at no cost: operands of any strides, and rows with gaps."""

from __future__ import annotations

from soapstone.ir.dims import Affine, Axis, Product
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import OpSpec, operator


def takes_strides(node: Node) -> bool:
    """Return whether a node's operands may have any strides at no cost."""
    return inner(node).strided


def takes_rows(graph: Graph, node: Node, value: str) -> bool:
    """Return whether a node may read part of a larger value, with gaps between rows, at no cost.

    A product whose operand has no windows, such as a 1x1 convolution, is a product of rows.
    """
    if node.spec.tiles_free or takes_strides(node):
        return True
    if not inner(node).epilogue or node.inputs[0] != value or node.inputs.count(value) > 1:
        return False
    return all(_plain(axis) for axis in graph.signature(node).inputs[0].axes)


def inner(node: Node) -> OpSpec:
    """Return the operator of a node, or the one that it wraps."""
    return operator(str(node.attributes["operator"])) if "arity" in node.attributes else node.spec


def _plain(axis: Axis) -> bool:
    """Return whether each index of a dim reads only its own index of the axis."""
    if isinstance(axis, Product):
        return all(extent == 1 for extent in axis.extents[:-1])
    return isinstance(axis, Affine) and (axis.stride, axis.offset, axis.window) == (1, 0, 1)
