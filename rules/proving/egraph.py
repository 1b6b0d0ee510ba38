"""E-graphs of concretely typed terms that can explain why two of them are equal.

Equality saturation (section 2.4 asks whether the laws entail an equation; this finds how): every
node is one exact term with its type, so that what is merged can be replayed step by step. Nodes
that are equal as values form a class. Two nodes with equal operands are congruent; a split is also
told where it cuts, since equal tensors may have different histories of concatenation. Ill-typed
terms are never added. What merges classes is kept as edges between nodes, for `explain.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from soapstone.ir.term import Term, Value
from soapstone.rules.proving.matcher import HEADS, Bound, Rewrite
from soapstone.search.rules.shapes import Type, concrete

ILL_TYPED = -1


class Types:
    """Numbers for types, and the remembered results of operators on them, for a whole process."""

    def __init__(self) -> None:
        self._numbers: dict[Type, int] = {}
        self.types: list[Type] = []
        self.shape_of: list[int] = []  # equal numbers for equal shapes
        self.results: dict[tuple[int, tuple[int, ...]], int] = {}
        self._shapes: dict[tuple[object, ...], int] = {}

    def number(self, type_: Type) -> int:
        """Return the number of a type."""
        number = self._numbers.get(type_)
        if number is None:
            number = self._numbers[type_] = len(self.types)
            self.types.append(type_)
            self.shape_of.append(self._shapes.setdefault(type_.shape, len(self._shapes)))
        return number

    def result(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the type of an operator's result, or ILL_TYPED."""
        key = (head, operands)
        type_number = self.results.get(key)
        if type_number is None:
            types = tuple(self.types[operand] for operand in operands)
            type_ = concrete(HEADS.symbols[head], HEADS.parameters[head], types)
            type_number = self.results[key] = ILL_TYPED if type_ is None else self.number(type_)
        return type_number

    def cut(self, head: int, operand: int) -> int:
        """Return where a split along the head's axis cuts a tensor of this type; -1 nowhere."""
        axis, trees = HEADS.parameters[head][0], self.types[operand].trees
        if not isinstance(axis, int) or not -len(trees) <= axis < 0:
            return -1
        tree = trees[axis]
        return tree.at if tree is not None and isinstance(tree.at, int) else -1


TYPES = Types()


class Applied(NamedTuple):
    """Why two nodes are equal: a rewrite put the second, as one of its outputs, for the first."""

    rewrite: Rewrite
    bound: Bound
    output: int = 0


class Edge(NamedTuple):
    """An equation between two nodes; by congruence where `why` is None."""

    first: int
    second: int
    why: Applied | None


def _head(term: Term) -> int:
    return HEADS.number(term.symbol, term.parameters)


