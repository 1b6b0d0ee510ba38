"""Constant operands of an inference graph, made when a kernel asks and kept by nobody else.

Kernels pack weights in their own layout when they are bound, one after another, so no more than one
weight need be in memory besides what is packed: those of a mapped file are copied out and its pages
let go, and those that are computed from others are computed then.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from soapstone.errors import DataError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes
from soapstone.native.memory import address
from soapstone.native.shared import shared
from soapstone.system import let_go


class Constants(Mapping[str, Array]):
    """Weights, and the outputs of a graph of weights alone; each is made anew when asked for."""

    def __init__(self, weights: Mapping[str, Array], prologue: Graph) -> None:
        self._weights = weights
        self._prologue = prologue
        self._made = prologue.producers
        total = sum(prologue.tensors[name].nbytes for name in prologue.outputs)
        check_bytes(total, f"what the weights of graph {prologue.name!r} determine", DataError)

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._weights

    def __iter__(self) -> Iterator[str]:
        yield from self._made
        yield from self._weights

    def __len__(self) -> int:
        return len(self._made) + len(self._weights)

    def __getitem__(self, name: str) -> Array:
        if name not in self._made:
            return shared(resident(self._weights[name]))
        made = determined(self._prologue, name, lambda weight: resident(self._weights[weight]))
        return made if made.flags.writeable else shared(made)


def determined(graph: Graph, name: str, weights: Callable[[str], Array]) -> Array:
    """Return a value of a graph that weights alone determine; only those are asked for."""
    nodes: dict[str, Node] = {}
    values = [name]
    while values:
        node = graph.producers.get(values.pop())
        if node is not None and node.name not in nodes:
            nodes[node.name] = node
            values += node.inputs
    order = tuple(node for node in graph.nodes if node.name in nodes)
    read = {i: graph.roles[i] for node in order for i in node.inputs if i in graph.roles}
    part = replace(graph, nodes=order, roles=read, outputs=(name,), updates={})
    made: Array = np.asarray(interpret(part, {n: weights(n) for n in read})[name])
    return made  # of no axes, it was a number


def mapping(array: Array) -> mmap.mmap | None:
    """Return the mapped file that an array's elements are in, or None."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None


def whole_file(array: Array) -> bool:
    """Return whether an array is all that has been mapped of a file, and not some rows of it."""
    base: object = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    found = isinstance(base, np.ndarray) and base.nbytes == array.nbytes
    return found and mapping(array) is not None


def resident(array: Array) -> Array:
    """Return the array's contents, which nobody will change.

    They are copied from arrays that may be written to, and from mapped files, whose pages are then
    let go.
    """
    base = mapping(array)
    if base is None:
        own = array.flags.aligned and not array.flags.writeable
        return array if own else np.array(array, order="C")
    copy = np.array(array, order="C")
    if array.flags.c_contiguous:
        offset = address(array) - address(np.frombuffer(base, np.uint8))
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            let_go(base, first, last - first)
    return copy


__all__ = ["Constants", "determined", "mapping", "resident", "whole_file"]
