"""Constant operands of an inference graph, computed when a kernel asks for them.

A kernel packs its weight in a layout of its own when it is bound, and kernels are bound one after
another. So at most one weight need be in memory beside the packed ones: a mapped file is read in
place and its pages are released afterwards, and what operators compute from weights is computed at
that moment and not kept. The next graph over the same weights, for inputs of other shapes, finds
what kernels packed (`Found`) and reads no weight again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, MutableMapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from weakref import WeakValueDictionary, ref

import numpy as np

from soapstone.errors import DataError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import run_all
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.limits import check_bytes
from soapstone.native.arrays import let_go, mapping
from soapstone.native.memory import aligned
from soapstone.native.promises import CONTENTS, Promise, forget_made
from soapstone.native.shared import LEAST, shared
from soapstone.system import give_back_freed

_NONE = np.zeros(0, np.uint8)
_PIECE = 4 << 20  # bytes that are copied before the pages they came from are let go
_KEPT = 32 << 20  # bytes of the largest copy whose memory is kept for the next
_MANY = 16 << 20  # bytes of weights read, from which memory is worth giving back
_MOST = 1 << 16  # constants that are told apart before all are forgotten


class Found:
    """What kernels have packed of constants, for as long as some kernel holds it.

    A constant is identified by a number: that of a weight array, or of an operator applied to
    constants. So graphs for several input shapes share their constants.
    """

    def __init__(self) -> None:
        self._weights: dict[int, ref[Array]] = {}  # by place, where the next array may be another
        self._known: dict[Hashable, WeakValueDictionary[Hashable, Array]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._fresh = count()  # no number is ever another constant's
        self._locks: dict[int, threading.RLock] = defaultdict(threading.RLock)

    def weight(self, array: Array) -> int:
        """Return the number of a weight. It becomes invalid when the array is collected."""
        place = id(array)
        if place not in self._weights:
            number = self._number(("weight", place))
            self._weights[place] = ref(array, lambda _: self._forget(place, number))
        return self._number(("weight", place))

    def outputs(self, node: Node, inputs: tuple[int, ...]) -> list[int]:
        """Return the numbers of a node's outputs, given the numbers of its inputs."""
        of = (node.operator, node.items, inputs)
        return [self._number((*of, position)) for position in range(len(node.outputs))]

    def known(self, number: int) -> MutableMapping[Hashable, Array]:
        """Return what has been made of a constant: a mapping by what kernels call it."""
        known = self._known.get(number)
        if known is None:
            known = self._known.setdefault(number, WeakValueDictionary())
        return known

    def lock(self, number: int) -> threading.RLock:
        """Return the lock that a processor holds while it makes something of a constant."""
        return self._locks[number]

    def bound(self) -> None:
        """Forget everything if very many constants are known; weights are then packed again."""
        if len(self._numbers) > _MOST:
            for each in (self._weights, self._known, self._numbers, self._locks):
                each.clear()

    def _forget(self, place: int, number: int) -> None:
        if self._numbers.get(("weight", place)) == number:
            del self._weights[place], self._numbers["weight", place]
            self._known.pop(number, None)
            self._locks.pop(number, None)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, next(self._fresh))


