"""Exact evaluation of nodes, in bulk: wrapping 64-bit integers under several seeds at once.

Every operator with a structure (`structure.py`) is evaluated by one of five loops that know no
operator. Elements are small signed integers, so that maxima and relu follow the order of the reals
wherever nothing overflows, and everything else holds modulo 2^64 even where it does. An average
divides by multiplication with the inverse of its divisor's odd part; images are multiples of it,
so that averages are small integers too. Seeds are the innermost axis: one index, several numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.ir.term import Term
from soapstone.rules.algebra.evaluate import exact_constant, split_sizes
from soapstone.rules.algebra.structure import POLYNOMIAL, Structure, structure
from soapstone.rules.enumeration import exact_loops as loops
from soapstone.rules.enumeration.exact_loops import SEEDS, Code
from soapstone.rules.enumeration.space import Input, OperatorUse, Space
from soapstone.search.rules.shapes import Type, extents

_LARGEST = 9  # magnitude of the elements of variables


class Grown:
    """An array that grows by doubling."""

    def __init__(self, dtype: Any, *shape: int) -> None:
        self._array: Array = np.zeros((1024, *shape), dtype)
        self.count = 0

    def extend(self, count: int) -> int:
        """Make room for more rows and return where they begin."""
        start, self.count = self.count, self.count + count
        if self.count > len(self._array):
            larger = np.zeros((max(self.count, 2 * len(self._array)), *self._array.shape[1:]))
            larger = larger.astype(self._array.dtype)
            larger[:start] = self._array[:start]
            self._array = larger
        return start

    def append(self, values: Any) -> int:
        """Add rows and return where they begin."""
        start = self.extend(len(values))
        self._array[start : self.count] = values
        return start

    @property
    def array(self) -> Array:
        """The elements so far."""
        return self._array[: self.count]


def _wrap(number: int) -> int:
    """Return a number modulo 2^64, signed."""
    return (number + 2**63) % 2**64 - 2**63


def _inverse(divisor: int) -> tuple[int, int]:
    """Return the factor and the shift that divide by a number."""
    shift = (divisor & -divisor).bit_length() - 1
    return _wrap(pow(divisor >> shift, -1, 2**64)), shift


class ExactEvaluator:
    """Evaluates nodes of a space whose operators all have structures; see `engine.Evaluator`."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._structures: dict[Any, int] = {}
        self._columns: dict[str, list[int]] = {
            name: [] for name in ("kind", "size", "first", "entry", "weight", "factor", "shift")
        }
        self._start, self._a, self._b = (Grown(np.int32) for _ in range(3))
        self._numerator = Grown(np.int64)
        self._handles: list[tuple[int, int, int, int, int]] = []
        self._data = Grown(np.int64, SEEDS)
        self._offset, self._types = Grown(np.int64), Grown(np.int32)
        self._largest = 1
        self._code: Code | None = None

    def begin(self, space: Space, types: tuple[int, ...]) -> Array:
        """Draw the inputs, which are tensors 0 and on; return their ids."""
        rng = np.random.default_rng(self._seed)
        ids = np.zeros(len(types), np.uint64)
        counts: Counter[str] = Counter()
        for number, each in enumerate(space.inputs):
            if each.term.is_variable:
                values = _draw(rng, each, counts[each.kind]) * _multiple(space, each)
                counts[each.kind] += 1
            else:
                values = constant(each.term, each.shape).reshape(-1, 1)
            size = math.prod(each.shape)
            self._types.append([types[number]])
            self._offset.append([self._data.extend(size)])
            rows = self._data.array[-size:]
            rows[:] = values
            ids[number] = loops.identify(types[number], rows, size, np.empty(SEEDS, np.uint64))
        return ids

    def prepare(
        self, use: OperatorUse, operands: tuple[Type, ...], outputs: tuple[int, ...]
    ) -> int:
        """Return the handle of an operator on operands of these types.

        Raises:
            GraphError: the operator has no structure.
        """
        shapes = tuple(map(extents, operands))
        parts = split_sizes(use.outputs[0], use.parameters, operands[0])
        left = None if parts is None else parts[0]
        found = [structure(symbol, use.parameters, shapes, left) for symbol in use.outputs]
        numbers = []
        for symbol, each in zip(use.outputs, found):
            if each is None or use.fixed:
                raise GraphError(f"operator {use} has no exact evaluation of {shapes}")
            numbers.append(self._add((symbol, use.parameters, shapes, left), each))
        numbers, kinds = (numbers * 2)[:2], (outputs * 2)[:2]
        self._handles.append((len(outputs), *numbers, *kinds))  # type: ignore[arg-type]
        self._code = None
        return len(self._handles) - 1

    def _add(self, key: Any, structure: Structure) -> int:
        if key in self._structures:
            return self._structures[key]
        units = bool((structure.numerator == 1).all())
        factor, shift = _inverse(structure.denominator)
        starts = structure.starts
        alone = units and bool((np.diff(starts) == 1).all()) and bool((structure.b < 0).all())
        kind = {"sum": loops.SUM, "max": loops.MAX, "relu": loops.RELU, "sum+relu": loops.SUM_RELU}[
            structure.kind
        ]
        if kind == loops.SUM and (factor, shift) == (1, 0):
            if alone:
                kind = loops.COPY
            elif units and bool((structure.a >= 0).all()) and bool((structure.b >= 0).all()):
                kind = loops.PRODUCT
        size = math.prod(structure.shape)
        self._largest = max(self._largest, size)
        entry = self._a.append(structure.a)
        self._b.append(structure.b)
        first = self._start.append(starts)
        weight = -1 if units else self._numerator.append(structure.numerator)
        for name, value in zip(self._columns, (kind, size, first, entry, weight, factor, shift)):
            self._columns[name].append(value)
        number = self._structures[key] = len(self._structures)
        return number

    def _compiled(self) -> Code:
        if self._code is None:
            columns: list[Array] = [np.array(column, np.int64) for column in self._columns.values()]
            handles = np.array(self._handles, np.int32).reshape(-1, 5)
            columns += [each.array for each in (self._start, self._a, self._b, self._numerator)]
            columns += [handles[:, 1:3].copy(), handles[:, 3:5].copy(), handles[:, 0].copy()]
            self._code = Code(*columns)
        return self._code

    def values(self, handles: Array, a: Array, b: Array) -> Array:
        """Return the ids of the outputs of nodes: uint64 (nodes, 2)."""
        out = np.zeros((len(handles), 2), np.uint64)
        scratch = np.empty((self._largest, SEEDS), np.int64)
        code = self._compiled()
        loops.values(handles, a, b, code, self._data.array, self._offset.array, scratch, out)
        return out

    def store(self, handles: Array, a: Array, b: Array) -> None:
        """Keep the outputs of nodes as the next tensors."""
        code = self._compiled()
        outputs = code.outputs[handles]
        used = np.arange(2)[None, :] < outputs[:, None]
        sizes = code.size[code.structures[handles]][used]
        first = self._types.append(code.types[handles][used])
        begin = self._data.extend(int(sizes.sum()))
        self._offset.append(begin + np.cumsum(sizes) - sizes)
        loops.store(handles, a, b, code, self._data.array, self._offset.array, first)

    def agree(
        self, handles: Array, a: Array, b: Array, outputs: Array, tensors: Array | None = None
    ) -> Array:
        """Return for each node whether an output of it equals a stored tensor, element by element.

        Where no tensors are given: whether it equals the output of the node before it.
        """
        good = np.zeros(len(handles), np.bool_)
        scratch = np.empty((2, self._largest, SEEDS), np.int64)
        others = np.zeros(0, np.int32) if tensors is None else tensors
        data, offset = self._data.array, self._offset.array
        code, types = self._compiled(), self._types.array
        loops.agree(handles, a, b, outputs, others, code, data, offset, types, scratch, good)
        return good

    def tensor(self, tensor: int) -> Array:
        """Return the elements of a stored tensor: (elements, seeds)."""
        begin = self._offset.array[tensor]
        after = self._offset.array[tensor + 1] if tensor + 1 < self._offset.count else None
        return self._data.array[begin:after]


