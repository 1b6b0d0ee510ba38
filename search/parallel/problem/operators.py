"""Operators and tasks of a graph: the units of configuration, and of execution.

Jia, section 3.4.1. Deviations: the gradient nodes of an operator are one task for each point (as in
FlexFlow's runtime), light nodes run with the operator that they follow, and parameter updates are
tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx

from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Role
from soapstone.ir.training.backward import backward

Task = tuple[int, tuple[Node, ...]]  # the number of its operator, and its nodes


class ParallelError(ValueError):
    """A graph or machine for which no strategy can be searched; says why."""


@dataclass(frozen=True)
class Operator:
    """The unit of configuration: a forward node, light nodes that follow it, and their gradients.

    Attributes:
        node: the forward node whose dims are the operator's.
        ahead: the nodes of its tasks in the forward pass, in program order, `node` first.
        back: the nodes of its tasks in the backward pass.
        source: the value whose tiles an update follows; None for other operators.
    """

    node: Node
    ahead: tuple[Node, ...]
    back: tuple[Node, ...]
    source: str | None

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.node.name


def fans_of(graph: Graph) -> dict[str, Node]:
    """Return the sums of a parameter's gradients, by value: one reduction, not a chain of adds."""
    fans = {}
    for node in graph.nodes:
        if node.operator != "accumulate" or node.outputs[0] in graph.outputs:
            continue
        readers = graph.consumers[node.outputs[0]]
        updates = readers and all(_updates_parameter(graph, reader) for reader in readers)
        alone = all(
            name in graph.producers and len(graph.consumers[name]) == 1 for name in node.inputs
        )
        if updates and alone:
            fans[node.outputs[0]] = node
    return fans


def _updates_parameter(graph: Graph, node: Node) -> bool:
    return any(graph.roles.get(old) is Role.PARAMETER for old in node.overwrites.values())


def operators_of(graph: Graph, fans: Mapping[str, Node]) -> tuple[Operator, ...]:
    """Return the operators; light nodes join the operator that makes what they read last.

    Nodes without inputs are constants, which are on every device.
    """
    dropped = {node.name for node in fans.values()}
    order = graph.positions
    first: list[Node] = []
    sources: list[str | None] = []
    ahead: list[list[Node]] = []
    back: list[list[Node]] = []
    home: dict[str, tuple[int, bool]] = {}  # operator, whether of the backward pass
    for node in graph.nodes:
        if node.name in dropped or not node.inputs:
            continue
        if node.origin in home:
            number = home[str(node.origin)][0]
            home[node.name] = number, True
            back[number].append(node)
            continue
        parameter = _updates_parameter(graph, node)
        light = None if parameter or _copies(graph, node) else followed(graph, node, order)
        if light is not None and light.late != node.late:
            light = None  # what repeats work for the backward pass runs when that does
        if light is not None and light.name in home and sources[home[light.name][0]] is None:
            number, late = home[light.name]
            home[node.name] = number, late
            (back if late else ahead)[number].append(node)
            continue
        home[node.name] = len(first), False
        first.append(node)
        sources.append(_gradient(graph, node) if parameter else None)
        ahead.append([node])
        back.append([])
    return tuple(
        Operator(node, tuple(early), tuple(late), source)
        for node, early, late, source in zip(first, ahead, back, sources)
    )


def _copies(graph: Graph, node: Node) -> bool:
    """Return whether a node is a copy that a strategy asks for, with its own tiles."""
    same = graph.tensors[node.inputs[0]] == graph.tensors[node.outputs[0]]
    return node.apart and node.operator == "broadcast" and same


def _gradient(graph: Graph, node: Node) -> str | None:
    """Return the value, made in this step, whose tiles an update follows."""
    old = next(iter(node.overwrites.values()))
    for name in node.inputs:
        shape = graph.tensors[name].shape
        if name != old and name in graph.producers and shape == graph.tensors[old].shape:
            return name
    return None


