"""Fusion of element-wise steps after a product into the product's launch."""

from __future__ import annotations

import math

from soapstone.dtypes import BYTES
from soapstone.engine.lower.elementwise import follows, program_of
from soapstone.engine.lower.halves import reads_halves, widens
from soapstone.engine.lower.rebuild import merged, substituted
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Strategy

MOST_STEPS = 6


def fuse_epilogues(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with each product and the element-wise chain on its result as one node.

    A chain continues while the value has a single reader that is element-wise and of the same
    shape, type and degrees; single precision may become bytes and back. The fused node is at the
    place of the chain's last node, where all other operands exist. If two products are added, the
    later one takes the addition. Bytes and halves that a step reads as real numbers are read as
    they are, and a chain may end with halves that a product reads.
    """
    taken: set[str] = set()  # nodes of chains, and their products
    fused: dict[str, tuple[Node, ...]] = {}  # what replaces the last node of a chain
    for node in reversed(graph.nodes):
        if not node.spec.epilogue or len(node.outputs) != 1 or node.name in taken:
            continue
        chain = _chain(graph, strategy, node, taken)
        if chain:
            chain = _with_narrow(graph, strategy, node, chain, taken)
            fused[chain[-1].name] = (_fused(node, chain),)
            taken.update(step.name for step in [node, *chain])
    gone: dict[str, tuple[Node, ...]] = dict.fromkeys(taken, ())
    return substituted(graph, gone | fused)


def _chain(graph: Graph, strategy: Strategy, node: Node, taken: set[str]) -> list[Node]:
    """Return the element-wise nodes that may join a product, in order."""
    degrees = strategy.configuration(graph, node).parts
    signature = graph.signature(node)
    if signature.monoid(0, degrees) is not None or signature.lowers(degrees):
        return []
    chain: list[Node] = []
    value = node.outputs[0]
    while len(chain) < MOST_STEPS:
        reader = graph.only_reader(value)
        if (
            reader is None
            or not reader.spec.elementwise
            or len(reader.outputs) != 1
            or reader.name in taken
            or reader.inputs.count(value) != 1
            or not follows(graph, value, reader.outputs[0])
            or not _same_tiles(graph, strategy, node, reader)
            or (widens(graph, reader) and _feeds_products(graph, reader))
        ):
            break
        chain.append(reader)
        value = reader.outputs[0]
    return chain


def _feeds_products(graph: Graph, cast: Node) -> bool:
    return any(reads_halves(graph, node) for node in graph.consumers.get(cast.outputs[0], ()))


def _with_narrow(
    graph: Graph, strategy: Strategy, node: Node, chain: list[Node], taken: set[str]
) -> list[Node]:
    """Return the chain with casts that widen its operands before the steps that read them."""
    steps: list[Node] = []
    made = {node.outputs[0], *(step.outputs[0] for step in chain)}
    for step in chain:
        for name in step.inputs:
            maker = graph.producers.get(name)
            if (
                name not in made
                and maker is not None
                and maker.name not in taken
                and maker.spec.elementwise
                and (graph.tensors[maker.inputs[0]].dtype in BYTES or widens(graph, maker))
                and follows(graph, maker.inputs[0], name)
                and graph.only_reader(name) is not None
                and _same_tiles(graph, strategy, node, maker)
            ):
                steps.append(maker)
        steps.append(step)
    return steps


def _same_tiles(graph: Graph, strategy: Strategy, node: Node, reader: Node) -> bool:
    """Return whether two nodes have the same tiles of their results on the same processors."""
    first, second = (strategy.configuration(graph, n) for n in (node, reader))
    if not first.degrees and not second.degrees:
        return first.devices == second.devices
    boxes = []
    for item, configuration in ((node, first), (reader, second)):
        signature = graph.signature(item)
        grid, lo, hi = signature.points(*configuration.cutting)
        boxes.append(signature.outputs[0].tiles(lo, hi, math.prod(grid)))
    (lo_a, hi_a), (lo_b, hi_b) = boxes
    return (
        lo_a.shape == lo_b.shape
        and bool((lo_a == lo_b).all() and (hi_a == hi_b).all())
        and (first.devices, first.copies) == (second.devices, second.copies)
    )


def _fused(node: Node, chain: list[Node]) -> Node:
    """Return one node for a product and the chain on its result."""
    inside = {node.outputs[0], *(step.outputs[0] for step in chain)}
    extras = list(dict.fromkeys(i for step in chain for i in step.inputs if i not in inside))
    number = {node.outputs[0]: 0} | {name: i for i, name in enumerate(extras, 1)}
    attributes = {
        "operator": node.operator,
        "items": node.items,
        "arity": len(node.inputs),
        "program": program_of(chain, number),
    }
    spec = operator("with_epilogue")
    return merged(
        [node, *chain],
        node,
        operator=spec.name,
        inputs=(*node.inputs, *extras),
        outputs=chain[-1].outputs,
        items=tuple(sorted(spec.normalise(attributes).items())),
    )


__all__ = ["fuse_epilogues"]
