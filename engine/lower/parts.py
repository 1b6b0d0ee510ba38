"""Splits and concatenations: merged where possible, and parts that need no memory of their own.

The parts of a split are boxes of its operand (`views.py`). A part is copied only if it must have
memory of its own, or if several of its readers would otherwise copy it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soapstone.engine.lower.rebuild import copied, merged, substituted
from soapstone.engine.lower.views import scan
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import TensorSpec

JOINS = ("concat", "split")


def merge_parts(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with nested concatenations, and nested splits, along one axis merged.

    A split that undoes a concatenation is removed, and vice versa. An element-wise operator that is
    applied to every part of a product becomes one operator on the whole product, so that it can be
    fused into the product's launch.
    """
    if not any(node.spec.view in JOINS for node in graph.nodes):
        return graph
    merger = _Merger(graph, strategy)
    for node in graph.nodes:
        merger.add(node)
    graph = merger.graph_of()
    while True:
        found = ((node, _steps(graph, strategy, node)) for node in graph.nodes)
        split, steps = next(((node, steps) for node, steps in found if steps), (None, ()))
        if split is None:
            return graph
        graph = _hoisted(graph, split, steps)


def copy_parts(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph with a copy of each part of a split that cannot be a view of its operand.

    A split none of whose parts can be a view is launched itself.
    """
    while any(node.spec.view == "split" for node in graph.nodes):
        _, refused = scan(graph, strategy)
        splits = {
            node.name: refused[node.name]
            for node in graph.nodes
            if len(refused.get(node.name, ())) in range(1, len(node.outputs))
        }
        if not splits:
            break
        graph = _with_copies(graph, splits)
    return graph


def _with_copies(graph: Graph, splits: dict[str, tuple[str, ...]]) -> Graph:
    unique = GraphBuilder(base=graph).unique
    made: dict[str, TensorSpec] = {}
    instead = {}
    for name, values in splits.items():
        node, copies = graph.by_name[name], list[Node]()
        seen = {value: unique(f"{value}.part") for value in values}
        for value, part in seen.items():
            made[part] = spec = graph.tensors[value]
            copies.append(copied(unique(f"{value}.copy"), part, value, spec, node))
        outputs = tuple(seen.get(value, value) for value in node.outputs)
        instead[name] = (replace(node, outputs=outputs), *copies)
    return substituted(graph, instead, made)


class _Merger:
    """A graph under reconstruction, and the new names of its values."""

    def __init__(self, graph: Graph, strategy: Strategy) -> None:
        self.graph, self.strategy = graph, strategy
        self.called: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}  # by name
        self.makers: dict[str, Node] = {}

    def add(self, node: Node) -> None:
        """Add a node, or record which existing values its results are."""
        if not self.called.keys().isdisjoint(node.inputs):
            node = replace(node, inputs=tuple(self.called.get(v, v) for v in node.inputs))
        view = node.spec.view
        if view == "concat":
            node = self._concat(node)
        if (view == "split" and self._split(node)) or (view == "concat" and self._same(node)):
            return
        self.nodes[node.name] = node
        self.makers.update(dict.fromkeys(node.outputs, node))

    def graph_of(self) -> Graph:
        """Return the graph without concatenations and splits whose results are unused."""
        needed, nodes = set(self.graph.results), list[Node]()
        for node in reversed(self.nodes.values()):
            if node.spec.view not in JOINS or needed.intersection(node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        return self.graph.with_nodes(reversed(nodes))

    def _behind(self, node: Node, value: str, view: str) -> Node | None:
        """Return the producer of an operand if it has this kind of view, along the node's axis."""
        maker = self.makers.get(value)
        if maker is None or maker.spec.view != view:
            return None
        same = maker.attributes["axis"] == node.attributes["axis"]
        first, second = (self.strategy.configuration(self.graph, n) for n in (maker, node))
        return maker if same and first == second else None

    def _alone(self, node: Node, value: str) -> bool:
        """Return whether a node is the only reader of a value and reads it once."""
        reader = self.graph.only_reader(value)
        return reader is not None and reader.name == node.name and node.inputs.count(value) == 1

    def _same(self, node: Node) -> bool:
        """Replace the result of a one-operand node by its operand; return whether that is legal."""
        if len(node.inputs) > 1 or node.outputs[0] in self.graph.results:
            return False
        self.called[node.outputs[0]] = node.inputs[0]
        return True

    def _concat(self, node: Node) -> Node:
        """Return the node with nested concatenations and complete splits in its operands merged."""
        inputs: list[str] = []
        for value in node.inputs:
            inner = self._behind(node, value, "concat") if self._alone(node, value) else None
            inputs += inner.inputs if inner else [value]
        joined: list[str] = []
        while inputs:
            split = self._behind(node, inputs[0], "split")
            if split is not None and tuple(inputs[: len(split.outputs)]) == split.outputs:
                joined.append(split.inputs[0])
                del inputs[: len(split.outputs)]
            else:
                joined.append(inputs.pop(0))
        return replace(node, inputs=tuple(joined))

    def _split(self, node: Node) -> bool:
        """Return whether a split is redundant: its parts exist or an outer split makes them."""
        (source,), axis, sizes = node.inputs, node.attributes["axis"], node.attributes["sizes"]
        joined = self._behind(node, source, "concat")
        if joined is not None and not self.graph.results.intersection(node.outputs):
            found = tuple(self.graph.tensors[v].shape[axis] for v in joined.inputs)
            if found == sizes:
                self.called.update(zip(node.outputs, joined.inputs))
                return True
        outer = self._behind(node, source, "split")
        if outer is None or not self._alone(node, source):
            return False
        at = outer.outputs.index(source)

        def spliced(old: Sequence[object], new: Sequence[object]) -> tuple[object, ...]:
            return (*old[:at], *new, *old[at + 1 :])

        items = dict(outer.items) | {"sizes": spliced(outer.attributes["sizes"], sizes)}
        outputs = tuple(map(str, spliced(outer.outputs, node.outputs)))
        frozen = tuple(sorted(items.items()))
        larger = merged([outer, node], outer, outputs=outputs, items=frozen)
        self.nodes[outer.name] = larger
        self.makers.update(dict.fromkeys(outputs, larger))
        return True


def _steps(graph: Graph, strategy: Strategy, split: Node) -> tuple[Node, ...]:
    """Return the element-wise operators on the parts of a product if the product can take them.

    Their other operands are the corresponding parts of other values.
    """
    if split.spec.view != "split" or graph.only_reader(split.inputs[0]) is None:
        return ()
    maker = graph.producers.get(split.inputs[0])
    if maker is None or not maker.spec.epilogue or len(maker.outputs) > 1:
        return ()
    readers = [graph.consumers[value] for value in split.outputs]
    if graph.results.intersection((split.inputs[0], *split.outputs)) or {1} != set(
        map(len, readers)
    ):
        return ()
    steps = tuple(step for (step,) in readers)
    first, form = steps[0], strategy.configuration(graph, maker)
    if not first.spec.elementwise or first.spec.localize or len(first.outputs) > 1:
        return ()
    if graph.tensors[first.outputs[0]] != graph.tensors[split.outputs[0]]:
        return ()
    for position, value in enumerate(first.inputs):
        other = graph.producers.get(value)
        if other is None or (other.spec.view, other.items) != ("split", split.items):
            return ()
        if graph.results.intersection(other.outputs) or other.outputs.index(value):
            return ()
        if tuple(step.inputs[position : position + 1] for step in steps) != tuple(
            (part,) for part in other.outputs
        ):
            return ()
    same = all(
        (step.operator, step.items, len(step.inputs))
        == (first.operator, first.items, len(first.inputs))
        and strategy.configuration(graph, step) == form
        for step in steps
    )
    return steps if same else ()


def _hoisted(graph: Graph, split: Node, steps: tuple[Node, ...]) -> Graph:
    """Return the graph with element-wise operators on parts applied to the whole value.

    The split comes last, where the last of the operands is available.
    """
    value = GraphBuilder(base=graph).unique(f"{split.name}.whole")
    splits = {graph.producers[name].name: graph.producers[name] for name in steps[0].inputs}
    sources = tuple(graph.producers[name].inputs[0] for name in steps[0].inputs)
    whole = merged(steps, steps[0], inputs=sources, outputs=(value,))
    parts = replace(split, inputs=(value,), outputs=tuple(step.outputs[0] for step in steps))
    gone = {step.name for step in steps} | {split.name}
    instead: dict[str, tuple[Node, ...]] = dict.fromkeys(gone, ())
    for node in splits.values():
        read = any(r.name not in gone for value in node.outputs for r in graph.consumers[value])
        instead[node.name] = (node,) if read else ()
    last = next(node.name for node in reversed(graph.nodes) if node.name in splits)
    instead[last] = (*instead[last], whole, parts)
    return substituted(graph, instead, {value: graph.tensors[split.inputs[0]]})