class Constants(Mapping[str, Array]):
    """Weights, and the results of a graph of weights alone, each computed whenever it is asked for.

    Args:
        weights: by name.
        prologue: the graph of weights alone.
        found: what kernels have made of constants of the same model.
        others, same: constants of another graph, and the names whose contents are the same there.

    Raises:
        DataError: the results of the prologue exceed the limit on memory.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        prologue: Graph,
        found: Found | None = None,
        *,
        others: Constants | None = None,
        same: Set[str] = frozenset(),
    ) -> None:
        self._others, self._same = others, same
        self._found = found or Found()
        self._contents = _Contents(weights, prologue, self._found)
        self._promised: dict[str, Array] = {}  # one of each: operators of many layers may read it
        self._lasting = False
        self._numbers = {name: self._found.weight(array) for name, array in weights.items()}
        for node in prologue.nodes:
            inputs = tuple(self._numbers[name] for name in node.inputs)
            self._numbers.update(zip(node.outputs, self._found.outputs(node, inputs)))
        total = sum(prologue.tensors[name].nbytes for name in prologue.outputs)
        check_bytes(total, f"what the weights of graph {prologue.name!r} determine", DataError)

    @property
    def found(self) -> Found:
        """What kernels have made of constants."""
        return self._found

    @property
    def read_bytes(self) -> int:
        """The bytes of all that was computed or read so far."""
        return self._contents.read_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._contents.made or name in self._contents.weights

    def __iter__(self) -> Iterator[str]:
        yield from self._contents.made
        yield from self._contents.weights

    def __len__(self) -> int:
        return len(self._contents.made) + len(self._contents.weights)

    def __getitem__(self, name: str) -> Array:
        return self._contents.of(name)

    def keep_promises(self) -> None:
        """Keep the promise of each constant from now on: many graphs will be bound to them."""
        self._lasting = True

    def promised(self, name: str) -> Array:
        """Return a constant as a promise of its contents; a small one is returned itself."""
        if self._others is not None and name in self._same:
            return self._others.promised(name)
        made = self._promised.get(name)
        if made is not None:
            return made
        contents, number = self._contents, self._numbers[name]
        spec = contents.like(name)
        known, lock = self._found.known(number), self._found.lock(number)
        if spec.nbytes < LEAST:
            with lock:
                made = known.get(CONTENTS)
                if made is None:
                    made = known[CONTENTS] = self[name]
        else:
            there = None if name in contents.made else _in_file(contents.weights[name])
            made = Promise.of(
                *(spec.shape, spec.dtype, partial(contents.of, name), partial(contents.lent, name)),
                *(known, lock, there),
            )
        self._promised[name] = made
        return made

    def lent(self, name: str) -> AbstractContextManager[Array]:
        """Yield a constant's contents for reading inside the block, in place where possible.

        Data of a file that are not aligned are copied to a buffer that is reused, unless their
        contents are in memory already. Only one large constant is lent at a time.
        """
        return self._contents.lent(name)

    def bound(self) -> None:
        """Release buffers and pages of weight files, once all kernels have packed their weights."""
        self._contents.bound()
        if not self._lasting:
            self._promised.clear()


class _Contents:
    """The contents of `Constants`, which promises keep.

    It has none of the promises itself: an array does not show the collector of garbage what keeps
    its memory, so what is in such a circle would stay for good, with the file that it reads.

    Attributes:
        weights: by name. made: what makes the others.
        read_bytes: of all that was computed or read so far.
    """

    def __init__(self, weights: Mapping[str, Array], prologue: Graph, found: Found) -> None:
        self.weights, self.made, self.read_bytes = weights, prologue.producers, 0
        self._prologue, self._found = prologue, found
        self._small: dict[str, Array] = {}  # what was computed on the way, until kernels are bound
        self._told_bytes = 0
        self._one_large = threading.RLock()
        self._room = threading.local()  # where a processor's thread copies what is not aligned

    def of(self, name: str) -> Array:
        """Return a constant."""
        made = np.require(self._value(name, resident), requirements=["C", "A"])
        return made if name in self.made and made.flags.writeable else shared(made)

    @contextmanager
    def lent(self, name: str) -> Iterator[Array]:
        """Yield a constant's contents; see `Constants.lent`."""
        read: list[Array] = []
        nbytes = self.like(name).nbytes

        def weight(array: Array) -> Array:
            contents = self._found.known(self._found.weight(array)).get(CONTENTS)
            if contents is not None:
                return contents
            if array.flags.aligned or name in self.made or not array.flags.c_contiguous:
                read.append(array)
                return np.require(array, requirements=["C", "A"])
            room: Array = getattr(self._room, "bytes", _NONE)
            if room.nbytes < nbytes:
                room = aligned(nbytes)
                if nbytes <= _KEPT:
                    self._room.bytes = room
            room = room[:nbytes]
            _move(array, room)
            return room.view(array.dtype).reshape(array.shape)

        large = nbytes > _KEPT
        with self._one_large if large else nullcontext():
            if large:
                give_back_freed()
            yield np.require(self._value(name, weight), requirements=["C", "A"])
        for array in read:
            let_go(array)

    def bound(self) -> None:
        """Release buffers and pages; see `Constants.bound`."""
        self._room = threading.local()
        self._small.clear()
        forget_made()
        read, self._told_bytes = self.read_bytes - self._told_bytes, self.read_bytes
        if read > _MANY:
            files = {id(base): base for base in map(mapping, self.weights.values())}
            for base in files.values():
                if base is not None:
                    let_go(np.frombuffer(base, np.uint8))
            give_back_freed()  # what weights were before they were packed

    def like(self, name: str) -> TensorSpec | Array:
        """Return an object with the shape and dtype of a constant."""
        return self._prologue.tensors[name] if name in self.made else self.weights[name]

    def _value(self, name: str, weight: Callable[[Array], Array]) -> Array:
        """Return a constant, computed from weights that `weight` has prepared for reading."""
        if name in self.made:
            weights = self.weights
            made = determined(
                self._prologue, name, lambda other: weight(weights[other]), self._small
            )
        else:
            made = weight(self.weights[name])
        self.read_bytes += made.nbytes
        return made


