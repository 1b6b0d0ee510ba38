"""Whether the laws contradict each other, and which follow from the others (TASO, section 2.4).

TASO asks Z3, with tensors and operators uninterpreted, whether laws contradict each other; of many
laws Z3 does not know. Laws that are all true of one model do not, and the model is at hand: tensors
of numbers, in which operators have their own meaning. `consistent` evaluates each law alone there
(`domain.differing`), so that a false one is named whatever others stand beside it. `redundant`
looks for a derivation of each law from the others, first by equality saturation, then by Z3 for
some time. Neither replaces validation (`validate.py`), which covers all sizes within its bounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from soapstone.ir.law import Law
from soapstone.ir.term import SPLITS, Value, subterms
from soapstone.rules.laws.domain import differing
from soapstone.rules.laws.sizes import Sizes, parameter_values, rank_choices, sizes
from soapstone.rules.proving import entail, prove
from soapstone.rules.workers import Progress, Workers
from soapstone.search.rules import language
from soapstone.search.rules.proof import Candidate

Verdict: TypeAlias = "Literal['consistent', 'contradictory']"
_EXTENT = 3  # of the sizes at which derivations are sought
_CHOICES = 3  # of parameters for which a derivation is needed
_EFFORT = 2  # rounds of equality saturation that a derivation is sought in
_TOGETHER = 32  # laws between two reports of progress


@dataclass(frozen=True)
class Consistency:
    """Whether laws are true of numbers together, how many were given, and which are false.

    `refuted` says of each false law where its sides differ. `consistent` says that all others were
    found true wherever they were evaluated: a law that is said of no operands is not among them.
    """

    verdict: Verdict
    refuted: Mapping[str, str]
    given: int
    seconds: float


@dataclass(frozen=True)
class Redundancy:
    """A law that others imply: which were used, and what found it out.

    `declared`: the law says itself that it follows from others (`Law.follows`).
    """

    law: str
    follows: tuple[str, ...]
    by: Literal["derivation", "Z3"]
    declared: bool


def consistent(laws: Sequence[Law] | None = None, processes: int = 1) -> Consistency:
    """Return whether laws are true of one model, tensors of numbers, and which are not."""
    start = time.perf_counter()
    given = language.laws() if laws is None else tuple(laws)
    with Workers(processes) as workers:
        found = zip(given, workers.map(differing, given))
        refuted = {law.name: where for law, where in found if where is not None}
    verdict: Verdict = "contradictory" if refuted else "consistent"
    return Consistency(verdict, refuted, len(given), time.perf_counter() - start)


def redundant(
    laws: Sequence[Law] | None = None,
    timeout_s: float = 2.0,
    progress: Progress | None = None,
    processes: int = 1,
) -> tuple[Redundancy, ...]:
    """Return the laws that the others imply, each with those from which it was derived.

    A derivation is sought at up to three choices of parameters, each on tensors of unequal extents.

    Args:
        laws: by default all that operators declare.
        timeout_s: for Z3, for each law that has no derivation; 0 asks it nothing.
        progress: is told the law, how many are done, and of how many.
        processes: that share the laws.
    """
    given = language.laws() if laws is None else tuple(laws)
    found: list[Redundancy | None] = []
    with Workers(processes) as workers:
        for first in range(0, len(given), _TOGETHER):
            some = given[first : first + _TOGETHER]
            found += workers.map(_redundancy, some, given, timeout_s)
            if progress is not None:
                progress(some[-1].name, len(found), len(given))
    return tuple(each for each in found if each is not None)


def _redundancy(law: Law, given: Sequence[Law], timeout_s: float) -> Redundancy | None:
    """Return whether a law follows from the others given, as far as is found out."""
    others = [other for other in given if other.name != law.name]
    used = derivation(law, others)
    if used is not None:
        return Redundancy(law.name, used, "derivation", bool(law.follows))
    if timeout_s > 0 and _by_z3(law, others, timeout_s):
        return Redundancy(law.name, law.follows, "Z3", bool(law.follows))
    return None


def derivation(law: Law, others: Sequence[Law]) -> tuple[str, ...] | None:
    """Return the names of the laws that derive a law, None if no derivation was found."""
    names: set[str] = set()
    several = _instances(law)
    for found in several:
        row = max(range(len(found)), key=lambda row: _variety(found, row))
        types = {
            str(leaf): tuple(extent for extent in type_.shape if isinstance(extent, int))
            for leaf, type_ in found.at(row).items()
        }
        left, right = found.sides
        proof = prove.prove(Candidate((left,), (right,), types, ""), effort=_EFFORT, laws=others)
        if proof is None:
            return None
        names.update(step.law for chain in proof for step in chain)
    return tuple(sorted(names)) if several else None


def _instances(law: Law) -> list[Sizes]:
    """Return the sizes of a law for a few choices of parameters, of the largest ranks."""
    if any(term.symbol in SPLITS for term in subterms(law.sides)):
        return []  # a variable's split tree is no part of a candidate
    choices: list[dict[str, Value]] = list(parameter_values(law))
    ranks = sorted(rank_choices(law), key=lambda ranks: -sum(ranks.values()))
    found: list[Sizes] = []
    for bindings in (*choices[::-1][:1], *choices):
        for rank in ranks:
            each = sizes(law, bindings, rank, _EXTENT)
            if each is not None and len(each):
                found.append(each)
                break
        if len(found) == min(_CHOICES, len(choices)):
            break
    return found


def _variety(sizes: Sizes, row: int) -> tuple[int, int, int]:
    """Return how telling a size is: few extents of 1, where much is equal, and many unequal."""
    extents = [extent for type_ in sizes.at(row).values() for extent in type_.shape]
    sum_ = sum(extent for extent in extents if isinstance(extent, int))
    return -extents.count(1), len(set(extents)), -sum_


def _by_z3(law: Law, others: Sequence[Law], timeout_s: float) -> bool:
    if law.where or entail.shape_bound(law):
        return False
    left, right = law.sides
    return entail.entailed_by_laws((left,), (right,), timeout_s, laws=others) == "proved"


def report(
    laws: Sequence[Law] | None = None,
    timeout_s: float = 2.0,
    progress: Progress | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Return both checks for JSON: `verdict`, `contradiction`, `redundant`, `seconds`."""
    start = time.perf_counter()
    first = consistent(laws, processes)
    found = redundant(laws, timeout_s, progress, processes=processes)
    return {
        "verdict": first.verdict,
        "contradiction": dict(first.refuted),
        "redundant": {
            each.law: {"follows": list(each.follows), "by": each.by, "declared": each.declared}
            for each in found
        },
        "seconds": round(time.perf_counter() - start, 3),
    }
