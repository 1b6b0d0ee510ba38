"""Iteration dims and interval maps: how each operand of an operator is indexed.

An operator iterates over named dims. An operand's axis maps intervals of those dims to an interval
of the axis, so a tile of the iteration space names the tile of every operand. From this one
declaration follow the shape rule, the legal configurations of the SOAP space (sample, operator,
attribute, parameter; Jia, chapter 3.3) together with the reduced dims, each point task's input and
output tiles, and the places where partial results must be reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.ir.errors import StrategyError
from soapstone.ir.tensor import TensorSpec
from soapstone.records import dataclass

Ints = np.ndarray[Any, np.dtype[np.int64]]
Intervals = Mapping[str, Ints]


class Kind(StrEnum):
    """How a dim may be split."""

    FREE = "free"  # every output is indexed by it
    REDUCED = "reduced"  # some output lacks it: partial results are combined by its monoid
    WHOLE = "whole"  # never split
    LOWERED = "lowered"  # split only after the composite operator is lowered to primitives


@dataclass(frozen=True)
class Dim:
    """A named index of an operator's iteration space, `0 <= index < extent`."""

    name: str
    extent: int
    kind: Kind = Kind.FREE
    monoid: str | None = None  # sum, max, min

    def may_split(self, lowers: bool) -> bool:
        """Return whether an operator may split it. lowers: whether the operator has a lowering."""
        return self.kind is not Kind.WHOLE and (lowers or self.kind is not Kind.LOWERED)

    def __str__(self) -> str:
        mark = {Kind.FREE: "", Kind.REDUCED: f":{self.monoid}"}.get(self.kind, f":{self.kind}")
        return f"{self.name}={self.extent}{mark}"


def affine_interval(
    first: Any, last: Any, stride: Any, offset: Any, window: Any, extent: Any
) -> tuple[Any, Any]:
    """Return the interval of an axis that indices in [first, last) of a dim read (`Affine`).

    Arguments are integers or arrays of them; searches compile it.
    """
    start = first * stride + offset
    stop = start + (last > first) * ((last - 1 - first) * stride + window)
    start = np.minimum(np.maximum(start, 0), extent)
    return start, np.maximum(start, np.minimum(np.maximum(stop, 0), extent))


@dataclass(frozen=True)
class Affine:
    """An axis indexed by one dim: [lo, hi) reads [lo*stride+offset, (hi-1)*stride+offset+window).

    The interval is clipped to the axis, so it may be empty. A window above the stride is a halo.
    """

    dim: str
    extent: int
    stride: int = 1
    offset: int = 0
    window: int = 1

    @property
    def dims(self) -> tuple[str, ...]:
        """The dim that indexes the axis."""
        return (self.dim,)

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring indices read common elements."""
        return self.window > self.stride

    def interval(self, lo: Intervals, hi: Intervals) -> tuple[Ints, Ints]:
        """Return the interval of the axis that is read, for intervals of the dims."""
        first, last = lo[self.dim], hi[self.dim]
        plain = (self.stride, self.offset, self.window) == (1, 0, 1)
        if plain and last.max(initial=0) <= self.extent:  # most are
            return first, last
        return affine_interval(first, last, self.stride, self.offset, self.window, self.extent)

    def __str__(self) -> str:
        if (self.stride, self.offset, self.window) == (1, 0, 1):
            return self.dim
        return f"{self.dim}*{self.stride}{self.offset:+d}~{self.window}"


@dataclass(frozen=True)
class Whole:
    """An axis that every point reads whole: broadcast, gathered by an index, or not split.

    of: the dim whose indices each gather part of the axis, as vertices gather neighbours; if
    samples are
        gathered, the axis counts as one of samples. by: the inputs that say which part, a matrix in
            CSR: offsets and indices. Given if the elements needed
        may be renumbered, in all operands that the same inputs gather. named: whether results
            depend on the numbers of rows as well. If rows are renumbered, the operator
        takes their original numbers as a further input. offsets: whether it is an axis of offsets,
            whose differences are gathered.
    """

    extent: int
    gathered: bool = False
    of: str = ""
    by: tuple[int, ...] = ()
    named: bool = False
    offsets: bool = False

    dims: tuple[str, ...] = ()
    overlaps = False

    def interval(self, lo: Intervals, hi: Intervals) -> tuple[Ints, Ints]:
        """Return the whole axis for each of as many points as the intervals have."""
        points = len(next(iter(lo.values()))) if lo else 1
        return np.zeros(points, np.int64), np.full(points, self.extent, np.int64)

    def __str__(self) -> str:
        return f"@{self.extent}" if self.gathered else f"[{self.extent}]"


@dataclass(frozen=True)
class Product:
    """An axis that enumerates several dims in row-major order: (group, channel), or a reshape.

    A tile is one interval only if every dim outside a split one is split into single indices.
    """

    dims: tuple[str, ...]
    extents: tuple[int, ...]
    overlaps = False

    @property
    def extent(self) -> int:
        """The product of the extents of the dims."""
        return math.prod(self.extents)

    def interval(self, lo: Intervals, hi: Intervals) -> tuple[Ints, Ints]:
        """Return the smallest interval of the axis with all that intervals of the dims read."""
        start: Any = 0
        last: Any = 0
        empty: Any = False
        for name, extent in zip(self.dims, self.extents):
            start = start * extent + lo[name]
            last = last * extent + hi[name] - 1
            empty = empty | (hi[name] <= lo[name])
        return start, np.where(empty, start, last + 1)

    def __str__(self) -> str:
        return f"({' '.join(self.dims)})"


Axis = Affine | Whole | Product


@dataclass(frozen=True)
class Operand:
    """The axes of one operand."""

    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the axes."""
        return tuple(axis.extent for axis in self.axes)

    @cached_property
    def dims(self) -> frozenset[str]:
        """The names of the dims that index it."""
        return frozenset(name for axis in self.axes for name in axis.dims)

    def tiles(self, lo: Intervals, hi: Intervals, points: int) -> tuple[Ints, Ints]:
        """Return the boxes of all points: two (points, rank) arrays."""
        starts = np.zeros((points, len(self.axes)), np.int64)
        stops = np.zeros((points, len(self.axes)), np.int64)
        for column, axis in enumerate(self.axes):
            starts[:, column], stops[:, column] = axis.interval(lo, hi)
        return starts, stops

    def __str__(self) -> str:
        return " ".join(map(str, self.axes)) or "()"


