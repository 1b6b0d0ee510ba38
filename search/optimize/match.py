"""Matching of rules in graphs (MetaFlow, section 3; TASO, section 2.6).

A variable matches any value, a symbol any value that can be read as one of its applications, and
commutative operands match in either order. The rule's own conditions decide what remains: its
guard, and the typing of both sides with the split trees of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, product

import numpy as np

from soapstone.ir.ops.forms import size_text
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import SPLITS, Term, Value, instantiate_value, is_variable, parse, subterms
from soapstone.search.optimize.pool import Items, Leaf, Pool
from soapstone.search.rules import language
from soapstone.search.rules.infer import with_parameters
from soapstone.search.rules.rule import Terms
from soapstone.search.rules.rulebook import Directed, Rulebook
from soapstone.search.rules.sample import applies, completed
from soapstone.search.rules.shapes import Type, concrete, tensor_type

Seen = set[tuple[tuple[int, ...], tuple[int, ...]]]  # roots, and values of variables
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of leaves, by name
Given = tuple[tuple[str, Value], ...]  # the values of a rule's parameter variables


@dataclass(frozen=True)
class Places:
    """A graph as the matcher reads it: values by the symbols they can be read as; readers."""

    values: Mapping[str, Sequence[int]]
    readers: Mapping[int, Sequence[int]]

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that occur."""
        return frozenset(self.values)


@dataclass(frozen=True)
class Match:
    """A match of a rule in a graph.

    Attributes:
        roots: the value of each of the rule's outputs.
        values: of tensor variables.
        parameters: of parameter variables.
        types: of the leaves of both sides, including constants of the right side.
    """

    rule: Directed
    roots: tuple[int, ...]
    values: Mapping[str, int]
    parameters: Mapping[str, Value]
    types: Mapping[Term, Type]


@lru_cache(maxsize=1 << 12)
def parse_leaf(name: str) -> Term:
    """Return the variable or constant that a name stands for."""
    return parse(name)


@lru_cache(maxsize=1 << 14)
def depth(term: Term) -> int:
    """Return the nesting depth of a term's operators."""
    return 1 + max(map(depth, term.operands)) if term.operands else 0


@lru_cache(maxsize=1 << 14)
def _leaf_names(term: Term) -> tuple[str, ...]:
    return tuple(str(part) for part in subterms([term]) if not part.operands)


_is_variable = lru_cache(maxsize=1 << 12)(is_variable)


@lru_cache(maxsize=1 << 6)
def _kind(dtype: str) -> str:
    return np.dtype(dtype).kind


@lru_cache(maxsize=1)
def _commutative() -> frozenset[str]:
    return language.commutative()


