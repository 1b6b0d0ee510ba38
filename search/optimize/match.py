"""Matches of rules in graphs (MetaFlow, section 3; TASO, section 2.6).

A variable matches any value, a symbol any value that can be said so, commutative operands match
either way round. Of what a match leaves open the rule's own conditions decide: its guard, and the
typing of both sides with the split trees that values have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement, product

from soapstone.ir.ops.forms import size_text
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import SPLITS, Term, Value, instantiate_value, is_variable, parse, subterms
from soapstone.search.optimize.pool import Leaf, Pool
from soapstone.search.optimize.rulebook import Directed
from soapstone.search.substitution.algebra import language
from soapstone.search.substitution.algebra.infer import with_parameters
from soapstone.search.substitution.algebra.sample import applies, completed
from soapstone.search.substitution.algebra.shapes import Type, concrete, plain
from soapstone.search.substitution.rules import Terms

Given = tuple[tuple[str, Value], ...]  # the values of a rule's parameter variables


@dataclass(frozen=True)
class Places:
    """A graph as the matcher looks at it: values by the symbols they can be said with; readers."""

    values: Mapping[str, Sequence[int]]
    readers: Mapping[int, Sequence[int]]

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(self.values)


@dataclass(frozen=True)
class Match:
    """A rule found in a graph.

    Attributes:
        roots: the value of each of the rule's outputs.
        values: of tensor variables.
        parameters: of parameter variables.
        types: of the leaves of both sides; those of the right side's constants are found here.
    """

    rule: Directed
    roots: tuple[int, ...]
    values: Mapping[str, int]
    parameters: Mapping[str, Value]
    types: Mapping[Term, Type]


@lru_cache(maxsize=1 << 12)
def parse_leaf(name: str) -> Term:
    """Return a variable or constant from its text."""
    return parse(name)


@lru_cache(maxsize=1 << 14)
def _depth(term: Term) -> int:
    return 1 + max(map(_depth, term.operands)) if term.operands else 0


_is_variable = lru_cache(maxsize=1 << 12)(is_variable)


@lru_cache(maxsize=1)
def _commutative() -> frozenset[str]:
    return language.commutative()


def places(pool: Pool, outputs: Sequence[int]) -> Places:
    """Return the places of a graph; what weights alone determine is none, for it costs nothing."""
    found: dict[str, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for value in pool.order(outputs):
        for operand in pool.operands(value):
            readers.setdefault(operand, []).append(value)
        if pool.fixed[value]:
            continue
        for reading in pool.readings(value):
            known = found.setdefault(reading.symbol, [])
            if not known or known[-1] != value:
                known.append(value)
    return Places(found, readers)


class Matcher:
    """Finds rules in the graphs of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def matches(self, rule: Directed, where: Places) -> Iterator[Match]:
        """Yield all matches of a rule; `where` is of the graph that is searched."""
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for roots, values, parameters in self._outputs(rule.left, 0, (), {}, {}, where):
            key = (roots, tuple(values[name] for name in sorted(values)))
            if key in seen or not self._connected(rule.left, values):
                continue
            seen.add(key)
            for given in self._proposals(rule, values, parameters, where):
                found = self._checked(rule, roots, values, given)
                if found is not None:
                    yield found

    def _outputs(
        self,
        left: Sequence[Term],
        position: int,
        roots: tuple[int, ...],
        values: dict[str, int],
        parameters: dict[str, Value],
        where: Places,
    ) -> Iterator[tuple[tuple[int, ...], dict[str, int], dict[str, Value]]]:
        if position == len(left):
            yield roots, values, parameters
            return
        term = left[position]
        for value in (
            self._near(term, values, where) if roots else where.values.get(term.symbol, ())
        ):
            if value in roots:
                continue
            for bound, named in self._at(term, value, values, parameters):
                yield from self._outputs(left, position + 1, (*roots, value), bound, named, where)

    def _near(self, term: Term, values: Mapping[str, int], where: Places) -> Sequence[int]:
        """Return values of a term's symbol that share operands with what is bound so far.

        Parts of one value count as shared; see `_connected`.
        """
        wave: set[int] = set()
        for value in values.values():
            maker = self._pool.makers[value]
            wave.update((value,) if isinstance(maker, Leaf) else maker.outputs)
        found: set[int] = set()
        for _ in range(_depth(term)):
            wave = {reader for value in wave for reader in where.readers.get(value, ())}
            found |= wave
        return [value for value in where.values.get(term.symbol, ()) if value in found]

    def _at(
        self, term: Term, value: int, values: dict[str, int], parameters: dict[str, Value]
    ) -> Iterator[tuple[dict[str, int], dict[str, Value]]]:
        """Yield the bindings under which a term is a value."""
        if term.is_variable:
            known = values.get(term.symbol)
            if known is None:
                yield {**values, term.symbol: value}, parameters
            elif known == value:
                yield values, parameters
            return
        if not term.operands:
            constant = self._pool.term_of(value)
            if constant is not None and constant.symbol == term.symbol:
                named = _bind(term.parameters, constant.parameters, parameters)
                if named is not None and values.get(str(term), value) == value:
                    yield {**values, str(term): value}, named
            return
        for reading in self._pool.readings(value):
            if reading.symbol != term.symbol:
                continue
            named = _bind(term.parameters, reading.parameters, parameters)
            if named is None:
                continue
            operands = self._pool.operands(value)
            yield from self._operands(term.operands, operands, values, named)
            if len(operands) == 2 and operands[0] != operands[1] and term.symbol in _commutative():
                yield from self._operands(term.operands, operands[::-1], values, named)

    def _operands(
        self,
        terms: Sequence[Term],
        operands: Sequence[int],
        values: dict[str, int],
        parameters: dict[str, Value],
    ) -> Iterator[tuple[dict[str, int], dict[str, Value]]]:
        if not terms:
            yield values, parameters
            return
        for bound, named in self._at(terms[0], operands[0], values, parameters):
            yield from self._operands(terms[1:], operands[1:], bound, named)

    def _proposals(
        self, rule: Directed, values: Mapping[str, int], named: dict[str, Value], where: Places
    ) -> Iterator[dict[str, Value]]:
        """Yield parameters with values for those that only the right side has: kernels' sizes.

        A size is the least that covers two kernels that read one value of the match, so that what
        is enlarged to it may merge with what is there (MetaFlow, Figures 1 and 7).
        """
        if not rule.open:
            yield named
            return
        sizes: dict[str, None] = {}
        for value in dict.fromkeys(values.values()):
            kernels = self._kernels(rule, value, where)
            for one, other in combinations_with_replacement(kernels, 2):
                sizes[size_text(tuple(map(max, one, other)))] = None
        for chosen in product(sizes, repeat=len(rule.open)):
            yield {**named, **dict(zip(rule.open, chosen))}

    def _kernels(self, rule: Directed, value: int, where: Places) -> list[tuple[int, ...]]:
        """Return the sizes of the kernels that the rule's operators apply to a value."""
        found: set[tuple[int, ...]] = set()
        for reader in where.readers.get(value, ()):
            image, *others = self._pool.operands(reader)
            said = {reading.symbol for reading in self._pool.readings(reader)}
            if image == value and others and not said.isdisjoint(rule.symbols):
                found.add(self._pool.specs[others[0]].shape[2:])
        return sorted(size for size in found if len(size) == 2)

    def _connected(self, left: Sequence[Term], values: Mapping[str, int]) -> bool:
        """Return whether all outputs of a match hang together by what they are made of.

        Operands are shared, or are parts of one value. Rules that join what has nothing in common
        match every pair there is, and their gain, if any, comes with a rule that sees more.
        """
        groups = []
        for term in left:
            used = {values[str(t)] for t in subterms([term]) if not t.operands}
            groups.append(set(map(self._whole, used)))
        first, rest = groups[0], groups[1:]
        while rest:
            near = next((group for group in rest if group & first), None)
            if near is None:
                return False
            rest.remove(near)
            first |= near
        return True

    def _whole(self, value: int) -> int | tuple[int, ...]:
        """Return what siblings have in common: the outputs of one operator."""
        maker = self._pool.makers[value]
        return value if isinstance(maker, Leaf) or len(maker.outputs) == 1 else maker.outputs

    def _checked(
        self,
        rule: Directed,
        roots: tuple[int, ...],
        values: Mapping[str, int],
        parameters: Mapping[str, Value],
    ) -> Match | None:
        """Return the match if the rule may be used there."""
        given = tuple(sorted(parameters.items()))
        left, right = bound(rule, given)
        types = {
            with_parameters(parse_leaf(name), parameters): plain(self._pool.specs[value].shape)
            for name, value in values.items()
        }
        match = Match(rule, roots, values, parameters, types)
        if build(self._pool, left, match) != roots:
            return None  # parts of other extents than the rule's
        every = _leaves(rule, right, given, types)
        return None if every is None else replace(match, types=every)


