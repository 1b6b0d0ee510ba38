"""E-graphs of concretely typed terms that can explain why two of them are equal.

Equality saturation (section 2.4 asks whether the laws entail an equation; this finds how): every
node is one exact term with its type, so that what is merged can be replayed step by step. Nodes
that are equal as values form a class. Two nodes with equal operands are congruent; a split is also
told where it cuts, since equal tensors may have different histories of concatenation. Ill-typed
terms are never added. Merging is explained by the edges it left behind: applications of laws
between exact instances, and congruences, each only by edges older than itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from soapstone.ir.term import Term, Value
from soapstone.search.substitution.matcher import HEADS, Bound, Rewrite
from soapstone.search.substitution.shapes import Type, concrete

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
        found = self._numbers.get(type_)
        if found is None:
            found = self._numbers[type_] = len(self.types)
            self.types.append(type_)
            self.shape_of.append(self._shapes.setdefault(type_.shape, len(self._shapes)))
        return found

    def result(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the type of an operator's result, or ILL_TYPED."""
        key = (head, operands)
        found = self.results.get(key)
        if found is None:
            types = tuple(self.types[operand] for operand in operands)
            type_ = concrete(HEADS.symbols[head], HEADS.parameters[head], types)
            found = self.results[key] = ILL_TYPED if type_ is None else self.number(type_)
        return found

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


@dataclass(frozen=True)
class Move:
    """A step of an explanation: at a path, the rewrite was used forward or backward."""

    path: tuple[int, ...]
    why: Applied
    backward: bool
    before: int
    after: int


