"""Groups of operators that ONNX Runtime may run as one, by which a graph is priced for it.

ONNX Runtime fuses what follows a product into it, spelled-out normalisations and activations into
one operator, and a padding or transposition into the product that reads it. Groups are at least as
large as its fusions, and each is measured as ONNX Runtime itself optimises it, so what is here
decides how often a measurement serves again and never which fusions there are (TASO, section 2.6:
the cost of a graph is the sum of measured costs of its operators).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, TensorSpec

MOST_NODES = 16  # a spelled-out layer norm and what surrounds it
# What ONNX Runtime's fusions take in beside element-wise operators: normalisations, spelled out too
_NORMALIZATIONS = frozenset({"batch_norm_inference", "layer_norm", "rms_norm"})
_REDUCTIONS = frozenset({"reduce_mean", "reduce_sum"})
_SUMS = frozenset({"add", "accumulate"})  # what another value joins a fusion by
_PADDING = frozenset({"pad"})


@dataclass
class Group:
    """Nodes in order that are measured as one, with what they read and what others read of them.

    `inputs` change from run to run; `fixed` are determined by constants alone.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    open: bool = True  # whether what follows may join
    last: int = 0  # position of the last node in the graph

    def form(self, graph: Graph, contents: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return what a measurement of the group depends on: all but names and large constants."""
        number: dict[str, int] = {}
        for name in (*self.inputs, *self.fixed):
            number[name] = len(number)
        nodes = []
        for node in self.nodes:
            nodes.append((node.operator, tuple(number[i] for i in node.inputs), node.items))
            for name in node.outputs:
                number[name] = len(number)
        fixed = tuple(_fixed_form(graph.tensors[name], contents.get(name)) for name in self.fixed)
        given = tuple((s.dtype, s.shape) for s in (graph.tensors[name] for name in self.inputs))
        return given, fixed, tuple(nodes), tuple(number[name] for name in self.outputs)


def _fixed_form(spec: TensorSpec, array: Array | None) -> tuple[Any, ...]:
    values = None if array is None else tuple(array.reshape(-1).tolist())
    return spec.dtype, spec.shape, values


def small(spec: TensorSpec) -> bool:
    """Return whether a constant's contents decide fusions: scales, exponents, epsilons."""
    return spec.size <= 1


def determined(graph: Graph, constants: Iterable[str]) -> set[str]:
    """Return the values that constants alone determine, which are folded before any run."""
    known = set(constants)
    for node in graph.nodes:
        if known.issuperset(node.inputs) and not node.spec.updates:
            known.update(node.outputs)
    return known


def groups(graph: Graph, known: Set[str]) -> list[Group]:
    """Return the groups of a graph, by their last nodes; `known` values are never computed."""
    members: list[Group] = []
    maker: dict[str, int] = {}  # value -> its group
    behind: dict[str, int] = dict.fromkeys(graph.roles, 0)  # value -> groups it depends on, as bits
    for position, node in enumerate(graph.nodes):
        if node.outputs[0] in known:
            continue
        read = [name for name in dict.fromkeys(node.inputs) if name not in known]
        chosen = _joined(graph, node, read, members, maker, behind)
        if chosen is None:
            chosen = len(members)
            members.append(Group(open=_opens(node)))
            if node.spec.epilogue or node.operator.startswith(("conv", "max_pool", "avg_pool")):
                for name in read:
                    _pull(graph, name, chosen, members, maker)
        group = members[chosen]
        group.nodes.append(node)
        group.last = position
        depends = 1 << chosen
        for name in read:
            depends |= behind.get(name, 0)
        for name in node.outputs:
            maker[name], behind[name] = chosen, depends
    found = sorted((g for g in members if g.nodes), key=lambda g: g.last)
    kept = graph.results
    for group in found:
        _bound(graph, group, known, kept)
    return found


def _opens(node: Node) -> bool:
    return node.spec.elementwise or node.spec.epilogue or _normalizes(node)


def _normalizes(node: Node) -> bool:
    return node.operator in _NORMALIZATIONS or node.operator in _REDUCTIONS


def _joined(
    graph: Graph,
    node: Node,
    read: list[str],
    members: list[Group],
    maker: Mapping[str, int],
    behind: Mapping[str, int],
) -> int | None:
    """Return the group that a node joins: one that makes an operand, and that no path re-enters."""
    if not (node.spec.elementwise or _normalizes(node)):
        return None
    if node.operator in _REDUCTIONS and not _over_last(graph, node):
        return None
    for candidate in sorted({maker[name] for name in read if name in maker}, reverse=True):
        group = members[candidate]
        if not group.open or len(group.nodes) >= MOST_NODES:
            continue
        outside = [name for name in read if maker.get(name) != candidate]
        if outside and node.operator not in _SUMS:
            continue
        if not any(behind.get(name, 0) >> candidate & 1 for name in outside):
            return candidate
    return None


def _over_last(graph: Graph, node: Node) -> bool:
    """Return whether a reduction is one of a layer norm: over the last axis, which stays."""
    rank = graph.tensors[node.inputs[0]].rank
    axes = node.attributes["axes"]
    return bool(node.attributes["keepdims"] and axes is not None and set(axes) <= {-1, rank - 1})


def _pull(
    graph: Graph, name: str, chosen: int, members: list[Group], maker: dict[str, int]
) -> None:
    """Move a padding or transposition that only this product reads into its group."""
    index = maker.get(name)
    if index is None or len(graph.consumers[name]) > 1 or name in graph.outputs:
        return
    group = members[index]
    if len(group.nodes) != 1:
        return
    node = group.nodes[0]
    if node.spec.view == "transpose" or node.operator in _PADDING:
        members[chosen].nodes.append(node)
        group.nodes.clear()
        maker[name] = chosen


def _bound(graph: Graph, group: Group, known: Set[str], kept: Set[str]) -> None:
    """Find what a group reads and what others read of it."""
    made = {name for node in group.nodes for name in node.outputs}
    read = dict.fromkeys(i for node in group.nodes for i in node.inputs if i not in made)
    group.inputs = tuple(name for name in read if name not in known)
    group.fixed = tuple(name for name in read if name in known)
    inside = {node.name for node in group.nodes}
    group.outputs = tuple(
        name
        for node in group.nodes
        for name in node.outputs
        if name in kept or any(reader.name not in inside for reader in graph.consumers[name])
    ) or tuple(group.nodes[-1].outputs[:1])
