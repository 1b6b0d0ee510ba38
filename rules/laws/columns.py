"""Types by number, and what operators make of columns of them (for `sizes.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, Value
from soapstone.search.rules.shapes import Type, concrete, tensor_type

Column: TypeAlias = "NDArray[np.int64]"


class Types:
    """Types by number, so that columns of them are arrays; and what operators make of them.

    Without split trees, a type is a shape: only splits tell tensors of one shape apart.
    """

    def __init__(self, split_trees: bool) -> None:
        self.split_trees = split_trees
        self.all: list[Type] = []
        self.results: dict[tuple[str, tuple[Value, ...]], dict[tuple[int, ...], int]] = {}
        self._numbers: dict[Type, int] = {}
        self._extents = np.full((1024, 4), -1)

    def number(self, type_: Type) -> int:
        """Return the number of a type, a new one if it has none."""
        if not self.split_trees and any(type_.trees):
            type_ = tensor_type(type_.shape)
        found = self._numbers.setdefault(type_, len(self.all))
        if found == len(self.all):
            if type_.rank > self._extents.shape[1]:
                raise GraphError(f"a tensor of rank {type_.rank} found, 4 at most")
            self.all.append(type_)
            if found == len(self._extents):
                self._extents = np.concatenate([self._extents, np.full_like(self._extents, -1)])
            if type_.rank:
                self._extents[found, -type_.rank :] = type_.shape
        return found

    def extents(self) -> NDArray[np.int64]:
        """Return the shape of every type, right-aligned in four columns; -1 is no axis."""
        return self._extents


# Shared by all laws, without splits and with them: what an operator takes is asked once.
TYPES = {split_trees: Types(split_trees) for split_trees in (False, True)}


def distinct(*columns: Column) -> tuple[list[Column], Column]:
    """Return the different rows of one or two columns of small numbers, and which each row is."""
    code, sizes, values = np.zeros(len(columns[0]), np.int64), [], []
    for column in columns:
        ranks, found = ranked(column)
        code = code * len(found) + ranks
        values.append(found)
        sizes.append(len(found))
    if math.prod(sizes) > max(1 << 17, 4 * len(code)):
        codes, where = np.unique(code, return_inverse=True)
    else:
        where, codes = ranked(code)
    places = np.unravel_index(codes, sizes) if len(codes) else [codes] * len(sizes)
    return [found[place] for found, place in zip(values, places)], where


def ranked(column: Column) -> tuple[Column, Column]:
    """Return each number's place among the different ones, and those, ascending."""
    present = np.zeros(int(column.max(initial=-1)) + 1, bool)
    present[column] = True
    ranks = np.cumsum(present, dtype=np.int32) - 1
    return ranks[column].astype(np.int64), np.flatnonzero(present)


def possible(term: Term, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return False only where an operator cannot take operands of these extents (last axis)."""
    fits = np.ones(np.broadcast_shapes(a.shape, b.shape)[:-1], bool)
    if term.symbol in ("add", "sub", "mul", "div"):
        fits &= ((a == b) | (np.abs(a) == 1) | (np.abs(b) == 1)).all(axis=-1)
    elif term.symbol == "=":
        fits &= (a == b).all(axis=-1)
    elif term.symbol == "matmul":
        fits &= (a[..., -1] == b[..., -2]) & (a[..., -1] > 0)
    elif term.symbol == "concat" and isinstance(term.parameters[0], int):
        others = [at for at in range(a.shape[-1]) if at - a.shape[-1] != term.parameters[0]]
        fits &= (a[..., others] == b[..., others]).all(axis=-1)
    elif term.symbol == "conv2d":
        groups, _, padding, _ = term.parameters
        fits &= (a[..., 0] > 0) & (b[..., 0] > 0)
        if groups == "depthwise":
            fits &= (a[..., -3] == b[..., -4]) & (b[..., -3] == 1)
        elif isinstance(groups, int) and groups > 0:
            fits &= (a[..., -3] == groups * b[..., -3]) & (b[..., -4] % groups == 0)
        if padding == "same":
            fits &= (b[..., -1] % 2 == 1) & (b[..., -2] % 2 == 1)
        elif padding == "valid":
            fits &= (a[..., -1] >= b[..., -1]) & (a[..., -2] >= b[..., -2])
    return fits


def _convolved(term: Term, types: Types, images: Column, kernels: Column) -> Column:
    """Return the types of many convolutions, where types are shapes.

    Where one of them is part of a size, `counterexamples.structure_of` compares it with
    `shapes.concrete`.
    """
    a, b = types.extents()[images], types.extents()[kernels]
    _, stride, padding, _ = term.parameters
    shapes = np.stack([a[:, 0], b[:, 0], a[:, 2], a[:, 3]], axis=1)
    if padding == "valid":
        shapes[:, 2:] -= b[:, 2:] - 1
    shapes[:, 2:] = (shapes[:, 2:] - 1) // int(stride) + 1
    found = np.full(len(a), -1)
    fits = possible(term, a, b)
    several, where = np.unique(shapes[fits], axis=0, return_inverse=True)
    numbers = [types.number(tensor_type(shape)) for shape in several.tolist()]
    found[fits] = np.array(numbers, np.int64)[where.ravel()]
    return found


def _typed(term: Term, types: Types, numbers: Sequence[int]) -> int:
    """Return the number of the type of an operator on operands of these types, or -1."""
    found = tuple(types.all[number] for number in numbers)
    if term.symbol == "=":
        return numbers[0] if found[0].shape == found[1].shape else -1
    type_ = concrete(term.symbol, term.parameters, found)
    return -1 if type_ is None else types.number(type_)


def apply(term: Term, types: Types, operands: Sequence[Column]) -> Column:
    """Return the type of an operator in every row, -1 where it has none."""
    pairs, where = distinct(*operands)
    if term.symbol == "conv2d" and not types.split_trees:
        return _convolved(term, types, *pairs)[where]
    known = types.results.setdefault((term.symbol, term.parameters), {})
    results = []
    for numbers in zip(*(column.tolist() for column in pairs)):
        result = known.get(numbers)
        if result is None:
            result = known[numbers] = _typed(term, types, numbers)
        results.append(result)
    return np.array(results, np.int64)[where]
