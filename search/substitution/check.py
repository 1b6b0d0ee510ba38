"""The checker of proofs: replays a derivation, symbolically in all extents (TASO, section 2.4).

A derivation is a chain of laws that leads from each output of the source to the target's. The
checker depends on the laws and on `shapes.py` alone, not on Z3 and not on how the derivation was
found. Both sides of a rule are taken to be well-typed, and its guard to hold; every term on the way
must then be well-typed too, every law's own conditions must follow, and what a law rewrites must
keep its shape, and its split points wherever a split lies above. What does not follow is missing
from the guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.term import (
    SPLITS,
    Term,
    Value,
    instantiate,
    instantiate_value,
    is_variable,
    match,
    subterms,
)
from soapstone.search.substitution.condition import Condition, IllTyped, read
from soapstone.search.substitution.dims import Dim, all_atoms, atom
from soapstone.search.substitution.facts import Facts
from soapstone.search.substitution.proof import Chain, Proof, Step
from soapstone.search.substitution.shapes import (
    CONSTANT_RANKS,
    Type,
    constant,
    kinds,
    plain,
    result,
)

Ranks: TypeAlias = "Mapping[str, int]"
Laws: TypeAlias = "Mapping[str, Law]"
Terms: TypeAlias = "tuple[Term, ...]"
AXES = (-1, -2, -3, -4)


class CheckError(Exception):
    """A proof that does not hold; names the output, the step and what is wrong with it."""


@lru_cache(maxsize=1)
def all_laws() -> Laws:
    """Return the declared laws, by name."""
    from soapstone.search.substitution.language import laws

    return {law.name: law for law in laws()}


def replay(
    source: Terms,
    target: Terms,
    ranks: Ranks | Sequence[Ranks],
    guard: Sequence[str],
    proof: Proof,
    *,
    laws: Laws | None = None,
) -> None:
    """Check that a proof shows source and target equal wherever both fit and the guard holds.

    `ranks` gives the rank of every tensor variable and of every constant, by its text; several are
    checked one by one. Variables that are axes take every value for which both sides fit.

    Raises:
        CheckError: it does not; names the step.
    """
    typings = (ranks,) if isinstance(ranks, Mapping) else tuple(ranks)
    if not typings:
        raise CheckError("no ranks found, those of each tensor variable needed")
    for typing in typings:
        _replay(source, target, typing, guard, proof, all_laws() if laws is None else laws, False)


def missing_guards(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    proof: Proof,
    *,
    guard: Sequence[str] = (),
    laws: Laws | None = None,
) -> tuple[str, ...]:
    """Return the conditions that a proof needs beyond the typing of both sides and this guard.

    None can be left out. Where axes are variables, they hold for each of their values.

    Raises:
        CheckError: the proof is wrong whatever is added.
    """
    laws = all_laws() if laws is None else laws
    found: list[str] = []
    for missing in _replay(source, target, ranks, guard, proof, laws, True):
        found += [text for text in missing if text not in found]
    for text in tuple(found) if len(found) > 1 else ():
        rest = [other for other in found if other != text]
        try:
            _replay(source, target, ranks, (*guard, *rest), proof, laws, False)
        except CheckError:
            continue
        found = rest
    return tuple(found)


def missing_by_axes(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    proof: Proof,
    *,
    guard: Sequence[str] = (),
    laws: Laws | None = None,
) -> list[tuple[str, ...]]:
    """Return the missing conditions for each legal choice of the axes that are variables.

    Raises:
        CheckError: the proof is wrong whatever is added.
    """
    return _replay(source, target, ranks, guard, proof, all_laws() if laws is None else laws, True)


def _replay(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    proof: Proof,
    laws: Laws,
    collect: bool,
) -> list[tuple[str, ...]]:
    """Check a proof for one choice of ranks; return what is missing for each choice of axes."""
    if not len(source) == len(target) == len(proof):
        raise CheckError(
            f"{len(source)} outputs of the source, {len(target)} of the target and {len(proof)}"
            " chains found, equal numbers needed"
        )
    found: list[tuple[str, ...]] = []
    refused: IllTyped | None = None
    for axes in axis_choices((*source, *target)):
        chosen = tuple(with_parameters(term, axes) for term in (*source, *target))
        first, last = chosen[: len(source)], chosen[len(source) :]
        try:
            typing = typed((*first, *last), ranks, guard, axes)
        except IllTyped as error:
            refused = error
            continue
        typing.facts.mode = "collect" if collect else "derive"
        for output, chain in enumerate(proof):
            _chain(first[output], last[output], chain, axes, typing, laws, output)
        found.append(tuple(_said(condition, typing.facts) for condition in typing.facts.missing))
    if not found:
        raise CheckError(f"source and target fit no operands: {refused}")
    return found


def _said(condition: Condition, facts: Facts) -> str:
    for value in condition.of:
        if any(name in facts.free or "/" in name for name in all_atoms(value)):
            raise CheckError(f"{condition} is needed, and cannot be said of the operands")
    return str(condition)


def with_parameters(term: Term, values: Mapping[str, Term | Value]) -> Term:
    """Return a term whose parameters have these values."""
    if not values:
        return term
    return Term(
        term.symbol,
        tuple(_chosen(value, values) for value in term.parameters),
        tuple(with_parameters(operand, values) for operand in term.operands),
    )


def _chosen(value: Value, values: Mapping[str, Term | Value]) -> Value:
    found = instantiate_value(value, values)
    if found is None:
        raise IllTyped(f"{value!r} is no number")
    return found


def parameter_kinds(terms: Iterable[Term]) -> dict[str, str]:
    """Return what each variable among the parameters is: axis, group, stride, padding, ..."""
    found: dict[str, str] = {}
    for term in subterms(terms):
        if not term.parameters:
            continue
        for value, kind in zip(term.parameters, kinds(term.symbol)):
            if isinstance(value, str):
                found.update((word, kind) for word in value.split("+") if is_variable(word))
    return found


def axis_choices(terms: Iterable[Term]) -> Iterator[dict[str, Value]]:
    """Yield every choice of axes for the parameters that are variable axes."""
    names = sorted(name for name, kind in parameter_kinds(terms).items() if kind == "axis")
    for axes in product(AXES, repeat=len(names)):
        yield dict(zip(names, axes))


class Typing:
    """The symbolic types of terms, of variables of given ranks, under a set of facts."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.facts = Facts()
        self._types: dict[Term, Type] = {}

    def __call__(self, term: Term) -> Type:
        """Return the type of a term.

        Raises:
            IllTyped: it has none, or the facts refuse a condition that it needs.
        """
        found = self._types.get(term)
        if found is None:
            found = self._leaf(term) if not term.operands else self._made(term)
            self._types[term] = found
        return found

    def _made(self, term: Term) -> Type:
        return result(term.symbol, term.parameters, tuple(map(self, term.operands)), self.facts)

    def _leaf(self, term: Term) -> Type:
        rank = self.ranks.get(str(term))
        if rank is None and term.is_variable:
            raise IllTyped(f"{term} has no rank")
        known = rank is not None
        if rank is None:
            rank = CONSTANT_RANKS.get(term.symbol, max(self.ranks.values(), default=2))
        names = [f"dim({term},{axis})" for axis in range(-rank, 0)]
        type_ = plain([atom(name) for name in names])
        if not known:  # a constant that only the proof has: its extents are what it needs
            self.facts.free.update(names)
        if not term.is_variable:
            constant(term, type_, self.facts)
        return type_

    def conditions(self, text: str, given: Mapping[str, Term | Value]) -> tuple[Condition, ...]:
        """Return what a condition's text says where its variables are these."""

        def extent(term: Term, axis: int) -> Dim:
            shape = self(_replaced(term, given)).shape
            if not -len(shape) <= axis < 0:
                raise IllTyped(f"{text}: {term} of rank {len(shape)} has no axis {axis}")
            return shape[axis]

        def parameter(name: str) -> Value:
            found = given.get(name, name)
            return name if isinstance(found, Term) else found

        return read(text, extent, parameter)


