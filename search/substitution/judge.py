"""What the rule set says of a rule of another system.

A foreign rule is refuted by a counterexample at sampled shapes, in the set if it is an instance of
one of its rules, or derivable: by the rules alone, or from the laws as a candidate is (Jia et al.,
TASO, section 2.4).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Bindings, Term, Value, instantiate_value, size, subterms
from soapstone.search.substitution import check, language, lift, prove
from soapstone.search.substitution.canonical import identity, subsumes
from soapstone.search.substitution.check import with_parameters
from soapstone.search.substitution.condition import IllTyped
from soapstone.search.substitution.decide import counterexample
from soapstone.search.substitution.derive import Smaller
from soapstone.search.substitution.equation import instances
from soapstone.search.substitution.evaluate import extents
from soapstone.search.substitution.foreign import ForeignRule
from soapstone.search.substitution.proof import Candidate, Proof, Step
from soapstone.search.substitution.rules import Rule, RuleFile, usable
from soapstone.search.substitution.sample import sample_types

Verdict = Literal["in the set", "derivable", "refuted", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("in the set", "derivable", "refuted", "unknown")
Progress = Callable[[str, int, "int | None"], None]
_SAMPLES = 24  # shapes at which a foreign rule is tested
_PROOFS = 2  # shapes at which a derivation from the laws is looked for


@dataclass(frozen=True)
class Judgement:
    """A verdict on a foreign rule.

    `rules`: those it is an instance of, or is derived by; `guard`: what the rule of the set needs
    and the foreign rule does not say; `reason`: the counterexample, or how it is derived.
    """

    name: str
    verdict: Verdict
    rules: tuple[str, ...] = ()
    guard: tuple[str, ...] = ()
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.name}: {self.verdict}"
        if self.rules:
            text += f" ({', '.join(self.rules)})"
        if self.guard:
            text += f", under the guard {' and '.join(self.guard)}"
        return f"{text}\n  {self.reason}" if self.reason else text


def match_all(
    foreign: Sequence[ForeignRule], file: RuleFile, *, progress: Progress | None = None
) -> list[Judgement]:
    """Return the verdict on each foreign rule."""
    by_symbols: dict[frozenset[str], list[Rule]] = {}
    for own in file.rules:
        by_symbols.setdefault(_symbols(own.source + own.target), []).append(own)
    smaller: list[Smaller] = []  # made when first needed
    judged = []
    for position, rule in enumerate(foreign):
        if progress is not None:
            progress("match", position, len(foreign))
        judged.append(_match(rule, file, by_symbols, smaller))
    return judged


def match(rule: ForeignRule, file: RuleFile) -> Judgement:
    """Return the verdict on one foreign rule."""
    return match_all([rule], file)[0]


def _match(
    rule: ForeignRule,
    file: RuleFile,
    by_symbols: Mapping[frozenset[str], Sequence[Rule]],
    smaller: list[Smaller],
) -> Judgement:
    try:
        tested = sum(1 for _ in _types(rule, 1))
        found = counterexample(rule.source, rule.target, rule.ranks, rule.where, _SAMPLES)
    except (GraphError, IllTyped) as error:
        return Judgement(rule.name, "unknown", reason=f"it is not typed: {error}")
    if not tested:
        return Judgement(rule.name, "unknown", reason="no shapes found at which both sides fit")
    covering: list[tuple[Rule, tuple[str, ...]]] = []
    symbols = _symbols(rule.source + rule.target)
    for own in (own for some, rules in by_symbols.items() if some <= symbols for own in rules):
        guard = _guard_of_instance(own, rule)
        if guard is not None:
            covering.append((own, guard))
    covering.sort(key=lambda pair: len(pair[1]))
    if found is not None:
        own_guard = covering[0] if covering else None
        return Judgement(
            *(rule.name, "refuted"),
            (own_guard[0].identity,) if own_guard else (),
            own_guard[1] if own_guard else (),
            str(found),
        )
    if covering:
        own, guard = covering[0]
        return Judgement(rule.name, "in the set", (own.identity,), guard, own.equation)
    used = _derived_by_rules(rule, file, smaller)
    if used:
        return Judgement(rule.name, "derivable", used, reason="by these rules")
    laws = _derived_from_laws(rule)
    if laws is not None:
        names = ", ".join(dict.fromkeys(step.law for chain in laws for step in chain))
        return Judgement(rule.name, "derivable", reason=f"from the laws {names}")
    return Judgement(rule.name, "unknown", reason="no counterexample and no derivation found")


def _symbols(terms: Sequence[Term]) -> frozenset[str]:
    """Return the operators of an equation: an instance may have more, in place of variables."""
    return frozenset(term.symbol for term in subterms(terms) if not term.is_variable)


def _guard_of_instance(own: Rule, rule: ForeignRule) -> tuple[str, ...] | None:
    """Return the guard under which a rule of the set is this rule; None where it is another.

    A guard that follows from how the foreign rule is typed is left out.
    """
    best: tuple[str, ...] | None = None
    commutative = language.commutative()
    for pair in ((own.source, own.target), (own.target, own.source)):
        for bindings in instances(pair, (rule.source, rule.target), commutative):
            if not _ranks_fit(own, rule, bindings):
                continue
            if not own.guard or _replays(own, rule, bindings):
                return ()
            best = best or tuple(f"{text} ({_shown(bindings)})" for text in own.guard)
    return best


def _shown(bindings: Mapping[str, Term | Value]) -> str:
    return ", ".join(f"{name.strip('[]')} is {value}" for name, value in sorted(bindings.items()))


def _ranks_fit(own: Rule, rule: ForeignRule, bindings: Bindings) -> bool:
    try:
        typing = check.typed(rule.source, rule.target, rule.ranks, rule.where)
        found = {
            name: typing(bound).rank for name, bound in bindings.items() if isinstance(bound, Term)
        }
    except IllTyped:
        return True  # axes are variables: tested at shapes, and replayed where it matters
    return any(all(ranks.get(n, r) == r for n, r in found.items()) for ranks in own.ranks)


def _replays(own: Rule, rule: ForeignRule, bindings: Bindings) -> bool:
    """Return whether the proof of a rule, with its variables bound, needs no more than typing."""
    tensors = {name: bound for name, bound in bindings.items() if isinstance(bound, Term)}
    values = {name[1:-1]: bound for name, bound in bindings.items() if not isinstance(bound, Term)}

    def put(term: Term) -> Term:
        if term.is_variable:
            return tensors.get(term.symbol, term)
        found = [instantiate_value(value, values) for value in term.parameters]
        parameters = tuple(v if new is None else new for v, new in zip(term.parameters, found))
        return Term(term.symbol, parameters, tuple(map(put, term.operands)))

    def put_value(value: Term | Value) -> Term | Value:
        if isinstance(value, Term):
            return put(value)
        found = instantiate_value(value, values)
        return value if found is None else found

    proof: Proof = tuple(
        tuple(
            Step(s.law, s.forward, s.path, {n: put_value(v) for n, v in s.bindings.items()})
            for s in chain
        )
        for chain in own.proof
    )
    source, target = tuple(map(put, own.source)), tuple(map(put, own.target))
    try:
        check.replay(source, target, rule.ranks, rule.where, proof)
    except check.CheckError:
        return False
    return True


def _derived_by_rules(
    rule: ForeignRule, file: RuleFile, smaller: list[Smaller]
) -> tuple[str, ...] | None:
    """Return the rules that lead from one side to the other, in either direction."""
    if not smaller:
        smaller.append(Smaller(file.rules))
    whole = Rule(
        *(identity(rule.source, rule.target), rule.source, rule.target, (rule.ranks,), rule.where),
        *((), max(size(rule.source), size(rule.target)), False, ()),
    )
    if not usable(rule.source, rule.target):
        return None
    for one in (whole, Rule(**{**vars(whole), "source": rule.target, "target": rule.source})):
        derivations = smaller[0].derive(one)
        if derivations is not None:
            uses = [use for derivation in derivations for chain in derivation for use in chain]
            return tuple(dict.fromkeys(use.rule for use in uses))
    return None


def _derived_from_laws(rule: ForeignRule) -> Proof | None:
    """Return a derivation from the laws that shows the rule at all shapes that it allows."""
    for values, types in _types(rule, _PROOFS):
        source = tuple(with_parameters(term, values) for term in rule.source)
        target = tuple(with_parameters(term, values) for term in rule.target)
        shapes = {str(term): extents(type_) for term, type_ in types.items()}
        proof = prove.prove(Candidate(source, target, shapes, ""))
        if proof is None:
            return None
        ranks = {name: len(shape) for name, shape in shapes.items()}
        try:
            lifted = lift.lift(source, target, proof, ranks, types=shapes)
            check.replay(lifted.source, lifted.target, lifted.ranks, rule.where, lifted.proof)
        except check.CheckError:
            continue
        one = (lifted.source, lifted.target)
        if subsumes(one, (rule.source, rule.target), values=True):
            return proof
    return None


def _types(rule: ForeignRule, count: int) -> Iterator[tuple[Mapping[str, Value], Any]]:
    rng = np.random.default_rng(zlib.crc32(str(rule).encode()))
    yield from sample_types(rule.source, rule.target, rule.ranks, rule.where, rng, count)
