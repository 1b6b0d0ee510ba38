"""Instances of rules: parameters and small shapes at which both sides fit (section 2.3.2).

The symbolic typing of a rule, in solved form, says which extents may be chosen and what the others
then are, so that few draws fail. What is drawn has equal extents, extents of 1, strides and groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from soapstone.ir.term import Term, Value, parse, subterms
from soapstone.search.substitution.check import (
    AXES,
    Ranks,
    Terms,
    Typing,
    parameter_kinds,
    typed,
    with_parameters,
)
from soapstone.search.substitution.condition import Condition, IllTyped, holds
from soapstone.search.substitution.dims import Applied, Dim, all_atoms, atom, substitute
from soapstone.search.substitution.shapes import Type, infer, plain

Types: TypeAlias = "dict[Term, Type]"
VALUES: dict[str, tuple[Value, ...]] = {
    "axis": AXES,
    "group": (1, 2, 3),
    "stride": (1, 2),
    "padding": ("same", "valid"),
    "activation": ("none", "relu"),
    "size": ("3x3", "1x1", "1x3", "5x3"),
    "divisor": ("all", "inside"),
}
_DRAWS = 60  # of extents, for one choice of parameters


@dataclass(frozen=True)
class _Instance:
    """A rule at certain parameters: its terms, and the equations of its extents."""

    source: Terms
    target: Terms
    leaves: tuple[Term, ...]
    typing: Typing
    free: tuple[str, ...]
    odd: frozenset[str]
    extents: Mapping[str, Dim]  # every leaf's, by atom, over the free ones

    @classmethod
    def of(
        cls,
        source: Terms,
        target: Terms,
        ranks: Ranks,
        guard: Sequence[str],
        values: Mapping[str, Value],
    ) -> _Instance:
        """Return the instance.

        Raises:
            IllTyped: the rule fits no operands at these parameters.
        """
        source = tuple(with_parameters(term, values) for term in source)
        target = tuple(with_parameters(term, values) for term in target)
        chosen = {str(with_parameters(parse(text), values)): rank for text, rank in ranks.items()}
        typing = typed((*source, *target), chosen, guard, values)
        leaves = tuple(term for term in subterms((*source, *target)) if not term.operands)
        facts = typing.facts
        extents = {
            name: facts.normal(atom(name))
            for leaf in leaves
            for extent in typing(leaf).shape
            for name in all_atoms(extent)
        }
        free: dict[str, None] = {}
        for extent in extents.values():
            free.update((name, None) for name in sorted(all_atoms(extent)))
        odd = set()
        for kind, of in facts.stated:
            size = of[1] if kind == "fits" and of[2] == "same" else of[0]
            if kind in ("fits", "odd") and not isinstance(size, str):
                odd |= all_atoms(facts.normal(size))
        plain_atoms = tuple(name for name in free if not isinstance(name, Applied))
        return cls(source, target, leaves, typing, plain_atoms, frozenset(odd), extents)

    def draw(self, rng: np.random.Generator) -> Types | None:
        """Return types of the leaves at which both sides fit, with equal shapes."""
        palette = _PALETTES[rng.integers(len(_PALETTES))]
        given: dict[str, Dim] = {
            name: int(rng.choice((1, 3)))
            if name in self.odd
            else int(palette[rng.integers(len(palette))])
            for name in self.free
        }
        extents = {name: substitute(extent, given) for name, extent in self.extents.items()}
        if not all(isinstance(extent, int) and 0 < extent <= 64 for extent in extents.values()):
            return None
        types = {leaf: at(self.typing(leaf), extents) for leaf in self.leaves}
        if not self.holds(extents):
            return None
        for one, other in zip(self.source, self.target):
            first, second = infer(one, types), infer(other, types)
            if first is None or second is None or first.shape != second.shape:
                return None
        return types

    def holds(self, extents: Mapping[str, Dim]) -> bool:
        """Return whether all that typing and guard state is true of these extents."""
        return all(holds(_at(condition, extents)) for condition in self.typing.facts.stated)


_UNEQUAL = ((1, 2, 3, 4, 5), (2, 3, 4, 5, 6), (3, 4, 5, 7))
_PALETTES = (*_UNEQUAL, *_UNEQUAL, (1, 2), (2, 3), (2,), (3,), (5,))


def at(type_: Type, extents: Mapping[str, Dim]) -> Type:
    """Return a type without trees whose atoms have these values."""
    return plain([substitute(extent, extents) for extent in type_.shape])


def _at(condition: Condition, extents: Mapping[str, Dim]) -> Condition:
    return Condition(
        condition.kind,
        tuple(v if isinstance(v, str) else substitute(v, extents) for v in condition.of),
    )


def applies(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    values: Mapping[str, Value],
    types: Mapping[Term, Type],
) -> bool:
    """Return whether a rule may be used at these parameters and shapes of its variables.

    They must satisfy what a proof takes for granted: the guard, and typing without broadcasting of
    extents that are 1 by chance.
    """
    try:
        instance = _Instance.of(source, target, ranks, guard, values)
        extents: dict[str, Dim] = {}
        for leaf in instance.leaves:
            wanted, found = instance.typing(leaf), types[leaf]
            if wanted.rank != found.rank:
                return False
            extents.update(
                (f"dim({leaf},{axis})", found.shape[axis]) for axis in range(-found.rank, 0)
            )
        return instance.holds(extents)
    except IllTyped:
        return False


def sample_types(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    rng: np.random.Generator,
    count: int,
) -> Iterator[tuple[dict[str, Value], Types]]:
    """Yield up to `count` pairs of parameters and types of leaves at which a rule may be used.

    Both sides are typed and of equal shapes, and the guard holds. Fewer are yielded where few of
    the draws fit; none where none did.
    """
    kinds = parameter_kinds((*source, *target))
    names = sorted(kinds)
    known: dict[tuple[Value, ...], _Instance | None] = {}
    failed = 0
    while count > 0 and failed < _TRIES:
        choice = []
        for name in names:
            options = _options(source, target, name, kinds[name])
            choice.append(options[rng.integers(len(options))])
        key = tuple(choice)
        if key not in known:
            try:
                known[key] = _Instance.of(source, target, ranks, guard, dict(zip(names, choice)))
            except IllTyped:
                known[key] = None
        instance = known[key]
        for _ in range(_DRAWS if instance is not None else 0):
            assert instance is not None
            types = instance.draw(rng)
            if types is not None:
                count -= 1
                yield dict(zip(names, choice)), types
                break
        else:
            failed += 1


_TRIES = 40


def _options(source: Terms, target: Terms, name: str, kind: str) -> tuple[Value, ...]:
    """Return the values to draw a parameter from."""
    if kind in VALUES:
        return VALUES[kind]
    from soapstone.search.substitution import language

    for term in subterms((*source, *target)):
        if name in term.parameters and term.symbol in language.forms():
            position = term.parameters.index(name)
            return tuple(language.forms()[term.symbol].form.parameters.values())[position]
    return (1,)
