"""The invariants of a graph after every lowering pass."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from soapstone.engine.lower.updates import in_place, readers_of
from soapstone.engine.lower.views import View, example
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node, inferred
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Role


def check_graph(graph: Graph, before: Graph | None = None, where: str = "graph") -> None:
    """Check that every value is made once, before it is read, and of the inferred type.

    Args:
        before: the graph that this one must be equivalent to: inputs, outputs and updates are
            compared.
        where: the beginning of errors.

    Raises:
        GraphError: names the operator or the value, what was found and what was needed.
    """
    known, names = set(graph.roles), set[str]()
    for node in graph.nodes:
        label = f"{where}: {node.label}"
        if node.name in names:
            raise GraphError(f"{label}: another node has its name; a new one needed")
        names.add(node.name)
        for name in node.inputs:
            if name not in known:
                raise GraphError(f"{label}: input {name!r} is read before it is made")
        _check_node(graph, node, label)
        for name in node.outputs:
            if name in known:
                raise GraphError(f"{label}: output {name!r} exists already; a new value needed")
            known.add(name)
    extra = graph.tensors.keys() - known - (before.tensors.keys() if before is not None else set())
    if extra:
        raise GraphError(f"{where}: value {min(extra)!r} has a type and no maker; both needed")
    for name, value in graph.updates.items():
        if graph.tensors.get(value) != graph.tensors.get(name, 0):
            raise GraphError(
                f"{where}: update of {name!r}: {graph.tensors.get(value)} found,"
                f" {graph.tensors.get(name)} needed"
            )
    missing = [name for name in graph.outputs if name not in known]
    if missing:
        raise GraphError(f"{where}: output {missing[0]!r} is never made")
    if before is not None:
        for what, found, needed in zip(_INTERFACE, _interface(graph), _interface(before)):
            if found != needed:
                raise GraphError(f"{where}: {what} {found} found, {needed} needed as before")


_INTERFACE = ("inputs", "outputs", "updates")


def _interface(graph: Graph) -> tuple[object, ...]:
    given = [(name, str(graph.tensors[name])) for name in graph.inputs(Role.INPUT)]
    return given, [str(graph.tensors[name]) for name in graph.outputs], [*graph.updates]


def _check_node(graph: Graph, node: Node, label: str) -> None:
    """Check a node's attributes, and its outputs' types against those that its operator infers."""
    try:
        if node.items != tuple(sorted(node.spec.normalise(node.attributes).items())):
            raise GraphError("attributes are not in their frozen form")
        needed = inferred(node, (graph.tensors[name] for name in node.inputs))
    except GraphError as error:
        raise type(error)(f"{label}: {error}") from None
    found = tuple(graph.tensors.get(name) for name in node.outputs)
    if found != needed:
        shown = [", ".join(map(str, specs)) for specs in (found, needed)]
        raise GraphError(f"{label}: outputs {shown[0]} found, {shown[1]} needed")


def check_sources(graph: Graph, began: Graph, where: str = "graph", whole: bool = True) -> None:
    """Check that nodes do the work of nodes of the graph before the passes.

    Args:
        whole: whether all of that work must be done, except what is only a view.

    Raises:
        GraphError: names the node whose work is unknown, or done by none.
    """
    known = {name for node in began.nodes for name in node.work_of}
    done: set[str] = set()
    for node in graph.nodes:
        done.update(node.work_of)
        unknown = [name for name in node.work_of if name not in known]
        if unknown and not (node.spec.updates and graph.roles.keys() >= set(node.inputs)):
            raise GraphError(f"{where}: {node.label}: does the work of {unknown[0]!r}, no node")
    for node in began.nodes if whole else ():
        lost = [name for name in node.work_of if name not in done]
        if lost and node.spec.view is None:
            raise GraphError(f"{where}: the work of {node.label} is done by none")


def check_aliases(graph: Graph) -> None:
    """Check that nothing reads an old value after an update has written over it.

    Raises:
        GraphError: names the reader and the update.
    """
    position = graph.positions
    for value, old in in_place(graph).items():
        update = graph.producers[value]
        for reader in readers_of(graph, old):
            if position[reader.name] > position[update.name]:
                raise GraphError(f"graph: {reader.label}: reads {old!r} after {update.label}")


def check_views(graph: Graph, strategy: Strategy, seen: Mapping[str, View]) -> None:
    """Check that each view is of a value with memory, is inside it, and that no two parts overlap.

    Raises:
        GraphError: names the value.
    """
    boxes: dict[str, list[str]] = {}
    for name, view in seen.items():
        label = f"value {name!r}, a view of {view.root!r}"
        if view.root in seen or view.root not in graph.tensors:
            raise GraphError(f"{label}: which has no memory of its own")
        array = example(graph.tensors[view.root].shape, strategy.layouts.get(view.root))
        if view.box is not None:
            array = array[tuple(map(slice, *view.box))]
        shape, needed = view.apply(array).shape, graph.tensors[name].shape
        if shape != needed:
            raise GraphError(f"{label}: shape {shape} found, {needed} needed")
        maker = graph.producers.get(name)
        if view.box is not None and maker is not None and maker.spec.view is None:
            boxes.setdefault(view.root, []).append(name)
    for root, parts in boxes.items():
        for one, other in combinations(parts, 2):
            (lo, hi), (low, high) = seen[one].box or ((), ()), seen[other].box or ((), ())
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(lo, hi, low, high)):
                raise GraphError(f"values {one!r} and {other!r}: overlap in {root!r}")
