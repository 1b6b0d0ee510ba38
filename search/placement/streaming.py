"""Memory plans without a search: streaming, and least recently used.

Both bring to a bounded memory what a node uses, from a backing memory that holds everything.
Streaming lets it all leave again after each node; LRU lets tensors stay until their bytes are
needed, and sends away the one unused for longest. Tensors die after their last use. They are the
baselines of optimal plans (ROC, section 4.4 of Jia's thesis).
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.plan import Action, MemoryPlan, Step
from soapstone.runtime.machines.space import Space


def stream(graph: Graph, capacity_bytes: int) -> MemoryPlan:
    """Return the plan that keeps nothing between two nodes; it is checked.

    graph: what is run, node after node. capacity_bytes: of the memory that nodes work in.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return _plan(graph, capacity_bytes, stay=False)


def least_recently_used(graph: Graph, capacity_bytes: int) -> MemoryPlan:
    """Return the plan that sends away what was not used for longest; it is checked.

    graph and capacity_bytes are as of `stream`.

    Raises:
        GraphError: a node that uses more than the capacity; names it.
    """
    return _plan(graph, capacity_bytes, stay=True)


def _plan(graph: Graph, capacity_bytes: int, stay: bool) -> MemoryPlan:
    builder = _Builder(graph, capacity_bytes)
    for node in graph.nodes:
        builder.run(node)
        if not stay:
            builder.leave(tuple(builder.resident))
    builder.leave(tuple(builder.resident))
    plan = MemoryPlan(capacity_bytes, tuple(builder.steps))
    plan.check(graph)
    return plan


class _Builder:
    """A plan in the making: what is resident (least recently used first), and what is backed."""

    def __init__(self, graph: Graph, capacity_bytes: int) -> None:
        self.sizes = {name: spec.nbytes for name, spec in graph.tensors.items()}
        self.space = Space(capacity_bytes)
        self.steps: list[Step] = []
        self.resident: dict[str, int] = {}  # offsets
        made = {name for node in graph.nodes for name in node.outputs}
        self.backed = set(self.sizes) - made
        self.empty: set[str] = set()  # resident, and not written yet
        self.uses = dict.fromkeys(graph.outputs, 1)  # still to come; outputs never die
        for node in graph.nodes:
            for name in node.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1

    def run(self, node: Node) -> None:
        """Bring what a node uses, run it, and free what dies."""
        needed = tuple(dict.fromkeys((*node.inputs, *node.outputs)))
        if not self._bring(needed, node):
            self.leave(tuple(self.resident))  # all of it, so that what is free is in one piece
            if not self._bring(needed, node):
                nbytes = sum(self.sizes[name] for name in needed)
                raise GraphError(
                    f"{node.label}: uses {nbytes} bytes at once, "
                    f"{self.space.capacity_bytes} found in the memory"
                )
        self.steps.append(Step(Action.RUN, node.name))
        self.empty.clear()
        for name in node.inputs:
            self.uses[name] -= 1
        for name in needed:
            if not self.uses.get(name):
                self._away(name, Action.FREE)

    def _bring(self, needed: Sequence[str], node: Node) -> bool:
        """Make tensors resident; returns whether they fit."""
        for name in needed:
            if name in self.resident:
                self.resident[name] = self.resident.pop(name)  # the most recently used is last
                continue
            while (found := self.space.take(self.sizes[name])) is None:
                victim = next((old for old in self.resident if old not in needed), None)
                if victim is None:
                    return False
                self.leave((victim,))
            self.resident[name] = found[0]
            action = Action.ALLOCATE if name in node.outputs else Action.FETCH
            self.steps.append(Step(action, name, self.sizes[name], found[0]))
            if action is Action.ALLOCATE:
                self.empty.add(name)
        return True

    def leave(self, names: Sequence[str]) -> None:
        """Move tensors to the backing memory, or free those that it holds as they are."""
        for name in names:
            kept = name in self.backed or name in self.empty
            self._away(name, Action.FREE if kept else Action.EVICT)

    def _away(self, name: str, action: Action) -> None:
        offset = self.resident.pop(name)
        if action is Action.EVICT:
            self.backed.add(name)
        self.space.give(offset, self.sizes[name])
        self.steps.append(Step(action, name, self.sizes[name], offset))