def followed(graph: Graph, node: Node, order: Mapping[str, int]) -> Node | None:
    """Return the node that a light node runs with, the last maker of its operands; else None.

    A node is light if it does little for each element that it reads: its first result is indexed
    like an operand, or is a view of one.
    """
    signature = graph.signature(node)
    result = signature.outputs[0].dims
    sums = any(dim.extent > 1 and dim.name not in result for dim in signature.dims)
    if sums and node.spec.view is None:
        return None
    made = [
        (order[graph.producers[name].name], position)
        for position, name in enumerate(node.inputs)
        if name in graph.producers and graph.producers[name].inputs
    ]
    if not made:
        return None
    position = max(made)[1]
    same = signature.inputs[position].axes == signature.outputs[0].axes
    if not same and node.spec.view is None:
        return None
    return graph.producers[node.inputs[position]]


def within(
    operators: tuple[Operator, ...], fans: Mapping[str, Node], only: Collection[str]
) -> tuple[Operator, ...]:
    """Return some operators, by name, with the updates that read their gradients."""
    kept = [item for item in operators if item.source is None and item.name in only]
    made = {name for item in kept for node in (*item.ahead, *item.back) for name in node.outputs}
    found = {item.name for item in kept}
    for item in operators:
        if item.source is not None:
            parts = fans[item.source].inputs if item.source in fans else (item.source,)
            if any(part in made for part in parts):
                found.add(item.name)
    return tuple(item for item in operators if item.name in found)


def tasks_of(
    graph: Graph, operators: tuple[Operator, ...], fans: Mapping[str, Node], fine: bool = False
) -> tuple[Task, ...]:
    """Return the tasks of each operator: its forward nodes, and its backward ones.

    Nodes that would wait for themselves if joined are separate tasks.

    Args:
        fine: whether each backward node is a task, so that earlier operators may continue as soon
            as they have their own gradient, before those of weights.
    """
    apart: set[int] = set()
    while True:
        made: list[Task] = []
        for number, item in enumerate(operators):
            if number in apart:
                made += [(number, (node,)) for node in (*item.ahead, *item.back)]
                continue
            made.append((number, item.ahead))
            if fine:
                made += [(number, (node,)) for node in item.back]
            elif item.back:
                made.append((number, item.back))
        waits = waits_of(graph, made, fans)
        knots = [part for part in networkx.strongly_connected_components(waits) if len(part) > 1]
        if not knots:
            return tuple(made)
        apart |= {made[i][0] for part in knots for i in part}


def waits_of(graph: Graph, tasks: Sequence[Task], fans: Mapping[str, Node]) -> networkx.DiGraph:
    """Return the graph of tasks, by number: an edge to each from those whose results it reads.

    Work that is repeated for the backward pass also waits for the gradient before it in program
    order.
    """
    task_of = {node.name: i for i, (_, nodes) in enumerate(tasks) for node in nodes}
    waits = networkx.DiGraph()
    waits.add_nodes_from(range(len(tasks)))
    for i, (_, nodes) in enumerate(tasks):
        for node in nodes:
            for name in node.inputs:
                for maker in _makers(graph, name, fans):
                    before = task_of.get(maker.name)
                    if before is not None and before != i:
                        waits.add_edge(before, i)
    last: int | None = None
    back = backward(graph) if any(node.late for node in graph.nodes) else frozenset()
    for node in graph.nodes if back else ():
        task = task_of.get(node.name)
        if node.late and None not in (task, last) and task != last:
            waits.add_edge(last, task)
        elif not node.late and node.origin is not None and node.name in back:
            last = task
    return waits


def _makers(graph: Graph, name: str, fans: Mapping[str, Node]) -> Iterable[Node]:
    if name in fans:
        return [graph.producers[part] for part in fans[name].inputs]
    return [graph.producers[name]] if name in graph.producers else []
