"""E-graphs over the values of a pool: classes of values that rules have shown to be equal.

A class is named by its oldest value. Its members are its distinct nodes, which are operators
applied to classes; each is represented by the first value made that way. Applications with equal
operands are congruent and are one node. The values of a pool are completely described by themselves
(even the sizes of splits), so an e-graph only adds equality (TENSAT, section 4). The e-graph that
proves rules (`rules/proving/egraph.py`) keeps every exact typed term instead, which optimising does
not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from soapstone.ir.term import Term, Value
from soapstone.search.optimize.match import Match, Matcher, Places, bound, build
from soapstone.search.optimize.pool import Application, Items, Leaf, Pool
from soapstone.search.rules.rulebook import Directed

Values = tuple[int, ...]
Key = tuple[str, Items, Values]
Said = tuple[tuple[Value, ...], Values]  # parameters and operands of a reading


@dataclass(frozen=True)
class Union:
    """The reason for an equality: a rule replaced `left` by `right`; `values` of its variables."""

    rule: Directed
    left: Values
    right: Values
    values: Mapping[str, int]


class EGraph:
    """The values of a pool, with equal ones in one class."""

    def __init__(self, pool: Pool, outputs: Iterable[int] = ()) -> None:
        self.pool = pool
        self.members: dict[int, list[int]] = {}  # by class: a value for each node
        self._parent: dict[int, int] = {}
        self._nodes: dict[Key, Values] = {}
        self._users: dict[int, list[Values]] = {}  # by class: outputs of what reads it
        self._twins: set[Values] = set()  # outputs of what is the same node as another
        for value in outputs:
            self.add(value)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return sum(map(len, self.members.values()))

    def __contains__(self, value: int) -> bool:
        return value in self._parent

    def find(self, value: int) -> int:
        """Return the class of a value in the e-graph."""
        parent = self._parent
        while parent[value] != value:
            parent[value] = value = parent[parent[value]]
        return value

    def add(self, value: int) -> int:
        """Add a value with everything it is made of; return its class."""
        if value not in self._parent:
            missing, pending = set(), [value]
            while pending:
                each = pending.pop()
                if each not in self._parent and each not in missing:
                    missing.add(each)
                    pending += self.pool.operands(each)
            for each in sorted(missing):  # operands are older
                if each not in self._parent:
                    self._enter(each)
        return self.find(value)

    def node(self, value: int) -> int:
        """Return the member that is the same node as a value."""
        maker = self.pool.makers[value]
        if isinstance(maker, Leaf):
            return value
        return self._nodes[self._key(maker)][maker.outputs.index(value)]

    def known(self, value: int) -> bool:
        """Return whether a value would add no node."""
        if value in self._parent:
            return True
        maker = self.pool.makers[value]
        if isinstance(maker, Leaf) or not all(map(self.known, maker.inputs)):
            return False
        for operand in maker.inputs:
            self.add(operand)
        return self._key(maker) in self._nodes

    def merge(self, one: int, other: int) -> bool:
        """Merge the classes of two values, and what becomes congruent; return whether any did."""
        pending, merged = [(one, other)], False
        while pending:
            low, high = sorted(map(self.find, pending.pop()))
            if low != high:
                merged = True
                self._parent[high] = low
                self.members[low] += self.members.pop(high)
                users = self._users.pop(high, [])
                self._users.setdefault(low, []).extend(users)
                pending += self._congruent(users)
        return merged

    def _key(self, maker: Application) -> Key:
        inputs = tuple(map(self.find, maker.inputs))
        return maker.operator, maker.items, self.pool.in_order(maker.operator, inputs)

    def _enter(self, value: int) -> None:
        maker = self.pool.makers[value]
        outputs = (value,) if isinstance(maker, Leaf) else maker.outputs
        twins = None if isinstance(maker, Leaf) else self._nodes.get(self._key(maker))
        if twins is not None:
            self._parent.update(zip(outputs, map(self.find, twins)))
            return
        for output in outputs:
            self._parent[output] = output
            self.members[output] = [output]
        if isinstance(maker, Application):
            self._nodes[self._key(maker)] = outputs
            for group in set(map(self.find, maker.inputs)):
                self._users.setdefault(group, []).append(outputs)

    def _congruent(self, users: Sequence[Values]) -> Iterator[tuple[int, int]]:
        """Yield pairs of values whose operands became equal; one node of each pair stays."""
        for outputs in users:
            if outputs in self._twins:
                continue
            maker = self.pool.makers[outputs[0]]
            assert isinstance(maker, Application)
            twins = self._nodes.setdefault(self._key(maker), outputs)
            if twins != outputs:
                self._twins.add(outputs)
                for output in outputs:
                    members = self.members[self.find(output)]
                    if output in members:
                        members.remove(output)
                yield from zip(outputs, twins)

    def union(self, match: Match) -> Union | None:
        """Merge a match with the result of its rule; return None if the result is ill-typed."""
        _, terms = bound(match.rule, tuple(sorted(match.parameters.items())))
        right = build(self.pool, terms, match)
        specs = self.pool.specs
        if right is None or any(specs[a] != specs[b] for a, b in zip(match.roots, right)):
            return None
        for one, other in zip(match.roots, right):
            self.add(other)
            self.merge(one, other)
        return Union(match.rule, match.roots, right, match.values)


class ClassMatcher(Matcher):
    """Finds matches of rules in an e-graph as it is; the values of matches are classes.

    born: the iteration in which each class was added.
    """

    def __init__(self, graph: EGraph, born: Mapping[int, int]) -> None:
        super().__init__(graph.pool)
        self.graph = graph
        self.taken: set[int] = set()  # classes that are outputs of no more matches
        pool, find = graph.pool, graph.find
        self._said: dict[int, dict[str, dict[Said, None]]] = {}
        self._siblings: dict[int, set[int]] = {}
        self._cut: dict[int, set[int]] = {}  # by class: what is cut out of it
        self._inside: dict[int, frozenset[int]] = {}
        values: dict[str, list[int]] = {}
        readers: dict[int, dict[int, None]] = {}
        for group in sorted(graph.members, key=lambda group: (-born[group], group)):
            members = graph.members[group]
            fixed = any(pool.fixed[value] for value in members)
            said = self._said[group] = {}
            for value in members:
                maker = pool.makers[value]
                operands = tuple(map(find, pool.operands(value)))
                for operand in operands:
                    readers.setdefault(operand, {})[group] = None
                for reading in pool.readings(value):
                    said.setdefault(reading.symbol, {})[reading.parameters, operands] = None
                if isinstance(maker, Application) and len(maker.outputs) > 1:
                    self._siblings.setdefault(group, set()).update(map(find, maker.outputs))
                    self._cut.setdefault(operands[0], set()).add(group)
            names = {term.symbol for term in self.constants(group)}
            for symbol in names if fixed else said:
                values.setdefault(symbol, []).append(group)
        self.newest = Places(values, {group: tuple(found) for group, found in readers.items()})

    def above(self, changed: Iterable[int], levels: int) -> list[Places]:
        """Return the classes up to 0, 1, ... levels above changed classes, oldest first."""
        found, near = [], set(changed)
        for _ in range(levels):
            values = {
                symbol: tuple(group for group in reversed(groups) if group in near)
                for symbol, groups in self.newest.values.items()
            }
            found.append(Places(values, self.newest.readers))
            near |= {reader for group in near for reader in self.newest.readers.get(group, ())}
        return found

    def applications(self, value: int, symbol: str) -> Iterable[Said]:
        return self._said[value].get(symbol, ())

    def constants(self, value: int) -> Iterable[Term]:
        found = (self._pool.term_of(member) for member in self.graph.members[value])
        return [term for term in found if term is not None]

    def siblings(self, value: int) -> set[int]:
        return self._siblings.get(value, {value})

    def apart(self, roots: Sequence[int], value: int) -> bool:
        """Return whether a class may be an output of a match beside others.

        A class that is merged with a part of itself would be computed twice, endlessly.
        """
        if not self.taken.isdisjoint((*roots, value)):
            return False
        return not roots or self._parts(value).isdisjoint(*map(self._parts, roots))

    def _parts(self, value: int) -> frozenset[int]:
        """Return the classes that are slices of a class, including itself."""
        found = self._inside.get(value)
        if found is None:
            seen, pending = {value}, [value]
            while pending:
                for part in self._cut.get(pending.pop(), ()):
                    if part not in seen:
                        seen.add(part)
                        pending.append(part)
            found = self._inside[value] = frozenset(seen)
        return found

    def as_left(self, match: Match, left: Values) -> Match | None:
        graph = self.graph
        if not all(map(graph.known, left)) or tuple(map(graph.add, left)) != match.roots:
            return None
        return replace(match, roots=left)
