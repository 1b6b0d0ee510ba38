"""Exact validation of laws that are not of polynomials: exp, roots, quotients, softmax.

Jia et al. (TASO, section 2.4) run a symbolic implementation of each operator on small tensors.
Here it is the operator's declared NumPy reference, run on arrays of `Expression`; a function of
each element that decides on signs (`sigmoid`, `relu`) is not interpreted. Both sides must be one
function of the inputs, defined at the same inputs (`field.py`). What is found different is refuted
by numbers only: a counterexample is one that the operators themselves compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from soapstone.ir.law import Law
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Term, Value, instantiate_value, is_variable, subterms
from soapstone.search.substitution import condition, language, shapes
from soapstone.search.substitution.expression import Elements, Undecided, elements
from soapstone.search.substitution.field import Field
from soapstone.search.substitution.shapes import Type

MOST = 600  # sizes of one choice of ranks and parameters


@dataclass(frozen=True)
class Instance:
    """The two sides of a law with their parameters' values, and the types of their tensors."""

    left: Term
    right: Term
    types: Mapping[Term, Type]

    def __str__(self) -> str:
        sizes = ", ".join(f"{term} {type_}" for term, type_ in self.types.items())
        return f"{self.left} = {self.right} with {sizes}"


# The sizes and parameter values at which a law is said


def with_values(term: Term, values: Mapping[str, Value]) -> Term:
    """Return a term with the variables among its parameters replaced."""
    found = [instantiate_value(value, values) for value in term.parameters]
    parameters = (value if new is None else new for value, new in zip(term.parameters, found))
    operands = tuple(with_values(operand, values) for operand in term.operands)
    return Term(term.symbol, tuple(parameters), operands)


def parameter_values(law: Law) -> Iterator[dict[str, Value]]:
    """Yield the values of a law's parameters that every form declares in which they stand."""
    allowed: dict[str, tuple[Value, ...]] = {}
    for term in subterms(law.sides):
        if term.operands:
            given = language.forms()[term.symbol].form.parameters
            for name, values in zip(term.parameters, given.values()):
                if is_variable(name):
                    before = allowed.get(str(name), values)
                    allowed[str(name)] = tuple(value for value in before if value in values)
    for choice in itertools.product(*allowed.values()):
        yield dict(zip(allowed, choice))


def leaf_ranks(law: Law) -> Iterator[dict[Term, int]]:
    """Yield the ranks of tensors for which a law is said."""
    leaves = [term for term in subterms(law.sides) if not term.operands]
    if not law.ranks:
        for rank in range(1, 5):
            yield dict.fromkeys(leaves, rank)
    for text in law.ranks:
        words = dict(word.split("=") for word in text.split())
        yield {leaf: int(words[str(leaf)]) for leaf in leaves}


def conditions_hold(law: Law, values: Mapping[str, Value], types: Mapping[Term, Type]) -> bool:
    """Return whether a law's conditions hold for these types and parameters."""

    def extent(term: Term, axis: int) -> int:
        found = shapes.infer(with_values(term, values), types)
        if found is None or not -found.rank <= axis < 0:
            raise condition.IllTyped(f"{term} has no axis {axis}")
        return int(str(found.shape[axis]))

    def parameter(name: str) -> Value:
        return values.get(name, name)

    try:
        said = [one for text in law.where for one in condition.read(text, extent, parameter)]
    except condition.IllTyped:
        return False
    return all(map(condition.holds, said))


@lru_cache(maxsize=32)
def _types(rank: int, limit: int) -> tuple[Type, ...]:
    return tuple(map(shapes.plain, itertools.product(range(1, limit + 1), repeat=rank)))


@lru_cache(maxsize=1 << 14)
def _partners(
    symbol: str,
    parameters: tuple[Value, ...],
    operands: tuple[Type | None, ...],
    rank: int,
    limit: int,
) -> tuple[Type, ...]:
    """Return the types of one operand, given as None, that fit the others."""
    return tuple(
        type_
        for type_ in _types(rank, limit)
        if shapes.concrete(symbol, parameters, tuple(type_ if o is None else o for o in operands))
    )


