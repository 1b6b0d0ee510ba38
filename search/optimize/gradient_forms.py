"""Gradients in operators that rules know: products with transposes, and sums of two operands.

`restored` reverses this where no rule made use of it, and takes a graph out of normal form, since a
training graph has no constants that the executor could fold.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from soapstone.engine.lower import merge_parts
from soapstone.engine.lower.rebuild import called, rebuild
from soapstone.engine.lower.weights import fold_biases
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Role
from soapstone.search.optimize import normal
from soapstone.search.optimize.pool import Pool


def in_forms(graph: Graph) -> Graph:
    """Return a graph with gradients as products and sums, and equal values computed once."""

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str] | None:
        form = _FORMS.get(node.operator)
        return (form(builder, node),) if form else None

    pool = Pool()
    frame, outputs = normal.read(rebuild(graph, emit), pool, {})
    return normal.write(pool, replace(frame, outputs=graph.outputs), outputs).graph


def _swapped(builder: GraphBuilder, value: str) -> str:
    """Return the transposes of matrices."""
    *first, m, n = range(builder.spec(value).rank)
    return builder.apply("transpose", value, permutation=(*first, n, m))[0]


def _rows(builder: GraphBuilder, value: str) -> str:
    """Return a value as a matrix, its leading dims joined."""
    *first, last = builder.spec(value).shape
    if len(first) == 1:
        return value
    return builder.apply("reshape", value, shape=(math.prod(first), last))[0]


def _in_forms_matmul(builder: GraphBuilder, node: Node) -> str:
    flags = node.attributes["transpose_a"], node.attributes["transpose_b"]
    inputs = [_swapped(builder, x) if flag else x for x, flag in zip(node.inputs, flags)]
    return builder.apply("matmul", *inputs, name=node.name)[0]


def _in_forms_grad_input(builder: GraphBuilder, node: Node) -> str:
    dy, w = node.inputs
    return builder.apply("matmul", dy, _swapped(builder, w), name=node.name)[0]


def _in_forms_grad_weight(builder: GraphBuilder, node: Node) -> str:
    x, dy = (_rows(builder, name) for name in node.inputs)
    return builder.apply("matmul", _swapped(builder, x), dy, name=node.name)[0]


def _in_forms_sum(builder: GraphBuilder, node: Node) -> str:
    total, *rest = node.inputs
    for part in rest:
        total = builder.apply("add", total, part, name=node.name)[0]
    return total


_FORMS: Mapping[str, Callable[[GraphBuilder, Node], str]] = {
    "matmul": _in_forms_matmul,
    "linear_grad_input": _in_forms_grad_input,
    "linear_grad_weight": _in_forms_grad_weight,
    "accumulate": _in_forms_sum,
}


def restored(graph: Graph, original: Graph) -> Graph:
    """Return a graph out of these operators and out of normal form.

    Biases and activations are in products again, and what no rule changed is as in the original.
    """
    outputs = graph.outputs

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str] | None:
        if node.operator != "matmul":
            return None
        return _product(builder, node, original.by_name.get(node.name))

    weights = {name for name, role in graph.roles.items() if role is Role.PARAMETER}
    graph = fold_biases(rebuild(graph, emit).pruned(), weights)
    graph = merge_parts(graph, Strategy({DEFAULT: Configuration()}))
    nodes = _called([_plain(graph, node) for node in graph.nodes], original)
    return called(replace(graph, nodes=nodes), outputs)[0]


def _product(builder: GraphBuilder, node: Node, original: Node | None) -> Sequence[str]:
    """Emit a product, with transposed operands where possible, or as the gradient that it was."""
    inputs, flags = [], []
    for name, flag in zip(node.inputs, ("transpose_a", "transpose_b")):
        behind = _behind(builder, name)
        inputs.append(behind or name)
        flags.append((behind is not None) != node.attributes[flag])
    was = None if original is None else original.operator
    a, b = (builder.spec(name).rank for name in inputs)
    if flags == [False, True] and b == 2 and (a > 2 or was == "linear_grad_input"):
        return builder.apply("linear_grad_input", *inputs, name=node.name)
    if flags == [True, False] and a == b == 2 and was == "linear_grad_weight":
        return builder.apply("linear_grad_weight", *_whole(builder, inputs), name=node.name)
    attributes = dict(zip(("transpose_a", "transpose_b"), flags))
    return builder.apply("matmul", *inputs, name=node.name, **attributes)


def _behind(builder: GraphBuilder, value: str) -> str | None:
    """Return the value of which a value is the matrix transpose, if it is one."""
    maker = builder.maker(value)
    *first, m, n = range(builder.spec(value).rank)
    if maker is None or maker.operator != "transpose":
        return None
    return maker.inputs[0] if maker.attributes["permutation"] == (*first, n, m) else None


def _whole(builder: GraphBuilder, rows: Sequence[str]) -> Sequence[str]:
    """Return the values whose rows are given, if they have the same leading dims."""
    makers = [builder.maker(name) for name in rows]
    found = [maker.inputs[0] for maker in makers if maker and maker.operator == "reshape"]
    shapes = [builder.spec(name).shape for name in found]
    last = [shape[-1:] for shape in shapes] == [builder.spec(name).shape[-1:] for name in rows]
    return found if last and len({shape[:-1] for shape in shapes}) == 1 else rows


def _plain(graph: Graph, node: Node) -> Node:
    """Return a product of two matrices without bias as `matmul`, which takes any strides."""
    if node.operator != "linear" or node.attributes["bias"] or node.attributes["activation"]:
        return node
    if graph.tensors[node.inputs[0]].rank != 2:
        return node
    items = (("transpose_a", False), ("transpose_b", False))
    return replace(node, operator="matmul", items=items)


def _called(nodes: Sequence[Node], original: Graph) -> tuple[Node, ...]:
    """Return nodes with the names of the original, where rebuilding added a number to them."""
    taken = {node.name for node in nodes}
    result = []
    for node in nodes:
        name, _, number = node.name.rpartition("_")
        free = name in original.by_name and name not in taken
        if free and number.isdigit() and node.name not in original.by_name:
            taken.add(name)
            node = replace(node, name=name)
        result.append(node)
    return tuple(result)


def in_order_of(graph: Graph, original: Graph) -> Graph:
    """Return a graph whose nodes run in the order of the nodes of the same names in another graph.

    For example, the gradient of a weight, next to that of its operand, finds both in the cache. New
    nodes run as early as they can.
    """
    position = {node.name: float(index) for index, node in enumerate(original.nodes)}
    index = graph.positions
    waiting: dict[str, int] = {}
    queue: list[tuple[float, int]] = []
    for number, node in enumerate(graph.nodes):
        before = {graph.producers[name].name for name in node.inputs if name in graph.producers}
        after = max((position[name] for name in before), default=-1.0)
        position.setdefault(node.name, after)
        waiting[node.name] = len(before)
        if not before:
            heapq.heappush(queue, (position[node.name], number))
    nodes = []
    while queue:
        node = graph.nodes[heapq.heappop(queue)[1]]
        nodes.append(node)
        for name in {reader.name for value in node.outputs for reader in graph.consumers[value]}:
            waiting[name] -= 1
            if not waiting[name]:
                heapq.heappush(queue, (position[name], index[name]))
    return replace(graph, nodes=tuple(nodes))