def _draw(rng: np.random.Generator, each: Input, number: int) -> Array:
    """Return the elements of the variable of some number among those of its kind.

    Scalars have every combination of signs, and are never small. In three seeds images and kernels
    are mostly of one sign, so that products and maxima of many elements are negative in some; in
    two of them every other image is larger, so that sums have either's sign.
    """
    shape = (math.prod(each.shape), SEEDS)
    negative = np.full(SEEDS, 0.5)
    if each.kind == "scalar":
        negative = (np.arange(SEEDS) >> number % 3 & 1).astype(np.float64)
    elif each.kind == "kernel":
        negative[-3:] = 0.05
    elif each.kind == "image":
        negative[-3:] = (0.95, 0.95, 0.05) if number % 2 == 0 else (0.95, 0.05, 0.95)
    signs = np.where(rng.random(shape) < negative, -1, 1)
    if each.kind == "scalar":
        return rng.permutation([3, 5, 7, 11, 13, 17, 19, 23])[None, :] * signs
    values = rng.integers(1, _LARGEST + 1, shape) * signs
    if each.kind == "image":
        values[:, -1 - number % 2] *= 4
    return values


def _multiple(space: Space, each: Input) -> int:
    """Return the number whose multiples an input's elements are, so that averages are integers."""
    if each.kind in ("scalar", "kernel"):
        return 1
    divisors = [1]
    for use in space.operators:
        if use.operands == 1 and use.result((each.kind,), (each.shape,)) is not None:
            found = structure(use.symbol, use.parameters, (each.shape,))
            divisors.append(1 if found is None else found.denominator)
    for other in space.inputs:
        if other.kind == "kernel" and each.kind == "image" and not other.term.is_variable:
            divisors += [part.denominator for part in _fractions(other.term, other.shape)]
    return int(math.lcm(*divisors) ** min(space.max_operators, 4))


def _fractions(term: Term, shape: tuple[int, ...]) -> tuple[Fraction, ...]:
    """Return the elements of a constant, in row-major order.

    Raises:
        GraphError: there is no such constant of that shape.
    """
    found = exact_constant(term, shape)
    if found is None:
        raise GraphError(f"constant {term} has no value of shape {shape}")
    return found


def constant(term: Term, shape: tuple[int, ...]) -> Array:
    """Return the elements of a constant modulo 2^64, in row-major order.

    Raises:
        GraphError: there is no such constant of that shape, or it has even divisors.
    """
    result = []
    for fraction in _fractions(term, shape):
        factor, shift = _inverse(fraction.denominator)
        if shift:
            raise GraphError(f"constant {term} has the element {fraction}, odd divisors needed")
        result.append(_wrap(fraction.numerator * factor))
    return np.array(result, np.int64)


def has_exact(space: Space) -> bool:
    """Return whether all operators of a space can be evaluated exactly."""
    return all(
        not use.fixed and all(symbol in POLYNOMIAL for symbol in use.outputs)
        for use in space.operators
    )
