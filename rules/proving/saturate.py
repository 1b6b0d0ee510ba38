"""Equality saturation: rewrites are applied to an e-graph until its goals are merged.

Matching is incremental: a generation matches new nodes, and nodes above classes that gained
members. Budgets count nodes and generations, never time, so that results repeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from soapstone.ir.term import Term, Value, is_variable
from soapstone.rules.proving.egraph import ILL_TYPED, TYPES, Applied, EGraph
from soapstone.rules.proving.matcher import HEADS, Bound, Rewrite
from soapstone.search.rules.condition import IllTyped, holds, read

_REMEMBERED = 1_000_000  # answers about conditions
_MORE = 2  # times the nodes of a budget, at which what matches at one node is left off


@dataclass(frozen=True)
class Budget:
    """How far saturation goes, and what it may introduce.

    Attributes:
        nodes, generations: the limits.
        foreign: whether symbols may appear that the problem does not have.
        widely: whether rewrites of anything (`x = transpose(transpose(x))`) apply to all nodes,
            not only to those of the problem.
        invent: whether rewrites may bring in any tensor of the problem (`x = add(sub(x, y), y)`).
    """

    nodes: int
    generations: int
    foreign: bool = False
    widely: bool = False
    invent: bool = False


@dataclass(frozen=True)
class Problem:
    """What rewrites with variables of their own are instantiated from.

    Attributes:
        nodes: the subterms of the problem.
        symbols: those that occur.
        values: those that occur at a parameter of a symbol.
    """

    nodes: tuple[int, ...]
    symbols: frozenset[str]
    values: Mapping[tuple[str, int], tuple[Value, ...]]

    @classmethod
    def of(cls, graph: EGraph) -> Problem:
        """Return the problem whose subterms are what the graph has now."""
        values: dict[tuple[str, int], dict[Value, None]] = defaultdict(dict)
        for node in range(len(graph)):
            symbol = HEADS.symbols[graph.heads[node]]
            for position, value in enumerate(graph.parameters[node]):
                values[symbol, position][value] = None
        symbols = frozenset(HEADS.symbols[head] for head in graph.heads)
        occurring = {place: tuple(known) for place, known in values.items()}
        return cls(tuple(range(len(graph))), symbols, occurring)


class System:
    """Rewrites, indexed by the symbols of their patterns: at an output, and at its operands."""

    def __init__(self, rewrites: Iterable[Rewrite] = ()) -> None:
        self.rewrites: list[Rewrite] = []
        self.depth = 1
        self._selected: dict[tuple[frozenset[str], bool, bool], Selected] = {}
        self._symbols: list[frozenset[str]] = []
        self._allowed: dict[tuple[int, tuple[int, ...], tuple[Value, ...]], bool] = {}
        for rewrite in rewrites:
            self.include(rewrite)

    def include(self, rewrite: Rewrite) -> None:
        """Add a rewrite."""
        number = len(self.rewrites)
        self.rewrites.append(rewrite)
        self.depth = max(self.depth, *(_depth(term) for term in rewrite.left))
        parts = {part for term in rewrite.right for part in term.subterms()}
        self._symbols.append(frozenset(part.symbol for part in parts if not part.is_variable))
        for allows, chosen in self._selected.items():
            self._extend(chosen, (number,), *allows)

    def selected(self, problem: Problem, budget: Budget) -> Selected:
        """Return the rewrites that a budget lets be applied to a problem."""
        allows = (problem.symbols, budget.foreign, budget.invent)
        selected = self._selected.get(allows)
        if selected is None:
            self._selected[allows] = selected = Selected({}, [])
            self._extend(selected, range(len(self.rewrites)), *allows)
        return selected

    def _extend(
        self,
        chosen: Selected,
        numbers: Iterable[int],
        symbols: frozenset[str],
        foreign: bool,
        invent: bool,
    ) -> None:
        for number in numbers:
            rewrite = self.rewrites[number]
            bare = bool(rewrite.extra) or rewrite.left[0].is_variable
            if not (self._symbols[number] <= symbols or (foreign and not bare)):
                continue
            if not invent and any(place < len(rewrite.tensors) for place in rewrite.extra):
                continue
            for output, term in enumerate(rewrite.left):
                if not term.is_variable:
                    inside = (None if part.is_variable else part.symbol for part in term.operands)
                    key = (term.symbol, *inside)
                    chosen.by_symbols.setdefault(key, []).append((number, output))
                elif len(rewrite.left) == 1:
                    chosen.anywhere.append(number)

    def allowed(self, graph: EGraph, number: int, bound: Bound) -> bool:
        """Return whether a rewrite is said for such operands: ranks, and conditions."""
        rewrite = self.rewrites[number]
        types = rewrite.types(graph, bound)
        values = bound[len(rewrite.tensors) :]
        if graph.values:
            values = tuple(graph.value(value) for value in values)
        key = (number, types, values)
        allowed = self._allowed.get(key)
        if allowed is None:
            if len(self._allowed) > _REMEMBERED:
                self._allowed.clear()
            allowed = self._allowed[key] = _holds(rewrite, types, values)
        return allowed


@dataclass(frozen=True)
class Selected:
    """Rewrites, with the output that is to match: by symbols, and those that match anything.

    Symbols are that of the output and those of its operands, None where any tensor may stand.
    """

    by_symbols: dict[tuple[str | None, ...], list[tuple[int, int]]]
    anywhere: list[int]

    def at(self, graph: EGraph, node: int) -> Iterator[tuple[int, int]]:
        """Yield the rewrites, and outputs, that may match a node."""
        inside = [(None, *graph.members[graph.root[child]]) for child in graph.children[node]]
        for key in product((HEADS.symbols[graph.heads[node]],), *inside):
            yield from self.by_symbols.get(key, ())


def _depth(term: Term) -> int:
    return 1 + max((_depth(operand) for operand in term.operands), default=0)


def _holds(rewrite: Rewrite, types: tuple[int, ...], values: tuple[Value, ...]) -> bool:
    if ILL_TYPED in types:
        return False
    names = (*rewrite.tensors, *map(str, rewrite.constants))
    shapes = {name: TYPES.types[type_].shape for name, type_ in zip(names, types)}
    ranks = {name: len(shape) for name, shape in shapes.items()}
    if rewrite.ranks:
        if not any(all(row.get(n, r) == r for n, r in ranks.items()) for row in rewrite.ranks):
            return False
    elif rewrite.tensors:
        distinct = {ranks[name] for name in rewrite.tensors}
        if len(distinct) > 1 or not distinct <= {1, 2, 3, 4}:
            return False
    given = dict(zip(rewrite.values, values))
    try:
        return all(
            holds(condition)
            for text in rewrite.where
            for condition in read(
                text, lambda term, axis: shapes[str(term)][axis], lambda name: given[name]
            )
        )
    except (IllTyped, IndexError, KeyError):
        return False


@dataclass
class Saturation:
    """A run of equality saturation; `run` may be called again with another budget."""

    graph: EGraph
    system: System
    goals: Sequence[tuple[int, int]]
    problem: Problem
    _done: set[tuple[int, Bound]] = field(default_factory=set)

    def reached(self) -> bool:
        """Return whether both nodes of every goal are in one class."""
        root = self.graph.root
        return all(root[one] == root[other] for one, other in self.goals)

    def run(self, budget: Budget) -> bool:
        """Apply rewrites within a budget; return whether the goals are reached."""
        graph = self.graph
        chosen = self.system.selected(self.problem, budget)
        todo: Iterable[int] = range(len(graph))
        graph.fresh.clear()
        graph.changed.clear()
        for _ in range(budget.generations):
            if self.reached():
                return True
            size = len(graph)
            for node in todo:
                if self._match(node, chosen, budget):
                    return True
                if len(graph) > budget.nodes:
                    return self.reached()
            todo = self._affected()
            if not todo and len(graph) == size:
                break
        return self.reached()

    def _affected(self) -> list[int]:
        """Return the nodes at which new matches may have come up, and forget the changes."""
        graph = self.graph
        affected = set(graph.fresh)
        groups = {graph.root[group] for group in graph.changed}
        for _ in range(self.system.depth - 1):
            above = {node for group in groups for node in graph.users[group]} - affected
            affected |= above
            groups = {graph.root[node] for node in above}
        graph.fresh.clear()
        graph.changed.clear()
        return sorted(affected - graph.hidden)

    def _match(self, node: int, chosen: Selected, budget: Budget) -> bool:
        """Apply what matches at a node; return whether the goals are reached."""
        graph, system = self.graph, self.system
        if node in graph.hidden:
            return False
        applicable: list[tuple[int, Bound]] = []
        for number, output in chosen.at(graph, node):
            rewrite = system.rewrites[number]
            matches = rewrite.finders[output](graph, node)
            if matches:
                if rewrite.extra:
                    matches = [full for bound in matches for full in self._filled(rewrite, bound)]
                applicable += [(number, bound) for bound in matches]
        if budget.widely or node < len(self.problem.nodes):
            for number in chosen.anywhere:
                rewrite = system.rewrites[number]
                for bound in rewrite.finders[0](graph, node):
                    applicable += [(number, full) for full in self._filled(rewrite, bound)]
        merged = False
        for number, bound in applicable:
            if len(graph) > _MORE * budget.nodes:
                break
            key = (number, bound)
            if key not in self._done:
                self._done.add(key)
                merged |= self._apply(number, bound, node)
        return merged and self.reached()

    def _filled(self, rewrite: Rewrite, bound: Bound) -> Iterator[Bound]:
        """Yield a match with the variables that it does not bind, from the problem."""
        choices: list[Iterable[int | Value]] = [(item,) for item in bound]
        for position in rewrite.extra:
            if position < len(rewrite.tensors):
                choices[position] = self.problem.nodes
            else:
                choices[position] = self._values(rewrite, position)
        yield from product(*choices)

    def _values(self, rewrite: Rewrite, position: int) -> list[Value]:
        name = rewrite.values[position - len(rewrite.tensors)]
        values: dict[Value, None] = {}
        for term in rewrite.right:
            for part in term.subterms():
                for place, value in enumerate(part.parameters):
                    if is_variable(value) and value == name:
                        known = self.problem.values.get((part.symbol, place), ())
                        values.update(dict.fromkeys(known))
        return list(values)

    def _apply(self, number: int, bound: Bound, node: int) -> bool:
        """Put a match's right side for its left; return whether classes were merged."""
        graph, rewrite = self.graph, self.system.rewrites[number]
        if len(rewrite.right) == 1:
            known = rewrite.known(graph, bound)[0]
            if known >= 0 and graph.root[known] == graph.root[node]:
                return False
        if not self.system.allowed(graph, number, bound):
            return False
        merged = False
        for output, builder in enumerate(rewrite.builders):
            pair = builder(graph, bound)
            if pair is not None:
                merged |= graph.union(*pair, Applied(rewrite, bound, output))
        return merged