def _replaced(term: Term, given: Mapping[str, Term | Value]) -> Term:
    if term.is_variable:
        found = given.get(term.symbol)
        return found if isinstance(found, Term) else term
    return Term(
        term.symbol,
        tuple(_chosen(value, given) for value in term.parameters),
        tuple(_replaced(operand, given) for operand in term.operands),
    )


def typed(
    terms: Iterable[Term],
    ranks: Ranks,
    guard: Sequence[str] = (),
    given: Mapping[str, Value] | None = None,
) -> Typing:
    """Return the types of terms, with what the guard and their typing state as facts.

    Raises:
        IllTyped: they fit no operands of these ranks.
    """
    typing = Typing(ranks)
    for text in guard:
        for condition in typing.conditions(text, given or {}):
            typing.facts.require(condition)
    for term in terms:
        typing(term)
    return typing


class _Wrong(Exception):
    """A step that is no instance of its law."""


def _chain(
    source: Term,
    target: Term,
    chain: Chain,
    axes: Mapping[str, Value],
    typing: Typing,
    laws: Laws,
    output: int,
) -> None:
    term = source
    for count, step in enumerate(chain):
        try:
            term = _stepped(term, step, axes, typing, laws)
        except (IllTyped, GraphError, _Wrong) as error:
            chosen = "".join(f", {name} = {axis}" for name, axis in axes.items())
            raise CheckError(f"output {output}, step {count}, {step}{chosen}: {error}") from None
    if term != target:
        raise CheckError(f"output {output}: the proof ends in {term}, {target} needed")