def places(pool: Pool, outputs: Sequence[int]) -> Places:
    """Return the places of a graph.

    What weights alone determine has no place, since it costs nothing, unless rules name it.
    """
    by_symbol: dict[str, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for value in pool.order(outputs):
        for operand in pool.operands(value):
            readers.setdefault(operand, []).append(value)
        if pool.fixed[value]:
            constant = pool.term_of(value)
            if constant is not None:
                by_symbol.setdefault(constant.symbol, []).append(value)
            continue
        for reading in pool.readings(value):
            known = by_symbol.setdefault(reading.symbol, [])
            if not known or known[-1] != value:
                known.append(value)
    return Places(by_symbol, readers)


class Matcher:
    """Finds matches of rules in the graphs of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def matches(self, rule: Directed, where: Places, seen: Seen | None = None) -> Iterator[Match]:
        """Yield all matches of a rule that are not in `seen`, and add them to it.

        where: the places of the graph that is searched.
        """
        seen = set() if seen is None else seen
        turns = sorted(range(len(rule.left)), key=lambda output: -depth(rule.left[output]))
        left = [rule.left[output] for output in turns]  # what says most is looked for first
        for made, values, parameters in self._outputs(left, 0, (), {}, {}, where):
            roots = tuple(root for _, root in sorted(zip(turns, made)))
            key = (roots, tuple(values[name] for name in sorted(values)))
            if key in seen or not self._connected(rule.left, values):
                continue
            seen.add(key)
            for given in self._proposals(rule, roots, values, parameters, where):
                match = self._checked(rule, roots, values, given)
                if match is not None:
                    yield match

    def every(self, book: Rulebook, where: Places) -> Iterator[tuple[Directed, list[Match]]]:
        """Yield the rules that match somewhere, each with all its matches."""
        for rule in book.rules:
            if rule.symbols <= where.symbols and (matches := list(self.matches(rule, where))):
                yield rule, matches

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
            if not self.apart(roots, value):
                continue
            for bound, named in self._at(term, value, values, parameters):
                yield from self._outputs(left, position + 1, (*roots, value), bound, named, where)

    def _near(self, term: Term, values: Mapping[str, int], where: Places) -> Sequence[int]:
        """Return values of a term's symbol that share operands with the values bound so far.

        Slices of one value count as shared; see `_connected`.
        """
        wave: set[int] = set()
        for value in values.values():
            wave |= self.siblings(value)
        near: set[int] = set()
        for _ in range(depth(term)):
            wave = {reader for value in wave for reader in where.readers.get(value, ())}
            near |= wave
        return [value for value in where.values.get(term.symbol, ()) if value in near]

    def _at(
        self, term: Term, value: int, values: dict[str, int], parameters: dict[str, Value]
    ) -> Iterator[tuple[dict[str, int], dict[str, Value]]]:
        """Yield the bindings under which a term is equal to a value."""
        if not term.operands and _is_variable(term.symbol):
            known = values.get(term.symbol)
            if known is None:
                yield {**values, term.symbol: value}, parameters
            elif known == value:
                yield values, parameters
            return
        if not term.operands:
            for constant in self.constants(value):
                if constant.symbol == term.symbol:
                    named = _bind(term.parameters, constant.parameters, parameters)
                    if named is not None and values.get(str(term), value) == value:
                        yield {**values, str(term): value}, named
            return
        for given, operands in self.applications(value, term.symbol):
            named = _bind(term.parameters, given, parameters)
            if named is None:
                continue
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
        self,
        rule: Directed,
        roots: Sequence[int],
        values: Mapping[str, int],
        named: dict[str, Value],
        where: Places,
    ) -> Iterator[dict[str, Value]]:
        """Yield parameters with values for those of the right side alone, which are kernel sizes.

        A size is the smallest that covers two kernels reading one value of the match, so that the
        enlarged kernel may merge with an existing one (MetaFlow, Figures 1 and 7). None is proposed
        where a bias would become channels of an image.
        """
        if not rule.open:
            yield named
            return
        pool, made = self._pool, {self._pool.specs[root] for root in roots}
        if any(pool.fixed[value] and pool.specs[value] in made for value in values.values()):
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
        sizes: set[tuple[int, ...]] = set()
        for reader in where.readers.get(value, ()):
            for symbol in rule.symbols:
                for _, (image, *others) in self.applications(reader, symbol):
                    if image == value and others:
                        sizes.add(self._pool.specs[others[0]].shape[2:])
        return sorted(size for size in sizes if len(size) == 2)

    def _connected(self, left: Sequence[Term], values: Mapping[str, int]) -> bool:
        """Return whether the outputs of a match are connected through shared operands.

        Slices of one value count as shared. A rule that joins unrelated values would match every
        pair, and its gain, if any, is found by a rule that sees more of the graph.
        """
        groups = []
        for term in left:
            used = {values[name] for name in _leaf_names(term)}
            groups.append(set().union(*map(self.siblings, used)))
        first, rest = groups[0], groups[1:]
        while rest:
            near = next((group for group in rest if group & first), None)
            if near is None:
                return False
            rest.remove(near)
            first |= near
        return True

    def applications(
        self, value: int, symbol: str
    ) -> Iterable[tuple[tuple[Value, ...], tuple[int, ...]]]:
        """Return the ways to read a value as a symbol's application: parameters and operands."""
        operands = self._pool.operands(value)
        readings = self._pool.readings(value)
        return [(each.parameters, operands) for each in readings if each.symbol == symbol]

    def apart(self, roots: Sequence[int], value: int) -> bool:
        """Return whether a value may be an output of a match beside others."""
        return value not in roots

    def constants(self, value: int) -> Iterable[Term]:
        """Return the constants of the language that equal a value."""
        constant = self._pool.term_of(value)
        return () if constant is None else (constant,)

    def siblings(self, value: int) -> set[int]:
        """Return the values that are made together with a value, including itself."""
        maker = self._pool.makers[value]
        return {value} if isinstance(maker, Leaf) else set(maker.outputs)

    def as_left(self, match: Match, left: tuple[int, ...]) -> Match | None:
        """Return a match if it is its rule's left side; slices may have other extents."""
        return match if left == match.roots else None

    def _checked(
        self,
        rule: Directed,
        roots: tuple[int, ...],
        values: Mapping[str, int],
        parameters: Mapping[str, Value],
    ) -> Match | None:
        """Return the match if the rule is proved for its shapes and parameters."""
        specs = self._pool.specs
        if not all(_kind(specs[value].dtype) in rule.kinds for value in (*roots, *values.values())):
            return None
        given = tuple(sorted(parameters.items()))
        shapes = tuple((name, specs[value].shape) for name, value in values.items())
        types = _leaves(rule, given, shapes)
        if types is None:
            return None
        match = Match(rule, roots, values, parameters, types)
        left = build(self._pool, bound(rule, given)[0], match)
        return None if left is None else self.as_left(match, left)


def build(pool: Pool, terms: Sequence[Term], match: Match) -> tuple[int, ...] | None:
    """Return terms without parameter variables as values; None if they are ill-typed."""
    made: dict[Term, tuple[int, Type]] = {}
    dtype = pool.specs[match.roots[0]].dtype
    for term in subterms(terms):
        value = _built(pool, term, made, match, dtype)
        if value is None:
            return None
        made[term] = value
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
    sizes: tuple[int, ...] = ()
    if term.symbol in SPLITS:
        axis = int(term.parameters[0])
        whole = operands[0][1]
        tree = whole.trees[axis]
        if tree is None or not isinstance(tree.at, int):
            return None
        sizes = (tree.at, _shape(whole)[axis] - tree.at)
    inputs = tuple(value for value, _ in operands)
    specs = tuple(pool.specs[value] for value in inputs)
    items = _attributes(term.symbol, term.parameters, specs, sizes)
    if items is None:
        return None
    if term.symbol == "enlarge" and type_or_none.shape == operands[0][1].shape:
        return operands[0]  # by the law enlarge-same
    declared = language.forms()[term.symbol]
    value = pool.apply_normal(declared.spec.name, items, inputs)[declared.form.output]
    return (value, type_or_none) if pool.specs[value].shape == type_or_none.shape else None


@lru_cache(maxsize=1 << 16)
def _attributes(
    symbol: str,
    parameters: tuple[Value, ...],
    specs: tuple[TensorSpec, ...],
    sizes: tuple[int, ...],
) -> Items | None:
    """Return the attributes of a term's operator on operands; None if it takes none like them.

    sizes: of the parts of a split.
    """
    declared = language.forms()[symbol]
    given = declared.form.attributes(parameters, *specs, **({"sizes": sizes} if sizes else {}))
    return None if given is None else tuple(sorted(declared.spec.normalise(given).items()))


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
    wanted: Sequence[Value], values: Sequence[Value], parameters: dict[str, Value]
) -> dict[str, Value] | None:
    """Return parameters extended so that the wanted values equal the given ones, or None."""
    result = parameters
    for pattern, value in zip(wanted, values):
        if _is_variable(pattern):
            known = result.get(str(pattern))
            if known is None:
                result = {**result, str(pattern): value}
            elif known != value:
                return None
        elif pattern != value and instantiate_value(pattern, result) != value:
            return None
    return result


@lru_cache(maxsize=1 << 16)
def _leaves(rule: Directed, given: Given, shapes: Shapes) -> Mapping[Term, Type] | None:
    """Return the types of all leaves if a rule may be used at these parameters and shapes."""
    one, parameters = rule.rule, dict(given)
    _, right = bound(rule, given)
    types = {
        with_parameters(parse_leaf(name), parameters): tensor_type(shape) for name, shape in shapes
    }
    missing = any(not term.operands and term not in types for term in subterms(right))
    for ranks in one.ranks:
        named = {
            with_parameters(parse_leaf(name), parameters): rank for name, rank in ranks.items()
        }
        if any(named[leaf] != type_.rank for leaf, type_ in types.items()):
            continue
        given_rule = (one.source, one.target, ranks, one.guard, parameters)
        whole = completed(*given_rule, types) if missing else dict(types)
        if whole is not None and applies(*given_rule, whole):
            return whole
    return None
