"""The canonical form of a rule: what is the same rule in other names is the same text.

Two rules are one where they differ in the names of variables, the order of the operands of
commutative operators or the order of outputs (Jia et al., TASO, section 2.5, "input tensor
renaming"). The canonical form is the least of these spellings: outputs and operands are ordered by
their text without names, and where that leaves a choice, by the numbers that variables get by first
occurrence. Every choice that leads to the least text is followed, so the form is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any, TypeAlias, TypeVar

from soapstone.ir.term import Term, Value, is_variable
from soapstone.search.rules import language
from soapstone.search.rules.proof import Candidate, equation

Terms: TypeAlias = tuple[Term, ...]
Sides: TypeAlias = tuple[Terms, Terms]
_TENSORS = "xyzwuvtrq"
_PARAMETERS = "abcdefghijklmnops"
# Names met so far, in order: those of tensors, those of parameters.
_Names: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
_Tokens: TypeAlias = tuple[int, ...]
_State = TypeVar("_State", bound=tuple[Any, ...])  # the last entry follows from the others


@dataclass(frozen=True)
class Canonical:
    """A rule in canonical form, and how it comes from the rule that was given.

    Attributes:
        names: the new name of each variable, of tensors and of parameters.
        order: output i is output `order[i]` of the rule given.
    """

    source: Terms
    target: Terms
    names: Mapping[str, str]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return equation(self.source, self.target)


def canonical_form(
    source: Terms, target: Terms, types: Mapping[str, object] | None = None
) -> Canonical:
    """Return the canonical form of a rule; the direction is kept.

    Where a symmetry of the rule leaves open which variable gets which name, `types` (by variable)
    decides, so that equal rules with equal types also get equal types.
    """
    patterns = [(skeleton(a), skeleton(b)) for a, b in zip(source, target, strict=True)]
    states: list[tuple[tuple[int, ...], _Names, Terms]] = [((), ((), ()), ())]
    for wanted in sorted(patterns):
        candidates: list[tuple[_Tokens, tuple[tuple[int, ...], _Names, Terms]]] = []
        for order, names, terms in states:
            tried: set[tuple[Term, Term]] = set()
            for i, pattern in enumerate(patterns):
                if pattern == wanted and i not in order and (source[i], target[i]) not in tried:
                    tried.add((source[i], target[i]))
                    tokens, ways = _walk(source[i], names)
                    candidates += [(tokens, ((*order, i), n, (*terms, t))) for n, t in ways]
        states = _least(candidates)
    for position in range(len(target)):
        candidates = []
        for order, names, terms in states:
            tokens, ways = _walk(target[order[position]], names)
            candidates += [(tokens, (order, n, (*terms, t))) for n, t in ways]
        states = _least(candidates)

    def preference(state: tuple[tuple[int, ...], _Names, Terms]) -> tuple[object, ...]:
        order, names, _ = state
        return [str((types or {}).get(name)) for name in names[0]], names, order

    order, names, terms = min(states, key=preference)
    new = _new_names(names, terms)
    renamed = rename(terms, new)
    return Canonical(renamed[: len(source)], renamed[len(source) :], new, order)


def canonical(source: Terms, target: Terms) -> Sides:
    """Return both sides in canonical form; the direction is kept."""
    form = canonical_form(source, target)
    return form.source, form.target


def canonical_candidate(candidate: Candidate) -> Candidate:
    """Return a candidate in canonical form, its types under the new names."""
    form = canonical_form(candidate.source, candidate.target, candidate.types)
    types = {form.names.get(name, name): shape for name, shape in candidate.types.items()}
    ordered = {name: types[name] for name in sorted(types)}
    return Candidate(form.source, form.target, ordered, candidate.space)


def identity(source: Terms, target: Terms) -> str:
    """Return 16 hexadecimal digits that name a rule in either direction."""
    least = min(equation(*canonical(source, target)), equation(*canonical(target, source)))
    return hashlib.sha256(least.encode()).hexdigest()[:16]


def rename(terms: Iterable[Term], names: Mapping[str, str]) -> Terms:
    """Return terms with variables of tensors and parameters renamed; others stay."""

    def value(value: Value) -> Value:
        if not isinstance(value, str):
            return value
        return "+".join(sorted(names.get(word, word) for word in value.split("+")))

    made: dict[Term, Term] = {}

    def walk(term: Term) -> Term:
        if term not in made:
            symbol = names.get(term.symbol, term.symbol) if term.is_variable else term.symbol
            made[term] = Term(
                symbol,
                tuple(value(found) for found in term.parameters),
                tuple(walk(operand) for operand in term.operands),
            )
        return made[term]

    return tuple(walk(term) for term in terms)


def subsumes(general: Sides, special: Sides, *, values: bool = False) -> bool:
    """Return whether the special rule is the general one with variables put for its variables.

    Commutative operands, the order of outputs and the direction are free. With `values`, a variable
    of a parameter may also become a value.
    """
    if len(general[0]) != len(special[0]):
        return False
    return any(
        True
        for source, target in (special, special[::-1])
        for _ in _cover(general, (source, target), frozenset(), {}, values)
    )


def _cover(
    general: Sides, special: Sides, used: frozenset[int], bound: dict[str, Value], values: bool
) -> Iterator[dict[str, Value]]:
    position = len(used)
    if position == len(general[0]):
        yield bound
        return
    for i in range(len(special[0])):
        if i not in used:
            for first in _renamings(general[0][position], special[0][i], bound, values):
                for both in _renamings(general[1][position], special[1][i], first, values):
                    yield from _cover(general, special, used | {i}, both, values)


def _renamings(
    general: Term, special: Term, bound: dict[str, Value], values: bool
) -> Iterator[dict[str, Value]]:
    """Yield the extensions of a renaming that make a term another."""
    if general.is_variable:
        if special.is_variable and bound.get(general.symbol, special.symbol) == special.symbol:
            yield {**bound, general.symbol: special.symbol}
        return
    if (
        general.symbol != special.symbol
        or len(general.operands) != len(special.operands)
        or len(general.parameters) != len(special.parameters)
    ):
        return
    starts = [bound]
    for wanted, found in zip(general.parameters, special.parameters):
        starts = [way for start in starts for way in _values(wanted, found, start, values)]
    orders = [special.operands]
    if len(set(special.operands)) == 2 and special.symbol in _commutative():
        orders.append(special.operands[::-1])
    for order in orders:
        ways = starts
        for wanted_operand, operand in zip(general.operands, order):
            ways = [w for way in ways for w in _renamings(wanted_operand, operand, way, values)]
        yield from ways


def _values(
    general: Value, special: Value, bound: dict[str, Value], values: bool
) -> Iterator[dict[str, Value]]:
    """Yield the extensions of a renaming that make a parameter another; words of a sum freely."""
    if isinstance(general, int) or isinstance(special, int):
        if is_variable(general) and values and bound.get(str(general), special) == special:
            yield {**bound, str(general): special}
        elif general == special:
            yield bound
        return
    wanted = general.split("+")
    for words in set(permutations(special.split("+"))) if "+" in general else [(special,)]:
        extended = dict(bound)
        if len(words) == len(wanted) and all(
            extended.setdefault(name, word) == word
            if is_variable(name) and (values or is_variable(word))
            else name == word
            for name, word in zip(wanted, words)
        ):
            yield extended


@lru_cache(maxsize=1)
def _commutative() -> frozenset[str]:
    return language.commutative()


@lru_cache(maxsize=1 << 16)
def skeleton(term: Term) -> str:
    """Return the text of a term without names, commutative operands in order."""
    if term.is_variable:
        return "_"
    parameters = map(_shown, term.parameters)
    operands = [skeleton(operand) for operand in term.operands]
    if term.symbol in _commutative():
        operands.sort()
    return f"{term.symbol}[{','.join(parameters)}]({','.join(operands)})"


def _shown(value: Value) -> str:
    """Return a parameter's text without names."""
    return "+".join("?" if is_variable(word) else word for word in str(value).split("+"))


