"""Pairs of terms: the smaller ones that they follow from, and the candidates that are left.

The same forms of common subgraph as in `cuts.py` (Jia et al., TASO, section 2.5), for the few pairs
that no enumeration holds: those with a variable of a shape that the space has none of, and terms
that are equal to a part of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from soapstone.ir.term import Term, size
from soapstone.rules.algebra.canonical import Sides, canonical_candidate, skeleton, subsumes
from soapstone.rules.enumeration.recheck import Recheck
from soapstone.rules.enumeration.space import Space
from soapstone.search.rules.language import commutative
from soapstone.search.rules.proof import Candidate, equation
from soapstone.search.rules.shapes import extents

Progress: TypeAlias = Callable[[str, int, "int | None"], None]
Shape = tuple[int, ...]


class Reducer:
    """Finds smaller pairs of equal graphs from which a pair follows."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._terms = Recheck({each.term: each.shape for each in space.inputs})
        used = {each.term.symbol[0] for each in space.inputs if each.term.is_variable}
        self._letter = next(letter for letter in "uvwxyzabcdefghijklmnopqrst" if letter not in used)
        self._fresh: dict[tuple[Shape, int], Term] = {}
        self._commutative = commutative()
        self._reduced: dict[tuple[Sides, int], list[Sides]] = {}

    def fresh(self, shape: Shape, number: int = 0) -> Term:
        """Return a variable of a shape that is none of the space's; several by number."""
        key = (shape, number)
        if key not in self._fresh:
            self._fresh[key] = Term(f"{self._letter}{len(self._fresh) + 1}")
            self._terms.add(self._fresh[key], shape)
        return self._fresh[key]

    def generalised(
        self, source: tuple[Term, ...], target: tuple[Term, ...], parts: Sequence[Term]
    ) -> Sides:
        """Return a pair in which new variables replace `parts`, terms common to both graphs."""
        taken = set(_names_of((*source, *target)))
        put: dict[Term, Term] = {}
        for part in parts:
            found = self._terms.value(part)
            assert found is not None, f"{part} is of the space, and fits its operands"
            shape = extents(found.type)
            number = 0
            while self.fresh(shape, number).symbol in taken:
                number += 1
            put[part] = self.fresh(shape, number)
            taken.add(put[part].symbol)
        return replaced(source, put), replaced(target, put)

    def equal(self, sides: Sides) -> bool:
        """Return whether all outputs are equal."""
        return all(self._terms.equal(a, b) for a, b in zip(*sides))

    def reduced(self, sides: Sides, needed: int) -> list[Sides]:
        """Return smaller pairs that a pair follows from; itself, if there are none.

        They are usable in the directions `needed`: 1 forward, 2 backward, 3 both.
        """
        key = (sides, needed)
        if key not in self._reduced:
            several = next(self._without_part(*sides, needed), None)
            several = several or next(self._without_output(*sides, needed), None)
            self._reduced[key] = (
                [sides]
                if several is None
                else [pair for smaller in several for pair in self.reduced(smaller, needed)]
            )
        return self._reduced[key]

    def _without_part(
        self, source: tuple[Term, ...], target: tuple[Term, ...], needed: int
    ) -> Iterator[list[Sides]]:
        """Yield the pair with a variable for a term, where that holds; the largest terms first."""
        inner = frozenset[Term]().union(*map(_parts, source))
        other = frozenset[Term]().union(*map(_parts, target))
        found = {*inner, *other}.difference(source)
        if needed & 1:  # a new variable of the target would be one of the source
            found -= other - inner
        if needed & 2:
            found -= inner - other
        parts = [part for part in found if not part.is_variable]
        parts.sort(key=lambda part: (-len(_parts(part)), str(part)))
        for part in parts:
            pair = self.generalised(source, target, [part])
            if needed & ~ways(pair) == 0 and self.equal(pair):
                yield [pair]

    def _without_output(
        self, source: tuple[Term, ...], target: tuple[Term, ...], needed: int
    ) -> Iterator[list[Sides]]:
        """Yield pairs that rewrite the operands of a common output operator, and the rest."""
        for place, (one, other) in enumerate(zip(source, target)):
            rest = (
                (*source[:place], *source[place + 1 :]),
                (*target[:place], *target[place + 1 :]),
            )
            if one == other and rest[0] and needed & ~ways(rest) == 0:
                yield [rest]
            if one.symbol != other.symbol or one.parameters != other.parameters:
                continue
            orders = [other.operands]
            if one.symbol in self._commutative:
                orders.append(other.operands[::-1])
            for order in orders:
                several: list[Sides] = [((a,), (b,)) for a, b in zip(one.operands, order) if a != b]
                several += [rest] if rest[0] else []
                if all(needed & ~ways(pair) == 0 and self.equal(pair) for pair in several):
                    yield several

    def candidates(
        self, pairs: Sequence[Sides], collapses: Sequence[Sides], say: Progress
    ) -> list[Candidate]:
        """Return what pairs and collapses reduce to: the most general, each once.

        A collapse is a term that is equal to a part of itself, and reduced in that direction only.
        """
        every: dict[Sides, None] = {}
        total = len(pairs) + len(collapses)
        for number, sides in enumerate([*pairs, *collapses]):
            needed = ways(sides) if number < len(pairs) else 1
            every.update(dict.fromkeys(self.reduced(sides, needed)))
            if number % 1000 == 0:
                say("reduction", number, total)
        found: dict[tuple[str, tuple[int, ...]], Candidate] = {}
        for number, sides in enumerate(every):
            if ways(sides):
                candidate = self._candidate(sides)
                ranks = tuple(map(len, candidate.types.values()))
                found.setdefault((str(candidate), ranks), candidate)
            if number % 1000 == 0:
                say("candidates", number, len(every))
        return sorted(_general(list(found.values())), key=_order)

    def _candidate(self, sides: Sides) -> Candidate:
        """Return a pair as a candidate whose source is the larger graph, where both could be."""
        possible = []
        for way, (source, target) in ((1, sides), (2, sides[::-1])):
            if ways(sides) & way:
                order = size(target), sorted(map(skeleton, target)), sorted(map(skeleton, source))
                possible.append((order, source, target))
        least = min(order for order, *_ in possible)
        found = []
        for order, source, target in possible:
            if order == least:
                leaves = frozenset[Term]().union(*map(_parts, source + target))
                types = {
                    str(term): self._terms.shapes[term] for term in leaves if not term.operands
                }
                candidate = Candidate(source, target, types, self._space.name)
                found.append(canonical_candidate(candidate))
        return min(found, key=str)


