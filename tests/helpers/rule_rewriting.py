"""Rewriting of graphs by rules, as plainly as can be: what pruning must not make unreachable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from soapstone.ir.term import Term, instantiate, size, subterms, variables
from soapstone.rules.enumeration.recheck import Recheck
from soapstone.rules.enumeration.reduce import replaced
from soapstone.search.rules.language import commutative

Terms = tuple[Term, ...]


def normal(terms: Sequence[Term]) -> Terms:
    """Return terms with the operands of commutative operators in order of their text."""
    symmetric = commutative()
    made: dict[Term, Term] = {}
    for term in subterms(terms):
        operands = tuple(made[operand] for operand in term.operands)
        if term.symbol in symmetric:
            operands = tuple(sorted(operands, key=str))
        made[term] = Term(term.symbol, term.parameters, operands)
    return tuple(made[term] for term in terms)


def matches(pattern: Term, term: Term, bound: Mapping[str, Term]) -> Iterator[dict[str, Term]]:
    """Yield the bindings under which a pattern is a term, commutative operands both ways."""
    if pattern.is_variable:
        if bound.get(pattern.symbol, term) == term:
            yield {**bound, pattern.symbol: term}
        return
    if (pattern.symbol, pattern.parameters) != (term.symbol, term.parameters):
        return
    orders = {term.operands}
    if term.symbol in commutative():
        orders.add(term.operands[::-1])
    for order in orders:
        ways = [dict(bound)]
        for wanted, operand in zip(pattern.operands, order):
            ways = [w for way in ways for w in matches(wanted, operand, way)]
        yield from ways


class Rewriting:
    """Rules in each direction in which they bring no new variable."""

    def __init__(self, rules: Iterable[tuple[Terms, Terms]], recheck: Recheck, most: int) -> None:
        self.recheck = recheck
        self.most = most  # operators of a graph on the way
        self.rules: list[tuple[Terms, Terms]] = []
        for source, target in rules:
            for left, right in ((source, target), (target, source)):
                if set(variables(right)) <= set(variables(left)):
                    self.rules.append((left, right))

    def after(self, graph: Terms) -> set[Terms]:
        """Return the graphs that one application of a rule gives, where it holds."""
        parts = list(subterms(graph))
        found = set()
        for source, target in self.rules:
            states: list[tuple[dict[str, Term], Terms]] = [({}, ())]
            for wanted in source:
                states = [
                    (more, (*taken, part))
                    for bound, taken in states
                    for part in parts
                    if part not in taken
                    for more in matches(wanted, part, bound)
                ]
            for bound, taken in states:
                new = [instantiate(term, bound) for term in target]
                put = dict(zip(taken, normal(new)))
                if all(self.recheck.equal(old, put[old]) for old in taken):
                    result = normal(replaced(graph, put))
                    if size(result) <= self.most:
                        found.add(result)
        return found

    def reaches(self, source: Terms, target: Terms, states: int) -> bool:
        """Return whether one graph becomes another, after at most so many graphs."""
        source, target = normal(source), normal(target)
        seen = {source}
        queue = deque([source])
        while queue and len(seen) <= states:
            here = queue.popleft()
            if here == target:
                return True
            new = self.after(here) - seen
            seen |= new
            if target in new:
                return True
            queue.extend(sorted(new, key=lambda graph: (size(graph), str(graph))))
        return False
