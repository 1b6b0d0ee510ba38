"""All sizes at which both sides of a law are typed, found by joining instead of trying.

The relations of both sides (`relation.py`) are joined where their shapes are equal. What takes
which types is asked once for each pair of types, of `shapes.concrete`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
from soapstone.rules.algebra.evaluate import exact_constant
from soapstone.rules.laws.columns import TYPES, Column, Types
from soapstone.rules.laws.relation import Relation, equal, relation
from soapstone.search.rules import condition, language
from soapstone.search.rules.shapes import Tree, Type, concrete, infer, tensor_type

MOST_RANK = 4
Bindings: TypeAlias = "Mapping[str, Value]"
Limit: TypeAlias = "int | tuple[int, int, int, int]"  # of all extents, or of those of axes -4 to -1


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

    def only(self, rows: NDArray[np.int64]) -> Sizes:
        """Return these rows."""
        return replace(self, columns=tuple(column[rows] for column in self.columns))

    def at(self, row: int) -> dict[Term, Type]:
        """Return the type of every leaf at one size."""
        return {
            leaf: self.types.all[column[row]] for leaf, column in zip(self.leaves, self.columns)
        }


def extents_up_to(limit: Limit) -> tuple[int, ...]:
    """Return the largest extents of the axes -4 to -1: one number is that of all."""
    return (limit,) * MOST_RANK if isinstance(limit, int) else tuple(limit)


def parameter_values(
    law: Law, instead: Mapping[str, tuple[Value, ...]] | None = None
) -> Iterator[dict[str, Value]]:
    """Yield all choices of values of a law's parameter variables, as their forms declare them.

    `instead`: other values, by what a parameter is: `stride`, `size`.
    """
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
        names = language.kinds(term.symbol)
        for value, name, declared in zip(term.parameters, names, known.values()):
            declared = (instead or {}).get(name, declared)
            for word in str(value).split("+") if isinstance(value, str) else ():
                if is_variable(word):
                    choices[word].update(dict.fromkeys(declared))
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values))


def rank_choices(law: Law, limit: int = MOST_RANK) -> Iterator[dict[Term, int]]:
    """Yield the ranks for which a law is said; constants of no said rank have any."""
    leaves = [term for term in subterms(law.sides) if not term.operands]
    variables = [str(leaf) for leaf in leaves if leaf.is_variable]
    one = range(1, limit + 1) if variables else (0,)
    every = tuple(dict.fromkeys(variables, rank) for rank in one)
    for given in language.said_ranks(law) or every:
        free: list[Sequence[int]] = []
        for leaf in leaves:
            constant = language.constants().get(leaf.symbol)
            rank = given.get(str(leaf), given.get(leaf.symbol))
            if rank is None and constant is not None:
                rank = constant.rank
            free.append(range(limit + 1) if rank is None else (rank,))
        for ranks in itertools.product(*free):
            yield dict(zip(leaves, ranks))


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


def _candidates(leaf: Term, rank: int, limit: Limit, sides: tuple[Term, Term]) -> Iterator[Type]:
    """Yield the types that a variable or constant may have."""
    most = extents_up_to(limit)[MOST_RANK - rank :]
    if not leaf.is_variable:
        sizes = [part for value in leaf.parameters for part in str(value).split("x")]
        top = max([1, *(int(part) for part in sizes if part.isdigit())])
        for shape in itertools.product(*(range(1, max(top, each) + 1) for each in most)):
            if exact_constant(leaf, shape) is not None:
                yield tensor_type(shape)
        return
    axes, depth = _split_axes(sides)
    for shape in itertools.product(*(range(1, each + 1) for each in most)):
        options = [
            _trees(extent, depth if at - rank in axes else 0) for at, extent in enumerate(shape)
        ]
        for trees in itertools.product(*options):
            yield Type(shape, trees)


def bound_sides(law: Law, bindings: Bindings) -> tuple[Term, Term] | None:
    """Return the sides with parameters' values, None where a sum of them has none."""
    names = {term.symbol: term for term in subterms(law.sides) if term.is_variable}
    for term in subterms(law.sides):
        if any(instantiate_value(value, bindings) is None for value in term.parameters):
            return None
    left, right = (instantiate(side, {**bindings, **names}) for side in law.sides)
    return left, right


def _leaves(
    sides: tuple[Term, Term], bindings: Bindings, ranks: Mapping[Term, int], limit: Limit
) -> tuple[Types, dict[Term, Relation]]:
    """Return the relation of every variable and constant: all types that it may have."""
    types = TYPES[any(term.symbol in SPLITS for term in subterms(sides))]
    leaves: dict[Term, Relation] = {}
    for unbound, rank in ranks.items():
        leaf = unbound if unbound.is_variable else instantiate(unbound, dict(bindings))
        numbers = [types.number(type_) for type_ in _candidates(leaf, rank, limit, sides)]
        column = np.array(numbers, np.int64)
        leaves[leaf] = Relation((leaf,), (column,), column)
    return types, leaves


