"""The verifier: every rule proved again, every derivation given to Z3, every stored proof replayed.

Rules follow from operator properties in first-order logic (Jia et al., TASO, section 2.4). `verify`
searches for a derivation from scratch and has Z3 check that the laws, as the stored derivation uses
them, entail the rule; `check_file` replays stored derivations and needs neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from soapstone.cache.sources import stamp
from soapstone.rules.algebra.canonical import identity
from soapstone.rules.candidates import EFFORT, counterexample
from soapstone.rules.laws import domain
from soapstone.rules.proving import check, entail, prove
from soapstone.rules.stages import resuming
from soapstone.rules.workers import Progress, Workers
from soapstone.search.rules import language, rulefile
from soapstone.search.rules.proof import Candidate
from soapstone.search.rules.rule import Rule, RuleError, RuleFile, laws_digest
from soapstone.search.rules.sample import candidate_at, drawn

TIMEOUT_S = 5.0  # of Z3, for one rule


@dataclass
class Verification:
    """What became of the rules of a file: a rule that is neither proved nor refuted is unknown."""

    rules: int = 0
    proved: int = 0
    refuted: int = 0
    unknown: int = 0
    seconds: float = 0.0
    because: dict[str, str] = field(default_factory=dict)  # by rule, of those that are not proved

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{name}: {why}" for name, why in self.because.items()]
        return "\n".join(
            [
                *lines,
                f"{self.rules:,} rules: {self.proved:,} proved, {self.refuted:,} refuted,"
                f" {self.unknown:,} unknown; {self.seconds:.1f} s",
            ]
        )


def verify(
    file: RuleFile,
    *,
    processes: int = 1,
    progress: Progress | None = None,
) -> Verification:
    """Return what becomes of each rule, proved from scratch and entailed according to Z3."""
    start = time.perf_counter()
    report = Verification(rules=len(file.rules))
    with _resuming(verify_rule, file) as results, Workers(processes) as workers:
        found = workers.each(
            *(verify_rule, file.rules, EFFORT, TIMEOUT_S),
            stage="verify",
            progress=progress,
            results=results,
        )
        for rule, (verdict, why) in zip(file.rules, found):
            report.proved += verdict == "proved"
            report.refuted += verdict == "refuted"
            report.unknown += verdict == "unknown"
            if verdict != "proved":
                report.because[rule.identity] = f"{verdict}: {why}"
    report.seconds = time.perf_counter() - start
    return report


def verify_rule(rule: Rule, effort: int, timeout_s: float) -> tuple[str, str]:
    """Return `proved`, `refuted` or `unknown`, and why."""
    for ranks in rule.ranks:
        found = counterexample(rule.source, rule.target, ranks, rule.guard)
        if found is not None:
            return "refuted", str(found)
        try:
            check.replay(rule.source, rule.target, ranks, rule.guard, rule.proof)
        except check.CheckError as error:
            return "unknown", f"the stored proof does not replay: {error}"
    candidate = sample(rule)
    if candidate is None:
        return "unknown", "no shapes found at which both sides are typed"
    if prove.prove(candidate, effort=effort) is None:
        return "unknown", f"no derivation found at {dict(candidate.types)}"
    verdict = entail.entailed(rule.source, rule.target, rule.proof, timeout_s)
    return verdict, f"Z3 answers {verdict}"


def sample(rule: Rule) -> Candidate | None:
    """Return a rule at some shapes and parameters."""
    sides, space = (rule.source, rule.target), rule.spaces[0] if rule.spaces else ""
    for values, types in drawn(*sides, rule.ranks[0], rule.guard, 1):
        return candidate_at(*sides, values, types, space)
    return None


@dataclass
class Checked:
    """What replaying the proofs of a file found: `failed` has the error of each rule that fails."""

    rules: int = 0
    proofs: int = 0
    steps: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    laws_unchanged: bool = True
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"rule {name}: {why}" for name, why in self.failed.items()]
        if not self.laws_unchanged:
            lines.append("the laws have changed since the file was written")
        passed = self.rules - len(self.failed)
        lines.append(
            f"{passed:,} of {self.rules:,} rules pass, {self.proofs:,} proofs of {self.steps:,}"
            f" steps; {self.seconds:.1f} s"
        )
        return "\n".join(lines)


def check_file(file: RuleFile, *, processes: int = 1, progress: Progress | None = None) -> Checked:
    """Return which rules of a file have proofs that replay."""
    start = time.perf_counter()
    report = Checked(rules=len(file.rules), laws_unchanged=file.laws == laws_digest())
    with _resuming(_failure, file) as results, Workers(processes) as workers:
        used = {step.law for rule in file.rules for chain in rule.proof for step in chain}
        laws = [law for law in language.laws() if law.name in used]
        domains = dict(zip((law.name for law in laws), workers.map(domain.of_law, laws)))
        failures = workers.each(
            _failure, file.rules, stage="check", progress=progress, results=results
        )
        for rule, failure in zip(file.rules, failures):
            failure = failure or _overclaimed(rule, domains)
            if failure is not None:
                report.failed[rule.identity] = failure
            report.proofs += len(rule.ranks)
            report.steps += sum(map(len, rule.proof))
    report.seconds = time.perf_counter() - start
    return report


def _resuming(function: Callable[..., Any], file: RuleFile) -> AbstractContextManager[list[Any]]:
    """Return the results of a function for the first rules of a file, as `resuming` does."""
    rules = [json.dumps(rulefile.rule_json(rule)) for rule in file.rules]
    return resuming(function.__name__, stamp(__name__), *rules)


def trusted(path: str | Path) -> RuleFile:
    """Return the rules of somebody's file, each of whose proofs replays.

    A rule that the shipped file has, word for word, is not replayed again.

    Raises:
        RuleError: a field is wrong, or a proof fails; names the rule and the step.
    """
    file = rulefile.load(path)
    shipped = rulefile.load().by_identity
    own = tuple(rule for rule in file.rules if shipped.get(rule.identity) != rule)
    report = check_file(replace(file, rules=own))
    for name, failure in report.failed.items():
        raise RuleError(f"file {str(path)!r}: rule {name}: not proved: {failure}")
    return file


def _failure(rule: Rule) -> str | None:
    """Return why a rule's proof does not replay for one of its typings, None where it does."""
    found = identity(rule.source, rule.target)
    if rule.identity.partition("-")[0] != found:
        return f"identity {rule.identity} found, {found} needed for {rule.equation}"
    try:
        check.replay(rule.source, rule.target, rule.ranks, rule.guard, rule.proof)
    except check.CheckError as error:
        return str(error)
    return None


def _overclaimed(rule: Rule, domains: Mapping[str, frozenset[str]]) -> str | None:
    """Return what a rule says of its domain beyond what the laws of its proof show."""
    known = domain.of_proof(rule.source, rule.proof, domains)
    if set(rule.domain) <= set(known):
        return None
    said, shown = (", ".join(("reals", *words)) for words in (rule.domain, known))
    return f"domain {said} found, {shown} is all that its proof shows"


def derivation(rule: Rule) -> str:
    """Return a rule's proof as text: a term a line, with the law that leads to the next."""
    lines = []
    for output, (chain, term, end) in enumerate(zip(rule.proof, rule.source, rule.target)):
        lines.append(f"output {output}:" if len(rule.source) > 1 else "proof:")
        lines.append(f"    {term}")
        for step, instance in zip(chain, prove.replay(term, chain)):
            term = term.replaced(instance.path, instance.after)
            lines.append(f"  = {term}  by {step}")
        if not chain:
            lines.append(f"  = {end}  the same term")
    return "\n".join(lines)
