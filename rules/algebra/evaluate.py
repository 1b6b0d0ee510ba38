"""What terms compute, by the operators' NumPy references; and where two graphs differ.

A term is evaluated in float64 through the attributes that its form says. Types travel with the
arrays, so a split finds where its operand was last concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.spec import OpSpec
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import SPLITS, Term, Value, subterms
from soapstone.search.rules.language import constants, forms
from soapstone.search.rules.shapes import Type, concrete, extents, tensor_type

Attributes = Mapping[str, Any]


@lru_cache(maxsize=1 << 16)
def attributes_of(
    symbol: str,
    parameters: tuple[Value, ...],
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, int] | None = None,
) -> Attributes | None:
    """Return the operator's attributes for operands of these shapes; None where they do not fit.

    `sizes`: the extents of the two parts, of a split.
    """
    declared = forms().get(symbol)
    if declared is None or len(shapes) != declared.form.operands:
        return None
    specs = [TensorSpec(shape, "float64") for shape in shapes]
    given = {"sizes": sizes} if symbol in SPLITS else {}
    try:
        found = declared.form.attributes(parameters, *specs, **given)
        if found is None:
            return None
        attributes = declared.spec.normalise(found)
        declared.spec.bind(specs, attributes)
    except GraphError:  # ShapeError is one
        return None
    return attributes


def apply(
    symbol: str,
    parameters: tuple[Value, ...],
    arrays: Sequence[Array],
    sizes: tuple[int, int] | None = None,
) -> Array | None:
    """Return the symbol's result on these operands; None where they do not fit."""
    shapes = tuple(array.shape for array in arrays)
    attributes = attributes_of(symbol, parameters, shapes, sizes)
    if attributes is None:
        return None
    declared = forms()[symbol]
    with np.errstate(all="ignore"):
        outputs = declared.spec.run(attributes, *arrays)
    return np.asarray(outputs[declared.form.output])


def constant(term: Term, shape: Sequence[int]) -> Array | None:
    """Return a constant of this shape (float64); None where there is none."""
    declared = constants().get(term.symbol)
    if declared is None or len(term.parameters) != len(declared.parameters):
        return None
    if declared.rank is not None and len(shape) != declared.rank:
        return None
    return declared.value(term.parameters, tuple(shape))


@lru_cache(maxsize=4096)
def exact_constant(term: Term, shape: tuple[int, ...]) -> tuple[Fraction, ...] | None:
    """Return the elements of a constant, exactly; None where there is none of that shape.

    Raises:
        ValueError: an element is no ratio of small integers.
    """
    array = constant(term, shape)
    if array is None:
        return None
    elements = []
    for element in np.asarray(array, np.float64).ravel().tolist():
        exact = Fraction(element).limit_denominator(1 << 12)
        if float(exact) != element:
            raise ValueError(f"constant {term} of shape {shape}: {element} is no simple ratio")
        elements.append(exact)
    return tuple(elements)


def evaluate(
    terms: Sequence[Term],
    arrays: Mapping[Term, Array],
    types: Mapping[Term, Type] | None = None,
) -> tuple[Array, ...] | None:
    """Return what the terms compute, in float64; None where one has operands that do not fit.

    arrays: the tensor of each variable; constants are made in the shapes of their types.
    types: of variables and constants; needed for constants, and for variables that can be split.
    """
    given = {term: tensor_type(np.shape(array)) for term, array in arrays.items()}
    plan = Plan.of(terms, {**given, **(types or {})})
    if plan is None or not all(term in arrays for term, array in plan.leaves if array is None):
        return None
    return plan.run(arrays)