def build(pool: Pool, terms: Sequence[Term], match: Match) -> tuple[int, ...] | None:
    """Return terms without parameter variables as values, None where they fit no operands."""
    made: dict[Term, tuple[int, Type]] = {}
    dtype = pool.specs[match.roots[0]].dtype
    for term in subterms(terms):
        found = _built(pool, term, made, match, dtype)
        if found is None:
            return None
        made[term] = found
    return tuple(made[term][0] for term in terms)


def _built(
    pool: Pool, term: Term, made: Mapping[Term, tuple[int, Type]], match: Match, dtype: str
) -> tuple[int, Type] | None:
    if not term.operands:
        type_ = match.types[term]
        value = match.values.get(str(term))
        if value is None:
            value = pool.constant(term, TensorSpec(_shape(type_), dtype))
        return None if value is None else (value, type_)
    operands = [made[operand] for operand in term.operands]
    type_or_none = concrete(term.symbol, term.parameters, tuple(type_ for _, type_ in operands))
    if type_or_none is None:
        return None
    declared = language.forms()[term.symbol]
    specs = [pool.specs[value] for value, _ in operands]
    sizes = {}
    if term.symbol in SPLITS:
        axis = int(term.parameters[0])
        whole = operands[0][1]
        tree = whole.trees[axis]
        if tree is None or not isinstance(tree.at, int):
            return None
        sizes["sizes"] = (tree.at, _shape(whole)[axis] - tree.at)
    attributes = declared.form.attributes(term.parameters, *specs, **sizes)
    if attributes is None:
        return None
    inputs = [value for value, _ in operands]
    if term.symbol == "enlarge" and type_or_none.shape == operands[0][1].shape:
        return operands[0]  # by the law enlarge-same
    value = pool.apply(declared.spec.name, inputs, attributes)[declared.form.output]
    return (value, type_or_none) if pool.specs[value].shape == type_or_none.shape else None


