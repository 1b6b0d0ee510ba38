"""Mixed precision: a graph whose products are computed in half precision.

Weights and states stay in single precision; products take halves of them. What sums over many
numbers or leaves their range (norms, softmax, losses, exponentials) takes single precision, and
all else the widest type of its operands. Each operator computes halves in single precision and
rounds once (`OpSpec.run`), so sums within products are in single precision too.

Source: Micikevicius et al., Mixed precision training, ICLR 2018, section 3.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.expression import order
from soapstone.ir.graph import Graph, Node

SINGLE = "float32"
# Operations whose results leave the range of halves where their operands do not.
_GROWING = frozenset({"exp", "log", "power", "pow", "div", "reciprocal", "tan"})


def mixed(graph: Graph, half: str = "float16") -> Graph:
    """Return a forward graph with casts, so that its products are computed in halves.

    Its inputs, outputs and updates are of the types that they have in the graph.

    graph: with no gradients yet. half: the element type of halves.
    """
    tensors = {name: graph.tensors[name] for name in graph.roles}
    bare = replace(graph, nodes=(), outputs=(), updates={}, tensors=tensors)
    builder, casts = GraphBuilder(base=bare), dict[tuple[str, str], str]()
    leaving = {*graph.outputs, *graph.updates.values()}
    now: dict[str, str] = {}  # values that are called otherwise here

    def cast(value: str, to: str) -> str:
        found = builder.spec(value).dtype
        if found == to or found not in (half, SINGLE):
            return value
        if (value, to) not in casts:
            (made,) = builder.apply("cast", value, name=f"{value}.{to}", to=to)
            casts[value, to] = made
            if to == SINGLE:  # which has lost nothing
                casts[made, found] = value
        return casts[value, to]

    for node in graph.nodes:
        inputs = tuple(now.get(name, name) for name in node.inputs)
        types = {builder.spec(name).dtype for name in inputs}
        to = _computed_in(graph, node, half, types)
        made = builder.add(
            replace(node, inputs=tuple(cast(name, to) for name in inputs) if to else inputs)
        )
        for name, value in zip(node.outputs, made):
            now[name] = cast(value, graph.tensors[name].dtype) if name in leaving else value
    builder.output(*(now.get(name, name) for name in graph.outputs))
    for name, value in graph.updates.items():
        builder.update(name, now.get(value, value))
    return builder.build()


def _computed_in(graph: Graph, node: Node, half: str, types: set[str]) -> str | None:
    """Return the type that a node's operands are cast to, None for those that they have.

    types: of its operands.
    """
    if not types & {half, SINGLE} or "float64" in types:
        return None
    if node.spec.half:
        return half
    formula = node.spec.formula
    growing = formula is not None and any(
        part.operation in _GROWING
        for part in order([formula.expressions[formula.value(node.attributes)]])
    )
    sums = any(dim.kind in (Kind.REDUCED, Kind.LOWERED) for dim in graph.signature(node).dims)
    return SINGLE if growing or sums or SINGLE in types else half
