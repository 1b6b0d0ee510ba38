"""Exact validation of laws that are not of polynomials: exp, roots, quotients, softmax.

Jia et al. (TASO, section 2.4) run a symbolic implementation of each operator on small tensors.
Here it is the operator's declared NumPy reference, run on arrays of `Element`; a function of
each element that decides on signs (`sigmoid`, `relu`) is not interpreted. Both sides must be one
function of the inputs, defined at the same inputs (`field.py`). What is found different is refuted
by numbers only: a counterexample is one that the operators themselves compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.ir.term import Term
from soapstone.rules.algebra import evaluate
from soapstone.rules.laws.element import Elements, Undecided, elements
from soapstone.rules.laws.field import Field
from soapstone.search.rules import language
from soapstone.search.rules.shapes import Type, extents

Types = Mapping[Term, Type]
Sides = tuple[Term, Term]
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


class Symbolic:
    """The values of terms as arrays of elements over one field."""

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
            return self._leaf(term, extents(types[term]))
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
