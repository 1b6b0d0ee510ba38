"""Operators that are better not split over samples, where every processor has its own memory.

Split over samples, an operator moves its parameters' gradients and their new values; split over a
dim of its parameters (the channels of a wide linear layer), it moves its samples. Krizhevsky (2014)
chose by hand; here the bytes decide. Tables whose rows are selected by samples need little
arithmetic, so they stay whole if there are enough to distribute evenly (Naumov et al., DLRM, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from soapstone.engine.mapper import row_dims
from soapstone.engine.parallelism import legal
from soapstone.ir.dims import Kind, Operand
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Role

PREFERENCE = 0.5  # samples are waited for, gradients travel while other layers compute
EVEN = 1.25  # times the mean share of the bytes of tables that a processor may have


def configure_apart(
    graph: Graph, samples: Mapping[str, str], parts: int
) -> dict[str, Configuration]:
    """Return the configurations of operators that are better not split over samples.

    samples: the sample dim of each node (`ir.analysis.samples`). parts: how many processors there
    are. The operators are those with parameters, their gradients, and these parameters' updates.
    """
    chosen = {}
    for group in _groups(graph, samples):
        dim = _best(graph, group, samples, parts)
        if dim is not None:
            chosen[group[0].name] = (group, dim)
    tables = [group[0] for group, _ in chosen.values() if _table(graph, group[0])]
    owners = _dealt(graph, tables, parts)
    configurations: dict[str, Configuration] = {}
    held: dict[str, int] = {}  # where a parameter, or its gradient, is whole
    axes: dict[str, int] = {}  # or along which axis it is split
    for first, (group, dim) in chosen.items():
        for node in group:
            own = _named(graph, node, dim, parts) or samples[node.name]
            whole = first in owners
            configurations[node.name] = _whole(owners[first]) if whole else _over(own, parts)
            for name, operand in _parameters(graph, node, samples[node.name]):
                axis = _axis(operand, own)
                if whole:
                    held[name] = owners[first]
                elif axis is not None:
                    axes[name] = axis
    for node in graph.nodes:  # updates, and what comes between a gradient and its update
        if node.name in samples:
            continue
        outputs = list(zip(node.outputs, graph.signature(node).outputs))
        owner = next((held[name] for name in node.inputs if name in held), None)
        along = _followed(graph, node, axes, parts)
        if owner is not None:
            configurations[node.name] = _whole(owner)
            held.update((name, owner) for name, _ in outputs)
        elif along is not None:
            configurations[node.name] = _over(along, parts)
            every = [(name, _axis(operand, along)) for name, operand in outputs]
            axes.update((name, axis) for name, axis in every if axis is not None)
    return configurations


def moved_bytes(
    graph: Graph,
    group: Sequence[Node],
    dims: Mapping[str, str],
    samples: Mapping[str, str],
    parts: int,
) -> int:
    """Return the bytes that nodes split over a dim each move between their points' memories.

    Values with samples are distributed in blocks of samples, and those that only nodes of the group
    use stay where they are made. A value without samples is a parameter or its gradient: its tiles
    stay, but where several places have all of it partial sums are added in blocks, and the blocks
    of updated parameters are copied everywhere.
    """
    made = {name for node in group for name in node.outputs}
    inside = {node.name for node in group}
    moved: dict[str, int] = {}
    for node in group:
        signature = graph.signature(node)
        _, lo, hi = signature.points({dims[node.name]: parts})
        _, home_lo, home_hi = signature.points({samples[node.name]: parts})
        inputs = list(zip(node.inputs, signature.inputs))
        for place, (name, operand) in enumerate((*inputs, *zip(node.outputs, signature.outputs))):
            reads = place < len(inputs)
            starts, stops = operand.tiles(lo, hi, parts)
            elements = int((stops - starts).prod(axis=1).sum())
            partial = not reads and elements > math.prod(operand.shape)
            if samples[node.name] not in operand.dims:
                elements = 2 * (elements - math.prod(operand.shape)) if partial else 0
            elif _stays(graph, name, made if reads else None, inside) and not partial:
                continue
            else:
                first, past = operand.tiles(home_lo, home_hi, parts)
                shared = np.minimum(stops, past) - np.maximum(starts, first)
                elements -= int(np.maximum(shared, 0).prod(axis=1).sum())
            nbytes = elements * np.dtype(graph.tensors[name].dtype).itemsize
            moved[name] = max(moved.get(name, 0), nbytes)
    return sum(moved.values())


def _stays(graph: Graph, name: str, made: Set[str] | None, inside: Set[str]) -> bool:
    """Whether a value of samples is where a group needs it; `made` None: only the group uses it."""
    if made is None:
        return all(user.name in inside for user in graph.consumers[name])
    return name in made or graph.roles.get(name) is Role.INPUT


def _groups(graph: Graph, samples: Mapping[str, str]) -> list[list[Node]]:
    """The operators with parameters and samples, each with its gradients."""
    groups = {
        node.name: [node]
        for node in graph.nodes
        if node.origin is None
        and node.name in samples
        and any(graph.roles.get(name) is Role.PARAMETER for name in node.inputs)
    }
    for node in graph.nodes:
        if node.origin in groups and node.name in samples:
            groups[node.origin].append(node)
    return list(groups.values())


def _best(
    graph: Graph, group: Sequence[Node], samples: Mapping[str, str], parts: int
) -> str | None:
    """The dim of the first node over which a group moves the fewest bytes; None for samples."""
    sample = samples[group[0].name]
    kind = graph.signature(group[0]).by_name[sample].kind
    extents = [graph.signature(node).by_name[samples[node.name]].extent for node in group]
    if kind is not Kind.FREE or min(extents) < parts:
        return None
    best, most = None, PREFERENCE * moved_bytes(graph, group, samples, samples, parts)
    for dim in row_dims(graph, group[0], parts, 1 if _table(graph, group[0]) else 16):
        named = {node.name: _named(graph, node, dim, parts) for node in group}
        dims = {name: own or samples[name] for name, own in named.items()}
        moved = moved_bytes(graph, group, dims, samples, parts)
        if dim != sample and moved < most:
            best, most = dim, moved
    return best


def _named(graph: Graph, node: Node, dim: str | None, parts: int) -> str | None:
    """A node's name for a dim of its origin, if it can be split over it."""
    names = dict(node.rename)
    for own in graph.signature(node).dims:
        if names.get(own.name, own.name) == dim and own.extent >= parts:
            return own.name if legal(graph, node, {own.name: parts}) else None
    return None


