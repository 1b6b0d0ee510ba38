"""Lists of an operator's legal configurations: all of them, or those with ordered placements."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import AFFINE, MOST_DIMS, WHOLE, Problem
from soapstone.search.parallel.problem.geometry import legal
from soapstone.search.parallel.problem.packing import call


def degrees_of(
    p: Problem, op: int, points: Collection[int], *, reduced: bool = True, equal: bool = False
) -> Iterator[tuple[int, ...]]:
    """Yield the legal degrees of an operator's dims, whose product is one of these numbers.

    Args:
        reduced: whether dims that index no result may be split.
        equal: whether degrees must divide extents, so that parts are equal.
    """
    row = p.operators[op]
    dims, most, node = int(row["dims"]), max(points), int(row["node"])
    made = _made(p, node)
    choices = []
    for dim in range(dims):
        extent = int(row["extent"][dim])
        free = row["splits"][dim] and (reduced or dim in made)
        wide = range(1, min(extent, most) + 1) if free else (1,)
        choices.append([d for d in wide if not (equal and extent % d)])
    padded = np.ones(MOST_DIMS, np.int64)

    def extended(found: tuple[int, ...], product: int) -> Iterator[tuple[int, ...]]:
        if len(found) == dims:
            padded[:dims] = found
            if product in points and call(legal, p, node, padded):
                yield found
            return
        for degree in choices[len(found)]:
            if product * degree <= most:
                yield from extended((*found, degree), product * degree)

    yield from extended((), 1)


def _made(p: Problem, node: int) -> set[int]:
    """Return the dims that index a result of a node without overlaps."""
    found: set[int] = set()
    for operand in p.operands[slice(*p.nodes[node]["operands"])]:
        for axis in p.axes[slice(*operand["axes"])] if operand["is_output"] else ():
            if axis["map"] != AFFINE or axis["window"] <= axis["stride"]:
                found.update(p.lists[slice(*axis["dims"])].tolist())
    return found


def placements(points: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered placements of points: consecutive devices, in blocks, then evenly spaced."""
    for first in range(0, devices - points + 1, points):
        yield tuple(range(first, first + points))
    stride = devices // points
    if points > 1 and stride > 1:
        for first in range(stride):
            yield tuple(range(first, first + points * stride, stride))


def every_placement(points: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield all placements of points, including several points on one device."""
    return itertools.product(range(devices), repeat=points)


def rows(
    choices: Collection[tuple[tuple[int, ...], tuple[int, ...]]], devices: int
) -> tuple[Array, Array]:
    """Return (degrees, devices of points) as rows of `Choice.operators` and `Choice.placed`."""
    splits = np.full(len(choices), WHOLE)
    placed = np.zeros((len(choices), devices), np.int64)
    for row, (degrees, where) in enumerate(choices):
        splits[row]["points"], splits[row]["degrees"][: len(degrees)] = len(where), degrees
        placed[row, : len(where)] = where
    return splits, placed