def instances(
    law: Law, ranks: Mapping[Term, int], values: Mapping[str, Value], limit: int, most: int = MOST
) -> list[Instance] | None:
    """Return the law at all sizes up to a limit; None where there are more than `most`."""
    left, right = (with_values(side, values) for side in law.sides)
    leaves = list(ranks)
    ready: list[list[Term]] = [[] for _ in leaves]
    for term in subterms((left, right)):
        if term.operands:
            last = max(leaves.index(leaf) for leaf in term.subterms() if not leaf.operands)
            ready[last].append(term)
    found: list[Instance] = []
    types: dict[Term, Type] = {}

    def candidates(at: int) -> tuple[Type, ...]:
        """Return the types of a leaf that fit one operator whose other operands are known."""
        leaf = leaves[at]
        for term in ready[at]:
            known = [types.get(o) for o in term.operands if o != leaf and o not in ready[at]]
            if len(term.operands) == len(known) + 1 and leaf in term.operands:
                operands = tuple(None if o == leaf else types[o] for o in term.operands)
                return _partners(term.symbol, term.parameters, operands, ranks[leaf], limit)
        return _types(ranks[leaf], limit)

    def fits(at: int) -> bool:
        for term in ready[at]:
            operands = tuple(types[operand] for operand in term.operands)
            type_ = shapes.concrete(term.symbol, term.parameters, operands)
            if type_ is None:
                return False
            types[term] = type_
        return True

    def assign(at: int) -> bool:
        """Give the leaves from one on every shape; say whether there is room for more."""
        if at == len(leaves):
            given = {leaf: types[leaf] for leaf in leaves}
            if types[left].shape == types[right].shape and conditions_hold(law, values, given):
                found.append(Instance(left, right, given))
            return len(found) <= most
        for type_ in candidates(at):
            types[leaves[at]] = type_
            if fits(at) and not assign(at + 1):
                return False
        return True

    return found if assign(0) else None


# Evaluation


class Symbolic:
    """The values of terms as arrays of expressions over one field."""

    def __init__(self) -> None:
        self.field = Field()
        self._numbers = np.vectorize(self.field.number, otypes=[object])
        self._inputs: dict[tuple[Term, tuple[int, ...]], Elements] = {}
        self._opaque: set[str] = set()  # functions that decide on signs

    def value(self, term: Term, types: Mapping[Term, Type]) -> Array:
        """Return the tensor that a term computes from symbolic inputs of these types.

        Raises:
            Undecided: a reference asks for the sign of an element.
        """
        if not term.operands:
            return self._leaf(term, tuple(int(str(extent)) for extent in types[term].shape))
        operands = [self.value(operand, types) for operand in term.operands]
        declared = language.forms()[term.symbol]
        spec, form = declared.spec, declared.form
        specs = [TensorSpec(operand.shape, "float64") for operand in operands]
        attributes = form.attributes(term.parameters, *specs)
        if attributes is None:
            raise Undecided(f"{term.symbol} does not take such operands")
        attributes = spec.normalise(attributes)
        if spec.name not in self._opaque:
            try:
                views = (operand.view(Elements) for operand in operands)
                return np.asarray(spec.run(attributes, *views)[form.output])
            except (Undecided, TypeError):
                if not spec.elementwise or len(operands) != 1:
                    raise
                self._opaque.add(spec.name)
        name = f"{spec.name}{attributes or ''}"
        result = np.empty(operands[0].size, object)
        result[:] = [self.field.function(name, element) for element in operands[0].flat]
        return result.reshape(operands[0].shape)

    def _leaf(self, term: Term, shape: tuple[int, ...]) -> Array:
        constant = language.constants().get(term.symbol)
        if constant is None:
            key = term, shape
            if key not in self._inputs:
                self._inputs[key] = elements(self.field, term.symbol, shape)
            return self._inputs[key]
        numbers = constant.value(term.parameters, shape)
        if numbers is None:
            raise Undecided(f"{term} has no value of shape {shape}")
        return np.asarray(self._numbers(numbers))

    def difference(self, instance: Instance) -> str | None:
        """Return where two sides are not found equal, None where they are equal everywhere."""
        left = self.value(instance.left, instance.types)
        right = self.value(instance.right, instance.types)
        if left.shape != right.shape:
            return f"shapes {left.shape} and {right.shape}"
        for position in np.ndindex(*left.shape):
            one, other = left[position], right[position]
            if not self.field.equal(one, other):
                return f"element {list(position)}: {one} and {other}"[:400]
        return None
