"""The generator of rules: enumerated spaces in, a rule file out.

The stages are those of TASO (Jia et al., sections 2.3 to 2.5), in this order: graphs are enumerated
and paired by fingerprint, pairs are pruned, candidates are tested in floating point and proved.
Proofs then say how far a rule reaches: it is lifted to all shapes and parameters that they allow,
with a guard where they need one. Everything is limited by counts, never by the clock, so the same
spaces and laws give the same file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.cache.sources import stamp
from soapstone.ir.term import parse, size, subterms
from soapstone.rules.candidates import EFFORT, Draft, decide
from soapstone.rules.merge import Collection
from soapstone.rules.proving import derive
from soapstone.rules.reach import other_values, settled
from soapstone.rules.stages import Stages
from soapstone.rules.workers import Progress, Workers
from soapstone.search.rules import rulefile
from soapstone.search.rules.proof import Candidate
from soapstone.search.rules.rule import (
    VERSION,
    Rejected,
    RuleError,
    RuleFile,
    StatedSpace,
    laws_digest,
)
from soapstone.system import peak_bytes

if TYPE_CHECKING:
    from soapstone.rules.enumeration.space import Space

DEFAULT_SPACES = ("matrices", "images", "published", "transformer")
CHUNK = 256  # candidates of one kept stage


@dataclass
class Report:
    """What a generation did: counts of each stage, time and memory.

    `unknown`: candidates that passed every test and have no proof. `stages`: seconds of each.
    """

    graphs: int = 0
    candidates: int = 0
    after_renaming: int = 0
    after_common_subgraph: int = 0
    rules: int = 0
    proved: int = 0
    unknown: int = 0
    refuted: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    by_space: dict[str, dict[str, int]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    unproved_because: dict[str, int] = field(default_factory=dict)
    resumed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**asdict(self), "resumed": list(self.resumed)}

    def __str__(self) -> str:
        lines = [
            f"{self.graphs:,} graphs, {self.candidates:,} candidates,"
            f" {self.after_renaming:,} after renaming,"
            f" {self.after_common_subgraph:,} after common subgraphs",
            f"{self.rules:,} rules from {self.proved:,} proofs;"
            f" {self.unknown:,} unproved, {self.refuted:,} refuted",
            f"{self.seconds:.1f} s, at most {self.peak_bytes / 1e6:,.0f} MB",
        ]
        lines += [f"  {count:,} unproved: {why}" for why, count in self.unproved_because.items()]
        return "\n".join(lines)


def generate(
    spaces: Sequence[Space],
    path: str | Path | None = None,
    *,
    effort: int = EFFORT,
    processes: int = 1,
    progress: Progress | None = None,
) -> tuple[RuleFile, Report]:
    """Return the rules of some spaces, and write them to a file.

    With a path, finished stages are kept in a folder beside it until it is written, so that the
    same call goes on where it was interrupted.

    Args:
        effort: how many rounds of `prove.py` are tried.
        processes: that share the proofs; with more than one, the caller's main module must be
            importable.
        progress: `progress(stage, done, total)`.
    """
    say = progress or (lambda stage, done, total: None)
    if path is not None and not Path(path).parent.is_dir():
        raise RuleError(f"file {str(path)!r}: folder {str(Path(path).parent)!r} does not exist")
    stated = tuple(state(space) for space in spaces)
    digest = laws_digest()
    sources = stamp(__name__)  # a stage that other code has finished is none
    key = json.dumps([VERSION, sources, digest, effort, CHUNK, *map(rulefile.space_json, stated)])
    stages = Stages(_partial(path), hashlib.sha256(key.encode()).hexdigest())
    report = Report()
    start = time.perf_counter()

    with Workers(processes) as workers:
        candidates: list[Candidate] = []
        for space in spaces:
            found, counts = stages.run(
                f"candidates-{space.name}",
                lambda space=space: enumerate_candidates(space, say),  # type: ignore[misc]
                lambda result: [[candidate_json(c) for c in result[0]], result[1]],
                lambda data: ([candidate_from_json(c) for c in data[0]], data[1]),
            )
            candidates += found
            report.by_space[space.name] = counts
        collection = Collection()
        outcome = Outcome(collection)
        outcome.decide(by_generality(candidates), "proofs", stages, workers, effort, say)
        varied = stages.run(
            "values",
            lambda: other_values(collection.rules(), stated, workers, say),
            lambda found: [candidate_json(candidate) for candidate in found],
            lambda data: [candidate_from_json(item) for item in data],
        )
        outcome.decide(by_generality(varied), "proofs-values", stages, workers, effort, say)
    rules, rejected = collection.rules(), outcome.rejected
    marked = stages.run(
        "derivable",
        lambda: derive.mark_derivable(
            rules, lambda done, total: say("derivable", done, total), processes=processes
        ),
        sorted,
        set,
    )
    file = RuleFile(
        laws=digest,
        max_operators=max(space.max_operators for space in stated),
        spaces=stated,
        counts=report.by_space,
        rules=tuple(replace(rule, derivable=rule.identity in marked) for rule in rules),
        unproved=_distinct(item for item in rejected if not item.reason.startswith("refuted")),
        refuted=_distinct(item for item in rejected if item.reason.startswith("refuted")),
    )
    if path is not None:
        rulefile.save(file, path)
        stages.clear()
    _fill(report, file, outcome.proved, stages, start)
    return file, report


def enumerate_candidates(space: Space, say: Progress) -> tuple[list[Candidate], dict[str, int]]:
    """Return the candidates of a space after pruning, and the counts of graphs and candidates."""
    from soapstone.rules.enumeration import prune
    from soapstone.rules.enumeration.engine import enumerate_space
    from soapstone.rules.enumeration.exact import ExactEvaluator, has_exact
    from soapstone.rules.enumeration.real import RealEvaluator

    def said(stage: str, done: int, total: int | None) -> None:
        say(f"{space.name}: {stage}", done, total)

    evaluator = ExactEvaluator() if has_exact(space) else RealEvaluator()
    enumeration = enumerate_space(space, evaluator, said)
    found, counts = prune.candidates(enumeration, said)
    return found, {
        "graphs": int(enumeration.counts.sum()),
        "candidates": int(counts.initial),
        "after_renaming": int(counts.after_renaming),
        "after_common_subgraph": int(counts.after_common_subgraph),
    }


def state(space: Space) -> StatedSpace:
    """Return what a space enumerates, as the rule file states it."""
    return StatedSpace(
        name=space.name,
        max_operators=space.max_operators,
        inputs=tuple((str(i.term), i.kind, tuple(i.shape)) for i in space.inputs),
        operators=tuple(
            (str(use), ", ".join(f"{' '.join(s[:-1])} -> {s[-1]}" for s in use.signatures))
            for use in space.operators
        ),
        repeated=space.repeated,
    )


def chosen_spaces(
    names: Sequence[str] | None = None,
    operators: Sequence[str] | None = None,
    max_operators: int | None = None,
) -> tuple[Space, ...]:
    """Return spaces by name, with other operators or sizes where these are given.

    With operators and no names: the spaces that have any of them, or else all.

    Raises:
        RuleError: there is no such space.
    """
    from soapstone.rules.enumeration.space import spaces
    from soapstone.rules.enumeration.transformer_space import transformer

    have = {space.name: space for space in (*spaces(), transformer())}
    for name in names or ():
        if name not in have:
            raise RuleError(f"space {name!r} found, one of {', '.join(have)} needed")
    chosen = [have[name] for name in (names or DEFAULT_SPACES) if name in have]
    if operators is not None:
        wanted = {name.rstrip("01") if name.startswith("split") else name for name in operators}
        some = [s for s in chosen if wanted & {use.symbol for use in s.operators}]
        chosen = [s.with_operators(operators) for s in (chosen if names else some or chosen)]
    if max_operators is not None:
        chosen = [space.with_max_operators(max_operators) for space in chosen]
    return tuple(chosen)


@dataclass
class Outcome:
    """What becomes of candidates: rules in a collection, and those that are none."""

    collection: Collection
    rejected: list[Rejected] = field(default_factory=list)
    proved: int = 0

    def decide(
        self,
        candidates: Sequence[Candidate],
        name: str,
        stages: Stages,
        workers: Workers,
        effort: int,
        say: Progress,
    ) -> None:
        """Decide candidates in chunks, each of which is kept when done."""
        for first in range(0, len(candidates), CHUNK):
            chunk = candidates[first : first + CHUNK]
            say("prove" if name == "proofs" else "prove other values", first, len(candidates))
            done = stages.run(
                f"{name}-{first // CHUNK:05}",
                lambda chunk=chunk: self._chunk(chunk, workers, effort),  # type: ignore[misc]
                lambda done: done,
                self._restored,
            )
            self.proved += done["proved"]
            found = [rulefile.rejected_from_json(item, "kept") for item in done["rejected"]]
            if name != "proofs":  # what was made up, and does not hold, was no candidate
                found = [item for item in found if not item.reason.startswith("refuted:")]
            self.rejected += found

    def _chunk(
        self, candidates: Sequence[Candidate], workers: Workers, effort: int
    ) -> dict[str, Any]:
        collection = self.collection
        collection.changed.clear()
        left = [candidate for candidate in candidates if not collection.note(candidate)]
        decided = workers.map(decide, left, effort)
        new = collection.include(item for item in decided if isinstance(item, Draft))
        rejected = [item for item in decided if isinstance(item, Rejected)]
        proved = len(candidates) - len(rejected)
        for rule, found in zip(new, workers.map(settled, new)):
            if isinstance(found, Rejected):
                collection.remove(rule.identity)
                rejected.append(found)
            else:
                collection.put(found)
        changed = {name: collection.get(name) for name in collection.changed}
        return {
            "proved": proved,
            "rules": [rulefile.rule_json(rule) for rule in changed.values() if rule is not None],
            "removed": [name for name, rule in changed.items() if rule is None],
            "rejected": [rulefile.rejected_json(item) for item in rejected],
        }

    def _restored(self, done: Any) -> dict[str, Any]:
        for position, item in enumerate(done["rules"]):
            self.collection.put(rulefile.rule_from_json(item, f"kept rule {position}"))
        for name in done["removed"]:
            if self.collection.get(name) is not None:
                self.collection.remove(name)
        result: dict[str, Any] = done
        return result


def by_generality(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, small ones first, and those of more variables before their instances."""

    def order(candidate: Candidate) -> tuple[int, int, int, int, str]:
        whole = candidate.source + candidate.target
        named = {term for term in subterms(whole) if not term.operands}
        constants = sum(not term.is_variable for term in named)
        most = max(size(candidate.source), size(candidate.target))
        return most, size(whole), constants - len(named), constants, str(candidate)

    return sorted(candidates, key=order)


