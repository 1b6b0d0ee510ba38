"""What becomes of a candidate: a proved draft of a rule, unproved for a reason, or refuted.

A candidate held at one shape (TASO, section 2.3.2, step 2). It is tested there in floating point,
then proved from the laws and lifted to what its proof needs of shapes and parameters (TASO, section
2.4). What fails at another shape is kept only under a guard that its proof gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from soapstone.ir.term import subterms
from soapstone.rules.algebra import evaluate
from soapstone.rules.proving import check, lift, prove
from soapstone.search.rules import language, shapes
from soapstone.search.rules.infer import at_parameters
from soapstone.search.rules.proof import Candidate, Proof, equation
from soapstone.search.rules.rule import Rejected, Terms
from soapstone.search.rules.sample import drawn

EFFORT = len(prove.ROUNDS)
SAMPLES = 4  # shapes at which a candidate and a draft are tested


@dataclass(frozen=True)
class Draft:
    """A proved and lifted candidate, before equal ones are merged."""

    source: Terms
    target: Terms
    ranks: Mapping[str, int]
    guard: tuple[str, ...]
    proof: Proof
    space: str


@dataclass(frozen=True)
class Counterexample:
    """Shapes and parameters at which two graphs differ, and how."""

    source: Terms
    target: Terms
    difference: str

    def __str__(self) -> str:
        return f"{equation(self.source, self.target)}: {self.difference}"


def decide(candidate: Candidate, effort: int = EFFORT) -> Draft | Rejected:
    """Return the draft of a rule, or why there is none."""
    source, target = candidate.source, candidate.target

    def rejected(reason: str) -> Rejected:
        return Rejected(source, target, reason, (candidate.space,))

    types = {
        term: shapes.tensor_type(candidate.types[str(term)])
        for term in subterms(source + target)
        if not term.operands
    }
    difference = evaluate.compare(source, target, types)
    if difference is not None:
        return rejected(f"refuted: {difference}")
    proof = prove.prove(candidate, effort=effort)
    if proof is None:
        found = counterexample(source, target, candidate.ranks, ())
        if found is not None:
            return rejected(f"refuted: {found}")
        return rejected(why_unproved(source + target, effort))
    return drafted(candidate, proof)


def drafted(candidate: Candidate, proof: Proof) -> Draft | Rejected:
    """Return what a proof of a candidate shows, in general."""
    sides = (candidate.source, candidate.target)
    try:
        lifted = lift.lift(*sides, proof, candidate.ranks, types=candidate.types)
    except check.CheckError as error:
        reason = f"its proof holds at one shape only: {error}"
        return Rejected(*sides, reason, (candidate.space,))
    return Draft(
        *(lifted.source, lifted.target, lifted.ranks, lifted.guard, lifted.proof),
        candidate.space,
    )


def counterexample(
    source: Terms,
    target: Terms,
    ranks: Mapping[str, int],
    guard: Sequence[str],
    count: int = SAMPLES,
) -> Counterexample | None:
    """Return shapes and parameters at which two graphs differ under a guard, if any is found."""
    for values, types in drawn(source, target, ranks, guard, count):
        one, other = at_parameters(source, values), at_parameters(target, values)
        difference = evaluate.compare(one, other, types, thorough=True)
        if difference is not None:
            return Counterexample(one, other, str(difference))
    return None


def why_unproved(terms: Terms, effort: int) -> str:
    """Return why a candidate that holds wherever it was tested has no proof."""
    silent = sorted({term.symbol for term in subterms(terms) if not term.is_variable} - _spoken())
    if silent:
        return f"no law mentions {', '.join(silent)}"
    needed = ", ".join(sorted({term.symbol for term in subterms(terms) if not term.is_variable}))
    return f"no derivation within {prove.ROUNDS[effort - 1].nodes} nodes: needs a law of {needed}"


@lru_cache(maxsize=1)
def _spoken() -> frozenset[str]:
    """Return the symbols that laws mention."""
    return frozenset(term.symbol for law in language.laws() for term in subterms(law.sides))