def ways(sides: Sides) -> int:
    """Return in which directions a pair is a rule: 1 forward, 2 backward, 3 both, 0 none."""
    source, target = (_names_of(side) for side in sides)
    return (1 if target <= source else 0) + (2 if source <= target else 0)


@lru_cache(maxsize=1 << 18)
def _parts(term: Term) -> frozenset[Term]:
    """Return the subterms of a term."""
    return frozenset([term]).union(*map(_parts, term.operands))


@lru_cache(maxsize=1 << 18)
def _names(term: Term) -> frozenset[str]:
    """Return the variables of a term."""
    return frozenset(part.symbol for part in _parts(term) if part.is_variable)


def _names_of(terms: Sequence[Term]) -> frozenset[str]:
    return _names(terms[0]) if len(terms) == 1 else frozenset().union(*map(_names, terms))


def replaced(terms: Sequence[Term], put: Mapping[Term, Term]) -> tuple[Term, ...]:
    """Return terms with some subterms replaced."""

    def walk(term: Term) -> Term:
        if term in put:
            return put[term]
        if not term.operands or _parts(term).isdisjoint(put):
            return term
        return Term(term.symbol, term.parameters, tuple(map(walk, term.operands)))

    return tuple(map(walk, terms))


def _order(candidate: Candidate) -> tuple[int, str, str]:
    return size(candidate.source) + size(candidate.target), str(candidate), str(candidate.types)


def _general(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates without those that are another one with variables put for variables."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        sides = (
            sorted(map(skeleton, candidate.source)),
            sorted(map(skeleton, candidate.target)),
        )
        groups.setdefault(tuple(map(str, sorted(sides))), []).append(candidate)
    kept = []
    for group in groups.values():
        group.sort(key=lambda each: (-len(each.types), str(each)))
        for position, candidate in enumerate(group):
            if not any(_instance(group[other], candidate) for other in range(position)):
                kept.append(candidate)
    return kept


def _instance(general: Candidate, special: Candidate) -> bool:
    """Return whether a candidate is another one with variables put for its variables."""
    ranks = [sorted({*map(len, each.types.values())}) for each in (general, special)]
    sides = [(each.source, each.target) for each in (general, special)]
    if ranks[0] != ranks[1] or not subsumes(sides[0], sides[1]):
        return False
    return equation(*sides[0]) != equation(*sides[1]) or general.types == special.types
