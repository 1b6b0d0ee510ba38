"""From signatures to tables: nodes, their operands, and the dims that index them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine, Axis, Kind, Product, Whole
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import once
from soapstone.ir.tensor import Array
from soapstone.search.cost.launches import work
from soapstone.search.parallel.problem.arrays import (
    AFFINE,
    AXIS,
    MOST_DIMS,
    MOST_RANK,
    NODE,
    OPERAND,
    PRODUCT,
    TYPES,
    UNINDEXED,
)
from soapstone.search.parallel.problem.numbering import Numbering
from soapstone.search.parallel.problem.operators import ParallelError, followed

Made = tuple[str, int, bool]  # a node, the position of an operand, whether it is an output
_KINDS = {Whole: UNINDEXED, Affine: AFFINE, Product: PRODUCT}


def write_dims(graph: Graph, row: Any, node: Node) -> None:
    """Write the dims of a node, or of the operator with that forward node."""
    dims = graph.signature(node).dims
    if len(dims) > MOST_DIMS:
        raise ParallelError(f"{node.label}: {len(dims)} dims found, {MOST_DIMS} at most")
    row["dims"], row["extent"] = len(dims), 1
    for j, dim in enumerate(dims):
        row["extent"][j] = max(dim.extent, 1)
        row["splits"][j] = dim.may_split(node.spec.lower is not None)


def nodes_of(n: Numbering) -> tuple[Array, Array]:
    """Return `Problem.nodes`, and `flops`."""
    rows = np.zeros(len(n.nodes), NODE)
    flops = np.zeros(len(n.nodes))
    sources = _sources(n)
    for i, node in enumerate(n.nodes):
        row, signature = rows[i], n.graph.signature(node)
        write_dims(n.graph, row, node)
        row["operator"], row["task"] = n.op_of[node.name], n.task_of[node.name]
        for j, dim in enumerate(signature.dims):
            row["lowers"][j] = dim.kind is Kind.LOWERED
            row["follows"][j] = sources[node.name].get(dim.name, -1)
        place = {dim.name: j for j, dim in enumerate(signature.dims)}
        row["nested"] = n.listed(place[dim] for pair in signature.nested for dim in pair)
        flops[i] = work(n.graph, node)[0]
        dtype = signature.dtypes[0] if signature.dtypes else "float32"
        row["rate"] = TYPES.index(dtype) if dtype in TYPES else 0
        row["once"] = bool(once(n.graph, node))
        row["is_view"] = node.spec.view in ("reshape", "split", "slice", "concat")
    return rows, flops


def _sources(n: Numbering) -> dict[str, dict[str, int]]:
    """Return, for each node, which of its operator's dims each of its dims follows.

    Those of a gradient node are its origin's by name; those of a light node index the same axes of
    what it follows.
    """
    found: dict[str, dict[str, int]] = {}
    order = {node.name: i for i, node in enumerate(n.graph.nodes)}
    for node in sorted(n.nodes, key=lambda item: order[item.name]):
        signature = n.graph.signature(node)
        if n.operators[n.op_of[node.name]].node is node:
            found[node.name] = {dim.name: j for j, dim in enumerate(signature.dims)}
        elif node.origin in found:
            known, rename = found[str(node.origin)], dict(node.rename)
            names = ((dim.name, rename.get(dim.name, dim.name)) for dim in signature.dims)
            found[node.name] = {own: known[name] for own, name in names if name in known}
        else:
            found[node.name] = _followed_dims(n, node, order, found)
    return found


def _followed_dims(
    n: Numbering, node: Node, order: Mapping[str, int], follows: Mapping[str, Mapping[str, int]]
) -> dict[str, int]:
    maker = followed(n.graph, node, order)
    assert maker is not None  # or it would be an operator of its own
    made = n.graph.signature(maker)
    result: dict[str, int] = {}
    for name, operand in zip(node.inputs, n.graph.signature(node).inputs):
        if name not in maker.outputs:
            continue
        whole = made.outputs[maker.outputs.index(name)]
        for theirs, ours in zip(whole.axes, operand.axes):
            if theirs.dims and ours.dims and theirs.dims[0] in follows[maker.name]:
                result.setdefault(ours.dims[0], follows[maker.name][theirs.dims[0]])
        return result
    return result


def operands_of(n: Numbering, nodes: Array) -> tuple[Array, Array, dict[Made, int]]:
    """Return `Problem.operands` and `axes`, and operands by their identity; set nodes' ranges."""
    number: dict[Made, int] = {}
    operands: list[tuple[Any, ...]] = []
    axes: list[tuple[Any, ...]] = []
    for i, node in enumerate(n.nodes):
        signature = n.graph.signature(node)
        place = {dim.name: j for j, dim in enumerate(signature.dims)}
        first = len(operands)
        for output, group, shaped in (
            (False, node.inputs, signature.inputs),
            (True, node.outputs, signature.outputs),
        ):
            for position, (name, operand) in enumerate(zip(group, shaped)):
                if len(operand.axes) > MOST_RANK:
                    raise ParallelError(
                        f"{node.label}: a tensor of rank {len(operand.axes)} found,"
                        f" {MOST_RANK} at most"
                    )
                number[node.name, position, output] = len(operands)
                begin = len(axes)
                axes += [
                    (*_axis(axis), n.listed(place[dim] for dim in axis.dims))
                    for axis in operand.axes
                ]
                size = np.dtype(n.graph.tensors[name].dtype).itemsize
                inside = output and _inside(n, name)
                operands.append((i, -1, output, size, inside, (begin, len(axes))))
        nodes[i]["operands"] = first, len(operands)
    return np.array(operands, OPERAND), np.array(axes, AXIS), number


def _inside(n: Numbering, name: str) -> bool:
    """Return whether a light node of the task that makes a value reads it."""
    maker = n.graph.producers[name]
    return any(
        n.task_of.get(reader.name) == n.task_of[maker.name] and reader.origin is None
        for reader in n.graph.consumers[name]
    )


def _axis(axis: Axis) -> tuple[int, ...]:
    """Return an axis map as numbers: kind, gathered, extent, stride, offset, window."""
    kind = _KINDS[type(axis)]
    if isinstance(axis, Affine):
        return kind, 0, axis.extent, axis.stride, axis.offset, axis.window
    gathered = isinstance(axis, Whole) and axis.gathered
    return kind, int(gathered), axis.extent, 1, 0, 1
