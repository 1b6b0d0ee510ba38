"""Half-precision operators in single precision: operands are cast up, and results down.

An operator computes halves in single precision and rounds once (`OpSpec.run`). If a dim that it
reduces is split, the rounded values would be partial results, and the primitives of a composite
would round every value in between; such nodes are therefore widened. On CPUs, whose kernels are in
single precision, all nodes but views are; halves are then only stored between launches. Casts join
element-wise chains, and those of constant weights are computed once.

If the processor is faster at multiplying bfloat16, products read it as it is stored
(`read_halves`), and values that products may round anyway are rounded where they are made
(`store_halves`), which moves half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from soapstone.dtypes import WIDE
from soapstone.engine.lower.composites import following
from soapstone.engine.lower.rebuild import kept, merged, rebuild, substituted
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Affine, Operand
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Strategy
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.cpu.onednn.library import available, gains_by_bfloat16
from soapstone.kernels.entry import BFLOAT16


def widen_partials(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with half-precision nodes that leave partial results in single precision."""
    return _widened(graph, strategy, lambda node: _leaves_partials(graph, strategy, node))


def widen_halves(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with nodes that take halves, except views, in single precision."""

    def computes(node: Node) -> bool:
        spec = node.spec
        moves = spec.view is not None or "to" in spec.attributes or spec.updates
        if _moves(node) and graph.tensors[node.inputs[0]].dtype == BFLOAT16:
            return False  # whose order kernels know
        return not moves and any(graph.tensors[name].is_half for name in node.inputs)

    return _widened(graph, strategy, computes)


def _moves(node: Node) -> bool:
    """Return whether results are elements of the operands, so rounding may come before."""
    return node.spec.view is not None or (node.spec.chooses and len(node.outputs) == 1)


def reads_halves(graph: Graph, node: Node) -> bool:
    """Return whether a node is a product that multiplies bfloat16 if its operands are in it.

    False if that is slower than float32; values that are not stored so may still be multiplied so.
    """
    spec = node.spec
    if spec.name == "with_epilogue":
        spec = operator(node.attributes["operator"])
    if not (spec.half and spec.epilogue and available() and gains_by_bfloat16()):
        return False
    single = "groups" in spec.attributes and graph.tensors[node.inputs[1]].shape[1] == 1
    return not single  # which gain nothing


def read_halves(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with products that read bfloat16 instead of casts from it."""
    instead: dict[str, tuple[Node, ...]] = {}
    if not any(spec.dtype == BFLOAT16 for spec in graph.tensors.values()):
        return graph
    for node in graph.nodes:
        if not reads_halves(graph, node) or _splits_sums(graph, strategy, node):
            continue
        casts = [graph.producers.get(name) for name in node.inputs[:2]]
        found = [each if widens(graph, each) else None for each in casts]
        given = node.inputs[1] in graph.roles  # weights, which are rounded as they are packed
        if found[0] and (found[1] or given):
            inputs = [each.inputs[0] if each else name for each, name in zip(found, node.inputs)]
            instead[node.name] = (
                _reading(node, [*inputs, *node.inputs[2:]], [*filter(None, found)]),
            )
    return substituted(graph, instead).pruned() if instead else graph


def widens(graph: Graph, node: Node | None) -> bool:
    """Return whether a node casts bfloat16 to single precision."""
    return (
        node is not None
        and node.operator == "cast"
        and graph.tensors[node.inputs[0]].dtype == BFLOAT16
        and graph.tensors[node.outputs[0]].dtype == SINGLE
    )


def _reading(node: Node, inputs: Sequence[str], casts: Sequence[Node]) -> Node:
    """Return a product that reads halves, and does the work of their casts."""
    spec, at = operator("with_epilogue"), dict(node.attributes)
    if node.operator != spec.name:
        at = {"operator": node.operator, "items": node.items, "arity": len(inputs), "program": ()}
    items = tuple(sorted(spec.normalise(at | {"wide": True}).items()))
    return merged([*casts, node], node, operator=spec.name, inputs=tuple(inputs), items=items)


def store_halves(graph: Graph, constants: Set[str]) -> Graph:
    """Return the graph with values that products read stored in bfloat16.

    Element-wise readers of such a value read the rounded one, and nodes that only move its elements
    move those; all others read it as it was.

    constants: inputs that never change.
    """
    fixed = set(constants)
    for node in graph.nodes:
        if fixed.issuperset(node.inputs):
            fixed.update(node.outputs)
    wanted = _wanted(graph, fixed)
    halves: dict[str, str] = {}  # by what they were in single precision, or by themselves

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str] | None:
        def cast(name: str, to: str) -> str:
            return str(builder.apply("cast", name, to=to)[0])

        moved = [halves.get(name, "") for name in node.inputs]
        if _moves(node) and all(moved) and wanted.issuperset(node.outputs):
            made = builder.add(replace(node, inputs=tuple(moved)))
            halves.update(zip(made, made))
            return made
        rounded = node.spec.elementwise or (
            all(name in halves or name in fixed for name in node.inputs[:2])
            and reads_halves(graph, graph.by_name[node.name])
        )
        inputs = tuple(
            cast(halves[name], SINGLE)
            if name in halves and (rounded or halves[name] == name)
            else name
            for name in node.inputs
        )
        made = kept(builder, replace(node, inputs=inputs), graph)
        for old, new in zip(node.outputs, made):
            if old in wanted:
                halves[new] = cast(new, BFLOAT16)
        return made

    return rebuild(graph, emit) if wanted else graph


def _wanted(graph: Graph, fixed: set[str]) -> set[str]:
    """Return the values that are worth storing in bfloat16.

    Products read them, perhaps after moving, or a step adds them to a later product's result.
    """
    wanted: set[str] = set()
    order = {name: place for place, name in enumerate(graph.producers)}
    able = {
        name
        for name, maker in graph.producers.items()
        if graph.tensors[name].dtype == SINGLE
        and name not in graph.outputs
        and name not in fixed
        and not widens(graph, maker)
    }
    made = {name for node in graph.nodes if reads_halves(graph, node) for name in node.outputs}
    for node in reversed(graph.nodes):
        if node.spec.elementwise and len(node.inputs) > 1 and made.issuperset(node.inputs):
            first, *_ = sorted(node.inputs, key=order.__getitem__)
            if first in able and graph.only_reader(first) is not None:
                wanted.add(first)
        elif _moves(node) and wanted.issuperset(node.outputs):
            wanted.update(able.intersection(node.inputs))
        elif fixed.union(able).issuperset(node.inputs[:2]) and reads_halves(graph, node):
            wanted.update(able.intersection(node.inputs[:2]))
    return wanted


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
    return _splits_sums(graph, strategy, node)


def _splits_sums(graph: Graph, strategy: Strategy, node: Node) -> bool:
    signature, degrees = graph.signature(node), strategy.configuration(graph, node).parts
    return signature.lowers(degrees) or any(
        signature.monoid(output, degrees) for output in range(len(node.outputs))
    )


def _renamed(operand: Operand) -> dict[str, str]:
    """Return the dim of each axis of an operand, by its name in `cast`."""
    return {
        f"d{number}": axis.dim
        if isinstance(axis, Affine) and axis == Affine(axis.dim, axis.extent)
        else ""
        for number, axis in enumerate(operand.axes)
    }
