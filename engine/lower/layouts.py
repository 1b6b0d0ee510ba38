"""Default layouts: which values are stored channels-last."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from soapstone.ir.graph import Graph, Node

Order = tuple[int, ...]  # of axes, outermost first: the layout of a value
# Of sequences (n, c, w) and images (n, c, h, w), by their rank.
CHANNELS_LAST: Mapping[int, Order] = MappingProxyType({3: (0, 2, 1), 4: (0, 2, 3, 1)})
_PLACES = {3: ("w",), 4: ("h", "w")}  # the dims of their last axes

NONE: Mapping[str, Order] = MappingProxyType({})


def channels_last(graph: Graph, boundary: Mapping[str, Order] = NONE) -> dict[str, Order]:
    """Return the values stored channels-last: images and sequences between spatial operators.

    Convolutions and pools run fastest on them. A value is an image if its axes run over the
    samples, channels, rows and columns of an operator that slides a window, and a sequence if it
    has no rows; element-wise operators on them, splits, slices and concatenations pass the layout
    on. Values that outlive a step stay in C order.

    boundary: the axis orders of inputs and outputs of a graph that is part of a larger one, and of
    values
        for which another order was chosen.
    """
    chosen = {name for name, order in boundary.items() if order in CHANNELS_LAST.values()}
    for node in graph.nodes:
        chosen.update(images(graph, node))
    for node in (*graph.nodes, *reversed(graph.nodes)):
        if not chosen.isdisjoint((*node.inputs, *node.outputs)):
            chosen.update(passing(graph, node))
    chosen -= stored(graph)
    ranks = {name: tensor.rank for name, tensor in graph.tensors.items() if name in chosen}
    found = {n: CHANNELS_LAST[rank] for n, rank in ranks.items() if rank in CHANNELS_LAST}
    return boundary_orders(graph, found | dict(boundary))


def boundary_orders(graph: Graph, boundary: Mapping[str, Order] = NONE) -> dict[str, Order]:
    """Return the orders of a boundary alone, without C order, in which all other values are."""
    return {
        name: order
        for name, order in boundary.items()
        if name in graph.tensors and order != tuple(range(len(order)))
    }


def stored(graph: Graph) -> frozenset[str]:
    """Return the values that outlive a step, which are in C order."""
    return graph.results | graph.roles.keys()


def images(graph: Graph, node: Node) -> list[str]:
    """Return the images, and sequences, of an operator that slides a window."""
    signature = graph.signature(node)
    if not {"n", "w"} <= signature.by_name.keys():
        return []
    found = []
    operands = (*signature.inputs, *signature.outputs)
    for name, operand in zip((*node.inputs, *node.outputs), operands):
        axes = operand.axes
        dims = [axis.dims[:1] for axis in (axes[0], *axes[2:])] if axes else []
        if dims == [(dim,) for dim in ("n", *_PLACES.get(len(axes), ()))]:
            found.append(name)
    return found


def passing(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the operands and results of an operator that share a layout, if it passes that on."""
    values = (*node.inputs, *node.outputs)
    if node.spec.view in ("concat", "split", "slice"):
        return values
    if not node.spec.elementwise:
        return ()
    shape = graph.tensors[node.outputs[0]].shape
    return tuple(name for name in values if graph.tensors[name].shape == shape)
