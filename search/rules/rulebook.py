"""The rules of a rule file as the optimiser uses them: directed, and ready to be matched.

Each rule is a match of its left side anywhere, and a way to make its right side. Rules are kept by
the operators that they ask for, so that a graph is only searched for those it may contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias

from soapstone.ir.term import SPLITS, Term, subterms
from soapstone.search.rules import rulefile
from soapstone.search.rules.infer import parameter_kinds
from soapstone.search.rules.rule import Rule, RuleFile, Terms, free

_OPEN_SIZE = 2
Floats: TypeAlias = "Literal['reals', 'zeros', 'infinities']"
FLOATS = ("reals", "zeros", "infinities")


@dataclass(frozen=True, eq=False)
class Directed:
    """A rule in one direction.

    Attributes:
        name: the rule's identity, with `'` where it is used from right to left.
        left: what is matched, an output a term.
        right: what takes its place.
    """

    name: str
    rule: Rule
    left: Terms
    right: Terms

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The operators that the left side asks for."""
        return _symbols(self.left)

    @cached_property
    def unsaid(self) -> frozenset[str]:
        """What only the right side speaks of."""
        return frozenset(free(self.right) - free(self.left))

    @cached_property
    def open(self) -> tuple[str, ...]:
        """The sizes of kernels that only the right side speaks of: a match proposes them."""
        if not self.unsaid:
            return ()
        kinds = parameter_kinds(self.right)
        return tuple(n for n, kind in kinds.items() if kind == "size" and f"[{n}]" in self.unsaid)

    @cached_property
    def kinds(self) -> str:
        """The kinds of NumPy's types (`f`, `i`, `u`, `b`) on which the rule holds."""
        words = (("integers", "iu"), ("booleans", "b"))
        return "f" + "".join(kinds for word, kinds in words if word in self.rule.domain)

    def keeps(self, floats: Floats) -> bool:
        """Return whether the rule, in this direction, may be used on such tensors."""
        way = "<-" if self.name.endswith("'") else "->"
        return floats == "reals" or f"{floats} {way}" in self.rule.domain

    @property
    def matchable(self) -> bool:
        """Whether the left side says what is made: a variable alone would match anything."""
        return all(term.operands for term in self.left) and len(self.open) == len(self.unsaid)

    @cached_property
    def only_adds(self) -> bool:
        """Whether the right side has all operators of the left, and more, or pads with constants.

        What such a rule makes, others only undo: `add(x, y)` as `sub(add(x, z), sub(z, y))`.
        """
        left, right = (Counter(_operators(side)) for side in (self.left, self.right))
        more = right.total() > left.total()
        pads = bool(_constants(self.right) - _constants(self.left))
        return more and (left <= right or pads)

    def __str__(self) -> str:
        sides = ("; ".join(map(str, side)) for side in (self.left, self.right))
        return " -> ".join(sides)


@dataclass(frozen=True)
class Rulebook:
    """Directed rules, in order."""

    rules: tuple[Directed, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Directed]:
        """The directed rules by their names."""
        return {rule.name: rule for rule in self.rules}

    def without_constants(self) -> Rulebook:
        """Return the rules that bring in no constants."""
        return Rulebook(tuple(rule for rule in self.rules if not _constants(rule.right)))


def rulebook(
    file: RuleFile,
    max_size: int | None = None,
    floats: Floats = "zeros",
) -> Rulebook:
    """Return the rules of a file, each in every direction in which it is usable.

    A direction that only adds operators is left out: `add(x, y)` as `sub(add(x, z), z)`. One that
    leaves the size of a kernel open is used up to two operators, as what begins a merge: a kernel
    enlarged, or joined by an identity.

    Args:
        max_size: the most operators of a rule's larger side.
        floats: what tensors hold: `zeros`, finite numbers; `infinities`, those and NaN too. A rule
            that makes NaN where there was none is used only over `reals`, which are taken to be
            such that both sides are defined: `div(ones, rsqrt(x))` as `mul(x, rsqrt(x))`.
    """
    found: list[Directed] = []
    for rule in file.rules:
        if (max_size is not None and rule.size > max_size) or rule.derivable:
            continue
        for directed in directions(rule):
            useful = rule.size <= _OPEN_SIZE if directed.open else not directed.only_adds
            if useful and directed.keeps(floats):
                found.append(directed)
    return Rulebook(tuple(found))


@lru_cache(maxsize=4)
def shipped(max_size: int | None = None, floats: Floats = "zeros") -> Rulebook:
    """Return the rules that the package carries, as `rulebook` does; made once for each choice."""
    return rulebook(rulefile.load(), max_size, floats)


def directions(rule: Rule) -> tuple[Directed, ...]:
    """Return a rule in each direction in which it can be matched."""
    both = (
        Directed(rule.identity, rule, rule.source, rule.target),
        Directed(rule.identity + "'", rule, rule.target, rule.source),
    )
    return tuple(directed for directed in both if directed.matchable)


def _operators(terms: Iterable[Term]) -> list[str]:
    """Return the operators of a graph; the two parts of a split are one."""
    made = {
        ("split" if t.symbol in SPLITS else t.symbol, t.parameters, t.operands)
        for t in subterms(terms)
        if t.operands
    }
    return [symbol for symbol, _, _ in made]


def _constants(terms: Iterable[Term]) -> set[str]:
    return {t.symbol for t in subterms(terms) if not t.operands and not t.is_variable}


def _symbols(terms: Iterable[Term]) -> frozenset[str]:
    return frozenset(t.symbol for t in subterms(terms) if t.operands or not t.is_variable)