def _least(states: Sequence[tuple[_Tokens, _State]]) -> list[_State]:
    """Return the states of the least tokens, one for each assignment of names."""
    least = min(tokens for tokens, _ in states)
    return list({state[:-1]: state for tokens, state in states if tokens == least}.values())


def _walk(term: Term, names: _Names) -> tuple[_Tokens, list[tuple[_Names, Term]]]:
    """Return the least numbers that a term's variables get, and every way to get them."""
    tensors, parameters = names
    if term.is_variable:
        if term.symbol in tensors:
            return (tensors.index(term.symbol),), [(names, term)]
        return (len(tensors),), [(((*tensors, term.symbol), parameters), term)]
    settled = _settled(term)
    if settled is not None:
        ordered, leaves = settled
        numbers_of = {name: number for number, name in enumerate(tensors)}
        numbered = tuple(numbers_of.setdefault(name, len(numbers_of)) for name in leaves)
        return numbered, [((tuple(numbers_of), parameters), ordered)]
    starts: list[tuple[_Tokens, tuple[_Names, Term]]] = []
    for known in _parameter_orders(term, parameters):
        numbers = [
            sorted(known.index(word) for word in value.split("+") if is_variable(word))
            for value in term.parameters
            if isinstance(value, str)
        ]
        tokens = tuple(number for group in numbers for number in group)
        starts.append((tokens, ((tensors, known), term)))
    least = min(tokens for tokens, _ in starts)
    orders = [term.operands]
    if len(set(term.operands)) == 2 and term.symbol in _commutative():
        first, second = term.operands
        if skeleton(first) == skeleton(second):
            orders.append((second, first))
        elif skeleton(second) < skeleton(first):
            orders = [(second, first)]
    found: list[tuple[_Tokens, tuple[_Names, Term]]] = []
    for _, (start, _) in (entry for entry in starts if entry[0] == least):
        for order in orders:
            ways: list[tuple[_Tokens, tuple[_Names, Terms]]] = [(least, (start, ()))]
            for operand in order:
                longer: list[tuple[_Tokens, tuple[_Names, Terms]]] = []
                for tokens, (state, done) in ways:
                    more, ends = _walk(operand, state)
                    longer += [(tokens + more, (n, (*done, t))) for n, t in ends]
                smallest = min(tokens for tokens, _ in longer)
                ways = [(smallest, state) for state in _least(longer)]
            found += [
                (tokens, (state, Term(term.symbol, term.parameters, done)))
                for tokens, (state, done) in ways
            ]
    return min(tokens for tokens, _ in found), _least(found)


