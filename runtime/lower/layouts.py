"""Which values are kept channels-last: the layouts that every strategy begins with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from soapstone.ir.graph import Graph

CHANNELS_LAST = (0, 2, 3, 1)


NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def channels_last(
    graph: Graph, boundary: Mapping[str, tuple[int, ...]] = NONE
) -> dict[str, tuple[int, ...]]:
    """Return the values kept channels-last: images between spatial operators.

    Convolutions and pools run fastest on them. A value is an image when its axes run over the
    samples, channels, rows and columns of an operator that slides a window; element-wise operators
    on images, and their splits, slices and concatenations, pass the layout on. Values that outlive
    a step keep plain order.

    boundary: axis orders of inputs and outputs of a graph that is a part of a larger one.
    """
    stored = {*graph.roles, *graph.updates.values(), *graph.outputs}
    chosen = {name for name, order in boundary.items() if order == CHANNELS_LAST}
    for node in graph.nodes:
        signature = graph.signature(node)
        if not {"n", "h", "w"} <= signature.by_name.keys():
            continue
        operands = (*signature.inputs, *signature.outputs)
        for name, operand in zip((*node.inputs, *node.outputs), operands):
            axes = operand.axes
            if len(axes) == 4 and [a.dims[:1] for a in (axes[0], *axes[2:])] == [
                ("n",),
                ("h",),
                ("w",),
            ]:
                chosen.add(name)
    pending = [*graph.nodes, *reversed(graph.nodes)]
    for node in pending:
        values = (*node.inputs, *node.outputs)
        if chosen.isdisjoint(values):
            continue
        if node.spec.view in ("concat", "split", "slice"):
            chosen.update(values)
        elif node.spec.elementwise:
            shape = graph.tensors[node.outputs[0]].shape
            chosen.update(n for n in values if graph.tensors[n].shape == shape)
    images = {
        name: CHANNELS_LAST
        for name in graph.tensors
        if name in chosen and name not in stored and graph.tensors[name].rank == 4
    }
    return images | {name: order for name, order in boundary.items() if name in graph.tensors}
