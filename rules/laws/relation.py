"""Relations between the types of a term's variables, and their joins (for `sizes.py`).

The relation of a term has a row for each choice of its variables' types that types it. The relation
of an operator joins those of its operands on the variables they share, and keeps the pairs of types
that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from soapstone.ir.term import Term, subterms
from soapstone.rules.laws.columns import Column, Types, apply, distinct, possible, ranked

_EQUATION = Term("=", (), (Term("x"), Term("y")))


@dataclass(frozen=True)
class Relation:
    """The typings of a term: each row has the types of its leaves and the type of the result.

    Types are numbers of `Types`.
    """

    leaves: tuple[Term, ...]
    columns: tuple[Column, ...]
    result: Column

    def __len__(self) -> int:
        return len(self.result)


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
        """Return the typings of the whole term: those pairs of rows that the operator takes."""
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
    (ours, values), (theirs, other_values) = ranked(left.result), ranked(right.result)
    groups = _groups(ours, len(values)), _groups(theirs, len(other_values))
    extents = types.extents()
    fits = possible(term, extents[values][:, None], extents[other_values][None, :])
    a, b = np.nonzero(fits)
    keep = apply(term, types, [values[a], other_values[b]]) >= 0
    return _Join(term, left, right, groups, (a[keep], b[keep]))


def _pending(term: Term, types: Types, leaves: Mapping[Term, Relation]) -> Relation | _Join:
    """Return the relation of a term, or the join that makes it."""
    if not term.operands:
        return leaves[term]
    operands = [relation(operand, types, leaves) for operand in term.operands]
    if len(operands) == 2:
        return _join(term, types, *operands)
    (one,) = operands
    result = apply(term, types, [one.result])
    keep = result >= 0
    return Relation(one.leaves, tuple(column[keep] for column in one.columns), result[keep])


def relation(term: Term, types: Types, leaves: Mapping[Term, Relation]) -> Relation:
    """Return all choices of the leaves' types that type a term."""
    found = _pending(term, types, leaves)
    return found.rows(types) if isinstance(found, _Join) else found


def equal(sides: tuple[Term, Term], types: Types, leaves: Mapping[Term, Relation]) -> Relation:
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
