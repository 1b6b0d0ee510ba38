"""Numbers for a graph's operators, tasks and nodes, and the lists that rows of tables refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from soapstone.ir.graph import Graph, Node
from soapstone.search.parallel.problem.operators import Operator, Task


class Numbering:
    """The names and numbers from which the arrays of a problem are written.

    Attributes:
        nodes: of all tasks; their numbers, and those of their tasks and operators, by name.
        lists: `Problem.lists` as written so far.
    """

    def __init__(
        self,
        graph: Graph,
        operators: tuple[Operator, ...],
        tasks: tuple[Task, ...],
        fans: Mapping[str, Node],
    ) -> None:
        self.graph, self.operators, self.tasks, self.fans = graph, operators, tasks, fans
        self.nodes = tuple(node for _, nodes in tasks for node in nodes)
        self.number = {node.name: i for i, node in enumerate(self.nodes)}
        self.task_of = {n.name: i for i, (_, nodes) in enumerate(tasks) for n in nodes}
        self.op_of = {n.name: op for op, nodes in tasks for n in nodes}
        self.lists: list[int] = []

    def listed(self, items: Iterable[int]) -> tuple[int, int]:
        """Append to `lists`; return the range."""
        first = len(self.lists)
        self.lists.extend(items)
        return first, len(self.lists)