@lru_cache(maxsize=1 << 16)
def _settled(term: Term) -> tuple[Term, tuple[str, ...]] | None:
    """Return a term with operands in order and its variables, None if its text leaves a choice."""
    if not term.operands:
        return term, (term.symbol,) if term.is_variable else ()
    if any(isinstance(value, str) and "?" in _shown(value) for value in term.parameters):
        return None
    operands = term.operands
    if term.symbol in _commutative() and operands[0] != operands[1]:
        first, second = map(skeleton, operands)
        if first == second:
            return None
        operands = operands[::-1] if second < first else operands
    parts = [_settled(operand) for operand in operands]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    ordered = Term(term.symbol, term.parameters, tuple(part for part, _ in found))
    return ordered, tuple(name for _, names in found for name in names)


def _parameter_orders(term: Term, known: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names of parameters after a term's own; words of a sum in any order."""
    orders = [known]
    for value in term.parameters:
        words = value.split("+") if isinstance(value, str) else []
        extended = []
        for order in orders:
            new = dict.fromkeys(word for word in words if is_variable(word) and word not in order)
            extended += [(*order, *way) for way in permutations(new)]
        orders = extended
    return iter(dict.fromkeys(orders))


def _new_names(names: _Names, terms: Terms) -> dict[str, str]:
    """Return a new name for each variable: x, y, z, ...; parameters by the forms' own letters."""
    letters: dict[str, str] = {}
    for term in Term("", (), terms).subterms():
        for wanted, value in zip(_letters(term.symbol), term.parameters):
            if is_variable(value):
                letters.setdefault(str(value), wanted)
    new: dict[str, str] = {}
    for number, name in enumerate(names[0]):
        turn, place = divmod(number, len(_TENSORS))
        new[name] = _TENSORS[place] + (str(turn) if turn else "")
    counts: dict[str, int] = {}
    for name in names[1]:
        letter = letters.get(name, "a")
        counts[letter] = counts.get(letter, -1) + 1
        new[name] = letter + (str(counts[letter]) if counts[letter] else "")
    return new


def _letters(symbol: str) -> Iterator[str]:
    """Yield a letter for each parameter of a form: its name's, unless that is a tensor's."""
    declared = language.forms().get(symbol)
    if declared is not None:
        for name in declared.form.parameters:
            yield name[0] if name[0] in _PARAMETERS else "a"
