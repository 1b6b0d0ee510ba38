"""Rules and rule files: proved substitutions, with the guard, the proof and the origin of each.

A substitution is a source graph, a target graph and the mapping of their outputs (Jia et al., TASO,
section 2.3.1); here output i of one is output i of the other. A rule file says in full which graphs
were enumerated, and is the only place that rules come from.
`rulefile.py` reads and writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, is_variable, subterms, words_of
from soapstone.search.rules.proof import Proof, equation

FORMAT, VERSION = "soapstone-rules", 2
SHIPPED = Path(__file__).with_name("rules.json")

Terms = tuple[Term, ...]


class RuleError(GraphError):
    """A rule or rule file that is not legal."""


@dataclass(frozen=True)
class Rule:
    """A proved substitution; it prints as mathematics.

    Attributes:
        identity: a short hash of the two graphs, whichever is first.
        source, target: the graphs, a term an output.
        ranks: the ranks of variables and constants, one mapping for each typing it is proved for.
        guard: conditions without which it does not hold.
        proof: for each output, the laws that lead from the source's term to the target's.
        domain: the numbers, beyond the reals, on which it holds (`laws/domain.py`).
        size: operators of the larger side.
        derivable: whether smaller rules reach the target from the source, and the reverse.
        spaces: the enumerated spaces that contain it.
    """

    identity: str
    source: Terms
    target: Terms
    ranks: tuple[Mapping[str, int], ...]
    guard: tuple[str, ...]
    proof: Proof
    domain: tuple[str, ...]
    size: int
    derivable: bool
    spaces: tuple[str, ...]

    @cached_property
    def directions(self) -> tuple[tuple[Terms, Terms], ...]:
        """The usable directions: what the right side speaks of, the left side determines."""
        return usable(self.source, self.target)

    @property
    def equation(self) -> str:
        """The rule as mathematics: source and target."""
        return equation(self.source, self.target)

    def __str__(self) -> str:
        lines = [f"{self.identity}  {self.equation}"]
        if self.guard:
            lines.append(f"  where {' and '.join(self.guard)}")
        lines += [f"  for {ranks_text(ranks)}" for ranks in self.ranks]
        lines.append(f"  over reals{''.join(f', {word}' for word in self.domain)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StatedSpace:
    """What was enumerated: every graph of at most so many operators over these inputs.

    `inputs`: (variable or constant, kind, shape); `operators`: (symbol with parameters, kinds of
    operands and result); `repeated`: whether both operands of an operator may be one tensor.
    """

    name: str
    max_operators: int
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    operators: tuple[tuple[str, str], ...]
    repeated: bool = False


@dataclass(frozen=True)
class Rejected:
    """A candidate that is no rule: unproved, for `reason`, or refuted, by `reason`."""

    source: Terms
    target: Terms
    reason: str
    spaces: tuple[str, ...]

    def __str__(self) -> str:
        return f"{equation(self.source, self.target)}\n  {self.reason}"


@dataclass(frozen=True)
class RuleFile:
    """A set of rules and how it came about.

    Attributes:
        laws: the digest of the laws that the proofs are made of.
        max_operators: of a graph, in any of the spaces.
        spaces: what was enumerated.
        counts: by space: graphs, candidates, those left after each pruning.
        rules: in order of size, then text.
        unproved: candidates that passed every test and have no proof: never used.
        refuted: candidates that held at one shape and fail at another.
    """

    laws: str
    max_operators: int
    spaces: tuple[StatedSpace, ...]
    counts: Mapping[str, Mapping[str, int]]
    rules: tuple[Rule, ...]
    unproved: tuple[Rejected, ...] = ()
    refuted: tuple[Rejected, ...] = ()
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for rule in self.rules:
            if rule.identity in seen:
                raise RuleError(f"rule {rule.identity}: found twice, once needed")
            seen.add(rule.identity)

    @cached_property
    def by_identity(self) -> Mapping[str, Rule]:
        """The rules by their identities."""
        return {rule.identity: rule for rule in self.rules}

    def rule(self, identity: str) -> Rule:
        """Return the rule whose identity begins so.

        Raises:
            RuleError: there is none, or several.
        """
        found = [rule for rule in self.rules if rule.identity.startswith(identity)]
        if len(found) != 1 or not identity:
            named = ", ".join(each.identity for each in found[:8]) + ", …" * (len(found) > 8)
            listed = f" ({named})" if found else ""
            raise RuleError(f"rule {identity!r}: {len(found)} rules found{listed}, one needed")
        return found[0]

    def statistics(self) -> dict[str, Any]:
        """Return the counts of rules: all, guarded, derivable, by size, symbol and space."""
        by_size: dict[str, int] = {}
        by_space: dict[str, int] = {}
        by_symbol: dict[str, int] = {}
        by_domain: dict[str, int] = {}
        for rule in self.rules:
            for word in rule.domain:
                by_domain[word] = by_domain.get(word, 0) + 1
            by_size[str(rule.size)] = by_size.get(str(rule.size), 0) + 1
            for name in rule.spaces:
                by_space[name] = by_space.get(name, 0) + 1
            for symbol in {t.symbol for t in subterms(rule.source + rule.target) if t.operands}:
                by_symbol[symbol] = by_symbol.get(symbol, 0) + 1
        return {
            "rules": len(self.rules),
            "proved": sum(len(rule.proof) == len(rule.source) for rule in self.rules),
            "guarded": sum(bool(rule.guard) for rule in self.rules),
            "derivable": sum(rule.derivable for rule in self.rules),
            "both_directions": sum(len(rule.directions) == 2 for rule in self.rules),
            "unknown": len(self.unproved),
            "refuted": len(self.refuted),
            "by_size": dict(sorted(by_size.items(), key=lambda item: int(item[0]))),
            "by_space": dict(sorted(by_space.items())),
            "by_domain": dict(sorted(by_domain.items())),
            "by_symbol": dict(sorted(by_symbol.items())),
        }


def ranks_text(ranks: Mapping[str, int]) -> str:
    """Return ranks as text: `x, y of rank 2; s of rank 0`."""
    by_rank: dict[int, list[str]] = {}
    for name, rank in ranks.items():
        by_rank.setdefault(rank, []).append(name)
    return "; ".join(f"{', '.join(names)} of rank {rank}" for rank, names in by_rank.items())


def free(terms: Iterable[Term]) -> set[str]:
    """Return what a graph speaks of: tensor variables, and parameter variables in brackets."""
    found = set()
    for term in subterms(terms):
        if term.is_variable:
            found.add(term.symbol)
        for value in term.parameters:
            found.update(f"[{word}]" for word in words_of(value) if is_variable(word))
    return found


def usable(source: Terms, target: Terms) -> tuple[tuple[Terms, Terms], ...]:
    """Return the directions in which the left side determines what the right side speaks of."""
    one, other = free(source), free(target)
    pairs = ((source, target, other <= one), (target, source, one <= other))
    return tuple((left, right) for left, right, fits in pairs if fits)


def leaves(terms: Iterable[Term]) -> tuple[str, ...]:
    """Return the variables and constants of a graph as text, by first occurrence."""
    return tuple(str(term) for term in subterms(terms) if not term.operands)


def laws_digest() -> str:
    """Return a digest of all laws: another one means that proofs may no longer replay."""
    from soapstone.search.rules import language

    texts = [f"{law.name}: {law} {' / '.join(law.ranks)}" for law in language.laws()]
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
