"""What each node of a graph touches in memory, in the order in which nodes run.

Memory plans are made for it and checked against it (`plan.py`). It is had of a graph as such, or of
what is launched of one (`engine/prepare.py`), where views and updates in place share memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from soapstone.ir.graph import Graph
from soapstone.records import dataclass


@dataclass(frozen=True)
class Touch:
    """How a node uses a value: whether it reads it, and how many bytes of it it writes."""

    value: str
    reads: bool
    written: int = 0


@dataclass(frozen=True)
class Touches:
    """What one node touches.

    Attributes:
        name: of the node. label: what errors call it.
        touches: each value once, those that are read first.
        workspace: bytes that it needs beside them while it runs.
    """

    name: str
    label: str
    touches: tuple[Touch, ...]
    workspace: int = 0

    @cached_property
    def values(self) -> tuple[str, ...]:
        """The values that it touches."""
        return tuple(touch.value for touch in self.touches)


@dataclass(frozen=True)
class Footprint:
    """What the nodes of a graph touch.

    Attributes:
        nodes: in the order in which they run. sizes: the bytes of each value.
        given: values that are in the backing memory at first.
        results: values whose last contents must be there in the end.
        fixed: whether the nodes run in this order and no other, as they do in other memories.
    """

    nodes: tuple[Touches, ...]
    sizes: Mapping[str, int]
    given: frozenset[str]
    results: frozenset[str]
    fixed: bool = False

    @staticmethod
    def of(graph: Graph | Footprint, workspace: Mapping[str, int] | None = None) -> Footprint:
        """Return the footprint of a graph whose every value has memory of its own.

        workspace: bytes that nodes need beside their operands, by name; 0 where none is given.
        """
        extra = workspace or {}
        if isinstance(graph, Footprint):
            nodes = (replace(n, workspace=extra.get(n.name, n.workspace)) for n in graph.nodes)
            return replace(graph, nodes=tuple(nodes)) if extra else graph
        sizes = {name: spec.nbytes for name, spec in graph.tensors.items()}
        made = graph.producers.keys()
        return Footprint(
            tuple(
                Touches(
                    node.name,
                    node.label,
                    (
                        *(Touch(name, True) for name in dict.fromkeys(node.inputs)),
                        *(Touch(name, False, sizes[name]) for name in node.outputs),
                    ),
                    extra.get(node.name, 0),
                )
                for node in graph.nodes
            ),
            sizes,
            frozenset(sizes.keys() - made),
            frozenset(graph.results & made),
        )

    def ordered(self, order: Sequence[int]) -> Footprint:
        """Return the same nodes in another order. order: their numbers."""
        return replace(self, nodes=tuple(self.nodes[number] for number in order))

    @cached_property
    def versions(self) -> Mapping[tuple[str, str], int]:
        """How often a value was written before a node that touches it, by node and value."""
        written: dict[str, int] = {}
        found: dict[tuple[str, str], int] = {}
        for node in self.nodes:
            for touch in node.touches:
                found[node.name, touch.value] = written.get(touch.value, 0)
                if touch.written:
                    written[touch.value] = found[node.name, touch.value] + 1
        return found

    @cached_property
    def after(self) -> tuple[frozenset[int], ...]:
        """The nodes that each node must follow: who wrote what it touches, or reads what it writes.

        Orders that keep to it compute the same.
        """
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        found = []
        for number, node in enumerate(self.nodes):
            before: set[int] = set()
            for touch in node.touches:
                if touch.value in writer:
                    before.add(writer[touch.value])
                if touch.written:
                    before.update(readers.get(touch.value, ()))
            for touch in node.touches:
                if touch.written:
                    writer[touch.value], readers[touch.value] = number, []
                else:
                    readers.setdefault(touch.value, []).append(number)
            found.append(frozenset(before - {number}))
        return tuple(found)
