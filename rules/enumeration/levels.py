"""All nodes of a space, level by level: each operator on each tensor, evaluated once.

The level of a node is how many operators its graph has. Ids are topological. A node that equals an
input or a tensor it needs is dropped, and recorded as a collapse: `transpose(transpose(x))` is `x`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.rules.enumeration import propose
from soapstone.rules.enumeration.compare import values_apart
from soapstone.rules.enumeration.propose import Classes, Pairs, Rows, Terms
from soapstone.rules.enumeration.protocol import Evaluator
from soapstone.rules.enumeration.space import Space
from soapstone.rules.enumeration.typetable import Tables, TypeTable
from soapstone.rules.workers import Progress
from soapstone.search.rules.shapes import tensor_type

_PAIRS = 1 << 13  # looked up and evaluated at once
_BUDGET = 20_000_000  # pairs looked at in one compiled call


class Collapses(NamedTuple):
    """Nodes whose output (0 or 1) equals a tensor: an input, or one that they need."""

    operator: Array
    a: Array
    b: Array
    output: Array
    tensor: Array
    mask: Array


class Built(NamedTuple):
    """All nodes of a space: `starts[l]` is the first of level l + 1."""

    terms: Terms
    operator: Array  # int16 (nodes)
    handle: Array  # int32 (nodes)
    starts: tuple[int, ...]
    collapses: Collapses
    table: TypeTable
    classes: Classes


def classes_of(space: Space) -> Classes:
    """Return the classes of interchangeable inputs: adjacent variables of one kind and shape."""
    shift, full = [], []
    start = 0
    for end in range(1, len(space.inputs) + 1):
        before = space.inputs[end - 1]
        if end < len(space.inputs):
            each = space.inputs[end]
            alike = (each.kind, each.shape) == (before.kind, before.shape)
            if alike and each.term.is_variable and before.term.is_variable:
                continue
        if end - start > 1:
            shift.append(start)
            full.append((1 << (end - start)) - 1)
        start = end
    return Classes(np.array(shift, np.int64), np.array(full, np.int64))


class _Nodes:
    """Columns of nodes and tensors, as lists of chunks."""

    def __init__(self, width: int, types: tuple[int, ...], values: Array) -> None:
        inputs = len(types)
        self.inputs = inputs
        self.nodes: dict[str, Array] = {
            "operator": np.zeros(0, np.int16),
            "handle": np.zeros(0, np.int32),
            "a": np.zeros(0, np.int32),
            "b": np.zeros(0, np.int32),
            "closure": np.zeros((0, width), np.int32),
            "outputs": np.zeros(0, np.int8),
            "mask": np.zeros(0, np.int64),
        }
        self.value, self.type = values, np.array(types, np.int32)
        self.chunks: list[dict[str, Array]] = []

    def freeze(self) -> Terms:
        """Return all nodes so far as contiguous arrays."""
        if self.chunks:
            for name, column in self.nodes.items():
                parts = [chunk[name] for chunk in self.chunks]
                self.nodes[name] = np.concatenate([column, *parts])
            self.value = np.concatenate([self.value, *(chunk["value"] for chunk in self.chunks)])
            self.type = np.concatenate([self.type, *(chunk["type"] for chunk in self.chunks)])
            self.chunks = []
        outputs = self.nodes["outputs"].astype(np.int32)
        ends = self.inputs + np.cumsum(outputs, dtype=np.int32)
        node = np.repeat(np.arange(len(outputs), dtype=np.int32), outputs)
        return Terms(
            self.inputs,
            self.nodes["a"],
            self.nodes["b"],
            self.nodes["closure"],
            ends - outputs,
            self.nodes["outputs"],
            self.nodes["mask"],
            self.value,
            np.concatenate([np.full(self.inputs, -1, np.int32), node]),
            self.type,
        )


def _buckets(closure: Array, begin: int, end: int, level_one: int) -> tuple[Array, Array]:
    """Return the nodes of a level by the nodes of level 1 that they need: (starts, nodes)."""
    part = closure[begin:end]
    row, column = np.nonzero((part >= 0) & (part < level_one))
    needed = part[row, column]
    order = np.argsort(needed, kind="stable")
    starts = np.searchsorted(needed[order], np.arange(level_one + 1))
    return starts.astype(np.int64), (row[order] + begin).astype(np.int32)


_Source = Iterator[tuple[int, float]]  # how many pairs, and the part of the source that is done


class Proposals:
    """The nodes that a level may have: operators applied to tensors of the levels before it."""

    def __init__(
        self, space: Space, terms: Terms, starts: tuple[int, ...], classes: Classes, level: int
    ) -> None:
        self.space, self.terms, self.starts = space, terms, starts
        self.classes, self.level = classes, level
        self._last = level == space.max_operators

    def chunks(self, tables: Tables) -> Iterator[tuple[Rows, int, float]]:
        """Yield buffers of rows, how many they hold, and the part of the level that is done.

        Rows of pairs of types that the table does not know are missing: the pairs are asked for.
        """
        pairs = Pairs(np.zeros(_PAIRS, np.int32), np.zeros(_PAIRS, np.int32))
        most = 2 * _PAIRS * int(max(tables.pair_count.max(), tables.single_count.max(), 1))
        rows = Rows(*(np.zeros(most, np.int32) for _ in range(3)))
        if self.level == 1:
            sources = [self._inputs(pairs)]
        else:
            sources = [self._closures(pairs), *self._two(tables, pairs)]
        for number, source in enumerate(sources):
            for written, part in source:
                count = propose.expand(
                    pairs, written, self.terms, tables, self.classes, self._last, rows
                )
                yield rows, count, (number + part) / len(sources)

    def _inputs(self, pairs: Pairs) -> _Source:
        tensors = range(self.terms.inputs)
        repeated = [(a, a) for a in tensors] if self.space.repeated else []
        both = [*((a, -1) for a in tensors), *repeated, *itertools.combinations(tensors, 2)]
        pairs.a[: len(both)], pairs.b[: len(both)] = np.array(both, np.int32).reshape(-1, 2).T
        yield len(both), 1.0

    def _closures(self, pairs: Pairs) -> _Source:
        begin, end = self.starts[self.level - 2], self.starts[self.level - 1]
        margin = 2 * (self.terms.inputs + 2 * self.terms.closure.shape[1] + 4)
        cursor = np.array([begin], np.int64)
        repeated = self.space.repeated
        while cursor[0] < end:
            count = propose.from_closures(self.terms, repeated, pairs, cursor, end, margin)
            yield count, (cursor[0] - begin) / (end - begin)

    def _two(self, tables: Tables, pairs: Pairs) -> Iterator[_Source]:
        for i in range(1, self.level - 1):
            for j in range(i, self.level - 1):
                shared = i + j - (self.level - 1)
                if shared == 0:
                    yield self._disjoint(i, j, tables, pairs)
                elif 1 <= shared < i:
                    yield self._shared(i, j, shared, tables, pairs)

    def _disjoint(self, i: int, j: int, tables: Tables, pairs: Pairs) -> _Source:
        starts = self.starts
        ends = np.array([starts[i - 1], starts[i], starts[j - 1], starts[j]], np.int64)
        cursor = np.array([ends[0], -1], np.int64)
        while cursor[0] < ends[1]:
            count = propose.from_disjoint(self.terms, tables, pairs, cursor, ends, _BUDGET)
            yield count, (cursor[0] - ends[0]) / (ends[1] - ends[0])

    def _shared(self, i: int, j: int, shared: int, tables: Tables, pairs: Pairs) -> _Source:
        starts, closure = self.starts, self.terms.closure
        left = _buckets(closure, starts[i - 1], starts[i], starts[1])
        right = _buckets(closure, starts[j - 1], starts[j], starts[1])
        cursor = np.array([0, -1, -1], np.int64)
        while cursor[0] < starts[1]:
            count = propose.from_shared(
                self.terms, tables, pairs, cursor, shared, i == j, *left, *right, _BUDGET
            )
            yield count, cursor[0] / max(starts[1], 1)


class Settled(NamedTuple):
    """Evaluated rows of a chunk: those kept are nodes, the others equal a tensor."""

    operator: Array
    handle: Array
    a: Array
    b: Array
    closure: Array
    outputs: Array
    mask: Array
    values: Array  # (rows, 2)
    types: Array  # (rows, 2)
    keep: Array
    equal: Array  # (rows, 2): the tensor, or -1


def evaluate(rows: Rows, count: int, tables: Tables, terms: Terms, evaluator: Evaluator) -> Settled:
    """Return proposed rows with values, closures, and which of them equal a tensor they need."""
    entry, a, b = (column[:count].copy() for column in rows)
    handle = tables.handle[entry]
    values = evaluator.values(handle, a, b)
    keep = np.zeros(count, np.bool_)
    equal = np.full((count, 2), -1, np.int32)
    closure = np.zeros((count, terms.closure.shape[1]), np.int32)
    mask = np.zeros(count, np.int64)
    chosen = Rows(entry, a, b)
    for _ in range(4):
        propose.settle(chosen, tables, values, terms, keep, equal, closure, mask)
        row, output = np.nonzero(equal >= 0)
        good = evaluator.agree(
            handle[row], a[row], b[row], output.astype(np.int32), equal[row, output]
        )
        if good.all():
            break
        # An id that two tensors share by accident: another one for this output.
        values[row[~good], output[~good]] += np.uint64(0x9E3779B97F4A7C15)
    return Settled(
        tables.operator[entry],
        handle,
        a,
        b,
        closure,
        tables.outputs[entry],
        mask,
        values,
        tables.types[entry],
        keep,
        equal,
    )


def known_tables(proposals: Proposals, table: TypeTable) -> Tables:
    """Return the type table with every pair of types that the level has."""
    count = len(table.types)
    while True:
        tables = table.tables(count)
        for _ in proposals.chunks(tables):
            pass
        if not table.answer():
            return tables


def build(
    space: Space,
    evaluator: Evaluator,
    levels: int,
    progress: Progress | None = None,
    store_last: bool = False,
) -> Built:
    """Return all nodes of the levels 1 to `levels`; tensors of the last are stored if asked."""
    table = TypeTable(space, evaluator)
    types = tuple(table.intern(tensor_type(each.shape), each.kind) for each in space.inputs)
    nodes = _Nodes(max(space.max_operators - 1, 1), types, evaluator.begin(space, types))
    classes = classes_of(space)
    starts: tuple[int, ...] = (0,)
    collapses: list[Collapses] = []
    for level in range(1, levels + 1):
        terms = nodes.freeze()
        values_apart(terms, nodes.nodes["handle"], evaluator)
        proposals = Proposals(space, terms, starts, classes, level)
        tables = known_tables(proposals, table)
        for rows, count, part in proposals.chunks(tables):
            settled = evaluate(rows, count, tables, terms, evaluator)
            _record(settled, nodes, collapses)
            if level < levels or store_last:
                keep = settled.keep
                evaluator.store(settled.handle[keep], settled.a[keep], settled.b[keep])
            if progress is not None:
                progress(f"terms of {level} operators", int(part * 1000), 1000)
        starts = (*starts, starts[-1] + sum(len(chunk["a"]) for chunk in nodes.chunks))
    terms = nodes.freeze()
    joined = Collapses(*(np.concatenate(parts) for parts in zip(*collapses)))
    return Built(
        terms, nodes.nodes["operator"], nodes.nodes["handle"], starts, joined, table, classes
    )


def _record(settled: Settled, nodes: _Nodes, collapses: list[Collapses]) -> None:
    keep = settled.keep
    used = np.arange(2)[None, :] < settled.outputs[keep, None]
    chunk = {
        name: getattr(settled, name)[keep]
        for name in ("operator", "handle", "a", "b", "closure", "outputs", "mask")
    }
    chunk["value"], chunk["type"] = settled.values[keep][used], settled.types[keep][used]
    nodes.chunks.append(chunk)
    row, output = np.nonzero(settled.equal >= 0)
    collapses.append(
        Collapses(
            settled.operator[row],
            settled.a[row],
            settled.b[row],
            output.astype(np.int8),
            settled.equal[row, output],
            settled.mask[row],
        )
    )