@dataclass(frozen=True)
class Plan:
    """Terms at certain types, ready to be run on many inputs.

    Attributes:
        leaves: the variables, and the constants with their tensors; these are numbered first.
        steps: for each operator, in order: its reference, its attributes, which output it is, and
            the numbers of its operands.
        roots: the numbers of the terms.
    """

    leaves: tuple[tuple[Term, Array | None], ...]
    steps: tuple[tuple[OpSpec, Attributes, int, tuple[int, ...]], ...]
    roots: tuple[int, ...]

    @classmethod
    def of(cls, terms: Sequence[Term], types: Mapping[Term, Type]) -> Plan | None:
        """Return how the terms are computed; None where one has operands that do not fit."""
        every = list(subterms(terms))
        leaves: list[tuple[Term, Array | None]] = []
        for term in every:
            if not term.operands:
                if term not in types:
                    return None
                array = None if term.is_variable else constant(term, extents(types[term]))
                leaves.append((term, None if array is None else np.asarray(array, np.float64)))
        number = {term: at for at, (term, _) in enumerate(leaves)}
        known = [types[term] for term, _ in leaves]
        steps = []
        for term in every:
            if not term.operands:
                continue
            numbers = tuple(number[operand] for operand in term.operands)
            operands = tuple(known[at] for at in numbers)
            type_ = concrete(term.symbol, term.parameters, operands)
            if type_ is None:
                return None
            shapes = tuple(extents(operand) for operand in operands)
            parts = split_sizes(term.symbol, term.parameters, operands[0])
            attributes = attributes_of(term.symbol, term.parameters, shapes, parts)
            if attributes is None:
                return None
            declared = forms()[term.symbol]
            steps.append((declared.spec, attributes, declared.form.output, numbers))
            number[term] = len(known)
            known.append(type_)
        return cls(tuple(leaves), tuple(steps), tuple(number[term] for term in terms))

    def run(self, arrays: Mapping[Term, Array], dtype: str = "float64") -> tuple[Array, ...]:
        """Return what the terms compute, in numbers of a type, of the variables' tensors."""
        values: list[Array] = []
        for term, array in self.leaves:
            given = arrays.get(term, array)
            if given is None:
                raise GraphError(f"{term} has no tensor")
            values.append(np.asarray(given, dtype))
        with np.errstate(all="ignore"):
            for spec, attributes, output, numbers in self.steps:
                found = spec.run(attributes, *(values[at] for at in numbers))
                values.append(np.asarray(found[output]))
        return tuple(values[root] for root in self.roots)


def split_sizes(
    symbol: str, parameters: tuple[Value, ...], operand: Type
) -> tuple[int, int] | None:
    """Return the extents of both parts of an operand that a split parts; None for others."""
    axis = parameters[0] if symbol in SPLITS else None
    tree = operand.trees[axis] if isinstance(axis, int) else None
    if tree is None or not isinstance(axis, int) or not isinstance(tree.at, int):
        return None
    return tree.at, extents(operand)[axis] - tree.at


@dataclass(frozen=True)
class Disagreement:
    """Inputs at which two graphs differ: the output, where in it, and both values there.

    `values` is None, and `index` empty, where already the shapes differ.
    """

    output: int
    index: tuple[int, ...]
    values: tuple[float, float] | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    seed: int

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {shape}" for name, shape in self.inputs.items())
        if self.values is None:
            return f"output {self.output} is {self.shapes[0]} but {self.shapes[1]}, of {inputs}"
        left, right = self.values
        return (
            f"output {self.output} at {self.index} is {left:.6g} but {right:.6g},"
            f" of {inputs}, seed {self.seed}"
        )


TOLERANCE = 1e-6  # of the largest magnitude; rounding in float64 stays far below


