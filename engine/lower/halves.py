"""Half-precision operators in single precision: their operands are cast up, and results down.

An operator computes halves in single precision and rounds once (`OpSpec.run`). Where the dim it
reduces is split, what it rounds would be partial results, and the primitives of a composite would
round every value between them; so such a node is widened. On CPUs, whose kernels are of single
precision, all are but views: halves are what is kept between launches. Casts join element-wise
chains, and those of constant weights are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from soapstone.dtypes import WIDE
from soapstone.engine.lower.composites import following
from soapstone.engine.lower.rebuild import rebuild
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Affine, Operand
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy


def widen_partials(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with single-precision twins of half-precision nodes that leave partials."""
    return _widened(graph, strategy, lambda node: _leaves_partials(graph, strategy, node))


def widen_halves(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with single-precision twins of nodes that take halves, but for views."""

    def computes(node: Node) -> bool:
        spec = node.spec
        moves = spec.view is not None or "to" in spec.attributes or spec.updates
        return not moves and any(graph.tensors[name].is_half for name in node.inputs)

    return _widened(graph, strategy, computes)


def _widened(graph: Graph, strategy: Strategy, chosen: Callable[[Node], bool]) -> Graph:
    if not any(spec.is_half for spec in graph.tensors.values()):
        return graph
    split = {node.name for node in graph.nodes if chosen(node)}
    if not split:
        return graph

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str] | None:
        if node.name not in split:
            return None
        signature = graph.signature(graph.by_name[node.name])
        emitter = following(builder, node, strategy)

        def cast(name: str, operand: Operand, to: str) -> str:
            if builder.spec(name).dtype == to:
                return name
            return emitter("cast", name, rename=_renamed(operand), to=to)

        inputs = []
        for name, operand in zip(node.inputs, signature.inputs):
            dtype = builder.spec(name).dtype
            inputs.append(cast(name, operand, WIDE.get(dtype, dtype)))
        made = builder.add(replace(node, inputs=tuple(inputs)))
        return [cast(*each) for each in zip(made, signature.outputs, signature.dtypes)]

    return rebuild(graph, emit)


def _leaves_partials(graph: Graph, strategy: Strategy, node: Node) -> bool:
    if not any(graph.tensors[name].is_half for name in (*node.inputs, *node.outputs)):
        return False
    signature, degrees = graph.signature(node), strategy.configuration(graph, node).parts
    return signature.lowers(degrees) or any(
        signature.monoid(output, degrees) for output in range(len(node.outputs))
    )


def _renamed(operand: Operand) -> dict[str, str]:
    """Return the dim that each axis of an operand runs along, by the name `cast` has for it."""
    return {
        f"d{number}": axis.dim
        if isinstance(axis, Affine) and axis == Affine(axis.dim, axis.extent)
        else ""
        for number, axis in enumerate(operand.axes)
    }
