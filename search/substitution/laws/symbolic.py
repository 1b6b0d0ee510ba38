"""Exact validation of laws that are not of polynomials: exp, roots, quotients, softmax.

Jia et al. (TASO, section 2.4) run a symbolic implementation of each operator on small tensors.
Here it is the operator's declared NumPy reference, run on arrays of `Expression`; a function of
each element that decides on signs (`sigmoid`, `relu`) is not interpreted. Both sides must be one
function of the inputs, defined at the same inputs (`field.py`). What is found different is refuted
by numbers only: a counterexample is one that the operators themselves compute.

Rank 4 is gone through up to extents of 3, and so are choices of ranks with thousands of sizes. A
law of element-wise operators alone says the same of each element, whatever the sizes: where
operands are repeated, extents of 2 and ranks up to 3 cover all cases.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.tensor import Array
from soapstone.ir.term import Term, Value, subterms
from soapstone.search.substitution.algebra import evaluate, language, shapes
from soapstone.search.substitution.algebra.condition import IllTyped, holds, read
from soapstone.search.substitution.algebra.shapes import Type
from soapstone.search.substitution.laws.expression import Elements, Undecided, elements
from soapstone.search.substitution.laws.field import Field
from soapstone.search.substitution.laws.sizes import (
    bound_sides,
    parameter_values,
    rank_choices,
    sizes,
)
from soapstone.search.substitution.laws.validate import LIMIT, Progress, Validation

Types = Mapping[Term, Type]
Sides = tuple[Term, Term]
_RANK_4 = 3  # the largest extent of tensors of rank 4
_MOST = 2000  # sizes of one choice of ranks and parameters; else extents are up to one less
_TRIES = 4  # random inputs, before a difference is called undecided


@dataclass(frozen=True)
class Difference:
    """A size at which two sides are not found equal: why, and numbers that show it.

    `numbers` is None where no inputs were found that do: the sides may be one function.
    """

    sides: Sides
    types: Types
    reason: str
    numbers: evaluate.Disagreement | None

    def __str__(self) -> str:
        given = ", ".join(f"{term} {type_}" for term, type_ in self.types.items())
        what = self.numbers or f"not decided: {self.reason}"
        return f"{self.sides[0]} = {self.sides[1]} with {given}: {what}"


def validate(law: Law, limit: int = LIMIT, progress: Progress | None = None) -> Validation:
    """Return whether a law holds for all parameters and all extents up to a limit, exactly."""
    start = time.perf_counter()
    obligations = 0
    tasks = list(itertools.product(parameter_values(law), rank_choices(law, limit)))
    computed = Symbolic()
    for done, (values, ranks) in enumerate(tasks):
        for sides, types in instances(law, values, ranks, limit):
            obligations += 1
            difference = computed.difference(sides, types)
            if difference is not None:
                return Validation(law, obligations, difference, time.perf_counter() - start)
        if progress is not None:
            progress(law.name, done + 1, len(tasks))
    return Validation(law, obligations, None, time.perf_counter() - start)


# Sizes


def is_pointwise(law: Law) -> bool:
    """Return whether all operators of a law are element-wise."""
    symbols = {term.symbol for term in subterms(law.sides) if term.operands}
    return all(language.forms()[symbol].spec.elementwise for symbol in symbols)


def instances(
    law: Law, values: Mapping[str, Value], ranks: Mapping[Term, int], limit: int
) -> Iterator[tuple[Sides, Types]]:
    """Yield both sides with parameters' values, and the types of their leaves, at all sizes."""
    most = min(limit, _RANK_4) if 4 in ranks.values() else limit
    sides = bound_sides(law, values)
    if sides is None:
        return
    if any(len(term.operands) > 2 for term in subterms(sides)):
        leaves = [term for term in subterms(sides) if not term.operands]
        for types in _tried(sides, leaves, ranks, most):
            if _conditions_hold(law, values, types):
                yield sides, types
        return
    pointwise = is_pointwise(law)
    repeated = 1 if 4 in ranks.values() else min(most, 2)
    found = sizes(law, values, ranks, repeated if pointwise else most)
    while found is not None and len(found) > _MOST:
        most -= 1
        found = sizes(law, values, ranks, most)
    for row in range(len(found) if found else 0):
        assert found is not None
        yield sides, found.at(row)
    rank = max(ranks.values())
    for shape in itertools.product(range(1, most + 1), repeat=rank) if pointwise else ():
        if max(shape, default=0) > repeated:  # no operand is repeated
            whole = {leaf: shapes.plain(shape[rank - r :]) for leaf, r in ranks.items()}
            one, other = (shapes.infer(side, whole) for side in sides)
            if one is not None and other is not None and one.shape == other.shape:
                yield sides, whole