def _shape(type_: Type) -> tuple[int, ...]:
    return tuple(extent for extent in type_.shape if isinstance(extent, int))


@lru_cache(maxsize=1 << 14)
def bound(rule: Directed, parameters: Given) -> tuple[Terms, Terms]:
    """Return both sides of a rule with its parameter variables replaced."""
    given = dict(parameters)
    return (
        tuple(with_parameters(term, given) for term in rule.left),
        tuple(with_parameters(term, given) for term in rule.right),
    )


def _bind(
    wanted: Sequence[Value], found: Sequence[Value], parameters: dict[str, Value]
) -> dict[str, Value] | None:
    """Return parameters extended by those that make the wanted ones the found ones, or None."""
    result = parameters
    for pattern, value in zip(wanted, found):
        if _is_variable(pattern):
            known = result.get(str(pattern))
            if known is None:
                result = {**result, str(pattern): value}
            elif known != value:
                return None
        elif pattern != value and instantiate_value(pattern, result) != value:
            return None
    return result


def _leaves(
    rule: Directed, right: Sequence[Term], given: Given, types: Mapping[Term, Type]
) -> dict[Term, Type] | None:
    """Return types of all leaves if a rule may be used at these parameters and shapes."""
    one, parameters = rule.rule, dict(given)
    missing = any(not term.operands and term not in types for term in subterms(right))
    for ranks in one.ranks:
        named = {
            with_parameters(parse_leaf(name), parameters): rank for name, rank in ranks.items()
        }
        if any(named[leaf] != type_.rank for leaf, type_ in types.items()):
            continue
        given_rule = (one.source, one.target, ranks, one.guard, parameters)
        found = completed(*given_rule, types) if missing else dict(types)
        if found is not None and applies(*given_rule, found):
            return found
    return None
