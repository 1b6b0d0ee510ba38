"""All sizes at which both sides of a law are typed, found by joining instead of trying.

The relation of a term has a row for each choice of its variables' types that types it. The relation
of an operator joins those of its operands on the variables they share, and keeps the pairs of types
that it takes; the law itself joins both sides and keeps equal shapes. What takes which types is
asked once for each pair of types, of `shapes.concrete`, which alone decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.term import (
    SPLITS,
    Term,
    Value,
    instantiate,
    instantiate_value,
    is_variable,
    parameter_variables,
    subterms,
)
from soapstone.search.substitution import condition, language
from soapstone.search.substitution.shapes import Tree, Type, concrete, infer, plain

Bindings: TypeAlias = "Mapping[str, Value]"
Column: TypeAlias = "NDArray[np.int64]"
_EQUATION = Term("=", (), (Term("x"), Term("y")))


class Types:
    """Types by number, so that columns of them are arrays; and what operators make of them.

    Without split trees, a type is a shape: only splits tell tensors of one shape apart.
    """

    def __init__(self, split_trees: bool) -> None:
        self.split_trees = split_trees
        self.all: list[Type] = []
        self.results: dict[tuple[str, tuple[Value, ...]], dict[tuple[int, ...], int]] = {}
        self._numbers: dict[Type, int] = {}
        self._extents = np.full((1024, 4), -1)

    def number(self, type_: Type) -> int:
        if not self.split_trees and any(type_.trees):
            type_ = plain(type_.shape)
        found = self._numbers.setdefault(type_, len(self.all))
        if found == len(self.all):
            if type_.rank > self._extents.shape[1]:
                raise GraphError(f"a tensor of rank {type_.rank} found, 4 at most")
            self.all.append(type_)
            if found == len(self._extents):
                self._extents = np.concatenate([self._extents, np.full_like(self._extents, -1)])
            if type_.rank:
                self._extents[found, -type_.rank :] = type_.shape
        return found

    def extents(self) -> NDArray[np.int64]:
        """Return the shape of every type, right-aligned in four columns; -1 is no axis."""
        return self._extents


# Shared by all laws, without splits and with them: what an operator takes is asked once.
TYPES = {split_trees: Types(split_trees) for split_trees in (False, True)}


@dataclass(frozen=True)
class Relation:
    """Rows of type numbers: of the leaves, and of the term that they type."""

    leaves: tuple[Term, ...]
    columns: tuple[Column, ...]
    result: Column

    def __len__(self) -> int:
        return len(self.result)


@dataclass(frozen=True)
class Sizes:
    """The sides of a law under one choice of parameters and ranks, and the types of its leaves."""

    bindings: Bindings
    sides: tuple[Term, Term]
    types: Types
    leaves: tuple[Term, ...]
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def at(self, row: int) -> dict[Term, Type]:
        """Return the type of every leaf at one size."""
        return {
            leaf: self.types.all[column[row]] for leaf, column in zip(self.leaves, self.columns)
        }


def parameter_values(law: Law) -> Iterator[dict[str, Value]]:
    """Yield all choices of values of a law's parameter variables, as their forms declare them."""
    choices: dict[str, dict[Value, None]] = {name: {} for name in parameter_variables(law.sides)}
    for term in subterms(law.sides):
        if not term.parameters:
            continue
        forms, constants = language.forms(), language.constants()
        known = (
            forms[term.symbol].form.parameters
            if term.symbol in forms
            else constants[term.symbol].parameters
        )
        for value, declared in zip(term.parameters, known.values()):
            for word in str(value).split("+") if isinstance(value, str) else ():
                if is_variable(word):
                    choices[word].update(dict.fromkeys(declared))
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values))


