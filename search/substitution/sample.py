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
from soapstone.search.substitution.condition import Condition, IllTyped, holds, window_size
from soapstone.search.substitution.dims import (
    Applied,
    Dim,
    all_atoms,
    atom,
    evaluate,
    substitute,
)
from soapstone.search.substitution.infer import (
    AXES,
    Ranks,
    Terms,
    Typing,
    parameter_kinds,
    typed,
    with_parameters,
)
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
_DRAWS = 40  # of extents, for one choice of parameters
_FAILURES = 12  # choices in a row that fit nothing, before giving up
_MOST = 64  # the largest extent


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
        stated = tuple(_stated(source, target, ranks, guard, values))
        source = tuple(with_parameters(term, values) for term in source)
        target = tuple(with_parameters(term, values) for term in target)
        chosen = {str(with_parameters(parse(text), values)): rank for text, rank in ranks.items()}
        typing = typed(source, target, chosen, guard, values)
        leaves = tuple(term for term in subterms((*source, *target)) if not term.operands)
        facts = typing.facts
        for condition in stated:
            facts.require(condition)
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
        picks = rng.integers(0, 1 << 16, len(self.free)).tolist()
        given = {
            name: (1, 3)[pick % 2] if name in self.odd else palette[pick % len(palette)]
            for name, pick in zip(self.free, picks)
        }
        extents: dict[str, int] = {}
        for name, extent in self.extents.items():
            found = evaluate(extent, given)
            if not 0 < found <= _MOST:
                return None
            extents[name] = found
        if not self.holds(extents):
            return None
        types = {
            leaf: plain([evaluate(extent, extents) for extent in self.typing(leaf).shape])
            for leaf in self.leaves
        }
        for one, other in zip(self.source, self.target):
            first, second = infer(one, types), infer(other, types)
            if first is None or second is None or first.shape != second.shape:
                return None
        return types

    def holds(self, extents: Mapping[str, int]) -> bool:
        """Return whether all that typing and guard state is true of these extents."""
        return all(
            holds(
                Condition(
                    kind, tuple(v if isinstance(v, str) else evaluate(v, extents) for v in of)
                )
            )
            for kind, of in self.typing.facts.stated
        )


def _stated(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    values: Mapping[str, Value],
) -> Iterator[Condition]:
    """Yield what typing states of the rule itself, said at these parameters.

    A kernel of size `k` is added to another of that size; that `k` is 1x1 allows no broadcasting.
    """
    axes = {
        name: values[name]
        for name, kind in parameter_kinds((*source, *target)).items()
        if kind == "axis"
    }
    if len(axes) == len(values):
        return  # the typing at these parameters states it
    source = tuple(with_parameters(term, axes) for term in source)
    target = tuple(with_parameters(term, axes) for term in target)
    given: dict[str, Dim] = {}
    words = {name: value for name, value in values.items() if isinstance(value, str)}
    for leaf in (term for term in subterms((*source, *target)) if not term.operands):
        named = with_parameters(leaf, values)
        for axis in range(-ranks[str(leaf)], 0):
            given[f"dim({leaf},{axis})"] = atom(f"dim({named},{axis})")
    for name, value in values.items():
        if isinstance(value, int):
            given[name] = value
        elif value.partition("x")[0].isdigit():
            given[f"{name}.h"], given[f"{name}.w"] = window_size(value)
    for kind, of in typed(source, target, ranks, guard, axes).facts.stated:
        yield Condition(
            kind,
            tuple(
                words.get(v, v) if isinstance(v, str) else substitute(v, given, words) for v in of
            ),
        )


_UNEQUAL = ((1, 2, 3, 4, 5), (2, 3, 4, 5, 6), (3, 4, 5, 7))
_PALETTES = (*_UNEQUAL, *_UNEQUAL, (1, 2), (2, 3), (2,), (3,), (5,))


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
        extents: dict[str, int] = {}
        for leaf in instance.leaves:
            wanted, found = instance.typing(leaf), types[leaf]
            if wanted.rank != found.rank:
                return False
            for axis, extent in enumerate(found.shape, -found.rank):
                if not isinstance(extent, int):
                    return False
                extents[f"dim({leaf},{axis})"] = extent
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
    while count > 0 and failed < _FAILURES:
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
                failed = 0
                yield dict(zip(names, choice)), types
                break
        else:
            failed += 1


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
