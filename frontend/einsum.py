"""Einstein sums as graphs: `einsum` emits transposes, reshapes, products and sums.

Subscripts are letters, as in NumPy and ONNX; `...` stands for further axes, which broadcast.
Operands are contracted two at a time, the cheapest pair first: as one matrix product where they
share a subscript that is summed over, else as an element-wise product.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.tensor import TensorSpec
from soapstone.records import dataclass

V = TypeVar("V")  # how values are named: by their names in a builder, or as a reader of files does

# The subscripts of one operand. An ellipsis is "~2", "~1", counted from the right, so that operands
# of different rank agree.
_Term = tuple[str, ...]


class Builder(Protocol[V]):
    """What emits operators, such as a `GraphBuilder`, whose values are names."""

    def spec(self, name: V, /) -> TensorSpec:
        """Return the shape and type of a value."""

    def apply(self, operator_name: str, *inputs: V, name: str, **attributes: Any) -> Sequence[V]:
        """Emit an operator and return its outputs."""


@dataclass(frozen=True)
class _Value(Generic[V]):
    """A value of the graph and the subscript of each of its axes."""

    name: V
    term: _Term


def einsum(builder: Builder[V], equation: str, names: Sequence[V], *, name: str = "einsum") -> V:
    """Return the value that the equation makes of the given values.

    Args:
        equation: such as `bij,bjk->bik`; without `->` the output has, in alphabetical order, the
            subscripts that appear once, after the ellipsis's.
        names: one value of the builder for each operand, of one element type.
        name: what the emitted nodes' names begin with.

    Raises:
        GraphError: the equation is malformed; says how.
        ShapeError: an operand's rank or the extents of a subscript do not fit; names them.
    """
    terms, output = _parse(equation, [builder.spec(value).rank for value in names])
    extents = _extents(builder, equation, terms, names)
    unknown = [label for label in output if label not in extents]
    if unknown:
        raise GraphError(
            f"einsum {equation!r}: subscript {unknown[0]} of the output is in no input"
        )
    emit = _Emission(builder, name, extents)
    values = [
        emit.prepared(_Value(value, term), _others(terms, position, output))
        for position, (value, term) in enumerate(zip(names, terms, strict=True))
    ]
    while len(values) > 1:
        i, j = min(
            itertools.combinations(range(len(values)), 2),
            key=lambda pair: emit.cost(values[pair[0]], values[pair[1]]),
        )
        a, b = values[i], values[j]
        rest = [value for k, value in enumerate(values) if k not in (i, j)]
        keep = {*output, *(label for value in rest for label in value.term)}
        values = [*rest, emit.pair(a, b, keep, output)]
    return emit.finished(values[0], output).name


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[_Term], _Term]:
    """Return the subscripts of every operand and of the output."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    sides = left.split(",")
    if len(sides) != len(ranks):
        raise GraphError(f"einsum {equation!r}: {len(ranks)} operands found, {len(sides)} needed")
    terms = [_term(equation, side, rank) for side, rank in zip(sides, ranks)]
    dots = max((sum(label[0] == "~" for label in term) for term in terms), default=0)
    ellipsis = tuple(f"~{number}" for number in range(dots, 0, -1))
    if arrow:
        head, found, tail = right.partition("...")
        output = (*_letters(equation, head), *(ellipsis if found else ()))
        output += _letters(equation, tail)
        twice = [label for label in output if output.count(label) > 1]
        if twice:
            raise GraphError(f"einsum {equation!r}: subscript {twice[0]} is twice in the output")
        return terms, output
    letters = [label for term in terms for label in term if label[0] != "~"]
    once = sorted(label for label in letters if letters.count(label) == 1)
    return terms, (*ellipsis, *once)


def _letters(equation: str, text: str) -> _Term:
    for letter in text:
        if letter not in string.ascii_letters:
            raise GraphError(f"einsum {equation!r}: {letter!r} found, a letter or `...` needed")
    return tuple(text)


def _term(equation: str, text: str, rank: int) -> _Term:
    head, found, tail = text.partition("...")
    before, after = _letters(equation, head), _letters(equation, tail)
    named = len(before) + len(after)
    if rank < named or (rank > named and not found):
        more = " or more" if found else ""
        raise ShapeError(
            f"einsum {equation!r}: an operand has rank {rank}; {text or 'a scalar'}"
            f" needs {named}{more}"
        )
    return (*before, *(f"~{number}" for number in range(rank - named, 0, -1)), *after)


