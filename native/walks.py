"""How compiled loops walk arrays of any strides: dims in memory order, merged where contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from soapstone.native.memory import Array, address

FIRST, COMBINE, IDENTITY = range(3)  # how a fold starts: with the first part, the output, identity


class Walk(NamedTuple):
    """Extents, outermost first, and for each array its strides in bytes along them."""

    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.extents)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.extents)

    @property
    def rows(self) -> Walk:
        """The walk over rows along the innermost dim; without others, one dim of extent 1."""
        return Walk(self.extents[:-1] or (1,), tuple(each[:-1] or (0,) for each in self.strides))

    @property
    def steps(self) -> tuple[int, ...]:
        """Each array's stride along the innermost dim."""
        return tuple(each[-1] for each in self.strides)


def walk(shape: Sequence[int], arrays: Sequence[Array], *, lead: int = 0) -> Walk:
    """Return the walk over `shape` that the arrays, broadcast to it, share.

    Dims are ordered by the strides of array number `lead`, largest first; dims of extent 1 are
    dropped and neighbours that are contiguous in every array are merged. At least one dim is left.
    """
    strides = [np.broadcast_to(a, shape).strides for a in arrays]
    return merge(shape, strides, memory_order(strides[lead]))


def memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dims as they lie in memory: by their strides, the largest first."""
    return sorted(range(len(strides)), key=lambda d: -abs(strides[d]))


def in_places(physical: Array, order: Sequence[int]) -> Array:
    """Return an array whose dims lie in memory in this order: a view of one with them so."""
    return physical.transpose([order.index(d) for d in range(len(order))])


def merge(
    shape: Sequence[int], strides: Sequence[Sequence[int]], dims: Iterable[int] | None = None
) -> Walk:
    """Return the dims without those of extent 1, neighbours merged where every array allows.

    strides[a][d] is the stride of array a along dim d; at least one dim is left. dims: which are
    walked, the outermost first, in place of all.
    """
    out: list[int] = []
    kept: list[list[int]] = []
    for d in range(len(shape)) if dims is None else dims:
        extent = shape[d]
        if extent == 1:
            continue
        steps = [s[d] for s in strides]
        if out and all(old == new * extent for old, new in zip(kept[-1], steps)):
            out[-1] *= extent
            kept[-1] = steps
        else:
            out.append(extent)
            kept.append(steps)
    if not out:
        out, kept = [1], [[0] * len(strides)]
    return Walk(tuple(out), tuple(zip(*kept)))


def moved(*arrays: Array) -> list[Array]:
    """Return arrays of one dtype as the words that code moves: integers along one more axis."""
    steps = [n for a in arrays for n in (a.itemsize, address(a), *a.strides)]
    unit = next(size for size in (8, 4, 2, 1) if all(step % size == 0 for step in steps))
    return [array[..., None].view(f"u{unit}") for array in arrays]
