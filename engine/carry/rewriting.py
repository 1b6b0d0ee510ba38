"""The rewriting: which value each reader in the backward pass reads instead.

The nodes of the graph are visited in program order. What a reader needs is made right before it
unless it exists, so nothing is recomputed, copied back or fetched before the backward pass needs
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration, Copies, Keep, Reshard
from soapstone.ir.strategy.recomputation import check_recomputation
from soapstone.ir.strategy.reshards import copy_node
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.training.backward import backward
from soapstone.ir.training.guard import followed

CARRY = "carry_out_strategy"  # the name of this step, before all passes


def carry_out(graph: Graph, strategy: Strategy) -> tuple[Graph, Strategy]:
    """Return a graph in which a strategy's choices for values are nodes, and its configurations.

    Choices for values that the graph does not have, or that no backward pass reads, are left out:
    one strategy serves training, evaluation and other batch sizes.

    Raises:
        StrategyError: a choice that cannot be carried out; names the value.
    """
    paths = any(item.layouts or _once(item) for item in strategy.reshards.values())
    if not paths and all(keep is Keep.KEEP for keep in strategy.tensors.values()):
        return graph, strategy
    return _Rewriting(graph, strategy).done()


class _Rewriting:
    """A graph that is visited node by node, and the nodes that have been added to its own."""

    def __init__(self, graph: Graph, strategy: Strategy) -> None:
        self.graph, self.strategy = graph, strategy
        self.builder = GraphBuilder(base=graph)  # for names that nothing has
        self.late = backward(graph)
        self.position = graph.positions
        self.nodes: list[Node] = []  # of the new graph, so far
        self.made: dict[str, TensorSpec] = {}  # the values that it has besides
        self.clones: dict[str, Node] = {}  # by the name of what they recompute
        self.configurations: dict[str, Configuration] = {}
        self.layouts: dict[str, tuple[int, ...]] = {}
        self.variants: dict[str, str] = {}
        self.tensors: dict[str, Keep] = {}
        self.moved: set[str] = set()  # values that some readers do not read any more
        self.copies: dict[tuple[str, str], str] = {}  # by value, and what a copy is for
        self.paths: dict[tuple[str, str], Reshard] = {}
        self.after: dict[str, str] = {}  # the consumer beside which alone a value is kept
        for value, keep in strategy.tensors.items():
            if value in graph.tensors:
                check_recomputation(graph, value, keep)
        for (value, consumer), item in strategy.reshards.items():
            node = graph.by_name.get(consumer)
            if node is None or value not in node.inputs:
                continue
            if item.layouts or _once(item):
                self.paths[value, consumer] = item
                if item.kept is Copies.AFTER and consumer not in self.late:
                    self.after.setdefault(value, consumer)

    def done(self) -> tuple[Graph, Strategy]:
        """Return the new graph and its strategy."""
        for node in self.graph.nodes:
            if node.name in self.late:
                moved = self._reading(node, partial(self._late, node.name, node.origin or ""))
            else:
                moved = self._reading(node, partial(self._early, node.name))
            self.nodes.append(moved)
        apart = {
            self.graph.producers[value].name
            for value in self.moved
            if value in self.graph.producers and self.graph.only_reader(value) is None
        }
        nodes = (replace(node, apart=True) if node.name in apart else node for node in self.nodes)
        strategy = replace(
            self.strategy,
            configurations={**self.strategy.configurations, **self.configurations},
            tensors=self.tensors,
            reshards={},
            layouts={**self.strategy.layouts, **self.layouts},
            variants={**self.strategy.variants, **self.variants},
        )
        return self.graph.with_nodes(nodes, self.made), strategy

    def _reading(self, node: Node, instead: Callable[[str], str]) -> Node:
        """Return a node that reads other values, except those that it overwrites."""
        own = set(node.overwrites.values())
        inputs = tuple(value if value in own else instead(value) for value in node.inputs)
        self.moved.update(old for old, new in zip(node.inputs, inputs) if old != new)
        return node if inputs == node.inputs else replace(node, inputs=inputs)

    def _early(self, reader: str, value: str) -> str:
        """Return what a node of the forward pass reads instead of a value."""
        if (value, reader) in self.paths and self.paths[value, reader].layouts:
            return self._along(value, reader, value, "")
        return value

    def _late(self, reader: str, origin: str, value: str) -> str:
        """Return what the backward pass reads instead of a value; make it if it does not exist.

        origin: the operator that the reader differentiates or recomputes, and whose copies it uses.
        """
        if (value, reader) in self.paths and reader in self.late:
            return self._along(value, reader, self._stayed(value), "")
        if (value, origin) in self.paths and origin not in self.late:
            if not self.paths[value, origin].layouts:
                return self._anew(value, origin)
            if self.paths[value, origin].kept is Copies.BEFORE:
                return self._along(value, origin, self._stayed(value), ".recomputed")
            return self._along(value, origin, value, "")
        if self.strategy.tensors.get(value) is Keep.RECOMPUTE and self._updates(reader):
            return value  # a flag; a clone of it would hold all gradients until it is made
        return self._stayed(value)

    def _updates(self, name: str) -> bool:
        """Return whether a node updates a parameter; clones are not known by name yet."""
        node = self.graph.by_name.get(name)
        return node is not None and bool(node.spec.updates)

    def _stayed(self, value: str) -> str:
        """Return a value as the backward pass has it, in the layout in which it was made."""
        keep = self.strategy.tensors.get(value)
        if value in self.after:
            return self._back(value)
        if keep is Keep.RECOMPUTE:
            return self._recomputed(value)
        return self._fetched(value) if keep is Keep.OFFLOAD else value

    # Copies

    def _along(self, value: str, consumer: str, begin: str, mark: str) -> str:
        """Return the end of a value's path to a consumer; it begins with `begin`."""
        name = f"to.{consumer}{mark}"
        return self._chain(value, name, begin, self.paths[value, consumer].layouts)

    def _anew(self, value: str, consumer: str) -> str:
        """Return a value that is copied again for a consumer's gradients.

        A reader in the forward pass has no layout of its own, so the value is copied where it is,
        unless it is recomputed anyway; copies of the forward pass are not read again.
        """
        begin = self._stayed(value)
        if begin != value:
            return begin
        return self._chain(value, f"to.{consumer}.recomputed", begin, [self._layout(value)])

    def _back(self, value: str) -> str:
        """Return a value that is copied back from the end of its path, along the same path.

        The way there is made by now, unless its consumer, such as the store of a running statistic,
        comes later.
        """
        consumer = self.after[value]
        layouts = [*self.paths[value, consumer].layouts[-2::-1], self._layout(value)]
        return self._chain(value, "back", self._along(value, consumer, value, ""), layouts)

    def _fetched(self, value: str) -> str:
        """Return a value that was in the backing memory since it was made."""
        layout = self._layout(value)
        if (value, "offloaded") not in self.copies:
            rest = self.nodes
            maker = self.graph.producers.get(value)
            names = [node.name for node in rest]
            place = 0 if maker is None else names.index(maker.name) + 1
            self.nodes = rest[:place]
            away = self._chain(value, "offloaded", value, [layout], late=False)
            self.nodes += rest[place:]
            self.tensors[away] = Keep.OFFLOAD
        return self._chain(value, "fetched", self.copies[value, "offloaded"], [layout])

    def _chain(
        self,
        value: str,
        role: str,
        begin: str,
        layouts: Sequence[Configuration],
        late: bool | None = None,
    ) -> str:
        """Return the last of a chain of copies of a value, which is made only once.

        late: by default all copies, except paths in the forward pass and of values of the backward
        pass.
        """
        if (value, role) in self.copies:
            return self.copies[value, role]
        if late is None:
            maker = self.graph.producers.get(value)
            made_late = maker is not None and maker.name in self.late
            forward = role.startswith("to.") and role[len("to.") :] not in self.late
            late = not made_late and (not forward or role.endswith(".recomputed"))
        for number, layout in enumerate(layouts, 1):
            suffix = f".{number}" if number < len(layouts) else ""
            name = self._named(f"{value}.{role}{suffix}")
            node = replace(copy_node(self.graph, value, name), inputs=(begin,))
            self._add(replace(node, apart=True, late=late), [self.graph.tensors[value]])
            self.configurations[name] = layout
            if value in self.strategy.layouts:
                self.layouts[name] = self.strategy.layouts[value]
            begin = name
        self.copies[value, role] = begin
        return begin

    def _layout(self, value: str) -> Configuration:
        """Return the layout in which a value is made: that of a copy with the same tiles."""
        graph, maker = self.graph, self.graph.producers.get(value)
        node = copy_node(graph, value, self._named(f"{value}.copy"))
        if maker is not None:
            origin, rename = followed(graph, maker, value)
            node = replace(node, origin=origin, rename=tuple(sorted(rename.items())))
        return self.strategy.configuration(graph, node)

    # Recomputation

    def _recomputed(self, value: str) -> str:
        """Return a recomputed value; its operands are recomputed in program order, each once."""
        maker = self.graph.producers[value]
        if maker.name not in self.clones:
            for node in sorted(self._needed(maker), key=lambda node: self.position[node.name]):
                self._clone(node)
        return self.clones[maker.name].outputs[maker.outputs.index(value)]

    def _needed(self, node: Node) -> list[Node]:
        """Return a node, and those of its operands' makers that must be recomputed too."""
        found, pending = dict[str, Node](), [node]
        while pending:
            node = pending.pop()
            found[node.name] = node
            pending += [
                self.graph.producers[value]
                for value in node.inputs
                if self._again(node, value)
                and self.graph.producers[value].name not in (found.keys() | self.clones.keys())
            ]
        return list(found.values())

    def _again(self, node: Node, value: str) -> bool:
        """Return whether a node that is recomputed reads a value that is recomputed as well.

        A value that nothing else reads would not be kept without the clone, so it is not kept for
        it either, unless the strategy says so.
        """
        keep = self.strategy.tensors.get(value)
        if keep is not None or value not in self.graph.producers:
            return keep is Keep.RECOMPUTE
        return self.graph.only_reader(value) is node

    def _clone(self, node: Node) -> None:
        """Add a copy of a node: the same operator, configuration and kernel."""
        graph = self.graph

        def instead(value: str) -> str:
            if self._again(node, value):
                maker = graph.producers[value]
                return self.clones[maker.name].outputs[maker.outputs.index(value)]
            return self._late("", node.name, value)

        name = self._named(f"{node.name}.recomputed")
        outputs = _outputs(name, len(node.outputs))
        clone = replace(
            self._reading(node, instead),
            name=name,
            outputs=outputs,
            origin=None,
            rename=(),
            sources=(),
            apart=all(graph.only_reader(value) is None for value in node.outputs),
            late=True,
        )
        self.clones[node.name] = clone
        self._add(clone, [graph.tensors[value] for value in node.outputs])
        self.configurations[name] = self.strategy.configuration(graph, node)
        for old, new in zip(node.outputs, outputs):
            if old in self.strategy.layouts:
                self.layouts[new] = self.strategy.layouts[old]
        if node.name in self.strategy.variants:
            self.variants[name] = self.strategy.variants[node.name]

    # Nodes

    def _named(self, name: str) -> str:
        """Return a name based on this one that no node or value has."""
        while self.builder.has(name) or name in self.made or name in self.graph.by_name:
            name = self.builder.unique(f"{name}_")
        return name

    def _add(self, node: Node, specs: Sequence[TensorSpec]) -> None:
        self.nodes.append(node)
        self.made.update(zip(node.outputs, specs))


def _once(item: Reshard) -> bool:
    """Return whether a path without layouts is repeated for the backward pass."""
    return bool(item.path) and not item.layouts and item.kept is Copies.BEFORE


def _outputs(name: str, count: int) -> tuple[str, ...]:
    """Return the names of a node's results, as a builder would choose them."""
    return (name,) if count == 1 else tuple(f"{name}.{i}" for i in range(count))