def _extents(
    builder: Builder[V], equation: str, terms: Sequence[_Term], names: Sequence[V]
) -> dict[str, int]:
    """Return the extent of each subscript; axes of extent 1 broadcast."""
    extents: dict[str, int] = {}
    first = builder.spec(names[0]) if names else None
    for position, (term, value) in enumerate(zip(terms, names)):
        spec = builder.spec(value)
        if first is not None and spec.dtype != first.dtype:
            raise ShapeError(
                f"einsum {equation!r}: operand {position} is {spec.dtype};"
                f" {first.dtype} of operand 0 needed"
            )
        own: dict[str, int] = {}
        for label, extent in zip(term, spec.shape):
            if own.setdefault(label, extent) != extent:
                raise ShapeError(
                    f"einsum {equation!r}: subscript {label} is {own[label]} and {extent}"
                    f" in operand {position}"
                )
            known = extents.get(label, 1)
            if known != extent and 1 not in (known, extent):
                raise ShapeError(
                    f"einsum {equation!r}: subscript {label} is {known} but {extent}"
                    f" in operand {position}"
                )
            extents[label] = extent if known == 1 else known
    return extents


def _others(terms: Sequence[_Term], position: int, output: _Term) -> set[str]:
    rest = (label for k, term in enumerate(terms) if k != position for label in term)
    return {*output, *rest}


def _moved(have: _Term, want: _Term) -> tuple[int, ...]:
    return tuple(have.index(label) for label in want)


