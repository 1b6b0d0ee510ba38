"""Rewrite rules for graphs whose weights never change, and the passes that apply them.

A rule sees a node and the graph as rebuilt so far (`Site`). The rules are in `weights.py`,
`few_bits.py` and `integers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Any

from soapstone.engine.constants import determined, determining
from soapstone.engine.lower.rebuild import kept, rebuild
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.by_extents import by_contents
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.windows.convolution import CONVOLUTIONS
from soapstone.ir.tensor import Array, Role
from soapstone.records import dataclass

# The axis of the weights, operand 1, that runs over the result's channels; and the result's.
CHANNELS = dict.fromkeys(CONVOLUTIONS, (0, 1)) | {"linear": (1, -1)}


@dataclass
class Site:
    """A graph under reconstruction, as a rule sees it that may replace the next node."""

    builder: GraphBuilder = field(init=False)
    constants: Mapping[str, Array]
    fixed: set[str]  # values that constants alone determine
    readers: dict[str, int]  # of values with no other use, how many read them
    _said: dict[tuple[str, object], Hashable] = field(default_factory=dict)

    def says(self, value: str, rule: Callable[[Array], Hashable]) -> Hashable:
        """Return a rule's result for a value's contents; None if constants do not determine it.

        rule: a function at the top level of a module.
        """
        if value in self.constants:
            return rule(self.constants[value])
        if value not in self.fixed:
            return None
        if (value, rule) not in self._said:
            graph = self.builder.build()
            made = determining(graph, value)
            if not made.roles.keys() <= self.constants.keys():
                return None  # contents may change
            contents = determined(made, value, self.constants.__getitem__)
            given = dict.fromkeys(graph.inputs(Role.INPUT), Role.INPUT)  # whose extents it goes by
            made = replace(made, roles={**given, **made.roles})
            self._said[value, rule] = by_contents(rule, made, contents)
        return self._said[value, rule]

    def host(self, value: str) -> Node | None:
        """Return the product with constant weights that makes a value with one reader, or None."""
        node = self.builder.maker(value)
        if (
            node is None
            or node.operator not in CHANNELS
            or self.readers.get(value) != 1
            or not self.fixed.issuperset(node.inputs[1:])
            or node.attributes["activation"] is not None
        ):
            return None
        return node

    def add(self, graph: Graph, node: Node, outputs: Sequence[str]) -> None:
        """Record the values that are now a node's results. graph: that of the node."""
        if self.fixed.issuperset(node.inputs):
            self.fixed.update(outputs)
        for old, new in zip(node.outputs, outputs):
            self.readers[new] = graph.reader_counts[old]

    def only(self, value: str, *operators: str, readers: int = 1) -> Node | None:
        """Return the producer of a value with `readers` readers, if it is of these operators."""
        node = self.builder.maker(value)
        read = self.readers.get(value) == readers
        return node if node is not None and node.operator in operators and read else None

    def emit(self, operator: str, *values: str, **attributes: Any) -> str:
        """Emit an operator; its result is constant if all its operands are."""
        made = self.builder.apply(operator, *values, **attributes)[0]
        if self.fixed.issuperset(values):
            self.fixed.add(made)
        return made

    def along(self, vector: str, axis: int, rank: int) -> str:
        """Emit a vector reshaped to `rank` axes, with its elements along `axis`, maybe negative."""
        spread = [1] * rank
        spread[axis] = self.builder.spec(vector).size
        return self.emit("reshape", vector, shape=tuple(spread))

    def with_weights(self, node: Node, weights: str, bias: str | None) -> str:
        """Emit a product with other weights and bias."""
        inputs = (node.inputs[0], weights, *((bias,) if bias else ()))
        return self.changed(node, inputs, bias=bias is not None)

    def changed(self, node: Node, inputs: Sequence[str], **attributes: Any) -> str:
        """Emit a node with other inputs and attributes; it does the work of the old one."""
        at = {**node.attributes, **attributes}
        sources = node.work_of
        return self.builder.apply(node.operator, *inputs, name=node.name, sources=sources, **at)[0]

    def scaled(self, node: Node, scale: str, shift: str | None) -> str:
        """Emit a product whose result is times `scale`, plus `shift`: vectors over channels."""
        rank = self.builder.spec(node.inputs[1]).rank
        column = self.along(scale, CHANNELS[node.operator][0], rank)
        weights = self.emit("mul", node.inputs[1], column)
        bias = self.emit("mul", node.inputs[2], scale) if node.attributes["bias"] else None
        if bias and shift:
            bias = self.emit("add", bias, shift)
        return self.with_weights(node, weights, bias or shift)


@dataclass(frozen=True)
class Fold:
    """A rewrite rule for nodes of certain operators.

    Attributes:
        rule: returns the value that replaces the node's result, or the values of several results;
            None where the rule does not apply.
    """

    name: str
    operators: tuple[str, ...]
    rule: Callable[[Site, Node], str | Sequence[str] | None]


def fold(
    by: Fold, graph: Graph, constants: Mapping[str, Array], weights: Set[str] = frozenset()
) -> Graph:
    """Return the graph with a rule applied to each node that it matches."""
    if not _applies(by, graph, constants, weights):
        return graph
    site = Site(constants, {*constants, *weights}, {})

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str]:
        site.builder = builder
        made = by.rule(site, node) if node.operator in by.operators else None
        outputs = (made,) if isinstance(made, str) else made or kept(builder, node, graph)
        site.add(graph, node, outputs)
        return outputs

    return rebuild(graph, emit)


def _applies(by: Fold, graph: Graph, constants: Mapping[str, Array], weights: Set[str]) -> bool:
    """Return whether a rule matches any node; otherwise the graph need not be rebuilt."""
    nodes = [node for node in graph.nodes if node.operator in by.operators]
    if not nodes:
        return False
    fixed = graph.following(frozenset((*constants, *weights)))
    site = Site(constants, set(fixed), dict(graph.reader_counts))
    site.builder = GraphBuilder(base=graph)  # what the rule emits there is of no use
    return any(by.rule(site, node) for node in nodes)