def rank_choices(law: Law, limit: int) -> Iterator[dict[Term, int]]:
    """Yield the ranks for which a law is said; constants of no said rank have any."""
    leaves = [term for term in subterms(law.sides) if not term.operands]
    texts = law.ranks or tuple(
        " ".join(f"{leaf}={rank}" for leaf in leaves if leaf.is_variable)
        for rank in range(1, limit + 1)
    )
    for text in dict.fromkeys(texts):
        given = {name: int(rank) for name, rank in (part.split("=") for part in text.split())}
        free = []
        for leaf in leaves:
            constant = language.constants().get(leaf.symbol)
            rank = given.get(str(leaf), given.get(leaf.symbol, constant and constant.rank))
            free.append(range(limit + 1) if rank is None else (rank,))
        for ranks in itertools.product(*free):
            yield dict(zip(leaves, ranks))


@lru_cache(maxsize=4096)
def constant_value(term: Term, shape: tuple[int, ...]) -> tuple[Fraction, ...] | None:
    """Return the elements of a constant, exactly; None where there is none of that shape.

    Raises:
        ValueError: an element is no ratio of small integers.
    """
    array = language.constants()[term.symbol].value(term.parameters, shape)
    if array is None:
        return None
    elements = []
    for element in np.asarray(array, np.float64).ravel().tolist():
        exact = Fraction(element).limit_denominator(1 << 12)
        if float(exact) != element:
            raise ValueError(f"constant {term} of shape {shape}: {element} is no simple ratio")
        elements.append(exact)
    return tuple(elements)


def _split_axes(sides: tuple[Term, Term]) -> tuple[frozenset[int], int]:
    """Return the axes along which variables may be concatenations, and how often in a row."""
    symbols = {term.symbol for term in subterms(sides)}
    splits = [term for term in subterms(sides) if term.symbol in SPLITS]
    axes = {axis for term in splits for axis in term.parameters if isinstance(axis, int)}
    if "transpose" in symbols and axes & {-1, -2}:
        axes |= {-1, -2}
    if "conv2d" in symbols and -3 in axes:
        axes.add(-4)
    if "merge" in symbols and -2 in axes:
        axes.add(-3)
    return frozenset(axes), len(splits)


@lru_cache(maxsize=256)
def _trees(extent: int, depth: int) -> tuple[Tree | None, ...]:
    """Return all split trees of an axis up to some depth."""
    found: list[Tree | None] = [None]
    for at in range(1, extent) if depth else ():
        pairs = itertools.product(_trees(at, depth - 1), _trees(extent - at, depth - 1))
        found += [Tree(left, right, at) for left, right in pairs]
    return tuple(found)


def _candidates(leaf: Term, rank: int, limit: int, sides: tuple[Term, Term]) -> Iterator[Type]:
    """Yield the types that a variable or constant may have."""
    if not leaf.is_variable:
        sizes = [part for value in leaf.parameters for part in str(value).split("x")]
        top = max([limit, *(int(part) for part in sizes if part.isdigit())])
        for shape in itertools.product(range(1, top + 1), repeat=rank):
            if constant_value(leaf, shape) is not None:
                yield plain(shape)
        return
    axes, depth = _split_axes(sides)
    for shape in itertools.product(range(1, limit + 1), repeat=rank):
        options = [
            _trees(extent, depth if at - rank in axes else 0) for at, extent in enumerate(shape)
        ]
        for trees in itertools.product(*options):
            yield Type(shape, trees)


def distinct(*columns: Column) -> tuple[list[Column], Column]:
    """Return the different rows of one or two columns of small numbers, and which each row is."""
    code, sizes, values = np.zeros(len(columns[0]), np.int64), [], []
    for column in columns:
        ranks, found = _ranked(column)
        code = code * len(found) + ranks
        values.append(found)
        sizes.append(len(found))
    if math.prod(sizes) > max(1 << 17, 4 * len(code)):
        codes, where = np.unique(code, return_inverse=True)
    else:
        where, codes = _ranked(code)
    places = np.unravel_index(codes, sizes) if len(codes) else [codes] * len(sizes)
    return [found[place] for found, place in zip(values, places)], where


def _ranked(column: Column) -> tuple[Column, Column]:
    """Return each number's place among the different ones, and those, ascending."""
    present = np.zeros(int(column.max(initial=-1)) + 1, bool)
    present[column] = True
    ranks = np.cumsum(present, dtype=np.int32) - 1
    return ranks[column].astype(np.int64), np.flatnonzero(present)