class _Emission(Generic[V]):
    """Emits the operators of one equation; every method returns a value of the builder."""

    def __init__(self, builder: Builder[V], name: str, extents: dict[str, int]) -> None:
        self._builder, self._name, self._extents = builder, name, extents

    def _apply(self, operator: str, *values: V, **attributes: Any) -> V:
        node = f"{self._name}.{operator}"
        return self._builder.apply(operator, *values, name=node, **attributes)[0]

    def _shape(self, value: _Value[V]) -> tuple[int, ...]:
        return self._builder.spec(value.name).shape

    def _size(self, labels: Collection[str]) -> int:
        return math.prod(self._extents[label] for label in labels)

    def _reshape(self, value: V, shape: Sequence[int]) -> V:
        if self._builder.spec(value).shape == tuple(shape):
            return value
        return self._apply("reshape", value, shape=tuple(shape))

    def transposed(self, value: _Value[V], term: _Term) -> _Value[V]:
        """The axes in the order of a term."""
        order = _moved(value.term, term)
        if order == tuple(range(len(order))):
            return value
        return _Value(self._apply("transpose", value.name, permutation=order), term)

    def summed(self, value: _Value[V], keep: Collection[str]) -> _Value[V]:
        """Without the axes that nothing else needs."""
        axes = tuple(axis for axis, label in enumerate(value.term) if label not in keep)
        if not axes:
            return value
        left = tuple(label for label in value.term if label in keep)
        return _Value(self._apply("reduce_sum", value.name, axes=axes), left)

    def prepared(self, value: _Value[V], keep: Collection[str]) -> _Value[V]:
        """An operand with each subscript once, no axis that broadcasts, and none to sum alone."""
        value = self._diagonal(value)
        shape = self._shape(value)
        stay = [
            axis for axis, label in enumerate(value.term) if shape[axis] == self._extents[label]
        ]
        if len(stay) < len(shape):
            name = self._reshape(value.name, [shape[axis] for axis in stay])
            value = _Value(name, tuple(value.term[axis] for axis in stay))
        return self.summed(value, keep)

    def _diagonal(self, value: _Value[V]) -> _Value[V]:
        """One axis for each subscript that an operand repeats: every so many elements of both."""
        repeated = next((x for x in value.term if value.term.count(x) > 1), None)
        if repeated is None:
            return value
        extent = self._shape(value)[value.term.index(repeated)]
        count = value.term.count(repeated)
        axes = [axis for axis, label in enumerate(value.term) if label == repeated]
        rest = [axis for axis, label in enumerate(value.term) if label != repeated]
        shape = [self._shape(value)[axis] for axis in rest]
        name = value.name
        if axes != list(range(count)):
            name = self._apply("transpose", name, permutation=(*axes, *rest))
        name = self._reshape(name, (extent**count, *shape))
        step = sum(extent**power for power in range(count))
        name = self._apply(
            "slice",
            name,
            starts=(0,) * (1 + len(shape)),
            stops=(extent**count, *shape),
            steps=(step, *(1 for _ in shape)),
        )
        return self._diagonal(_Value(name, (repeated, *(value.term[axis] for axis in rest))))

    def cost(self, a: _Value[V], b: _Value[V]) -> int:
        """Multiplications of a product of two values."""
        return self._size({*a.term, *b.term})

    def pair(self, a: _Value[V], b: _Value[V], keep: Collection[str], output: _Term) -> _Value[V]:
        """The product of two values, summed over the subscripts that are not kept."""
        a = self.summed(a, {*keep, *b.term})
        b = self.summed(b, {*keep, *a.term})
        shared = [label for label in a.term if label in b.term]
        batch = sorted((x for x in shared if x in keep), key=lambda x: _rank(x, output))
        inner = tuple(label for label in shared if label not in keep)
        if not inner:
            return self._multiplied(a, b, tuple(batch))
        rows = tuple(label for label in a.term if label not in shared)
        columns = tuple(label for label in b.term if label not in shared)
        if rows and columns and _rank(columns[0], output) < _rank(rows[0], output):
            a, b, rows, columns = b, a, columns, rows  # no transpose is needed then
        order = min(
            (inner, tuple(label for label in b.term if label in inner)),
            key=lambda order: (
                (a.term not in ((*batch, *rows, *order), (*batch, *order, *rows)))
                + (b.term not in ((*batch, *order, *columns), (*batch, *columns, *order)))
            ),
        )
        lead = tuple(batch)
        left, turned_a = self._matrix(a, lead, rows, order)
        right, turned_b = self._matrix(b, lead, columns, order)
        made = self._apply("matmul", left, right, transpose_a=turned_a, transpose_b=not turned_b)
        term = (*lead, *rows, *columns)
        return _Value(self._reshape(made, [self._extents[label] for label in term]), term)

    def _matrix(self, value: _Value[V], batch: _Term, outer: _Term, inner: _Term) -> tuple[V, bool]:
        """The value as matrices (batch…, outer, inner), or (batch…, inner, outer) and True."""
        turned = value.term == (*batch, *inner, *outer) and bool(outer)
        sides = (inner, outer) if turned else (outer, inner)
        value = self.transposed(value, (*batch, *sides[0], *sides[1]))
        shape = [self._extents[label] for label in batch]
        return self._reshape(value.name, [*shape, *map(self._size, sides)]), turned

    def _multiplied(self, a: _Value[V], b: _Value[V], batch: _Term) -> _Value[V]:
        """The product element by element; axes that only one of them has are broadcast."""
        rows = tuple(label for label in a.term if label not in batch)
        columns = tuple(label for label in b.term if label not in batch)
        # Where one has all axes of the other, its order needs no transpose.
        term = (*batch, *rows, *columns)
        if not columns:
            term = a.term
        elif not rows:
            term = b.term
        sides = []
        for value in (a, b):
            own = tuple(label for label in term if label in value.term)
            name = self.transposed(value, own).name
            held = [self._extents[label] if label in own else 1 for label in term]
            while held and held[0] == 1 and term[len(term) - len(held)] not in own:
                del held[0]  # broadcasting adds leading axes
            sides.append(self._reshape(name, held))
        return _Value(self._apply("mul", *sides), term)

    def finished(self, value: _Value[V], output: _Term) -> _Value[V]:
        """The value with the axes of the output."""
        value = self.summed(value, output)
        lost = tuple(label for label in output if label not in value.term)
        if lost:  # all of extent 1, and summed nowhere
            value = _Value(
                self._reshape(value.name, (*self._shape(value), *(1 for _ in lost))),
                (*value.term, *lost),
            )
        return self.transposed(value, output)


def _rank(label: str, output: _Term) -> tuple[int, str]:
    return (output.index(label) if label in output else len(output), label)
