"""Candidates and proofs: what the generator hands to the prover, and what is kept of a derivation.

A proof of `source = target` is, for each output, a chain of law applications that leads from the
source's term to the target's: "all substitutions are sequences of the properties" (Jia et al.,
TASO, section 2.4). It is stored with the rule and replayed by `check.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from soapstone.ir.term import Term, Value


@dataclass(frozen=True)
class Step:
    """One application of a law to the subterm at a path.

    `bindings` holds what the matched side does not determine: the variables that only the other
    side of the law has.
    """

    law: str
    forward: bool
    path: tuple[int, ...]
    bindings: Mapping[str, Term | Value] = field(default_factory=dict)

    def __str__(self) -> str:
        place = ".".join(map(str, self.path)) or "root"
        given = "".join(f", {name} = {value}" for name, value in sorted(self.bindings.items()))
        return f"{'' if self.forward else 'reverse of '}{self.law} at {place}{given}"


Chain: TypeAlias = tuple[Step, ...]
Proof: TypeAlias = tuple[Chain, ...]


def graph_text(terms: Iterable[Term]) -> str:
    """Return a graph as text, its outputs separated by `;`."""
    return "; ".join(map(str, terms))


def equation(source: Iterable[Term], target: Iterable[Term]) -> str:
    """Return a rule as it is written: `relu(relu(x)) = relu(x)`."""
    return f"{graph_text(source)} = {graph_text(target)}"


@dataclass(frozen=True)
class Candidate:
    """Two graphs that computed the same tensors: output i of one equals output i of the other.

    `types` gives the concrete shape of each variable and constant, by its text, at which they did.
    """

    source: tuple[Term, ...]
    target: tuple[Term, ...]
    types: Mapping[str, tuple[int, ...]]
    space: str

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of its variables and constants."""
        return {name: len(shape) for name, shape in self.types.items()}

    def __str__(self) -> str:
        return equation(self.source, self.target)