class EGraph:
    """Terms, equal ones in one class.

    `values` gives words among parameters a value for typing: they stay opaque for matching.
    """

    def __init__(self, values: Mapping[str, Value] | None = None) -> None:
        self.values = values or {}
        self.heads: list[int] = []
        self.children: list[tuple[int, ...]] = []
        self.parameters: list[tuple[Value, ...]] = []
        self.types: list[int] = []
        self.root: list[int] = []
        self.members: list[dict[str, list[int]]] = []  # by class: nodes to match, by symbol
        self.users: list[list[int]] = []  # by class: nodes to match with an operand in it
        self.shape_of = TYPES.shape_of
        self.changed: list[int] = []  # classes that gained members, to be taken by who matches
        self.fresh: list[int] = []  # nodes to match that are new
        self._all: list[list[int]] = []  # by class: every node
        self._exact: dict[tuple[int, tuple[int, ...]], int] = {}
        self._congruent: dict[tuple[int, ...], int] = {}
        self._variants: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.edges: list[Edge] = []  # oldest first
        self.edges_of: list[list[int]] = []  # by node: the numbers of its edges
        self._linked: set[tuple[int, int]] = set()
        self.hidden: set[int] = set()  # nodes that need no matching: a congruent one serves
        self._terms: dict[int, Term] = {}
        self._typed_heads: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.root)

    # -- terms ------------------------------------------------------------------------------------

    def leaf(self, term: Term, type_: Type) -> int:
        """Return the node of a variable or constant of a given type."""
        head = _head(term)
        node = self._exact.get((head, ()))
        return self._new(head, (), TYPES.number(type_)) if node is None else node

    def add(self, term: Term) -> int:
        """Return the node of a term whose leaves are there, or ILL_TYPED."""
        operands = tuple(self.add(operand) for operand in term.operands)
        if ILL_TYPED in operands:
            return ILL_TYPED
        return self.node(_head(term), operands)

    def node(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the node of an operator applied to exactly these nodes, or ILL_TYPED."""
        node = self._exact.get((head, operands))
        if node is None:
            type_ = self.type_of(head, tuple(self.types[operand] for operand in operands))
            node = ILL_TYPED if type_ < 0 else self._new(head, operands, type_)
        return node

    def type_of(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the type of an operator's result, or ILL_TYPED; constants only if present."""
        if not operands:
            constant = self._exact.get((head, ()), ILL_TYPED)
            return constant if constant < 0 else self.types[constant]
        head = self._typed_head(head)
        result = TYPES.results.get((head, operands))
        return TYPES.result(head, operands) if result is None else result

    def look(self, head: int, operands: tuple[int, ...]) -> int:
        """Return a node equal to an operator applied to these nodes, or -1."""
        exact = self._exact.get((head, operands))
        return self._congruent.get(self._key(head, operands), -1) if exact is None else exact

    def find(self, term: Term) -> int:
        """Return a node equal to a term, or -1."""
        operands = tuple(self.find(operand) for operand in term.operands)
        return -1 if -1 in operands else self.look(_head(term), operands)

    def term(self, node: int) -> Term:
        """Return the term that a node is."""
        term = self._terms.get(node)
        if term is None:
            head = self.heads[node]
            operands = tuple(self.term(operand) for operand in self.children[node])
            term = Term(HEADS.symbols[head], HEADS.parameters[head], operands)
            self._terms[node] = term
        return term

    def cut(self, head: int, node: int) -> int:
        """Return where a split, of this head, of a node cuts it; -1 nowhere."""
        return TYPES.cut(self._typed_head(head), self.types[node])

    def same(self, first: int, second: int) -> bool:
        """Return whether two nodes are known to be equal."""
        return self.root[first] == self.root[second]

    def nodes_of(self, symbol: str) -> Iterator[int]:
        """Yield the nodes of a symbol that are worth matching."""
        for group in [members.get(symbol) for members in self.members]:
            yield from group or ()

    def _typed_head(self, head: int) -> int:
        if not self.values:
            return head
        typed = self._typed_heads.get(head)
        if typed is None:
            given = HEADS.parameters[head]
            values = tuple(self.value(value) for value in given)
            typed = HEADS.number(HEADS.symbols[head], values) if values != given else head
            self._typed_heads[head] = typed
        return typed

    def value(self, value: Value) -> Value:
        """Return what a parameter's value is for typing."""
        if not isinstance(value, str):
            return value
        parts = [self.values.get(part, part) for part in value.split("+")]
        if all(isinstance(part, int) for part in parts):
            return sum(part for part in parts if isinstance(part, int))
        return "+".join(map(str, parts))

    def _key(self, head: int, operands: tuple[int, ...]) -> tuple[int, ...]:
        """Return what congruent nodes share."""
        root = self.root
        if HEADS.split[head]:
            return (head, root[operands[0]], self.cut(head, operands[0]))
        return (head, *[root[operand] for operand in operands])

    def _new(self, head: int, operands: tuple[int, ...], type_: int) -> int:
        node = len(self.root)
        key = self._key(head, operands)
        self._exact[(head, operands)] = node
        self.heads.append(head)
        self.children.append(operands)
        self.parameters.append(HEADS.parameters[head])
        self.types.append(type_)
        self.root.append(node)
        self.edges_of.append([])
        twin = self._congruent.setdefault(key, node)
        self.members.append({})
        if twin == node:
            self.users.append([])
            self._all.append([node])
            self._show(node)
            return node
        group = self.root[twin]
        self.root[node] = group
        self.users.append([])
        self._all.append([])
        self._all[group].append(node)
        self._link(Edge(node, twin, None))
        kinds = tuple(self.types[operand] for operand in operands)
        known = tuple(self.types[operand] for operand in self.children[twin])
        if kinds != known and self._variants.setdefault((key, kinds), node) == node:
            self._show(node)
            self.changed.append(group)
        return node

    def _show(self, node: int) -> None:
        """Let a node be matched."""
        symbol = HEADS.symbols[self.heads[node]]
        self.members[self.root[node]].setdefault(symbol, []).append(node)
        for group in {self.root[operand] for operand in self.children[node]}:
            self.users[group].append(node)
        self.fresh.append(node)

    # -- equality ---------------------------------------------------------------------------------

    def union(self, first: int, second: int, why: Applied) -> bool:
        """Merge the classes of two nodes that a rewrite equates; return whether they were two."""
        if first == second:
            return False
        self._link(Edge(first, second, why))
        pending = [(first, second)]
        if self.root[first] == self.root[second]:
            return False
        while pending:
            one, other = pending.pop()
            small, large = self.root[one], self.root[other]
            if small != large:
                if len(self._all[small]) > len(self._all[large]):
                    small, large = large, small
                pending += self._merge(small, large)
        return True

    def _merge(self, small: int, large: int) -> list[tuple[int, int]]:
        """Put one class into another; return what has become congruent."""
        for node in self._all[small]:
            self.root[node] = large
        self._all[large] += self._all[small]
        for symbol, nodes in self.members[small].items():
            self.members[large].setdefault(symbol, []).extend(nodes)
        self.members[small] = {}
        moved, self.users[small] = self.users[small], []
        congruent = []
        for node in moved:
            key = self._key(self.heads[node], self.children[node])
            twin = self._congruent.setdefault(key, node)
            if twin == node:
                continue
            self._link(Edge(node, twin, None))
            if self.root[twin] != self.root[node]:
                congruent.append((node, twin))
            kinds = tuple(self.types[operand] for operand in self.children[node])
            if kinds == tuple(self.types[operand] for operand in self.children[twin]):
                self._hide(node)
        known = set(self.users[large])
        self.users[large] += [n for n in moved if n not in known and n not in self.hidden]
        self.changed.append(large)
        return congruent

    def _hide(self, node: int) -> None:
        """Let a node not be matched any more: another one serves."""
        group = self.members[self.root[node]].get(HEADS.symbols[self.heads[node]], [])
        if node in group:
            group.remove(node)
        self.hidden.add(node)

    def _link(self, edge: Edge) -> None:
        pair = (edge.first, edge.second) if edge.first < edge.second else (edge.second, edge.first)
        if pair not in self._linked:
            self._linked.add(pair)
            self.edges_of[edge.first].append(len(self.edges))
            self.edges_of[edge.second].append(len(self.edges))
            self.edges.append(edge)
