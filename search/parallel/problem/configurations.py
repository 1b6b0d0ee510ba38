"""Legal configurations of an operator, listed: every one, or those that are placed in order."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import numpy as np

from soapstone.search.parallel.problem.arrays import (
    AFFINE,
    AXES,
    DEGREES,
    DIMS,
    EXTENT,
    MAP,
    MAPPED,
    MOST_DIMS,
    NODE,
    OK,
    OPERANDS,
    OUTPUT,
    POINTS,
    STRIDE,
    WINDOW,
    Array,
    Problem,
)
from soapstone.search.parallel.problem.geometry import legal
from soapstone.search.parallel.problem.packing import call


def degrees_of(
    p: Problem, op: int, points: Collection[int], *, reduced: bool = True, equal: bool = False
) -> Iterator[tuple[int, ...]]:
    """Yield the legal degrees of an operator's dims, whose product is one of these numbers.

    Args:
        reduced: whether dims that index no result may be split.
        equal: degrees divide extents, so that parts are equal.
    """
    row = p.operators[op]
    dims, most = int(row[DIMS]), max(points)
    made = _made(p, int(row[NODE]))
    choices = []
    for dim in range(dims):
        extent = int(row[EXTENT + dim])
        free = row[OK + dim] and (reduced or dim in made)
        wide = range(1, min(extent, most) + 1) if free else (1,)
        choices.append([d for d in wide if not (equal and extent % d)])
    padded = np.ones(MOST_DIMS, np.int64)

    def extended(found: tuple[int, ...], product: int) -> Iterator[tuple[int, ...]]:
        if len(found) == dims:
            padded[:dims] = found
            if product in points and call(legal, p, int(row[NODE]), padded):
                yield found
            return
        for degree in choices[len(found)]:
            if product * degree <= most:
                yield from extended((*found, degree), product * degree)

    yield from extended((), 1)


def _made(p: Problem, node: int) -> set[int]:
    """Return the dims that index a result of a node without overlaps."""
    found: list[set[int]] = []
    for operand in range(p.nodes[node, OPERANDS], p.nodes[node, OPERANDS + 1]):
        if not p.operands[operand, OUTPUT]:
            continue
        mine: set[int] = set()
        for axis in range(p.operands[operand, AXES], p.operands[operand, AXES + 1]):
            overlaps = p.axes[axis, MAP] == AFFINE and p.axes[axis, WINDOW] > p.axes[axis, STRIDE]
            if not overlaps:
                mine.update(p.lists[p.axes[axis, MAPPED] : p.axes[axis, MAPPED + 1]].tolist())
        found.append(mine)
    return set().union(*found)


def placements(points: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield devices for points: neighbours in order, in blocks, then evenly spaced ones."""
    for first in range(0, devices - points + 1, points):
        yield tuple(range(first, first + points))
    stride = devices // points
    if points > 1 and stride > 1:
        for first in range(stride):
            yield tuple(range(first, first + points * stride, stride))


def every_placement(points: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield all devices for points, also one for several."""
    return itertools.product(range(devices), repeat=points)


def rows(
    choices: Collection[tuple[tuple[int, ...], tuple[int, ...]]], devices: int
) -> tuple[Array, Array]:
    """Return (degrees, devices of points) as rows of `Choice.operators` and `Choice.placed`."""
    degrees = np.ones((len(choices), DEGREES + MOST_DIMS), np.int64)
    placed = np.zeros((len(choices), devices), np.int64)
    for row, (split, where) in enumerate(choices):
        degrees[row, POINTS] = len(where)
        degrees[row, DEGREES : DEGREES + len(split)] = split
        placed[row, : len(where)] = where
    return degrees, placed


__all__ = ["degrees_of", "every_placement", "placements", "rows"]
