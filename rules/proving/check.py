"""The checker of proofs: replays a derivation, symbolically in all extents (TASO, section 2.4).

A derivation is a chain of laws that leads from each output of the source to the target's. The
checker depends on the laws and on `shapes.py` alone, not on Z3 and not on how the derivation was
found. Both sides of a rule are taken to be well-typed, and its guard to hold; every term on the way
must then be well-typed too, every law's own conditions must follow, and what a law rewrites must
keep its shape, and its split points wherever a split lies above. What does not follow is missing
from the guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.term import SPLITS, Term, Value, instantiate, match
from soapstone.search.rules import language
from soapstone.search.rules.condition import Condition, IllTyped
from soapstone.search.rules.extents import Dim, all_atoms
from soapstone.search.rules.facts import Facts
from soapstone.search.rules.infer import (
    Ranks,
    Terms,
    Typing,
    axis_choices,
    chosen,
    typed,
    with_parameters,
)
from soapstone.search.rules.proof import Chain, Proof, Step

Laws: TypeAlias = "Mapping[str, Law]"


class CheckError(Exception):
    """A proof that does not hold; names the output, the step and what is wrong with it."""


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
        _replay(
            source,
            target,
            typing,
            guard,
            proof,
            language.laws_by_name() if laws is None else laws,
            False,
        )


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
    found: list[str] = []
    while True:  # a condition may state that an extent is 1, and so allow what was not
        more = _replay(source, target, ranks, (*guard, *found), proof, laws, True)
        new = [text for missing in more for text in missing if text not in found]
        if not new:
            break
        found += dict.fromkeys(new)
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
    return _replay(source, target, ranks, guard, proof, laws, True)


def _replay(
    source: Terms,
    target: Terms,
    ranks: Ranks,
    guard: Sequence[str],
    proof: Proof,
    laws: Laws | None,
    collect: bool,
) -> list[tuple[str, ...]]:
    """Check a proof for one choice of ranks; return what is missing for each choice of axes."""
    if not len(source) == len(target) == len(proof):
        raise CheckError(
            f"{len(source)} outputs of the source, {len(target)} of the target and {len(proof)}"
            " chains found, equal numbers needed"
        )
    laws = language.laws_by_name() if laws is None else laws
    found: list[tuple[str, ...]] = []
    refused: IllTyped | None = None
    for axes in axis_choices((*source, *target)):
        first, last = (
            tuple(with_parameters(term, axes) for term in terms) for terms in (source, target)
        )
        try:
            typing = typed(first, last, ranks, guard, axes)
        except IllTyped as error:
            if refused is None or str(refused).startswith("axis"):
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
            case = "".join(f", {name} = {axis}" for name, axis in axes.items())
            raise CheckError(f"output {output}, step {count}, {step}{case}: {error}") from None
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
        name: with_parameters(value, axes) if isinstance(value, Term) else chosen(value, axes)
        for name, value in step.bindings.items()
    }
    try:
        old = term.at(step.path)
    except IndexError:
        raise _Wrong(f"{term} has no such place") from None
    if any(position < 0 for position in step.path):
        raise _Wrong("a place is counted from the first operand, 0")
    bindings = match(matched, old, given)
    if bindings is None:
        raise _Wrong(f"{old} is no instance of {matched}")
    new = instantiate(made, bindings)
    facts = typing.facts
    _within_ranks(law, bindings, typing)
    for text in law.where:
        for condition in typing.conditions(text, bindings):
            facts.require(condition)
    before, after = typing(old), typing(new)
    if before.rank != after.rank:
        raise _Wrong(f"{new} has shape {after} where {old} has {before}")
    for left, right in zip(before.shape, after.shape):
        if left != right:
            facts.require(Condition("equal", (left, right)))
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
    allowed = language.said_ranks(law)
    if not allowed:
        fits = len(set(found.values())) <= 1 and all(1 <= rank <= 4 for rank in found.values())
    else:
        fits = any(
            all(ranks.get(name, rank) == rank for name, rank in found.items()) for ranks in allowed
        )
    if not fits:
        ranks = " ".join(f"{name}={rank}" for name, rank in sorted(found.items()))
        raise _Wrong(f"the law is not said for ranks {ranks}")