def _parameters(graph: Graph, node: Node, sample: str) -> list[tuple[str, Operand]]:
    """The parameters that a node reads and the gradients that it makes, with their axes."""
    signature = graph.signature(node)
    pairs = [*zip(node.inputs, signature.inputs), *zip(node.outputs, signature.outputs)]
    return [
        (name, operand)
        for name, operand in pairs
        if sample not in operand.dims and graph.roles.get(name, Role.PARAMETER) is Role.PARAMETER
    ]


def _followed(graph: Graph, node: Node, axes: Mapping[str, int], parts: int) -> str | None:
    """The dim of a node along the axis over which one of its operands is split."""
    rows = row_dims(graph, node, parts, 1)
    for name, operand in zip(node.inputs, graph.signature(node).inputs):
        if name in axes:
            dims = operand.axes[axes[name]].dims
            if len(dims) == 1 and dims[0] in rows:
                return dims[0]
    return None


def _table(graph: Graph, node: Node) -> bool:
    """Whether a node only selects by samples: a parameter has a dim that no other operand has."""
    signature = graph.signature(node)
    operands = list(zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs)))
    return any(
        graph.roles.get(name) is Role.PARAMETER
        and operand.dims - {d for other, o in operands if other != name for d in o.dims}
        for name, operand in operands
    )


def _dealt(graph: Graph, nodes: Sequence[Node], parts: int) -> dict[str, int]:
    """The processor of each table, the largest first; nothing if shares would be uneven."""
    sizes = {
        node.name: sum(
            graph.tensors[name].nbytes
            for name in node.inputs
            if graph.roles.get(name) is Role.PARAMETER
        )
        for node in nodes
    }
    load = [0] * parts
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += sizes[name]
    return owners if max(load) * parts <= EVEN * sum(load) else {}


def _axis(operand: Operand, dim: str) -> int | None:
    """The axis of an operand that a dim runs along, if one does alone."""
    return next((i for i, axis in enumerate(operand.axes) if axis.dims == (dim,)), None)


def _whole(processor: int) -> Configuration:
    return Configuration({}, (processor,))


def _over(dim: str, parts: int) -> Configuration:
    return Configuration({dim: parts}, tuple(range(parts)))