def equal_cut(extent: int, parts: int, part: int) -> int:
    """Return where one of `parts` nearly equal tiles of [0, extent) begins; searches compile it."""
    return extent * part // parts


def equal_cuts(extent: int, parts: int) -> tuple[int, ...]:
    """Return the boundaries of `parts` nearly equal tiles of [0, extent)."""
    return tuple(equal_cut(extent, parts, part) for part in range(parts + 1))


@dataclass(frozen=True)
class Tiled:
    """The points of an operator: their grid, the intervals of each dim, and operands' boxes."""

    grid: tuple[int, ...]
    lo: Mapping[str, Ints]
    hi: Mapping[str, Ints]
    inputs: tuple[tuple[Ints, Ints], ...]
    outputs: tuple[tuple[Ints, Ints], ...]


@dataclass(frozen=True)
class Signature:
    """An operator bound to shapes: its dims, and how each operand is indexed by them."""

    dims: tuple[Dim, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    dtypes: tuple[str, ...] = field(default=("float32",))

    @cached_property
    def by_name(self) -> dict[str, Dim]:
        """The dims by their names."""
        return {dim.name: dim for dim in self.dims}

    @cached_property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """The shapes and types of the outputs."""
        return tuple(TensorSpec(o.shape, dtype) for o, dtype in zip(self.outputs, self.dtypes))

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The axes of operands that several dims index."""
        operands = (*self.inputs, *self.outputs)
        return tuple({a for o in operands for a in o.axes if isinstance(a, Product)})

    @cached_property
    def nested(self) -> tuple[tuple[str, str], ...]:
        """Pairs of dims: the first may be split only if the second is split into single indices."""
        return tuple(
            (inner, outer)
            for product in self.products
            for position, inner in enumerate(product.dims)
            for outer in product.dims[:position]
        )

    @cached_property
    def indexed(self) -> dict[str, frozenset[tuple[int, int]]]:
        """The axes that each dim indexes, as numbers of the operand (inputs first) and its axis."""
        operands = (*self.inputs, *self.outputs)
        return {
            dim.name: frozenset(
                (position, axis)
                for position, operand in enumerate(operands)
                for axis, of in enumerate(operand.axes)
                if dim.name in of.dims
            )
            for dim in self.dims
        }

    def lowers(self, degrees: Mapping[str, int]) -> bool:
        """Return whether these degrees need the operator's lowering to primitives."""
        return any(degrees.get(dim.name, 1) > 1 and dim.kind is Kind.LOWERED for dim in self.dims)

    def check(self, degrees: Mapping[str, int], lowers: bool = True) -> None:
        """Check that degrees are legal for this operator.

        Raises:
            StrategyError: they are not; names the dim.
        """
        for name, degree in degrees.items():
            dim = self.by_name.get(name)
            if dim is None:
                have = ", ".join(self.by_name) or "none"
                raise StrategyError(f"dim {name!r} does not exist; dims are {have}")
            if not 1 <= degree <= max(dim.extent, 1):
                raise StrategyError(
                    f"dim {name}: degree {degree} found, 1 to {max(dim.extent, 1)} needed"
                )
            if degree > 1 and not dim.may_split(lowers):
                raise StrategyError(f"dim {name} is never split; degree {degree} found, 1 needed")
        for name, outer in self.nested:
            extent = self.by_name[outer].extent
            if degrees.get(name, 1) > 1 and degrees.get(outer, 1) != extent:
                raise StrategyError(
                    f"dim {name}: degree {degrees[name]} splits inside dim {outer}, whose"
                    f" degree is {degrees.get(outer, 1)}; {extent} needed"
                )

    def allows(self, degrees: Mapping[str, int], lowers: bool = True) -> bool:
        """Return whether the degrees are legal for this operator."""
        try:
            self.check(degrees, lowers)
        except StrategyError:
            return False
        return True

    def configurations(self, most_points: int, lowers: bool = True) -> Iterator[dict[str, int]]:
        """Yield every legal choice of degrees with at most `most_points` point tasks."""
        splittable = [dim for dim in self.dims if dim.may_split(lowers)]
        choices = [range(1, max(1, min(dim.extent, most_points)) + 1) for dim in splittable]
        for degrees in itertools.product(*choices):
            if math.prod(degrees) > most_points:
                continue
            candidate = {dim.name: d for dim, d in zip(splittable, degrees) if d > 1}
            if self.allows(candidate, lowers):
                yield candidate

    def points(
        self,
        degrees: Mapping[str, int],
        cuts: Mapping[str, Sequence[int]] | None = None,
        replicated: Sequence[str] = (),
    ) -> tuple[tuple[int, ...], dict[str, Ints], dict[str, Ints]]:
        """Return the grid and, for each dim, the interval of every point in row-major order.

        replicated: dims that every point has whole.
        """
        grid = tuple(degrees.get(dim.name, 1) for dim in self.dims)
        count = math.prod(grid)
        index = np.unravel_index(np.arange(count), grid) if grid else ()
        lo: dict[str, Ints] = {}
        hi: dict[str, Ints] = {}
        for dim, parts, position in zip(self.dims, grid, index):
            bounds = np.asarray(
                (cuts or {}).get(dim.name) or equal_cuts(dim.extent, parts), np.int64
            )
            lo[dim.name], hi[dim.name] = bounds[position], bounds[position + 1]
            if dim.name in replicated:
                lo[dim.name], hi[dim.name] = np.full((2, count), [[0], [dim.extent]])
        return grid, lo, hi

    @cached_property
    def undivided(self) -> Tiled:
        """The only point of an operator without split dims; shared, so never written to."""
        first = dict.fromkeys(self.by_name, np.zeros(1, np.int64))
        past = {dim.name: np.array([dim.extent], np.int64) for dim in self.dims}
        return self._tiled((1,) * len(self.dims), first, past)

    def tiled(
        self,
        degrees: Mapping[str, int],
        cuts: Mapping[str, Sequence[int]],
        replicated: Sequence[str],
    ) -> Tiled:
        """Return the points that `points` gives, with the boxes of every operand."""
        if not cuts and all(degree == 1 for degree in degrees.values()):
            return self.undivided
        return self._tiled(*self.points(degrees, cuts, replicated))

    def _tiled(self, grid: tuple[int, ...], lo: dict[str, Ints], hi: dict[str, Ints]) -> Tiled:
        points = math.prod(grid)
        inputs = tuple(operand.tiles(lo, hi, points) for operand in self.inputs)
        outputs = tuple(self.written(i, lo, hi, points) for i in range(len(self.outputs)))
        return Tiled(grid, lo, hi, inputs, outputs)

    def written(self, output: int, lo: Intervals, hi: Intervals, points: int) -> tuple[Ints, Ints]:
        """Return the boxes of an output's tiles: two (points, rank) arrays.

        An axis along a dim without indices is whole, since elements to which no index contributes
        are written too.
        """
        operand = self.outputs[output]
        first, last = operand.tiles(lo, hi, points)
        for column, axis in enumerate(operand.axes):
            if axis.extent and any(not self.by_name[name].extent for name in axis.dims):
                first[:, column], last[:, column] = 0, axis.extent
        return first, last

    def monoid(self, output: int, degrees: Mapping[str, int]) -> str | None:
        """Return the monoid that folds an output's partial tiles, or None when tiles are final."""
        operand = self.outputs[output]
        for dim in self.dims:
            if degrees.get(dim.name, 1) > 1 and dim.name not in operand.dims:
                return dim.monoid or "sum"
        for axis in operand.axes:
            if axis.overlaps and any(degrees.get(name, 1) > 1 for name in axis.dims):
                return "sum"
        return None

    def __str__(self) -> str:
        left = ", ".join(map(str, self.inputs))
        right = ", ".join(map(str, self.outputs))
        return f"{left} -> {right}   {' '.join(map(str, self.dims))}"
