"""A collection of rules: equal ones are one, and none is an instance of another.

Two candidates of different shapes or parameters are often one rule once lifted (Jia et al., TASO,
section 2.5, prunes candidates in the same way). What is an instance of a rule that is already
there needs no proof of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from soapstone.ir.term import Term, Value, size
from soapstone.rules.algebra.canonical import canonical_form, identity, rename
from soapstone.rules.algebra.equation import instances
from soapstone.rules.candidates import Draft
from soapstone.rules.laws import domain
from soapstone.rules.proving import check
from soapstone.search.rules import language
from soapstone.search.rules.proof import Candidate, Proof
from soapstone.search.rules.rule import Rule, Terms, usable

_NAME = re.compile(r"(?<![\w.])([a-z][0-9]*)\b")
Key = tuple[str, ...]


class Collection:
    """Rules by identity and by the operators that they have.

    `changed` has the identities of what was added or changed since it was last emptied.
    """

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._by_skeleton: dict[Key, dict[str, None]] = {}
        self.changed: dict[str, None] = {}

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace that of its identity."""
        self._rules[rule.identity] = rule
        self._by_skeleton.setdefault(skeleton(rule.source + rule.target), {})[rule.identity] = None
        self.changed[rule.identity] = None

    def remove(self, name: str) -> None:
        """Remove a rule."""
        rule = self._rules.pop(name)
        del self._by_skeleton[skeleton(rule.source + rule.target)][name]
        self.changed[name] = None

    def get(self, name: str) -> Rule | None:
        """Return the rule of an identity."""
        return self._rules.get(name)

    def note(self, candidate: Candidate) -> bool:
        """Return whether a candidate is an instance of a rule, and note its space there."""
        sides = (candidate.source, candidate.target)
        for name in self._by_skeleton.get(skeleton(candidate.source + candidate.target), ()):
            rule = self._rules[name]
            if not rule.guard and covers(rule, *sides, (candidate.ranks,), ()):
                if candidate.space not in rule.spaces:
                    self.put(changed(rule, rule.ranks, (*rule.spaces, candidate.space)))
                return True
        return False

    def include(self, drafts: Iterable[Draft]) -> list[Rule]:
        """Add what drafts show; return the rules that are new."""
        new: dict[str, None] = {}
        for draft in sorted(map(tidy, drafts), key=lambda draft: len(draft.guard)):
            if not usable(draft.source, draft.target):
                continue
            key = identity(draft.source, draft.target)
            names = [key]
            while names[-1] in self._rules:
                names.append(f"{key}-{len(names)}")
            for name in names[:-1]:
                found = _joined(self._rules[name], draft)
                if found is not None:
                    self.put(found)
                    break
            else:
                self.put(_rule(names[-1], draft))
                new[names[-1]] = None
        return [self._rules[name] for name in new]

    def rules(self) -> list[Rule]:
        """Return the most general rules, in order of size and text."""
        kept = [rule for rule in self._rules.values() if not self._is_special(rule)]
        return sorted(
            kept, key=lambda rule: (rule.size, size(rule.source + rule.target), str(rule))
        )

    def _is_special(self, rule: Rule) -> bool:
        key = rule.identity.partition("-")[0]
        return any(
            name.partition("-")[0] != key
            and covers(self._rules[name], rule.source, rule.target, rule.ranks, rule.guard)
            for name in self._by_skeleton[skeleton(rule.source + rule.target)]
        )


def tidy(draft: Draft) -> Draft:
    """Return a draft with canonical names of variables; operands stay where the proof has them."""
    types = {name: (rank,) for name, rank in draft.ranks.items()}
    forms = [
        canonical_form(draft.source, draft.target, types),
        canonical_form(draft.target, draft.source, types),
    ]
    names = min(forms, key=str).names

    def words(text: str) -> str:
        return _NAME.sub(lambda found: names.get(found[1], found[1]), text)

    def bound(value: Term | Value) -> Term | Value:
        if isinstance(value, Term):
            return rename((value,), names)[0]
        return words(value) if isinstance(value, str) else value

    proof: Proof = tuple(
        tuple(
            replace(step, bindings={name: bound(value) for name, value in step.bindings.items()})
            for step in chain
        )
        for chain in draft.proof
    )
    ranks = {words(name): rank for name, rank in draft.ranks.items()}
    return Draft(
        source=rename(draft.source, names),
        target=rename(draft.target, names),
        ranks=dict(sorted(ranks.items())),
        guard=tuple(sorted(map(words, draft.guard))),
        proof=proof,
        space=draft.space,
    )


def _rule(name: str, draft: Draft) -> Rule:
    operators = max(size(draft.source), size(draft.target))
    return Rule(
        *(name, draft.source, draft.target, (draft.ranks,), draft.guard, draft.proof),
        *(domain.of_proof(draft.source, draft.proof), operators, False, (draft.space,)),
    )


def _joined(rule: Rule, draft: Draft) -> Rule | None:
    """Return the rule with a draft's typing, if its own proof and guard serve that too."""
    spaces = tuple(dict.fromkeys((*rule.spaces, draft.space)))
    if not set(rule.guard) <= set(draft.guard):
        return None
    if draft.ranks in rule.ranks:
        return changed(rule, rule.ranks, spaces)
    if set(draft.ranks) != set(rule.ranks[0]) or not replays(rule, draft.ranks):
        return None
    return changed(rule, (*rule.ranks, draft.ranks), spaces)


def changed(rule: Rule, ranks: Iterable[Mapping[str, int]], spaces: tuple[str, ...]) -> Rule:
    """Return a rule with other typings, in order, and spaces."""
    ordered = sorted(({**each} for each in ranks), key=lambda each: sorted(each.items()))
    return replace(rule, ranks=tuple(ordered), spaces=spaces)


def replays(rule: Rule, ranks: Mapping[str, int]) -> bool:
    """Return whether a rule's proof serves other ranks under the same guard."""
    try:
        check.replay(rule.source, rule.target, ranks, rule.guard, rule.proof)
    except check.CheckError:
        return False
    return True


def skeleton(terms: Iterable[Term]) -> Key:
    """Return what an instance shares with what it is an instance of: its operators, sorted."""
    counts: list[str] = []

    def walk(term: Term) -> None:
        if term.operands:
            counts.append(term.symbol)
        for operand in term.operands:
            walk(operand)

    for term in terms:
        walk(term)
    return tuple(sorted(counts))


def covers(
    general: Rule,
    source: Terms,
    target: Terms,
    typings: Iterable[Mapping[str, int]],
    guard: Iterable[str],
) -> bool:
    """Return whether two graphs are a rule with variables, constants or values for its variables.

    For each of their typings, and under a guard that says what the rule's does.
    """
    commutative = language.commutative()
    for pair in ((general.source, general.target), (general.target, general.source)):
        for bindings in instances(pair, (source, target), commutative):
            tensors = {n: b for n, b in bindings.items() if isinstance(b, Term)}
            if any(bound.operands for bound in tensors.values()):
                continue
            if general.guard and not _said(general.guard, bindings) <= set(guard):
                continue
            if all(
                any(all(r[n] == ranks[str(b)] for n, b in tensors.items()) for r in general.ranks)
                for ranks in typings
            ):
                return True
    return False


def _said(guard: Iterable[str], bindings: Mapping[str, Term | Value]) -> set[str]:
    names = {name.strip("[]"): str(bound) for name, bound in bindings.items()}
    return {_NAME.sub(lambda found: names.get(found[1], found[1]), text) for text in guard}