class EGraph:
    """Terms, equal ones in one class.

    `values` gives words among parameters a value for typing: they stay opaque for matching. In a
    `directed` graph, explanations use no rewrite backward whose left side its right does not
    determine.
    """

    def __init__(
        self, values: Mapping[str, Value] | None = None, *, directed: bool = False
    ) -> None:
        self.values = values or {}
        self.directed = directed
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
        self._edges: list[Edge] = []
        self._at: list[list[int]] = []  # by node: its edges
        self._linked: set[tuple[int, int]] = set()
        self.hidden: set[int] = set()  # nodes that need no matching: a congruent one serves
        self._terms: dict[int, Term] = {}
        self._costs: dict[tuple[int, bool], float] = {}  # of congruences, each way
        self._typed_heads: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.root)

    # -- terms ------------------------------------------------------------------------------------

    def leaf(self, term: Term, type_: Type) -> int:
        """Return the node of a variable or constant of a given type."""
        head = _head(term)
        found = self._exact.get((head, ()))
        return self._new(head, (), TYPES.number(type_)) if found is None else found

    def add(self, term: Term) -> int:
        """Return the node of a term whose leaves are there, or ILL_TYPED."""
        operands = tuple(self.add(operand) for operand in term.operands)
        if ILL_TYPED in operands:
            return ILL_TYPED
        return self.node(_head(term), operands)

    def node(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the node of an operator applied to exactly these nodes, or ILL_TYPED."""
        found = self._exact.get((head, operands))
        if found is None:
            type_ = self.type_of(head, tuple(self.types[operand] for operand in operands))
            found = ILL_TYPED if type_ < 0 else self._new(head, operands, type_)
        return found

    def type_of(self, head: int, operands: tuple[int, ...]) -> int:
        """Return the type of an operator's result, or ILL_TYPED; constants only if present."""
        if not operands:
            found = self._exact.get((head, ()), ILL_TYPED)
            return found if found < 0 else self.types[found]
        head = self._typed_head(head)
        result = TYPES.results.get((head, operands))
        return TYPES.result(head, operands) if result is None else result

    def look(self, head: int, operands: tuple[int, ...]) -> int:
        """Return a node equal to an operator applied to these nodes, or -1."""
        found = self._exact.get((head, operands))
        return self._congruent.get(self._key(head, operands), -1) if found is None else found

    def find(self, term: Term) -> int:
        """Return a node equal to a term, or -1."""
        operands = tuple(self.find(operand) for operand in term.operands)
        return -1 if -1 in operands else self.look(_head(term), operands)

    def term(self, node: int) -> Term:
        """Return the term that a node is."""
        found = self._terms.get(node)
        if found is None:
            head = self.heads[node]
            operands = tuple(self.term(operand) for operand in self.children[node])
            found = Term(HEADS.symbols[head], HEADS.parameters[head], operands)
            self._terms[node] = found
        return found

    def type(self, node: int) -> Type:
        """Return the type of a node."""
        return TYPES.types[self.types[node]]

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
        found = self._typed_heads.get(head)
        if found is None:
            given = HEADS.parameters[head]
            values = tuple(self.value(value) for value in given)
            found = HEADS.number(HEADS.symbols[head], values) if values != given else head
            self._typed_heads[head] = found
        return found

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
        self._at.append([])
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
        if kinds != tuple(self.types[operand] for operand in self.children[twin]):
            if self._variants.setdefault((key, kinds), node) == node:
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
        found = []
        for node in moved:
            key = self._key(self.heads[node], self.children[node])
            twin = self._congruent.setdefault(key, node)
            if twin == node:
                continue
            self._link(Edge(node, twin, None))
            if self.root[twin] != self.root[node]:
                found.append((node, twin))
            kinds = tuple(self.types[operand] for operand in self.children[node])
            if kinds == tuple(self.types[operand] for operand in self.children[twin]):
                self._hide(node)
        known = self.hidden.union(self.users[large])
        self.users[large] += [node for node in moved if node not in known]
        self.changed.append(large)
        return found

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
            self._at[edge.first].append(len(self._edges))
            self._at[edge.second].append(len(self._edges))
            self._edges.append(edge)

    # -- explanations -----------------------------------------------------------------------------

    def explain(self, first: int, second: int) -> list[Move] | None:
        """Return how to rewrite one node's term into another's, or None if there is no such way.

        The moves are replayed: every term on the way is typed, and splits cut where they did. If a
        shortest way fails at that, one that passes only terms of the same type below splits is
        tried.
        """
        for keep_types in (False, True):
            moves: list[Move] = []
            if not self._moves(first, second, (), len(self._edges), keep_types, moves):
                continue
            current = first
            for move in moves:
                current = self._moved(current, move.path, move) if current >= 0 else ILL_TYPED
            if current == second:
                return moves
        return None

    def _moved(self, node: int, path: tuple[int, ...], move: Move) -> int:
        """Return the node with the part at a path replaced, or ILL_TYPED."""
        if not path:
            return move.after if node == move.before else ILL_TYPED
        operands = list(self.children[node])
        old = operands[path[0]]
        new = operands[path[0]] = self._moved(old, path[1:], move)
        head = self.heads[node]
        if new < 0 or (HEADS.split[head] and self.cut(head, new) != self.cut(head, old)):
            return ILL_TYPED
        return self.node(head, tuple(operands))

    def _moves(
        self,
        first: int,
        second: int,
        path: tuple[int, ...],
        before: int,
        keep_types: bool,
        moves: list[Move],
    ) -> bool:
        _, route = self._shortest(first, second, before, keep_types)
        if route is None:
            return False
        here = first
        for number in route:
            edge = self._edges[number]
            there = edge.second if edge.first == here else edge.first
            if edge.why is not None:
                backward = here != edge.first
                moves.append(Move(path, edge.why, backward, here, there))
            else:
                split = HEADS.split[self.heads[here]]
                pairs = zip(self.children[here], self.children[there])
                for position, (one, other) in enumerate(pairs):
                    inside = (*path, position)
                    kept = keep_types or split
                    if not self._moves(one, other, inside, number, kept, moves):
                        return False
            here = there
        return True

    def _shortest(
        self, first: int, second: int, before: int, keep_types: bool
    ) -> tuple[float, list[int] | None]:
        """Return the fewest steps between two nodes over edges older than one, and the edges."""
        if first == second:
            return 0.0, []
        types = {self.types[first], self.types[second]} if keep_types else None
        costs = {first: 0.0}
        came: dict[int, int] = {}
        queue = [(0.0, first)]
        while queue:
            cost, node = heapq.heappop(queue)
            if node == second:
                route = []
                while node != first:
                    route.append(came[node])
                    edge = self._edges[came[node]]
                    node = edge.second if edge.first == node else edge.first
                return cost, route[::-1]
            if cost > costs[node]:
                continue
            for number in self._at[node]:
                if number >= before:
                    break
                edge = self._edges[number]
                backward = edge.first != node
                there = edge.first if backward else edge.second
                if types is not None and self.types[there] not in types:
                    continue
                total = cost + self._cost(number, backward)
                if total < costs.get(there, float("inf")):
                    costs[there] = total
                    came[there] = number
                    heapq.heappush(queue, (total, there))
        return float("inf"), None

    def _cost(self, number: int, backward: bool) -> float:
        """Return how many steps an edge stands for, taken forward or backward."""
        edge = self._edges[number]
        if edge.why is not None:
            usable = not (self.directed and backward) or edge.why.rewrite.reversible
            return 1.0 if usable else float("inf")
        backward = backward and self.directed
        found = self._costs.get((number, backward))
        if found is None:
            one, other = (edge.second, edge.first) if backward else (edge.first, edge.second)
            split = HEADS.split[self.heads[one]]
            pairs = zip(self.children[one], self.children[other])
            found = sum(self._shortest(a, b, number, split)[0] for a, b in pairs)
            self._costs[number, backward] = found
        return found