def candidate_json(candidate: Candidate) -> list[Any]:
    """Return a candidate as JSON."""
    sides = [[str(term) for term in side] for side in (candidate.source, candidate.target)]
    types = {name: list(shape) for name, shape in candidate.types.items()}
    return [*sides, types, candidate.space]


def candidate_from_json(data: list[Any]) -> Candidate:
    """Return the candidate that JSON says."""
    source, target = (tuple(parse(text) for text in side) for side in data[:2])
    types = {name: tuple(shape) for name, shape in data[2].items()}
    return Candidate(source, target, types, data[3])


def _distinct(items: Iterator[Rejected]) -> tuple[Rejected, ...]:
    """Return rejected candidates, equal ones of several spaces as one, in order of size."""
    from soapstone.rules.algebra.canonical import identity

    found: dict[str, Rejected] = {}
    for item in items:
        key = identity(item.source, item.target)
        if key in found:
            first = found[key]
            names = tuple(dict.fromkeys((*first.spaces, *item.spaces)))
            found[key] = replace(first, spaces=names)
        else:
            found[key] = item
    return tuple(
        sorted(found.values(), key=lambda i: (size(i.source + i.target), str(i), i.reason))
    )


def _partial(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).with_name(Path(path).name + ".partial")


def _fill(report: Report, file: RuleFile, proofs: int, stages: Stages, start: float) -> None:
    for name in ("graphs", "candidates", "after_renaming", "after_common_subgraph"):
        setattr(report, name, sum(counts[name] for counts in report.by_space.values()))
    report.rules, report.proved = len(file.rules), proofs
    report.unknown, report.refuted = len(file.unproved), len(file.refuted)
    for item in file.unproved:
        report.unproved_because[item.reason] = report.unproved_because.get(item.reason, 0) + 1
    for name, seconds in stages.seconds.items():
        stage = name.rstrip("0123456789").rstrip("-")
        report.stages[stage] = report.stages.get(stage, 0.0) + seconds
    report.resumed = tuple(stages.resumed)
    earlier = sum(stages.seconds[name] for name in stages.resumed)
    report.seconds = time.perf_counter() - start + earlier
    report.peak_bytes = max(peak_bytes(), peak_bytes(children=True))
