"""Instances of rules: parameters and small shapes at which both sides fit (section 2.3.2).

The symbolic typing of a rule, in solved form, says which extents may be chosen and what the others
then are, so that few draws fail. What is drawn has equal extents, extents of 1, strides and groups.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from soapstone.ir.term import Term, Value, subterms
from soapstone.search.rules.condition import Condition, IllTyped, holds, window_size
from soapstone.search.rules.extents import Applied, Dim, all_atoms, atom, evaluate, substitute
from soapstone.search.rules.facts import Facts
from soapstone.search.rules.infer import (
    AXES,
    Ranks,
    Terms,
    at_parameters,
    parameter_kinds,
    typed,
    with_parameters,
)
from soapstone.search.rules.proof import Candidate, equation
from soapstone.search.rules.shapes import Type, extents, infer, tensor_type

Types: TypeAlias = "dict[Term, Type]"
Values: TypeAlias = "Mapping[str, Value]"
VALUES: dict[str, tuple[Value, ...]] = {
    "axis": AXES,
    "group": (1, 2, 3),
    "stride": (1, 2),
    "padding": ("same", "valid"),
    "activation": ("none", "relu"),
    "size": ("3x3", "1x1", "1x3", "5x3", "2x2"),
    "divisor": ("all", "inside"),
}
_DRAWS = 40  # of extents, for one choice of parameters
_FAILURES = 12  # choices in a row that fit nothing, before giving up
_CHOICES = 400  # choices that are wrong for any operands, before giving up
_MOST = 64  # the largest extent


@dataclass(frozen=True)
class _Open:
    """A rule of which only the axes are chosen, and all that its guard and typing state."""

    source: Terms
    target: Terms
    stated: tuple[Condition, ...]
    ranks: Mapping[Term, int]  # of the leaves

    @classmethod
    def of(
        cls, source: Terms, target: Terms, ranks: Ranks, guard: Sequence[str], axes: Values
    ) -> _Open:
        """Return the rule with these axes.

        Raises:
            IllTyped: it fits no operands.
        """
        source, target = at_parameters(source, axes), at_parameters(target, axes)
        typing = typed(source, target, ranks, guard, axes)
        leaves = [term for term in subterms((*source, *target)) if not term.operands]
        return cls(
            source,
            target,
            tuple(typing.facts.stated),
            {leaf: typing(leaf).rank for leaf in leaves},
        )

    def at(self, values: Values) -> _Instance:
        """Return the rule at these parameters.

        What is stated of the open rule is what its proof takes for granted: that a kernel is added
        to another of size `k`, say, and is not broadcast to it where `k` is 1x1.

        Raises:
            IllTyped: a condition on parameters is false.
        """
        given: dict[str, Dim] = {}
        words = {name: value for name, value in values.items() if isinstance(value, str)}
        leaves = {leaf: with_parameters(leaf, values) for leaf in self.ranks}
        for leaf, named in leaves.items():
            if named is not leaf:
                for axis in range(-self.ranks[leaf], 0):
                    given[f"dim({leaf},{axis})"] = atom(f"dim({named},{axis})")
        for name, value in values.items():
            if isinstance(value, int):
                given[name] = value
            elif value.partition("x")[0].isdigit():
                given[f"{name}.h"], given[f"{name}.w"] = window_size(value)
        stated = [
            Condition(
                kind,
                tuple(
                    words.get(part, part)
                    if isinstance(part, str)
                    else substitute(part, given, words)
                    for part in of
                ),
            )
            for kind, of in self.stated
        ]
        return _Instance(
            at_parameters(self.source, values),
            at_parameters(self.target, values),
            {leaves[leaf]: rank for leaf, rank in self.ranks.items()},
            stated,
        )


class _Instance:
    """A rule at certain parameters, and the equations of its extents."""

    def __init__(
        self, source: Terms, target: Terms, ranks: Mapping[Term, int], stated: list[Condition]
    ) -> None:
        self.source = source
        self.target = target
        self.ranks = ranks
        self.stated = stated
        self.extents: dict[str, Dim] = {}  # of the leaves, over those that are free
        self.free: tuple[str, ...] = ()
        self.odd: set[str] = set()

    def solve(self) -> None:
        """Find which extents are free, and what the others then are.

        Raises:
            IllTyped: none fit.
        """
        facts = Facts()
        for condition in self.stated:
            facts.require(condition)
        for leaf, rank in self.ranks.items():
            for axis in range(-rank, 0):
                name = f"dim({leaf},{axis})"
                self.extents[name] = facts.normal(atom(name))
        free: dict[str, None] = {}
        for extent in self.extents.values():
            free.update((name, None) for name in sorted(all_atoms(extent)))
        self.free = tuple(name for name in free if not isinstance(name, Applied))
        for kind, of in facts.stated:
            size = of[1] if kind == "fits" and of[2] == "same" else of[0]
            if kind in ("fits", "odd") and not isinstance(size, str):
                self.odd |= all_atoms(facts.normal(size))

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
            leaf: tensor_type([extents[f"dim({leaf},{axis})"] for axis in range(-rank, 0)])
            for leaf, rank in self.ranks.items()
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
            for kind, of in self.stated
        )


_UNEQUAL = ((1, 2, 3, 4, 5), (2, 3, 4, 5, 6), (3, 4, 5, 7))
_PALETTES = (*_UNEQUAL, *_UNEQUAL, (1, 2), (2, 3), (2,), (3,), (5,))


def applies(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    values: Values,
    types: Mapping[Term, Type],
) -> bool:
    """Return whether a rule may be used at these parameters and shapes of its variables.

    They must satisfy what a proof takes for granted: the guard, and typing without broadcasting of
    extents that are 1 by chance.
    """
    instance = _instance_at(
        source, target, tuple(ranks.items()), tuple(guard), tuple(values.items())
    )
    if instance is None:
        return False
    extents: dict[str, int] = {}
    for leaf, rank in instance.ranks.items():
        found = types[leaf]
        if found.rank != rank:
            return False
        for axis, extent in enumerate(found.shape, -rank):
            if not isinstance(extent, int):
                return False
            extents[f"dim({leaf},{axis})"] = extent
    return instance.holds(extents)


def completed(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    values: Values,
    types: Mapping[Term, Type],
) -> Types | None:
    """Return types of all leaves from those of some, None where these do not determine them.

    So the shape of a constant that only the target has follows from that of what it meets.
    """
    instance = _instance_at(
        source, target, tuple(ranks.items()), tuple(guard), tuple(values.items()), True
    )
    if instance is None:
        return None
    known: dict[str, int] = {}
    for name, extent in _extents(instance, types):
        (one, *others) = all_atoms(instance.extents[name]) or ("",)
        if not others and evaluate(instance.extents[name], {one: extent + 1}) == extent + 1:
            known[one] = extent
    found = dict(types)
    for leaf, rank in instance.ranks.items():
        if leaf not in types:
            shape = [instance.extents[f"dim({leaf},{axis})"] for axis in range(-rank, 0)]
            if not all(known.keys() >= set(all_atoms(extent)) for extent in shape):
                return None
            found[leaf] = tensor_type([evaluate(extent, known) for extent in shape])
    return found


def _extents(instance: _Instance, types: Mapping[Term, Type]) -> Iterator[tuple[str, int]]:
    for leaf, rank in instance.ranks.items():
        if leaf in types and types[leaf].rank == rank:
            for axis, extent in enumerate(types[leaf].shape, -rank):
                assert isinstance(extent, int)
                yield f"dim({leaf},{axis})", extent


@lru_cache(maxsize=1 << 15)
def _instance_at(
    source: Terms,
    target: Terms,
    ranks: tuple[tuple[str, int], ...],
    guard: tuple[str, ...],
    values: tuple[tuple[str, Value], ...],
    solved: bool = False,
) -> _Instance | None:
    """Return a rule at some parameters, None where it fits no operands."""
    kinds = parameter_kinds((*source, *target))
    axes = {name: value for name, value in values if kinds.get(name) == "axis"}
    try:
        instance = _Open.of(source, target, dict(ranks), guard, axes).at(dict(values))
        if solved:
            instance.solve()
    except IllTyped:
        return None
    return instance


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
    options = {name: _options(source, target, name, kind) for name, kind in sorted(kinds.items())}
    known: dict[tuple[Value, ...], _Instance | None] = {}
    opened: dict[tuple[Value, ...], _Open | None] = {}
    failed = wrong = 0
    while count > 0 and failed < _FAILURES and wrong < _CHOICES:
        values = {name: some[rng.integers(len(some))] for name, some in options.items()}
        key = tuple(values.values())
        if key not in known:
            axes = {name: value for name, value in values.items() if kinds[name] == "axis"}
            where = tuple(axes.values())
            if where not in opened:
                opened[where] = _opened(source, target, ranks, guard, axes)
            rule = opened[where]
            known[key] = None if rule is None else _solved(rule, values)
        instance = known[key]
        if instance is None:
            wrong += 1
            continue
        for _ in range(_DRAWS):
            types = instance.draw(rng)
            if types is not None:
                count -= 1
                failed = wrong = 0
                yield values, types
                break
        else:
            failed += 1


def drawn(
    source: Terms, target: Terms, ranks: Ranks, guard: Sequence[str], count: int
) -> Iterator[tuple[dict[str, Value], Types]]:
    """Yield what `sample_types` does, the same for the same graphs."""
    rng = np.random.default_rng(zlib.crc32(equation(source, target).encode()))
    return sample_types(source, target, ranks, guard, rng, count)


def candidate_at(
    source: Terms, target: Terms, values: Values, types: Mapping[Term, Type], space: str
) -> Candidate:
    """Return two graphs at these parameters and types of their leaves."""
    shapes = {str(term): extents(type_) for term, type_ in types.items()}
    return Candidate(at_parameters(source, values), at_parameters(target, values), shapes, space)


def _opened(
    source: Terms, target: Terms, ranks: Ranks, guard: Sequence[str], axes: Values
) -> _Open | None:
    try:
        return _Open.of(source, target, ranks, guard, axes)
    except IllTyped:
        return None


def _solved(rule: _Open, values: Values) -> _Instance | None:
    try:
        instance = rule.at(values)
        instance.solve()
    except IllTyped:
        return None
    return instance


def _options(source: Terms, target: Terms, name: str, kind: str) -> tuple[Value, ...]:
    """Return the values to draw a parameter from."""
    if kind in VALUES:
        return VALUES[kind]
    from soapstone.search.rules import language

    for term in subterms((*source, *target)):
        if name in term.parameters and term.symbol in language.forms():
            position = term.parameters.index(name)
            return tuple(language.forms()[term.symbol].form.parameters.values())[position]
    return (1,)