def _stepped(term: Term, step: Step, axes: Mapping[str, Value], typing: Typing, laws: Laws) -> Term:
    """Return the term after a step.

    Raises:
        _Wrong: the step is no instance of its law.
        IllTyped: what it makes does not fit, or a condition does not follow.
    """
    law = laws.get(step.law)
    if law is None:
        raise _Wrong("there is no such law")
    matched, made = law.sides if step.forward else law.sides[::-1]
    given = {
        name: with_parameters(value, axes) if isinstance(value, Term) else _chosen(value, axes)
        for name, value in step.bindings.items()
    }
    try:
        old = term.at(step.path)
    except IndexError:
        raise _Wrong(f"{term} has no such place") from None
    bindings = match(matched, old, given)
    if bindings is None:
        raise _Wrong(f"{old} is no instance of {matched}")
    new = instantiate(made, bindings)
    facts = typing.facts
    before, after = typing(old), typing(new)
    if before.rank != after.rank:
        raise _Wrong(f"{new} has shape {after} where {old} has {before}")
    for left, right in zip(before.shape, after.shape):
        if left != right:
            facts.require(Condition("equal", (left, right)))
    _within_ranks(law, bindings, typing)
    for text in law.where:
        for condition in typing.conditions(text, bindings):
            facts.require(condition)
    whole = term.replaced(step.path, new)
    typing(whole)
    for depth in range(len(step.path)):
        above, now = term.at(step.path[:depth]), whole.at(step.path[:depth])
        if above.symbol in SPLITS:
            left, right = (_point(part, typing) for part in (above, now))
            if left != right:
                facts.require(Condition("equal", (left, right)))
    return whole


def _point(split: Term, typing: Typing) -> Dim:
    axis = split.parameters[0]
    assert isinstance(axis, int)
    tree = typing(split.operands[0]).trees[axis]
    assert tree is not None  # its type would have been refused
    return tree.at


def _within_ranks(law: Law, bindings: Mapping[str, Term | Value], typing: Typing) -> None:
    """Refuse a law for operands of ranks that it was not said, and not validated, for."""
    found = {name: typing(term).rank for name, term in bindings.items() if isinstance(term, Term)}
    allowed = _allowed_ranks(law.ranks)
    if allowed is None:
        fits = len(set(found.values())) <= 1 and all(1 <= rank <= 4 for rank in found.values())
    else:
        fits = any(
            all(ranks.get(name, rank) == rank for name, rank in found.items()) for ranks in allowed
        )
    if not fits:
        ranks = " ".join(f"{name}={rank}" for name, rank in sorted(found.items()))
        raise _Wrong(f"the law is not said for ranks {ranks}")


@lru_cache(maxsize=1024)
def _allowed_ranks(texts: tuple[str, ...]) -> tuple[dict[str, int], ...] | None:
    if not texts:
        return None
    return tuple(
        {name: int(rank) for name, _, rank in (item.partition("=") for item in text.split())}
        for text in texts
    )