def _possible(term: Term, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return False only where an operator cannot take operands of these extents (last axis)."""
    fits = np.ones(np.broadcast_shapes(a.shape, b.shape)[:-1], bool)
    if term.symbol in ("add", "sub", "mul", "div"):
        fits &= ((a == b) | (np.abs(a) == 1) | (np.abs(b) == 1)).all(axis=-1)
    elif term.symbol == "=":
        fits &= (a == b).all(axis=-1)
    elif term.symbol == "matmul":
        fits &= (a[..., -1] == b[..., -2]) & (a[..., -1] > 0)
    elif term.symbol == "concat" and isinstance(term.parameters[0], int):
        others = [at for at in range(a.shape[-1]) if at - a.shape[-1] != term.parameters[0]]
        fits &= (a[..., others] == b[..., others]).all(axis=-1)
    elif term.symbol == "conv2d":
        groups, _, padding, _ = term.parameters
        fits &= (a[..., 0] > 0) & (b[..., 0] > 0)
        if groups == "depthwise":
            fits &= (a[..., -3] == b[..., -4]) & (b[..., -3] == 1)
        elif isinstance(groups, int) and groups > 0:
            fits &= (a[..., -3] == groups * b[..., -3]) & (b[..., -4] % groups == 0)
        if padding == "same":
            fits &= (b[..., -1] % 2 == 1) & (b[..., -2] % 2 == 1)
        elif padding == "valid":
            fits &= (a[..., -1] >= b[..., -1]) & (a[..., -2] >= b[..., -2])
    return fits


def _convolved(term: Term, types: Types, images: Column, kernels: Column) -> Column:
    """Return the types of many convolutions, where types are shapes.

    Where one of them is part of a size, `refute.structure_of` compares it with `shapes.concrete`.
    """
    a, b = types.extents()[images], types.extents()[kernels]
    _, stride, padding, _ = term.parameters
    shapes = np.stack([a[:, 0], b[:, 0], a[:, 2], a[:, 3]], axis=1)
    if padding == "valid":
        shapes[:, 2:] -= b[:, 2:] - 1
    shapes[:, 2:] = (shapes[:, 2:] - 1) // int(stride) + 1
    found = np.full(len(a), -1)
    fits = _possible(term, a, b)
    several, where = np.unique(shapes[fits], axis=0, return_inverse=True)
    numbers = [types.number(plain(shape)) for shape in several.tolist()]
    found[fits] = np.array(numbers, np.int64)[where.ravel()]
    return found


def _typed(term: Term, types: Types, numbers: Sequence[int]) -> int:
    """Return the number of the type of an operator on operands of these types, or -1."""
    found = tuple(types.all[number] for number in numbers)
    if term.symbol == "=":
        return numbers[0] if found[0].shape == found[1].shape else -1
    type_ = concrete(term.symbol, term.parameters, found)
    return -1 if type_ is None else types.number(type_)


def apply(term: Term, types: Types, operands: Sequence[Column]) -> Column:
    """Return the type of an operator in every row, -1 where it has none."""
    pairs, where = distinct(*operands)
    if term.symbol == "conv2d" and not types.split_trees:
        return _convolved(term, types, *pairs)[where]
    known = types.results.setdefault((term.symbol, term.parameters), {})
    results = []
    for numbers in zip(*(column.tolist() for column in pairs)):
        result = known.get(numbers)
        if result is None:
            result = known[numbers] = _typed(term, types, numbers)
        results.append(result)
    return np.array(results, np.int64)[where]


@dataclass(frozen=True)
class _Join:
    """Two relations and the pairs of their groups of rows that may go together, not yet listed."""

    term: Term
    left: Relation
    right: Relation
    groups: tuple[tuple[Column, Column, Column], tuple[Column, Column, Column]]
    pairs: tuple[Column, Column]

    def __len__(self) -> int:
        (_, _, count), (_, _, other) = self.groups
        return int((count[self.pairs[0]] * other[self.pairs[1]]).sum())

    def rows(self, types: Types) -> Relation:
        """Return the relation: all pairs of rows that the operator takes."""
        ((order, first, count), (order_b, first_b, count_b)), (a, b) = self.groups, self.pairs
        each = count[a] * count_b[b]
        group = np.repeat(np.arange(len(a)), each)
        place = np.arange(len(group)) - np.repeat(np.cumsum(each) - each, each)
        width = count_b[b][group]
        rows = order[first[a][group] + place // width]
        others = order_b[first_b[b][group] + place % width]
        left, right = self.left, self.right
        result = apply(self.term, types, [left.result[rows], right.result[others]])
        keep = result >= 0
        rows, others, result = rows[keep], others[keep], result[keep]
        more = {leaf: c for leaf, c in zip(right.leaves, right.columns) if leaf not in left.leaves}
        columns = [column[rows] for column in left.columns]
        columns += [column[others] for column in more.values()]
        return Relation((*left.leaves, *more), tuple(columns), result)


def _groups(keys: Column, count: int) -> tuple[Column, Column, Column]:
    """Return rows in order of key, and each key's first place in it and how many it has."""
    small = keys.astype(np.uint16) if count < 1 << 16 else keys  # sorted by digits
    counts = np.bincount(keys, minlength=count)
    return np.argsort(small, kind="stable"), np.cumsum(counts) - counts, counts


def _join(term: Term, types: Types, left: Relation, right: Relation) -> _Join:
    """Return the join of the operands' relations, on the leaves that they share."""
    shared = [leaf for leaf in left.leaves if leaf in right.leaves]
    if shared:
        keys = np.zeros(len(left) + len(right), np.int64)
        for leaf in shared:
            columns = [side.columns[side.leaves.index(leaf)] for side in (left, right)]
            _, keys = distinct(keys, np.concatenate(columns))
        count = int(keys.max(initial=-1)) + 1
        groups = _groups(keys[: len(left)], count), _groups(keys[len(left) :], count)
        (both,) = np.nonzero((groups[0][2] > 0) & (groups[1][2] > 0))
        return _Join(term, left, right, groups, (both, both))
    (ours, values), (theirs, other_values) = _ranked(left.result), _ranked(right.result)
    groups = _groups(ours, len(values)), _groups(theirs, len(other_values))
    extents = types.extents()
    fits = _possible(term, extents[values][:, None], extents[other_values][None, :])
    a, b = np.nonzero(fits)
    keep = apply(term, types, [values[a], other_values[b]]) >= 0
    return _Join(term, left, right, groups, (a[keep], b[keep]))


def _pending(term: Term, types: Types, leaves: Mapping[Term, Relation]) -> Relation | _Join:
    """Return the relation of a term, or the join that makes it."""
    if not term.operands:
        return leaves[term]
    operands = [_relation(operand, types, leaves) for operand in term.operands]
    if len(operands) == 2:
        return _join(term, types, *operands)
    (one,) = operands
    result = apply(term, types, [one.result])
    keep = result >= 0
    return Relation(one.leaves, tuple(column[keep] for column in one.columns), result[keep])


def _relation(term: Term, types: Types, leaves: Mapping[Term, Relation]) -> Relation:
    """Return all choices of the leaves' types that type a term."""
    found = _pending(term, types, leaves)
    return found.rows(types) if isinstance(found, _Join) else found


def _equal(sides: tuple[Term, Term], types: Types, leaves: Mapping[Term, Relation]) -> Relation:
    """Return all choices of the leaves' types that type both sides, with one shape.

    Where a side has all leaves, its rows are listed and the other side is typed in each.
    """
    found = [_pending(side, types, leaves) for side in sides]
    every = {leaf for side in sides for leaf in subterms([side]) if not leaf.operands}
    whole = [at for at, side in enumerate(sides) if every <= set(subterms([side]))]
    if not whole:
        rows = [part.rows(types) if isinstance(part, _Join) else part for part in found]
        return _join(_EQUATION, types, *rows).rows(types)
    start = min(whole, key=lambda at: len(found[at]))
    first = found[start]
    one = first.rows(types) if isinstance(first, _Join) else first
    columns = dict(zip(one.leaves, one.columns))
    columns[sides[start]] = one.result
    for term in (*subterms(sides), _EQUATION):
        operands = sides if term is _EQUATION else term.operands
        if operands and term not in columns:
            result = apply(term, types, [columns[operand] for operand in operands])
            keep = result >= 0
            columns[term] = result
            if not keep.all():
                columns = {known: column[keep] for known, column in columns.items()}
    return Relation(one.leaves, tuple(columns[leaf] for leaf in one.leaves), columns[_EQUATION])


def bound_sides(law: Law, bindings: Bindings) -> tuple[Term, Term] | None:
    """Return the sides with parameters' values, None where a sum of them has none."""
    names = {term.symbol: term for term in subterms(law.sides) if term.is_variable}
    for term in subterms(law.sides):
        if any(instantiate_value(value, bindings) is None for value in term.parameters):
            return None
    left, right = (instantiate(side, {**bindings, **names}) for side in law.sides)
    return left, right


def sizes(law: Law, bindings: Bindings, ranks: Mapping[Term, int], limit: int) -> Sizes | None:
    """Return all sizes at which both sides are typed, of one shape, and the conditions hold.

    Raises:
        GraphError: a condition of the law is none.
    """
    sides = bound_sides(law, bindings)
    if sides is None:
        return None
    types = TYPES[any(term.symbol in SPLITS for term in subterms(sides))]
    leaves: dict[Term, Relation] = {}
    for unbound, rank in ranks.items():
        leaf = unbound if unbound.is_variable else instantiate(unbound, dict(bindings))
        numbers = [types.number(type_) for type_ in _candidates(leaf, rank, limit, sides)]
        column = np.array(numbers, np.int64)
        leaves[leaf] = Relation((leaf,), (column,), column)
    both = _equal(sides, types, leaves)
    found = Sizes(bindings, sides, types, both.leaves, both.columns)
    keep = np.ones(len(found), bool)
    for text in law.where:
        keep &= _holding(text, found)
    elements = sum(np.abs(types.extents()).prod(axis=1)[column] for column in found.columns)
    rows = np.argsort(elements, kind="stable")
    rows = rows[keep[rows]]
    return Sizes(
        bindings, sides, types, both.leaves, tuple(column[rows] for column in both.columns)
    )


def _holding(text: str, found: Sizes) -> NDArray[np.bool_]:
    """Return at which sizes a condition holds; it is read once for each choice of its extents."""
    used: dict[tuple[Term, int], None] = {}

    def parameter(name: str) -> Value:
        return found.bindings.get(name, name)

    def noted(term: Term, axis: int) -> int:
        used[term, axis] = None
        return 1

    def ask(extent: Any) -> bool:
        try:
            return all(map(condition.holds, condition.read(text, extent, parameter)))
        except condition.IllTyped:
            return False

    ask(noted)
    names = {leaf.symbol: leaf for leaf in found.leaves if leaf.is_variable}
    table = [np.zeros(len(found), np.int64)]
    for unbound, axis in used:
        term = instantiate(unbound, {**found.bindings, **names})
        inside = [leaf for leaf in found.leaves if leaf in subterms([term])]
        columns = [found.columns[found.leaves.index(leaf)] for leaf in inside]
        rows, where = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        extents = []
        for row in rows:
            type_ = infer(term, {leaf: found.types.all[n] for leaf, n in zip(inside, row)})
            known = type_ is not None and -type_.rank <= axis < 0
            extents.append(type_.shape[axis] if known and type_ is not None else -1)
        table.append(np.array(extents, np.int64)[where.ravel()])
    rows, where = np.unique(np.stack(table, axis=1), axis=0, return_inverse=True)
    answers = []
    for row in rows:
        extents = dict(zip(used, row[1:].tolist()))
        answers.append(-1 not in extents.values() and ask(lambda *at, of=extents: of[at]))
    return np.array(answers, bool)[where.ravel()]
