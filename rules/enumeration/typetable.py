"""The table of which operators apply to which pairs of tensor types: all that the engine knows.

Types (shape, split trees, kind) are numbered; for each pair of them that occurs, the shape rules
(`shapes.py`) say once which operators fit and what results, so that compiled code only looks up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.ir.term import Term
from soapstone.rules.enumeration.protocol import Evaluator
from soapstone.rules.enumeration.space import Kind, OperatorUse, Space
from soapstone.search.rules.language import commutative
from soapstone.search.rules.shapes import Type, concrete, tensor_type

UNKNOWN, ASKED = -1, -2


class Tables(NamedTuple):
    """The table as compiled code reads it: `pair[a, b]` and `single[a]` are runs of entries."""

    pair: Array  # int32 (types, types): the first entry, UNKNOWN, or ASKED
    pair_count: Array
    single: Array
    single_count: Array
    operator: Array  # of each entry
    outputs: Array
    types: Array  # (entries, 2)
    handle: Array  # the evaluator's name for it
    symmetric: Array
    fixed: Array  # int64 (operators): mask of the fixed inputs


class TypeTable:
    """Types of tensors, numbered, and for pairs of them the operators that can be applied."""

    def __init__(self, space: Space, evaluator: Evaluator) -> None:
        self.space = space
        self.types: list[Type] = []
        self.kinds: list[Kind] = []
        self._evaluator = evaluator
        self._ids: dict[tuple[Type, Kind], int] = {}
        self._legal: dict[tuple[int, tuple[Any, ...]], Kind | None] = {}
        self._entries: list[tuple[int, int, int, int, int, bool]] = []
        self._arrays: tuple[Array, ...] | None = None
        self._capacity = 0
        self._pair = np.zeros((0, 0), np.int32)
        self._pair_count = np.zeros((0, 0), np.int16)
        self._single: list[tuple[int, int]] = []
        shapes = {each.term: tensor_type(each.shape) for each in space.inputs}
        self._fixed = [tuple(shapes[term] for term in use.fixed) for use in space.operators]
        position = {each.term: number for number, each in enumerate(space.inputs)}
        self._masks = np.array(
            [sum(1 << position[term] for term in set(use.fixed)) for use in space.operators],
            np.int64,
        )
        symmetric = commutative()
        self.symmetric = [use.symbol in symmetric and use.operands == 2 for use in space.operators]

    def intern(self, type_: Type, kind: Kind) -> int:
        """Return the number of a type of tensors of a kind, a new one if it has none."""
        found = self._ids.get((type_, kind))
        if found is None:
            found = self._ids[type_, kind] = len(self.types)
            self.types.append(type_)
            self.kinds.append(kind)
        return found

    def tables(self, count: int) -> Tables:
        """Return the table for the first `count` types as operands."""
        while len(self._single) < count:
            self._single.append(self._fill((len(self._single),)))
        if count > self._capacity:
            self._capacity = count * 2
            pair = np.full((self._capacity, self._capacity), UNKNOWN, np.int32)
            counts = np.zeros((self._capacity, self._capacity), np.int16)
            old = self._pair.shape[0]
            pair[:old, :old], counts[:old, :old] = self._pair, self._pair_count
            self._pair, self._pair_count = pair, counts
        return self._tables()

    def _tables(self) -> Tables:
        if self._arrays is None:
            entries = list(zip(*self._entries)) or [()] * 6
            types = np.array([entries[2], entries[3]], np.int32).reshape(2, -1).T.copy()
            self._arrays = (
                np.array(entries[0], np.int16),
                np.array(entries[1], np.int8),
                types,
                np.array(entries[4], np.int32),
                np.array(entries[5], np.bool_),
            )
        single = np.array(self._single, np.int32).reshape(-1, 2)
        first, count = single[:, 0].copy(), single[:, 1].copy()
        columns = [self._pair, self._pair_count, first, count, *self._arrays, self._masks]
        return Tables(*columns)

    def answer(self) -> bool:
        """Fill the pairs that were asked for; return whether there were any."""
        asked = np.argwhere(self._pair == ASKED)
        for left, right in asked.tolist():
            self._pair[left, right], self._pair_count[left, right] = self._fill((left, right))
        return len(asked) > 0

    def _fill(self, operands: tuple[int, ...]) -> tuple[int, int]:
        start = len(self._entries)
        types = tuple(self.types[operand] for operand in operands)
        shapes = tuple(type_.shape for type_ in types)
        kinds = tuple(self.kinds[operand] for operand in operands)
        for number, use in enumerate(self.space.operators):
            if use.operands != len(operands):
                continue
            key = (number, (shapes, kinds))
            if key not in self._legal:
                self._legal[key] = self._result_kind(number, use, kinds, shapes)
            kind = self._legal[key]
            if kind is None:
                continue
            results = self._results(use, (*types, *self._fixed[number]))
            if not results:
                continue
            outputs = tuple(self.intern(type_, kind) for type_ in results)
            handle = self._evaluator.prepare(use, types, outputs)
            self._entries.append(
                (number, len(outputs), outputs[0], outputs[-1], handle, self.symmetric[number])
            )
            self._arrays = None
        return start, len(self._entries) - start

    def _result_kind(
        self, number: int, use: OperatorUse, kinds: tuple[Kind, ...], shapes: tuple[Any, ...]
    ) -> Kind | None:
        kind = use.result(kinds, shapes)
        if kind is None or len(use.outputs) > 1:  # whether a tensor splits depends on its trees
            return kind
        bare = (*map(tensor_type, shapes), *self._fixed[number])
        return kind if concrete(use.symbol, use.parameters, bare) is not None else None

    def _results(self, use: OperatorUse, operands: tuple[Type, ...]) -> list[Type]:
        found = [concrete(symbol, use.parameters, operands) for symbol in use.outputs]
        return [type_ for type_ in found if type_ is not None] if None not in found else []


def term_of(use: OperatorUse, output: int, operands: Iterable[Term]) -> Term:
    """Return the term of an output of an operator applied to operands."""
    return Term(use.outputs[output], use.parameters, (*operands, *use.fixed))
