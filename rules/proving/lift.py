"""From a proof at one shape to the rule it shows: explanation-based generalisation (section 2.4).

A derivation found for given parameters is replayed on terms whose parameters are all open, and
whose variables are all distinct; each law closes only what it must. So a convolution of stride 1
becomes one of stride `s` wherever no law of the proof asks for stride 1, and what the proof needs
of shapes beyond the typing of both sides becomes the rule's guard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from soapstone.ir.term import (
    Term,
    Value,
    instantiate,
    instantiate_value,
    is_variable,
    parse,
    variables,
)
from soapstone.rules.proving import check
from soapstone.rules.proving.check import CheckError, Laws
from soapstone.rules.proving.unify import General, Renaming, Unlike
from soapstone.search.rules import language
from soapstone.search.rules.infer import Ranks, Terms, with_parameters
from soapstone.search.rules.proof import Proof
from soapstone.search.rules.sample import applies
from soapstone.search.rules.shapes import infer, tensor_type

Shapes = Mapping[str, tuple[int, ...]]
_TENSORS = "xyzwvutr"
_CLOSING = re.compile(r"[a-z][0-9]* = ([0-9]+|[a-z_]{2,})\Z")
_VARIABLE = re.compile(r"(?<![\w(.])([a-z][0-9]*)\b")


@dataclass(frozen=True)
class Lifted:
    """A rule with its proof, what it needs beyond typing, and the ranks it is proved for."""

    source: Terms
    target: Terms
    proof: Proof
    guard: tuple[str, ...]
    ranks: Mapping[str, int]


def lift(
    source: Terms,
    target: Terms,
    proof: Proof,
    ranks: Ranks,
    *,
    types: Shapes | None = None,
    laws: Laws | None = None,
) -> Lifted:
    """Return the most general rule that a proof shows, with the guard that it needs.

    Args:
        source: one term an output.
        target: likewise.
        proof: a derivation that is right at the shapes where it was found.
        ranks: of every variable and constant, by its text.
        types: the shapes where it was found; given these, the rule applies there.
        laws: those of the proof; all declared ones if not given.

    Raises:
        CheckError: the proof is wrong, or shows nothing that can be said.
    """
    laws = language.laws_by_name() if laws is None else laws
    reason: CheckError | None = None
    generals: list[General] = []
    for apart in (True, False):
        try:
            general = General(source, target, proof, laws, apart)
        except (Unlike, CheckError) as error:
            reason = reason or CheckError(str(error))
            continue
        if not apart or general.as_usable():
            generals.append(general)
    for broadcast in (False, True) if types is not None else (False,):
        for general in generals:
            for fixed in general.choices():
                try:
                    return _Draft(general, fixed, ranks, types, laws).lifted(broadcast)
                except CheckError as error:
                    reason = reason or error
    assert reason is not None
    raise reason


class _Draft:
    """A general derivation with some parameters closed, and all names chosen."""

    def __init__(
        self,
        general: General,
        fixed: frozenset[str],
        ranks: Ranks,
        types: Shapes | None,
        laws: Laws,
    ) -> None:
        self.general = general
        self.types = types
        self.laws = laws
        self.parameters: dict[str, str] = {}  # open ones, by their names in the rule
        self.names = self._named(fixed)
        self.source, self.target = (
            tuple(instantiate(term, self.names) for term in terms)
            for terms in (general.source, general.target)
        )
        self.leaves = dict(_aligned((*self.source, *self.target), general.special))
        self.ranks = {str(leaf): ranks[str(special)] for leaf, special in self.leaves.items()}

    def _named(self, fixed: frozenset[str]) -> Renaming:
        """Return what open variables and parameters are called or closed to."""
        origin = self.general.unifier.origin
        whole = (*self.general.source, *self.general.target)
        result: Renaming = {}
        used: set[str] = set()
        tensors = variables(whole)
        for name in tensors:
            special = str(origin[name])
            new = special if special not in used else _unused(_TENSORS, {*used, *_words(origin)})
            used.add(new)
            result[name] = Term(new)
        for name, kind in self.general.kinds.items():
            if name in fixed:
                result[name] = origin[name]
            else:
                new = _unused(language.LETTERS.get(kind, "m"), used)
                used.add(new)
                result[name] = new
                self.parameters[new] = name
        same = {str(origin[name]): result[name] for name in reversed(tensors)}
        for name, special_ in origin.items():  # what only the steps have
            if name not in result:
                result[name] = (
                    same.get(str(special_), special_) if isinstance(special_, Term) else special_
                )
        return result

    def lifted(self, broadcast: bool) -> Lifted:
        """Return the rule with its guard, which says what is 1 if that may be `broadcast`.

        Raises:
            CheckError: its proof is not right in general, or it does not apply where it was found.
        """
        proof = tuple(
            tuple(replace(step, bindings=self._bindings(given)) for step, given, _ in steps)
            for steps in self.general.steps
        )
        axes = tuple(self._axes())
        if broadcast:
            lifted = self._broadcast(proof, axes)
        else:
            lifted = self._guarded(proof, axes)
            if not self._applies(lifted):
                raise CheckError("the rule does not apply at the shapes where it was found")
        check.replay(
            *(lifted.source, lifted.target, lifted.ranks, lifted.guard, proof), laws=self.laws
        )
        return lifted

    def _broadcast(self, proof: Proof, axes: tuple[str, ...]) -> Lifted:
        """Return the rule with those extents said to be 1 that must be, to be broadcast.

        Raises:
            CheckError: it does not apply where it was found even so.
        """
        ones = tuple(self._ones())
        if not ones:
            raise CheckError("the rule does not apply at the shapes where it was found")
        lifted = self._guarded(proof, (*axes, *ones))
        if not self._applies(lifted):
            raise CheckError("the rule does not apply at the shapes where it was found")
        for one in ones:
            fewer = tuple(other for other in ones if other != one)
            try:
                simpler = self._guarded(proof, (*axes, *fewer))
            except CheckError:
                continue
            if self._applies(simpler) and len(simpler.guard) < len(lifted.guard):
                ones, lifted = fewer, simpler
        return lifted

    def _axes(self) -> Iterator[str]:
        """Yield what laws say of axes that are variables here, such as `a >= b+1`."""
        for steps in self.general.steps:
            for step, _, bound in steps:
                for text in self.laws[step.law].where:
                    names = set(_VARIABLE.findall(text))
                    if "(" in text or "." in text or not names <= set(bound):
                        continue
                    values = {name: str(self._final(bound[name])) for name in names}
                    opened = (self.parameters.get(value, "") for value in values.values())
                    if "axis" in map(self.general.kinds.get, opened):
                        yield _VARIABLE.sub(partial(_lookup, values), text)

    def _bindings(self, given: Renaming) -> Renaming:
        return {name: self._final(value) for name, value in given.items()}

    def _final(self, value: Term | Value) -> Term | Value:
        """Return what a term or parameter of the open derivation is in the rule."""
        if isinstance(value, Term):
            return instantiate(self.general.unifier.resolved(value), self.names)
        found = instantiate_value(self.general.unifier.resolved_value(value), self.names)
        if found is None:
            raise CheckError(f"{value!r} is no number")
        return found

    def _guarded(self, proof: Proof, seeds: tuple[str, ...]) -> Lifted:
        """Return the rule with these conditions and those that its proof needs besides."""
        rule = (self.source, self.target, self.ranks, proof)
        needs = check.missing_by_axes(*rule, guard=seeds, laws=self.laws)
        if len(set(needs)) > 1:
            raise CheckError("what is needed depends on the axis")
        missing = needs[0]
        if missing:
            missing = check.missing_guards(*rule, guard=seeds, laws=self.laws)
        for text in missing:
            height, width = text.replace(".w =", ".h ="), text.replace(".h =", ".w =")
            if _CLOSING.match(text) or (height != width and {height, width} <= set(missing)):
                raise CheckError(f"{text} is needed, so it is no variable")
        return Lifted(self.source, self.target, proof, (*seeds, *missing), self.ranks)

    def _applies(self, lifted: Lifted) -> bool:
        """Return whether the rule applies where the proof was found; if that is known."""
        if self.types is None:
            return True
        values = self._values(self.types)
        if values is None:
            return False
        types = {
            with_parameters(leaf, values): tensor_type(self.types[str(special)])
            for leaf, special in self.leaves.items()
        }
        return applies(lifted.source, lifted.target, lifted.ranks, lifted.guard, values, types)

    def _values(self, shapes: Shapes) -> dict[str, Value] | None:
        """Return what the open parameters were; as a number of groups, `depthwise` is channels."""
        origin = self.general.unifier.origin
        values: dict[str, Value] = {}
        types = {parse(text): tensor_type(shape) for text, shape in shapes.items()}
        for name, open_ in self.parameters.items():
            value = origin[open_]
            assert not isinstance(value, Term)
            if value == "depthwise":
                channels = {
                    None if (type_ := infer(special.operands[0], types)) is None else type_.shape[1]
                    for term, special in _pairs((*self.source, *self.target), self.general.special)
                    if name in term.parameters
                }
                if len(channels) != 1:
                    return None
                (found,) = channels
                if not isinstance(found, int):
                    return None
                value = found
            values[name] = value
        return values

    def _ones(self) -> Iterator[str]:
        """Yield that extents are 1 where they were, so that they may be broadcast."""
        assert self.types is not None
        for leaf, special in self.leaves.items():
            shape = self.types[str(special)]
            if leaf.is_variable or language.constants()[leaf.symbol].rank is None:
                for axis in range(-len(shape), 0):
                    if shape[axis] == 1:
                        yield f"dim({leaf},{axis}) = 1"


def _pairs(general: Terms, special: Terms) -> Iterator[tuple[Term, Term]]:
    """Yield the corresponding operators and leaves of terms and of instances of them."""
    for one, other in zip(general, special):
        yield one, other
        yield from _pairs(one.operands, other.operands)


def _aligned(general: Terms, special: Terms) -> Iterator[tuple[Term, Term]]:
    return ((one, other) for one, other in _pairs(general, special) if not one.operands)


def _words(origin: Mapping[str, Term | Value]) -> set[str]:
    return {str(value) for value in origin.values() if is_variable(str(value))}


def _lookup(values: Mapping[str, str], match: re.Match[str]) -> str:
    return values[match.group(1)]


def _unused(letters: str, used: Iterable[str]) -> str:
    taken = set(used)
    for count in range(1000):
        for letter in letters:
            name = f"{letter}{count}" if count else letter
            if name not in taken:
                return name
    raise AssertionError(letters)