def _tried(
    sides: Sides, leaves: list[Term], ranks: Mapping[Term, int], limit: int
) -> Iterator[Types]:
    """Yield the sizes at which both sides have one shape, leaf by leaf."""
    ready: list[list[Term]] = [[] for _ in leaves]
    for term in subterms(sides):
        if term.operands:
            inside = [leaves.index(leaf) for leaf in term.subterms() if not leaf.operands]
            ready[max(inside)].append(term)
    types: dict[Term, Type] = {}

    def assign(at: int) -> Iterator[Types]:
        if at == len(leaves):
            if types[sides[0]].shape == types[sides[1]].shape:
                yield {leaf: types[leaf] for leaf in leaves}
            return
        for shape in itertools.product(range(1, limit + 1), repeat=ranks[leaves[at]]):
            types[leaves[at]] = shapes.plain(shape)
            for term in ready[at]:
                operands = tuple(types[operand] for operand in term.operands)
                type_ = shapes.concrete(term.symbol, term.parameters, operands)
                if type_ is None:
                    break
                types[term] = type_
            else:
                yield from assign(at + 1)

    return assign(0)


def _conditions_hold(law: Law, values: Mapping[str, Value], types: Types) -> bool:
    def extent(term: Term, axis: int) -> int:
        found = shapes.infer(term, types)
        if found is None or not -found.rank <= axis < 0:
            raise IllTyped(f"{term} has no axis {axis}")
        return int(str(found.shape[axis]))

    try:
        read_ = [read(text, extent, lambda name: values.get(name, name)) for text in law.where]
        return all(holds(condition) for conditions in read_ for condition in conditions)
    except IllTyped:
        return False


# Evaluation


class Symbolic:
    """The values of terms as arrays of expressions over one field."""

    def __init__(self) -> None:
        self.field = Field()
        self._inputs: dict[tuple[Term, tuple[int, ...]], Array] = {}
        self._opaque: set[str] = set()  # operators whose reference decides on signs

    def difference(self, sides: Sides, types: Types) -> Difference | None:
        """Return where two sides are not found equal, None where they are equal everywhere."""
        try:
            reason = self._reason(*(self.value(side, types) for side in sides))
        except Undecided as error:
            reason = str(error)
        if reason is None:
            return None
        for seed in range(_TRIES):
            numbers = evaluate.compare(sides[:1], sides[1:], types, seed)
            if numbers is not None:
                return Difference(sides, types, reason, numbers)
        return Difference(sides, types, reason, None)

    def _reason(self, left: Array, right: Array) -> str | None:
        if left.shape != right.shape:
            return f"shapes {left.shape} and {right.shape}"
        for number, (one, other) in enumerate(zip(left.flat, right.flat)):
            if not self.field.equal(one, other):
                position = [int(i) for i in np.unravel_index(number, left.shape)]
                return f"element {position} is {one} and {other}"[:300]
        return None

    def value(self, term: Term, types: Types) -> Array:
        """Return the tensor that a term computes from symbolic inputs of these types.

        Raises:
            Undecided: a reference asks for the sign of an element.
            GraphError: the term does not fit the types.
        """
        if not term.operands:
            return self._leaf(term, evaluate.extents(types[term]))
        operands = [self.value(operand, types) for operand in term.operands]
        shapes_ = tuple(operand.shape for operand in operands)
        attributes = evaluate.attributes_of(term.symbol, term.parameters, shapes_)
        if attributes is None:
            raise GraphError(f"{term} does not fit shapes {shapes_}")
        declared = language.forms()[term.symbol]
        spec = declared.spec
        if spec.name not in self._opaque:
            try:
                views = (operand.view(Elements) for operand in operands)
                return np.asarray(spec.run(attributes, *views)[declared.form.output])
            except (Undecided, TypeError):
                if not spec.elementwise or len(operands) != 1:
                    raise
                self._opaque.add(spec.name)
        name = f"{spec.name}{dict(attributes) or ''}"
        result = np.empty(operands[0].size, object)
        result[:] = [self.field.function(name, element) for element in operands[0].flat]
        return result.reshape(operands[0].shape)

    def _leaf(self, term: Term, shape: tuple[int, ...]) -> Array:
        if (term, shape) not in self._inputs:
            if term.is_variable:
                found: Array = elements(self.field, term.symbol, shape)
            else:
                numbers = evaluate.constant(term, shape)
                if numbers is None:
                    raise GraphError(f"{term} has no value of shape {shape}")
                found = np.vectorize(self.field.number, otypes=[object])(numbers)
            self._inputs[term, shape] = found
        return self._inputs[term, shape]
