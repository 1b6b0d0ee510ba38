"""From drafts to rules: equal ones are one, and each reaches as far as its proof allows.

Two candidates of different shapes or parameters are often one rule once lifted. What the proof
leaves at a fixed parameter value or rank is tried at the others: one parameter value is enumerated,
all are meant (Jia et al., TASO, section 2.3.1, configuration parameters).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from soapstone.ir.term import Term, Value, is_variable, size, subterms
from soapstone.search.substitution import check, language
from soapstone.search.substitution.canonical import canonical_form, identity, rename, subsumes
from soapstone.search.substitution.check import with_parameters
from soapstone.search.substitution.decide import (
    Draft,
    counterexample,
    decide,
)
from soapstone.search.substitution.equation import instances
from soapstone.search.substitution.evaluate import extents
from soapstone.search.substitution.proof import Candidate, Proof, Step
from soapstone.search.substitution.rules import Rejected, Rule, Terms, graph_text, usable
from soapstone.search.substitution.sample import sample_types
from soapstone.search.substitution.workers import Workers

Progress = Callable[[str, int, "int | None"], None]
_NAME = re.compile(r"(?<![\w.])([a-z][0-9]*)\b")
MOST_RANK = 4


def merged(drafts: Iterable[Draft], rules: Sequence[Rule] = ()) -> list[Rule]:
    """Return the rules that drafts make, added to others: no two equal, the most general only."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.identity.partition("-")[0], []).append(rule)
    for draft in sorted(map(tidy, drafts), key=lambda draft: len(draft.guard)):
        key = identity(draft.source, draft.target)
        same = found.setdefault(key, [])
        for position, rule in enumerate(same):
            joined = _joined(rule, draft)
            if joined is not None:
                same[position] = joined
                break
        else:
            if usable(draft.source, draft.target):
                name = f"{key}-{len(same)}" if same else key
                same.append(_rule(name, draft))
    return _most_general([rule for same in found.values() for rule in same])


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
            Step(
                *(step.law, step.forward, step.path),
                {name: bound(value) for name, value in step.bindings.items()},
            )
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
        *(operators, False, (draft.space,)),
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
    return Rule(
        *(rule.identity, rule.source, rule.target, tuple(ordered), rule.guard, rule.proof),
        *(rule.size, rule.derivable, spaces),
    )


def replays(rule: Rule, ranks: Mapping[str, int]) -> bool:
    """Return whether a rule's proof serves other ranks under the same guard."""
    try:
        check.replay(rule.source, rule.target, ranks, rule.guard, rule.proof)
    except check.CheckError:
        return False
    return True


def _most_general(rules: list[Rule]) -> list[Rule]:
    """Return rules without those that are another at certain parameters or of equal variables."""
    by_skeleton: dict[tuple[str, ...], list[Rule]] = {}
    for rule in rules:
        by_skeleton.setdefault(_skeleton(rule), []).append(rule)
    kept = []
    for rule in rules:
        if not any(
            other is not rule and _covers(other, rule) for other in by_skeleton[_skeleton(rule)]
        ):
            kept.append(rule)
    return sorted(kept, key=lambda rule: (rule.size, size(rule.source + rule.target), str(rule)))


def _skeleton(rule: Rule) -> tuple[str, ...]:
    """Return what an instance shares with what it is an instance of: how often each symbol is."""
    counts: list[str] = []

    def walk(term: Term) -> None:
        if term.operands:
            counts.append(term.symbol)
        for operand in term.operands:
            walk(operand)

    for term in rule.source + rule.target:
        walk(term)
    return tuple(sorted(counts))


def _covers(general: Rule, special: Rule) -> bool:
    """Return whether a rule is another with variables, constants or values put for variables."""
    if general.identity.partition("-")[0] == special.identity.partition("-")[0]:
        return False
    whole = (special.source, special.target)
    commutative = language.commutative()
    for pair in ((general.source, general.target), (general.target, general.source)):
        for bindings in instances(pair, whole, commutative):
            tensors = {n: b for n, b in bindings.items() if isinstance(b, Term)}
            if any(bound.operands for bound in tensors.values()):
                continue
            if general.guard and not _same_guard(general, special, bindings):
                continue
            if all(
                any(all(r[n] == ranks[str(b)] for n, b in tensors.items()) for r in general.ranks)
                for ranks in special.ranks
            ):
                return True
    return False


def _same_guard(general: Rule, special: Rule, bindings: Mapping[str, Term | Value]) -> bool:
    names = {name.strip("[]"): str(bound) for name, bound in bindings.items()}
    put = {_NAME.sub(lambda found: names.get(found[1], found[1]), text) for text in general.guard}
    return put <= set(special.guard)


# Other parameter values


