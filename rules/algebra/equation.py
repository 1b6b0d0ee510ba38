"""Matching of equations: whether one is an instance of another.

Operands of commutative operators may change places, and so may the outputs; both graphs of a
substitution are bound at once, output by output (Jia et al., TASO, section 2.3.1: the mapping
relation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from soapstone.ir.term import Bindings, Term, Value, instantiate_value, is_variable

Terms = tuple[Term, ...]


def matches(
    pattern: Term, term: Term, bindings: Mapping[str, Term | Value], commutative: frozenset[str]
) -> Iterator[Bindings]:
    """Yield every way to bind the pattern's variables so that it is the term.

    Names of parameter variables are in brackets, so that they differ from those of tensors.
    """
    if pattern.is_variable:
        bound = bindings.get(pattern.symbol)
        if bound is None:
            yield {**bindings, pattern.symbol: term}
        elif bound == term:
            yield dict(bindings)
        return
    if (
        pattern.symbol != term.symbol
        or len(pattern.operands) != len(term.operands)
        or len(pattern.parameters) != len(term.parameters)
    ):
        return
    found: Bindings = dict(bindings)
    for wanted, value in zip(pattern.parameters, term.parameters):
        if is_variable(wanted):
            if found.setdefault(f"[{wanted}]", value) != value:
                return
        elif isinstance(wanted, str) and "+" in wanted:
            if found.setdefault(f"+{wanted}", value) != value:
                return  # its variables may be bound later: `instances` looks at them
        elif wanted != value:
            return
    orders = [term.operands]
    if pattern.symbol in commutative and term.operands[0] != term.operands[1]:
        orders.append(term.operands[::-1])
    for operands in orders:
        yield from _all(list(zip(pattern.operands, operands)), found, commutative)


def _all(
    pairs: Sequence[tuple[Term, Term]],
    bindings: Mapping[str, Term | Value],
    commutative: frozenset[str],
) -> Iterator[Bindings]:
    if not pairs:
        yield dict(bindings)
        return
    (pattern, term), *rest = pairs
    for extended in matches(pattern, term, bindings, commutative):
        yield from _all(rest, extended, commutative)


def instances(
    pattern: tuple[Terms, Terms], graphs: tuple[Terms, Terms], commutative: frozenset[str]
) -> Iterator[Bindings]:
    """Yield every way in which a pair of graphs is an instance of another, output by output."""
    wanted = [Term("=", (), sides) for sides in zip(*pattern)]
    found = [Term("=", (), sides) for sides in zip(*graphs)]
    if len(wanted) != len(found):
        return

    def assign(at: int, free: tuple[int, ...], bindings: Bindings) -> Iterator[Bindings]:
        if at == len(wanted):
            plain = {name[1:-1]: value for name, value in bindings.items() if name[0] == "["}
            sums = {name: value for name, value in bindings.items() if name[0] == "+"}
            if all(instantiate_value(name[1:], plain) == value for name, value in sums.items()):
                yield {name: value for name, value in bindings.items() if name not in sums}
            return
        for position in free:
            rest = tuple(other for other in free if other != position)
            for extended in matches(wanted[at], found[position], bindings, commutative):
                yield from assign(at + 1, rest, extended)

    yield from assign(0, tuple(range(len(found))), {})