def promised(constants: Mapping[str, Array], name: str) -> Array:
    """Return a constant: a promise if `constants` computes it on demand, else its contents."""
    return constants.promised(name) if isinstance(constants, Constants) else constants[name]


def determining(graph: Graph, name: str) -> Graph:
    """Return the part of a graph that a value depends on, with that value as its output."""
    nodes, read = _needed(graph, name, ())
    roles = {value: graph.roles[value] for value in read}
    return replace(graph, nodes=tuple(nodes), roles=roles, outputs=(name,), updates={})


def _needed(graph: Graph, name: str, known: Container[str]) -> tuple[list[Node], list[str]]:
    """Return the nodes that a value depends on, in order, and what else they read.

    known: values that are read, whatever makes them.
    """
    nodes, read, values = dict[str, Node](), dict[str, None](), [name]
    while values:
        value = values.pop()
        node = None if value in known else graph.producers.get(value)
        if node is None:
            read[value] = None
        elif node.name not in nodes:
            nodes[node.name] = node
            values += node.inputs
    return [nodes[each] for each in sorted(nodes, key=graph.positions.__getitem__)], list(read)


def determined(
    graph: Graph,
    name: str,
    weights: Callable[[str], Array],
    small: MutableMapping[str, Array] | None = None,
) -> Array:
    """Return a value that weights alone determine; only the weights that it needs are read.

    small: values that were computed before, which gets those of few bytes that are now.
    """
    known = {} if small is None else small
    nodes, read = _needed(graph, name, known)
    given = {n: known[n] if n in known else np.asarray(weights(n)) for n in read}
    made = given.get(name)
    with np.errstate(all="ignore"):  # of what is not selected afterwards
        for node, arrays in run_all(nodes, graph.tensors, given):
            for value, array in zip(node.outputs, arrays):
                if value == name:
                    made = array
                if small is not None and array.nbytes < LEAST:
                    small[value] = array
    return np.asarray(made)  # of no axes, it was a number


def whole_file(array: Array) -> bool:
    """Return whether an array is the whole of a file's mapping, and not a part of it."""
    base: object = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    found = isinstance(base, np.ndarray) and base.nbytes == array.nbytes
    return found and mapping(array) is not None


def _in_file(array: Array) -> Array | None:
    """Return the array if it is part of a mapped file and not writeable, else None."""
    flags = array.flags
    fixed = flags.c_contiguous and not flags.writeable and mapping(array) is not None
    return array if fixed else None


def resident(array: Array) -> Array:
    """Return an array with the same contents that nobody will change.

    Arrays that are writeable or in a mapped file are copied, and the pages of the file released.
    """
    if mapping(array) is None:
        own = array.flags.aligned and not array.flags.writeable
        return array if own else np.array(array, order="C")
    if not array.flags.c_contiguous:
        return np.array(array, order="C")
    copy = np.empty(array.shape, array.dtype)
    _move(array, copy.reshape(-1).view(np.uint8))
    return copy


def _move(array: Array, room: Array) -> None:
    """Copy an array's bytes to `room`, and release the pages of its file meanwhile."""
    data = array.reshape(-1).view(np.uint8)
    for first in range(0, data.size, _PIECE):
        piece = data[first : first + _PIECE]
        room[first : first + piece.size] = piece
        let_go(piece)
    let_go(array)  # and those that two pieces share


__all__ = ["Constants", "Found", "determined", "determining", "promised", "resident", "whole_file"]