def other_values(
    rules: Sequence[Rule], workers: Workers, effort: int, say: Progress
) -> tuple[list[Rule], list[Rejected]]:
    """Return the rules, and those that they become with other values of fixed parameters.

    The second list has what passed the tests and was not proved.
    """
    known = {rule.identity.partition("-")[0] for rule in rules}
    by_skeleton: dict[tuple[str, ...], list[Rule]] = {}
    for rule in rules:
        by_skeleton.setdefault(_skeleton(rule), []).append(rule)
    tried: dict[str, tuple[Terms, Terms, Rule]] = {}
    for rule in rules:
        similar = by_skeleton[_skeleton(rule)]
        for source, target in variants(rule):
            key = identity(source, target)
            if key in known or key in tried:
                continue
            if any(subsumes((r.source, r.target), (source, target), values=True) for r in similar):
                continue
            tried[key] = (source, target, rule)
    tasks = list(tried.values())
    found: list[Draft | Rejected | None] = []
    for first in range(0, len(tasks), 256):
        say("other values", first, len(tasks))
        found += workers.map(_varied, tasks[first : first + 256], effort)
    say("other values", len(tasks), len(tasks))
    drafts = [item for item in found if isinstance(item, Draft)]
    return merged(drafts, rules), [item for item in found if isinstance(item, Rejected)]


def variants(rule: Rule) -> Iterator[tuple[Terms, Terms]]:
    """Yield a rule's graphs with one fixed parameter changed, everywhere or in one operator."""
    forms = language.forms()
    slots: dict[tuple[str, Value], list[tuple[Term, int]]] = {}
    for term in subterms(rule.source + rule.target):
        if term.symbol not in forms or not term.operands:
            continue
        for position, name in enumerate(forms[term.symbol].form.parameters):
            value = term.parameters[position]
            if not is_variable(value) and not (isinstance(value, str) and "+" in value):
                slots.setdefault((name, value), []).append((term, position))
    for (name, value), places in slots.items():
        declared = dict.fromkeys(
            other
            for term, _ in places
            for other in forms[term.symbol].form.parameters[name]
            if other != value
        )
        groups = [{*places}] + ([{place} for place in places] if len(places) > 1 else [])
        for other in declared:
            for group in groups:
                yield (
                    tuple(_with_value(term, group, other) for term in rule.source),
                    tuple(_with_value(term, group, other) for term in rule.target),
                )


def _with_value(term: Term, places: set[tuple[Term, int]], value: Value) -> Term:
    parameters = tuple(
        value if (term, position) in places else old for position, old in enumerate(term.parameters)
    )
    operands = tuple(_with_value(operand, places, value) for operand in term.operands)
    return Term(term.symbol, parameters, operands)


def _varied(task: tuple[Terms, Terms, Rule], effort: int) -> Draft | Rejected | None:
    """Return what becomes of a variant of a rule.

    None where it does not hold, or fits only where extents are 1 that are not in the rule.
    """
    source, target, rule = task
    drawn = _draws(source, target, rule.ranks[0])
    if not drawn or _ones([t for _, t in drawn]) - _ones(
        [types for _, types in _draws(rule.source, rule.target, rule.ranks[0], rule.guard)]
    ):
        return None
    values, types = max(drawn, key=lambda each: _distinct(each[1]))
    candidate = Candidate(
        tuple(with_parameters(term, values) for term in source),
        tuple(with_parameters(term, values) for term in target),
        {str(term): shape for term, shape in types.items()},
        rule.spaces[0],
    )
    decision = decide(candidate, effort)
    if isinstance(decision, Rejected) and decision.reason.startswith("refuted:"):
        return None
    return decision


Shapes = dict[Term, tuple[int, ...]]


def _draws(
    source: Terms, target: Terms, ranks: Mapping[str, int], guard: Sequence[str] = ()
) -> list[tuple[Mapping[str, Value], Shapes]]:
    text = f"{graph_text(source)} = {graph_text(target)}"
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    return [
        (values, {term: extents(type_) for term, type_ in types.items()})
        for values, types in sample_types(source, target, ranks, guard, rng, 8)
    ]


def _ones(drawn: Sequence[Shapes]) -> set[tuple[str, int]]:
    """Return the variables and axes whose extent is always 1."""
    found: list[set[tuple[str, int]]] = [
        {
            (str(term), axis)
            for term, shape in shapes.items()
            for axis, extent in enumerate(shape)
            if extent == 1 and term.is_variable
        }
        for shapes in drawn
    ]
    return set.intersection(*found) if found else set()


def _distinct(shapes: Shapes) -> int:
    return len({extent for shape in shapes.values() for extent in shape} - {1})


# Other ranks


def other_ranks(rules: Sequence[Rule], workers: Workers, say: Progress) -> list[Rule]:
    """Return the rules with every uniform change of ranks that their proofs and tests allow."""
    found: list[Rule] = []
    for first in range(0, len(rules), 256):
        say("other ranks", first, len(rules))
        found += workers.map(_ranked, rules[first : first + 256])
    say("other ranks", len(rules), len(rules))
    return found


def _ranked(rule: Rule) -> Rule:
    ranks = list(rule.ranks)
    for start in rule.ranks:
        least = min((rank for rank in start.values() if rank), default=0)
        for by in range(1 - least, MOST_RANK):
            other = {name: rank + by if rank >= least else rank for name, rank in start.items()}
            if not by or max(other.values(), default=0) > MOST_RANK or other in ranks:
                continue
            if replays(rule, other) and not counterexample(
                rule.source, rule.target, other, rule.guard, 2
            ):
                ranks.append(other)
    return changed(rule, ranks, rule.spaces)
