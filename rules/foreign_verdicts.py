"""What the rule set says of a rule of another system.

A foreign rule is refuted by a counterexample at sampled shapes, in the set if it is an instance of
one of its rules, or derivable: by the rules alone, or from the laws as a candidate is (Jia et al.,
TASO, section 2.4).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Bindings, Term, Value, instantiate_value, size, subterms
from soapstone.rules.algebra.canonical import identity, subsumes
from soapstone.rules.algebra.equation import instances
from soapstone.rules.candidates import counterexample
from soapstone.rules.foreign import ForeignRule
from soapstone.rules.laws import domain
from soapstone.rules.proving import check, lift, prove
from soapstone.rules.proving.derive import Smaller
from soapstone.rules.proving.saturate import Budget
from soapstone.rules.workers import Progress
from soapstone.search.rules import language
from soapstone.search.rules.condition import IllTyped
from soapstone.search.rules.infer import typed
from soapstone.search.rules.proof import Proof, Step
from soapstone.search.rules.rule import Rule, RuleFile, Terms, usable
from soapstone.search.rules.sample import candidate_at, sample_types

Verdict = Literal["in the set", "derivable", "refuted", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("in the set", "derivable", "refuted", "unknown")
_BUDGET = Budget(nodes=4000, generations=6)  # of a derivation from rules
_SAMPLES = 16  # shapes at which a foreign rule is tested
_PROOFS = 2  # shapes at which a derivation from the laws is looked for


@dataclass(frozen=True)
class Judgement:
    """A verdict on a foreign rule.

    `rules`: those it is an instance of, or is derived by; `guard`: what the rule of the set needs
    and the foreign rule does not say; `reason`: the counterexample, or how it is derived; `domain`:
    `integers` and `booleans`, where what is found shows it for them too.
    """

    name: str
    verdict: Verdict
    rules: tuple[str, ...] = ()
    guard: tuple[str, ...] = ()
    reason: str = ""
    domain: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the judgement for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.name}: {self.verdict}"
        if self.rules:
            text += f" ({', '.join(self.rules)})"
        if self.guard:
            text += f", under the guard {' and '.join(self.guard)}"
        if self.domain:
            text += f", over {' and '.join(self.domain)} too"
        return f"{text}\n  {self.reason}" if self.reason else text


class Judge:
    """A rule set that foreign rules are judged by."""

    def __init__(self, file: RuleFile) -> None:
        self._rules = file.rules
        self._by_identity = file.by_identity
        self._by_symbols: dict[frozenset[str], list[Rule]] = {}
        for rule in file.rules:
            self._by_symbols.setdefault(_symbols(rule.source + rule.target), []).append(rule)

    @cached_property
    def _smaller(self) -> Smaller:
        smaller = Smaller(self._rules)
        x, y = Term("x"), Term("y")
        for symbol in sorted(language.commutative()):
            # A rule never says this: graphs are the same whatever the order of such operands.
            one, other = (Term(symbol, (), (x, y)),), (Term(symbol, (), (y, x)),)
            ranks = tuple({"x": m, "y": n} for m in range(5) for n in range(5))
            smaller.include(Rule(symbol, one, other, ranks, (), ((),), (), 1, False, ()))
        return smaller

    def match(self, rule: ForeignRule) -> Judgement:
        """Return the verdict on a foreign rule, on all numbers for which it is said."""
        found = self._over_reals(rule)
        if found.verdict not in ("in the set", "derivable"):
            return found
        for word in rule.domain:
            if word not in found.domain:
                wrong = domain.refuted(rule.source, rule.target, [rule.ranks], rule.where, word)
                reason = f"both sides differ on {word}" if wrong else f"not shown on {word}"
                verdict: Verdict = "refuted" if wrong else "unknown"
                return replace(found, verdict=verdict, reason=reason)
        return found

    def _over_reals(self, rule: ForeignRule) -> Judgement:
        try:
            if next(_types(rule, 1), None) is None:
                return Judgement(rule.name, "unknown", reason="no shapes fit both sides")
        except (GraphError, IllTyped) as error:
            return Judgement(rule.name, "unknown", reason=f"it is not typed: {error}")
        covering = self._covering(rule)
        own, guard = covering or (None, ())
        if own is not None and not guard:
            return Judgement(rule.name, "in the set", (own.identity,), (), *_said(own))
        found = counterexample(rule.source, rule.target, rule.ranks, rule.where, _SAMPLES)
        named = (own.identity,) if own is not None else ()
        if found is not None:
            return Judgement(rule.name, "refuted", named, guard, str(found))
        if own is not None:
            return Judgement(rule.name, "in the set", named, guard, *_said(own))
        used = self._used(rule)
        if used:
            known = [set(self._by_identity[name].domain) for name in used]
            shown = tuple(word for word in domain.EXACT if all(word in each for each in known))
            return Judgement(rule.name, "derivable", used, (), "by these rules", shown)
        laws = _derived_from_laws(rule)
        if laws is not None:
            names = ", ".join(dict.fromkeys(step.law for chain in laws[1] for step in chain))
            shown = tuple(w for w in domain.of_proof(laws[0], laws[1]) if w in domain.EXACT)
            return Judgement(rule.name, "derivable", (), (), f"from the laws {names}", shown)
        return Judgement(rule.name, "unknown", reason="no counterexample and no derivation found")

    def _covering(self, rule: ForeignRule) -> tuple[Rule, tuple[str, ...]] | None:
        """Return the rule that a foreign rule is an instance of, and the guard that it lacks."""
        symbols = _symbols(rule.source + rule.target)
        best: tuple[Rule, tuple[str, ...]] | None = None
        for some, rules in self._by_symbols.items():
            for own in rules if some <= symbols else ():
                guard = _guard_of_instance(own, rule)
                if guard == ():
                    return own, guard
                if guard is not None and (best is None or len(guard) < len(best[1])):
                    best = own, guard
        return best

    def _used(self, rule: ForeignRule) -> tuple[str, ...] | None:
        """Return the rules that lead from one side to the other, in either direction."""
        sides = (rule.source, rule.target)
        one = Rule(
            *(identity(*sides), *sides, (rule.ranks,), rule.where),
            *((), (), max(map(size, sides)), False, ()),
        )
        for source, target in usable(*sides):
            derivation = self._smaller.reach(one, source, target, _BUDGET)
            if derivation is not None:
                used = dict.fromkeys(use.rule for chain in derivation for use in chain)
                return tuple(name for name in used if name not in language.commutative())
        return None


def match_all(
    foreign: Sequence[ForeignRule], file: RuleFile, *, progress: Progress
) -> list[Judgement]:
    """Return the verdict on each foreign rule."""
    judge = Judge(file)
    judged = []
    for position, rule in enumerate(foreign):
        progress("match", position, len(foreign))
        judged.append(judge.match(rule))
    return judged


def _said(own: Rule) -> tuple[str, tuple[str, ...]]:
    """Return what a rule says, and on which numbers beside the reals."""
    return own.equation, tuple(word for word in own.domain if word in domain.EXACT)


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
        typing = typed(rule.source, rule.target, rule.ranks, rule.where)
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


def _derived_from_laws(rule: ForeignRule) -> tuple[Terms, Proof] | None:
    """Return a derivation from the laws that shows the rule at all shapes that it allows.

    With the terms of the source at which it begins.
    """
    for values, types in _types(rule, _PROOFS):
        candidate = candidate_at(rule.source, rule.target, values, types, "")
        source, target, shapes = candidate.source, candidate.target, candidate.types
        proof = prove.prove(candidate)
        if proof is None:
            return None
        ranks = candidate.ranks
        try:
            lifted = lift.lift(source, target, proof, ranks, types=shapes)
            check.replay(lifted.source, lifted.target, lifted.ranks, rule.where, lifted.proof)
        except check.CheckError:
            continue
        one = (lifted.source, lifted.target)
        if subsumes(one, (rule.source, rule.target), values=True):
            return source, proof
    return None


def _types(rule: ForeignRule, count: int) -> Iterator[tuple[Mapping[str, Value], Any]]:
    rng = np.random.default_rng(zlib.crc32(str(rule).encode()))
    yield from sample_types(rule.source, rule.target, rule.ranks, rule.where, rng, count)