def sizes(law: Law, bindings: Bindings, ranks: Mapping[Term, int], limit: Limit) -> Sizes | None:
    """Return all sizes at which both sides are typed, of one shape, and the conditions hold.

    Raises:
        GraphError: a condition of the law is none.
    """
    sides = bound_sides(law, bindings)
    if sides is None:
        return None
    types, leaves = _leaves(sides, bindings, ranks, limit)
    several = any(len(term.operands) > 2 for term in subterms(sides))
    both = _tried(sides, types, leaves) if several else equal(sides, types, leaves)
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


def _tried(sides: tuple[Term, Term], types: Types, leaves: Mapping[Term, Relation]) -> Relation:
    """Return the relation of both sides leaf by leaf, where operators have more operands."""
    ready: list[list[Term]] = [[] for _ in leaves]
    for term in subterms(sides):
        if term.operands:
            inside = [at for at, leaf in enumerate(leaves) if leaf in subterms([term])]
            ready[max(inside)].append(term)
    known: dict[Term, Type] = {}
    rows: list[tuple[int, ...]] = []

    def assign(at: int, row: tuple[int, ...]) -> None:
        if at == len(leaves):
            if known[sides[0]].shape == known[sides[1]].shape:
                rows.append(row)
            return
        leaf = list(leaves)[at]
        for number in leaves[leaf].result.tolist():
            known[leaf] = types.all[number]
            for term in ready[at]:
                operands = tuple(known[operand] for operand in term.operands)
                type_ = concrete(term.symbol, term.parameters, operands)
                if type_ is None:
                    break
                known[term] = type_
            else:
                assign(at + 1, (*row, number))

    assign(0, ())
    columns = np.array(rows, np.int64).reshape(len(rows), len(leaves)).T
    return Relation(tuple(leaves), tuple(columns), np.zeros(len(rows), np.int64))


def one_sided(
    law: Law, bindings: Bindings, ranks: Mapping[Term, int], limit: Limit
) -> tuple[dict[Term, Type], Type | None, Type | None] | None:
    """Return types of the leaves at which the sides are not typed alike, and both their types."""
    sides = bound_sides(law, bindings)
    if sides is None:
        return None
    types, leaves = _leaves(sides, bindings, ranks, limit)
    if not all(map(len, leaves.values())):
        return None
    for side in sides:
        typed = relation(side, types, leaves)
        others = [leaf for leaf in leaves if leaf not in typed.leaves]
        last = [np.full(len(typed), leaves[leaf].result[-1]) for leaf in others]
        found = Sizes(bindings, sides, types, (*typed.leaves, *others), (*typed.columns, *last))
        keep = np.ones(len(found), bool)
        for text in law.where:
            keep &= _holding(text, found)
        for row in np.flatnonzero(keep)[::-1]:  # rather of unequal extents
            at = found.at(int(row))
            left, right = infer(sides[0], at), infer(sides[1], at)
            if left is None or right is None or left.shape != right.shape:
                return at, left, right
    return None


def _holding(text: str, sizes: Sizes) -> NDArray[np.bool_]:
    """Return at which sizes a condition holds; it is read once for each choice of its extents."""
    used: dict[tuple[Term, int], None] = {}

    def parameter(name: str) -> Value:
        return sizes.bindings.get(name, name)

    def noted(term: Term, axis: int) -> int:
        used[term, axis] = None
        return 1

    def ask(extent: Any) -> bool:
        try:
            return all(map(condition.holds, condition.read(text, extent, parameter)))
        except condition.IllTyped:
            return False

    ask(noted)
    names = {leaf.symbol: leaf for leaf in sizes.leaves if leaf.is_variable}
    table = [np.zeros(len(sizes), np.int64)]
    for unbound, axis in used:
        term = instantiate(unbound, {**sizes.bindings, **names})
        inside = [leaf for leaf in sizes.leaves if leaf in subterms([term])]
        columns = [sizes.columns[sizes.leaves.index(leaf)] for leaf in inside]
        rows, where = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        extents = []
        for row in rows:
            type_ = infer(term, {leaf: sizes.types.all[n] for leaf, n in zip(inside, row)})
            known = type_ is not None and -type_.rank <= axis < 0
            extents.append(type_.shape[axis] if known and type_ is not None else -1)
        table.append(np.array(extents, np.int64)[where.ravel()])
    rows, where = np.unique(np.stack(table, axis=1), axis=0, return_inverse=True)
    answers = []
    for row in rows:
        known_extents = dict(zip(used, row[1:].tolist()))
        typed = -1 not in known_extents.values()
        answers.append(typed and ask(lambda *at, of=known_extents: of[at]))
    return np.array(answers, bool)[where.ravel()]
