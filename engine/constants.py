"""Constant operands of an inference graph, made when a kernel asks and kept by nobody else.

Kernels pack weights in their own layout when they are bound, one after another, so no more than one
weight need be in memory besides what is packed: a mapped file is read where it is, its pages are
then let go, and what is computed from weights is computed then. The next graph over the same
weights, for inputs of other shapes, finds what kernels made of them (`Found`) and reads none again.
"""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from weakref import WeakValueDictionary

import numpy as np

from soapstone.errors import DataError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, spec_of
from soapstone.limits import check_bytes
from soapstone.native.memory import Promise, address, aligned
from soapstone.native.shared import LEAST, shared
from soapstone.system import let_go

_NONE = np.zeros(0, np.uint8)
_MOST = 1 << 16  # constants that are told apart before all are forgotten


class Found:
    """What kernels made of constants, by which constant that is, for as long as somebody has it.

    A constant is a weight, or operators on constants: graphs of several shapes have the same ones.
    """

    def __init__(self) -> None:
        self._weights: dict[int, Array] = {}  # so that the next array is not at the same place
        self._known: dict[Hashable, WeakValueDictionary[Hashable, Array]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._fresh = count()  # no number is ever another constant's
        self._locks: dict[int, threading.RLock] = defaultdict(threading.RLock)

    def weight(self, array: Array) -> int:
        """Return the number of a weight."""
        self._weights[id(array)] = array
        return self._number(("weight", id(array)))

    def outputs(self, node: Node, inputs: tuple[int, ...]) -> list[int]:
        """Return the numbers of a node's outputs, by those of its inputs."""
        of = (node.operator, node.items, inputs)
        return [self._number((*of, position)) for position in range(len(node.outputs))]

    def known(self, number: int) -> MutableMapping[Hashable, Array]:
        """Return what has been made of the constant of a number, by what that is."""
        return self._known.setdefault(number, WeakValueDictionary())

    def lock(self, number: int) -> threading.RLock:
        """Return what one of several processors holds while it makes something of a constant."""
        return self._locks[number]

    def bound(self) -> None:
        """Forget all, where constants of many shapes are known: weights are then packed anew."""
        if len(self._numbers) > _MOST:
            for each in (self._weights, self._known, self._numbers, self._locks):
                each.clear()

    def _number(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = next(self._fresh)
        return self._numbers[key]


class Constants(Mapping[str, Array]):
    """Weights, and the outputs of a graph of weights alone; each is made anew when asked for.

    `read_bytes` counts what has been made.
    """

    def __init__(
        self, weights: Mapping[str, Array], prologue: Graph, found: Found | None = None
    ) -> None:
        self._weights = weights
        self._prologue = prologue
        self._found = found or Found()
        self._numbers = {name: self._found.weight(array) for name, array in weights.items()}
        for node in prologue.nodes:
            inputs = tuple(self._numbers[name] for name in node.inputs)
            self._numbers.update(zip(node.outputs, self._found.outputs(node, inputs)))
        self._made = prologue.producers
        self.read_bytes = 0
        self._room = threading.local()  # where a processor's thread copies what is not aligned
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
        made = self._value(name, resident)
        return made if name in self._made and made.flags.writeable else shared(made)

    def promised(self, name: str) -> Array:
        """Return a constant whose contents are promised, where it is large enough to be shared."""
        made = name in self._made
        spec = self._prologue.tensors[name] if made else spec_of(self._weights[name])
        if spec.nbytes < LEAST:
            return self[name]
        number = self._numbers[name]
        known, lock = self._found.known(number), self._found.lock(number)
        return Promise.of(
            spec.shape, spec.dtype, lambda: self[name], lambda: self.lent(name), known, lock
        )

    @contextmanager
    def lent(self, name: str) -> Iterator[Array]:
        """Give a constant to be read in this block: weights are read where they are.

        In a file they may lie at any byte; then they are copied first, to memory that is reused.
        """
        read: list[Array] = []

        def weight(array: Array) -> Array:
            read.append(array)
            if array.flags.aligned or name in self._made or not array.flags.c_contiguous:
                return np.require(array, requirements=["C", "A"])
            room: Array = getattr(self._room, "bytes", _NONE)
            if room.nbytes < array.nbytes:
                room = self._room.bytes = aligned(array.nbytes)
            room = room[: array.nbytes]
            room[...] = array.reshape(-1).view(np.uint8)
            return room.view(array.dtype).reshape(array.shape)

        yield np.require(self._value(name, weight), requirements=["C", "A"])
        for array in read:
            _let_go(array)

    def _value(self, name: str, weight: Callable[[Array], Array]) -> Array:
        """Return a constant, made of weights as they are given."""
        if name in self._made:
            made = determined(self._prologue, name, lambda other: weight(self._weights[other]))
        else:
            made = weight(self._weights[name])
        self.read_bytes += made.nbytes
        return made


def promised(constants: Mapping[str, Array], name: str) -> Array:
    """Return a constant, as a promise where it is made when asked for."""
    return constants.promised(name) if isinstance(constants, Constants) else constants[name]


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
    if mapping(array) is None:
        own = array.flags.aligned and not array.flags.writeable
        return array if own else np.array(array, order="C")
    copy = np.array(array, order="C")
    _let_go(array)
    return copy


def _let_go(array: Array) -> None:
    """Say that an array will not be read again, where it is of a mapped file."""
    base = mapping(array)
    if base is not None and array.flags.c_contiguous:
        offset = address(array) - address(np.frombuffer(base, np.uint8))
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            let_go(base, first, last - first)


__all__ = ["Constants", "Found", "determined", "mapping", "promised", "resident", "whole_file"]
