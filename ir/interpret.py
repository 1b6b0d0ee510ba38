"""The sequential NumPy run of a graph: the meaning that every way of running it must keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, TensorSpec, spec_of


def steps(graph: Graph, values: Mapping[str, Array]) -> Iterator[tuple[Node, tuple[Array, ...]]]:
    """Yield every node with its outputs, in order, as the operators' references compute them.

    Raises:
        GraphError: an input is missing or has another shape or type; names it.
    """
    known: dict[str, Array] = {}
    for name in graph.roles:
        if name not in values:
            raise GraphError(f"input {name!r} of graph {graph.name!r} is missing")
        found = spec_of(values[name])
        if found.shape != graph.tensors[name].shape:
            raise GraphError(f"input {name!r}: {found} found, {graph.tensors[name]} needed")
        known[name] = np.asarray(values[name])
    yield from run_all(graph.nodes, graph.tensors, known)


def run_all(
    nodes: Sequence[Node], tensors: Mapping[str, TensorSpec], known: dict[str, Array]
) -> Iterator[tuple[Node, tuple[Array, ...]]]:
    """Yield nodes with their outputs, in order, as the operators' references compute them.

    tensors: the types of what they make. known: what they read besides; gets what they make, and
    loses what none of them reads any more.
    """
    last_use = {name: i for i, node in enumerate(nodes) for name in node.inputs}
    for position, node in enumerate(nodes):
        dtypes = [tensors[name].dtype for name in node.outputs]
        operands = (known[name] for name in node.inputs)
        arrays = node.spec.run(node.attributes, *operands, dtypes=dtypes)
        known.update(zip(node.outputs, arrays))
        yield node, arrays
        for name in node.inputs:
            if last_use[name] == position:
                known.pop(name, None)


def interpret(graph: Graph, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the graph's outputs and the next values of its updates, by value name."""
    results = {name: np.asarray(values[name]) for name in graph.results if name in graph.roles}
    for node, arrays in steps(graph, values):
        results.update((n, a) for n, a in zip(node.outputs, arrays) if n in graph.results)
    return results


def first_non_finite(graph: Graph, values: Mapping[str, Array]) -> str | None:
    """Return what first holds a NaN or infinity: the label of a node, or an input; or None."""
    for name in graph.roles:
        if not np.isfinite(values[name]).all():
            return f"input {name!r}"
    with np.errstate(all="ignore"):  # which NumPy would warn of
        for node, arrays in steps(graph, values):
            if not all(np.isfinite(array).all() for array in arrays):
                return node.label
    return None
