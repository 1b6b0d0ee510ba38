"""Which sizes of a law say nothing that a smaller one does not, seen from the axes' slices.

Where every operator of a law passes an axis through, a row of its result is made of the same rows
of its operands. Both sides are then equal if their slices are, and a slice is the same law where
that axis has the extent 1: one size stands for all extents of such an axis, broadcast or not. Which
axes an operator passes through is read from the signatures it declares (`OpSpec.signature`): a free
dim that indexes axes plainly. So sizes up to 4x4x4x4 (Jia et al., TASO, section 2.4) are decided
exactly, and only those that are no slice of another are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone.ir.dims import Affine, Axis, Kind, Product, Signature
from soapstone.ir.law import Law
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Term, Value, subterms
from soapstone.rules.algebra.evaluate import attributes_of, exact_constant, split_sizes
from soapstone.rules.laws.columns import Column, Types, distinct
from soapstone.rules.laws.sizes import Sizes, sizes
from soapstone.search.rules import language
from soapstone.search.rules.shapes import Tree, Type, extents, infer

Place: TypeAlias = "tuple[Term, int]"  # a term and one of its axes, counted from the end
_LIMIT = 4  # extents at which signatures are read
_LARGEST, _EVENLY = 100, 200  # sizes at which they are


@dataclass(frozen=True)
class Passing:
    """What an operator does with axes, counted from the end.

    Attributes:
        through: for each axis of the result that is passed through, the operands' axes it is.
        single: axes of the result whose extent is always 1.
    """

    through: Mapping[int, frozenset[tuple[int, int]]]
    single: frozenset[int]


@lru_cache(maxsize=1 << 12)
def passing(symbol: str, parameters: tuple[Value, ...], ranks: tuple[int, ...]) -> Passing:
    """Return which axes an operator passes through, for operands of these ranks."""
    through: dict[int, set[tuple[int, int]]] = {}
    coupled: set[int] = set()
    inside: set[tuple[int, int]] = set()  # operands' axes that are not passed through
    rank = 0
    for signature in _signatures(symbol, parameters, ranks):
        dims = signature.by_name
        result = signature.outputs[language.forms()[symbol].form.output].axes
        rank = len(result)
        names = [_plain(axis, signature) for axis in result]
        for at, (axis, name) in enumerate(zip(result, names)):
            if axis.extent == 1:
                continue
            if name is None or names.count(name) > 1 or dims[name].kind != Kind.FREE:
                coupled.add(at - rank)
                continue
            through.setdefault(at - rank, set())
        for number, operand in enumerate(signature.inputs):
            for at, axis in enumerate(operand.axes):
                place = number, at - len(operand.axes)
                name = _plain(axis, signature)
                if name is not None and name in names:
                    through.setdefault(names.index(name) - rank, set()).add(place)
                    continue
                if axis.extent != 1:
                    inside.add(place)
                # Broadcast, an axis of one element has no dim; padded, it has one.
                coupled |= {n - rank for n, known in enumerate(names) if known in axis.dims}
    found = {
        axis: frozenset(places)
        for axis, places in through.items()
        if places and axis not in coupled and not places & inside
    }
    seen = coupled | set(through)
    return Passing(found, frozenset(axis for axis in range(-rank, 0) if axis not in seen))


def _plain(axis: Axis, signature: Signature) -> str | None:
    """Return the dim that alone indexes a whole axis of more than one element, plainly."""
    if axis.extent == 1:
        return None
    if isinstance(axis, Product):
        several = [name for name, extent in zip(axis.dims, axis.extents) if extent != 1]
        return several[0] if len(several) == 1 else None
    if isinstance(axis, Affine) and (axis.stride, axis.offset, axis.window) == (1, 0, 1):
        return axis.dim if signature.by_name[axis.dim].extent == axis.extent else None
    return None


def _signatures(
    symbol: str, parameters: tuple[Value, ...], ranks: tuple[int, ...]
) -> Iterator[Signature]:
    """Yield an operator's signatures at many sizes: the largest, and others evenly."""
    operands = tuple(Term(f"x{number}") for number in range(len(ranks)))
    term = Term(symbol, parameters, operands)
    found = sizes(Law("slices", f"{term} = {term}"), {}, dict(zip(operands, ranks)), _LIMIT)
    if found is None:
        return
    count = len(found)
    rows = {*range(count)[-_LARGEST:], *range(0, count, max(1, count // _EVENLY))}
    spec = language.forms()[symbol].spec
    for row in sorted(rows):
        types = found.at(row)
        shapes = tuple(extents(types[operand]) for operand in operands)
        parts = split_sizes(symbol, parameters, types[operands[0]])
        attributes = attributes_of(symbol, parameters, shapes, parts)
        if attributes is not None:
            yield spec.bind([TensorSpec(shape, "float64") for shape in shapes], attributes)


def passed(sides: tuple[Term, Term], types: Mapping[Term, Type]) -> list[tuple[Place, ...]]:
    """Return groups of the leaves' axes that both sides of an equation pass through together.

    types: of the leaves, at any size: only ranks matter.
    """
    rank = {}
    for term in subterms(sides):
        type_ = infer(term, types)
        if type_ is None:
            return []
        rank[term] = type_.rank
    groups = _Groups()
    for term in rank:
        axes = range(-rank[term], 0)
        if not term.operands:
            for axis in axes:
                if not term.is_variable and not _uniform(term, rank[term], axis):
                    groups.spoil((term, axis))
            continue
        ranks = tuple(rank[operand] for operand in term.operands)
        known = passing(term.symbol, term.parameters, ranks)
        for axis in axes:
            if axis not in known.through and axis not in known.single:
                groups.spoil((term, axis))
        kept = {place for places in known.through.values() for place in places}
        for number, operand in enumerate(term.operands):
            for axis in range(-rank[operand], 0):
                if (number, axis) not in kept:
                    groups.spoil((operand, axis))
        for axis, places in known.through.items():
            for number, other in places:
                groups.join((term, axis), (term.operands[number], other))
    for axis in range(-rank[sides[0]], 0):
        groups.join((sides[0], axis), (sides[1], axis))
    found = []
    for group in groups.sound():
        leaves = tuple(place for place in group if not place[0].operands)
        if leaves:
            found.append(leaves)
    return found


class _Groups:
    """Places of which one is passed through where the others are; some are not."""

    def __init__(self) -> None:
        self._above: dict[Place, Place] = {}
        self._spoilt: set[Place] = set()

    def _top(self, place: Place) -> Place:
        while (above := self._above.setdefault(place, place)) != place:
            place = above
        return place

    def join(self, one: Place, other: Place) -> None:
        self._above[self._top(one)] = self._top(other)

    def spoil(self, place: Place) -> None:
        self._top(place)
        self._spoilt.add(place)

    def sound(self) -> list[list[Place]]:
        """Return the groups without a spoilt place, and without two axes of one term."""
        groups: dict[Place, list[Place]] = {}
        for place in self._above:
            groups.setdefault(self._top(place), []).append(place)
        spoilt = {self._top(place) for place in self._spoilt}
        return [
            group
            for top, group in groups.items()
            if top not in spoilt and len({term for term, _ in group}) == len(group)
        ]


@lru_cache(maxsize=1 << 10)
def _uniform(constant: Term, rank: int, axis: int) -> bool:
    """Return whether all slices of a constant along an axis are the constant of one slice."""
    for shape in np.ndindex(*(_LIMIT,) * rank):
        whole = tuple(extent + 1 for extent in shape)
        values = exact_constant(constant, whole)
        if values is None:
            continue
        one = list(whole)
        one[axis] = 1
        slice_ = exact_constant(constant, tuple(one))
        if slice_ is None:
            return False
        array = np.moveaxis(np.array(values, object).reshape(whole), axis, 0)
        if not (array == np.array(slice_, object).reshape(array.shape[1:])).all():
            return False
    return True


def needed(sizes: Sizes) -> NDArray[np.int64]:
    """Return the rows at which a law must be compared, so that it holds at all of them."""
    rows = np.arange(len(sizes))
    if not len(sizes):
        return rows
    groups = passed(sizes.sides, sizes.at(0))
    if not groups:
        return rows
    rows = np.unique(_sliced(sizes, rows, groups))
    for group in groups if len(groups) > 1 else ():
        rows = np.unique(_sliced(sizes, rows, [group]))
    return rows


def _sliced(
    sizes: Sizes, rows: NDArray[np.int64], groups: Sequence[Sequence[Place]]
) -> NDArray[np.int64]:
    """Return for each row that of its slice along groups of axes, itself where there is none."""
    columns = {leaf: column[rows] for leaf, column in zip(sizes.leaves, sizes.columns)}
    fits = np.ones(len(rows), bool)
    for group in groups:
        shapes = sizes.types.extents()
        along = np.stack([shapes[columns[leaf], axis] for leaf, axis in group])
        fits &= ((along == 1) | (along == along.max(axis=0))).all(axis=0)
        for leaf, axis in group:
            columns[leaf], whole = _slice(columns[leaf], axis, sizes.types)
            fits &= whole
    keys = np.zeros(len(sizes) + len(rows), np.int64)
    for leaf, column in zip(sizes.leaves, sizes.columns):
        _, keys = distinct(keys, np.concatenate([column, columns[leaf]]))
    place = np.full(int(keys.max()) + 1, -1)
    place[keys[: len(sizes)]] = np.arange(len(sizes))
    target = place[keys[len(sizes) :]]
    return np.where(fits & (target >= 0), target, rows)


def _slice(column: Column, axis: int, types: Types) -> tuple[Column, NDArray[np.bool_]]:
    """Return types with the extent 1 along an axis, and where that is a slice of the type."""
    numbers, where = np.unique(column, return_inverse=True)
    sliced, whole = numbers.copy(), np.ones(len(numbers), bool)
    for at, number in enumerate(numbers.tolist()):
        type_ = types.all[number]
        if type_.shape[axis] == 1:
            continue
        if type_.trees[axis] is not None:
            whole[at] = False
            continue
        shape = list(type_.shape)
        shape[axis] = 1
        trees: tuple[Tree | None, ...] = type_.trees
        sliced[at] = types.number(Type(tuple(shape), trees))
    return sliced[where], whole[where]