def compare(
    source: Sequence[Term],
    target: Sequence[Term],
    types: Mapping[Term, Type],
    seed: int = 0,
    *,
    thorough: bool = False,
    largest: float = np.inf,
) -> Disagreement | None:
    """Return where two graphs differ on random inputs of these types, None if nowhere.

    Inputs are drawn between -1 and 1, then above 0, where roots and quotients have values, then
    below 0: the maximum of many is positive unless all are negative. With `thorough`, signs, sizes
    and patterns are then drawn for each input alone, for equations of relu and maxima that hold at
    most points. No element is larger than `largest`.

    Raises:
        GraphError: a term does not fit these types; says which.
    """
    leaves = [term for term in subterms((*source, *target)) if not term.operands]
    shapes = {str(term): extents(types[term]) for term in leaves if term in types}
    inputs = [term for term in leaves if term.is_variable and term in types]
    plan = Plan.of((*source, *target), types)
    if plan is None:
        wrong = next((side for side in (source, target) if Plan.of(side, types) is None), source)
        raise GraphError(f"{'; '.join(map(str, wrong))} does not fit {shapes}")
    for draw in range(len(_EVERYWHERE) + (_MIXED if thorough else 0)):
        rng = _generator(seed, draw)
        arrays = {}
        for term in inputs:
            style = _EVERYWHERE[draw] if draw < len(_EVERYWHERE) else str(rng.choice(_STYLES))
            drawn = _random(style, shapes[str(term)], rng)
            arrays[term] = drawn.clip(-largest, largest)
        tensors = plan.run(arrays)
        for output, pair in enumerate(zip(tensors, tensors[len(source) :])):
            difference = _differ(*pair)
            if difference is not None:
                index, values = difference
                sizes = (pair[0].shape, pair[1].shape)
                return Disagreement(output, index, values, sizes, shapes, seed)
    return None


_GENERATOR = np.random.default_rng(0)


def _generator(seed: int, draw: int) -> np.random.Generator:
    """Return `default_rng((seed, draw))`, which takes longer to make than small tensors do."""
    _GENERATOR.bit_generator.state = _state(seed, draw)
    return _GENERATOR


@lru_cache(maxsize=1 << 10)
def _state(seed: int, draw: int) -> Mapping[str, Any]:
    return np.random.default_rng((seed, draw)).bit_generator.state


_EVERYWHERE = ("spread", "positive", "negative")  # the same for all inputs
_STYLES = (*_EVERYWHERE, "large", "small", "uneven", "alternating")
_MIXED = 32  # draws of `thorough`


def _random(style: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random elements in one of the styles."""
    spread = rng.uniform(-1, 1, shape)
    match style:
        case "positive":
            return rng.uniform(0.1, 1, shape)
        case "negative":
            return rng.uniform(-1, -0.1, shape)
        case "large":
            return 3 * spread
        case "small":
            return 0.1 * spread
        case "uneven":  # a few much larger than the others
            return np.asarray(spread * np.exp(2 * rng.standard_normal(shape)))
        case "alternating":  # along some of the axes
            weights = rng.integers(0, 2, len(shape))
            place = np.tensordot(weights, np.indices(shape), 1) if shape else 0
            return np.asarray((-1.0) ** (place + rng.integers(2)) * (1 + 0.1 * spread))
    return spread


def _differ(left: Array, right: Array) -> tuple[tuple[int, ...], tuple[float, float] | None] | None:
    """Return the place and values of the largest difference, None where there is none."""
    if left.shape != right.shape:
        return (), None
    if not left.size:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(left - right)
    largest = error.max()
    all_finite = bool(np.isfinite(largest))  # so all elements are
    if all_finite and largest <= TOLERANCE * max(np.abs(left).max(), np.abs(right).max()):
        return None
    finite = np.isfinite(left) & np.isfinite(right)
    with np.errstate(invalid="ignore"):
        equal = (left == right) | (np.isnan(left) & np.isnan(right))
        error = np.where(finite, np.abs(left - right), np.where(equal, 0.0, np.inf))
    scale = np.max(np.abs(np.where(finite, np.maximum(np.abs(left), np.abs(right)), 0.0)))
    place = np.unravel_index(int(np.argmax(error)), error.shape)
    if error[place] <= TOLERANCE * scale:
        return None
    return tuple(int(i) for i in place), (float(left[place]), float(right[place]))
