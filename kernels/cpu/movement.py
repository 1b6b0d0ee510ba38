"""Operators that move elements, as copies between views: nothing is decided while they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from soapstone.kernels.cpu.copies import copy, fill
from soapstone.kernels.cpu.native import noop, sequence
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant


def _all(entries: Sequence[Entry | None]) -> Entry | None:
    """Return one entry of all, or None if one is missing."""
    made = [entry for entry in entries if entry is not None]
    if len(made) < len(entries):
        return None
    return sequence(made) if made else noop()


def _parts(whole: Array, parts: Sequence[Array], axis: int) -> Iterator[tuple[Array, Array]]:
    """Yield each part with the view of the whole that it is concatenated to."""
    bounds = itertools.accumulate((part.shape[axis] for part in parts), initial=0)
    before = (slice(None),) * axis
    for part, (start, stop) in zip(parts, itertools.pairwise(bounds)):
        yield part, whole[(*before, slice(start, stop))]


@variant("store", "numba")
def store(call: Call) -> Entry | None:
    """x, as the next value of old."""
    return copy(call.outputs[0], call.inputs[0], call.threads)


@variant("concat", "numba")
def concat(call: Call) -> Entry | None:
    """The inputs one after the other along the axis."""
    pairs = _parts(call.outputs[0], call.inputs, call.attributes["axis"])
    return _all([copy(view, part, call.threads) for part, view in pairs])


@variant("split", "numba")
def split(call: Call) -> Entry | None:
    """Stretches of the axis, an output each."""
    pairs = _parts(call.inputs[0], call.outputs, call.attributes["axis"])
    return _all([copy(part, view, call.threads) for part, view in pairs])


@variant("transpose", "numba")
def transpose(call: Call) -> Entry | None:
    """The axes in another order."""
    x = call.inputs[0].transpose(call.attributes["permutation"])
    return copy(call.outputs[0], x, call.threads)


@variant("slice", "numba")
def strided_slice(call: Call) -> Entry | None:
    """Every so many elements between two bounds of each axis."""
    bounds = zip(*(call.attributes[name] for name in ("starts", "stops", "steps")))
    place: tuple[Any, ...] = (
        ...,
        *(slice(*bound) for bound in bounds),
    )  # `...`: a view at rank 0 too
    return copy(call.outputs[0], call.inputs[0][place], call.threads)


@variant("broadcast", "numba")
def broadcast(call: Call) -> Entry | None:
    """The elements repeated along new axes and those of extent 1."""
    y = call.outputs[0]
    return copy(y, np.broadcast_to(call.inputs[0], y.shape), call.threads)


@variant("full", "numba")
def full(call: Call) -> Entry | None:
    """One value everywhere."""
    return fill(call.outputs[0], call.attributes["value"], call.threads)


@variant("pad", "numba")
def pad(call: Call) -> Entry | None:
    """A border of one value around x, and the same value between its elements."""
    x, y, a = call.inputs[0], call.outputs[0], call.attributes
    entries: list[Entry | None] = []
    inside: list[Any] = []
    dilated = any(between and extent > 1 for between, extent in zip(a["interior"], x.shape))
    if dilated:
        entries.append(fill(y, a["value"], call.threads))
    for axis, (low, between, extent) in enumerate(zip(a["low"], a["interior"], x.shape)):
        stop = low + extent + max(extent - 1, 0) * between
        if low < 0 or stop > y.shape[axis]:
            return None
        if not dilated:  # the border: two slabs an axis, as long as what earlier axes left inside
            for slab in (slice(0, low), slice(stop, None)):
                entries.append(fill(y[(*inside, slab)], a["value"], call.threads))
        inside.append(slice(low, stop, between + 1))
    entries.append(copy(y[(..., *inside)], x, call.threads))
    return _all(entries)


# ---------------------------------------------------------------------------------------- reshape
@variant("reshape", "numba")
def reshape(call: Call) -> Entry | None:
    """The same elements in row-major order under another shape."""
    x, y = call.inputs[0], call.outputs[0]
    if y.size == 0:
        return noop()
    views = common_views(x, y)
    return None if views is None else copy(views[1], views[0], call.threads)


def common_views(x: Array, y: Array) -> tuple[Array, Array] | None:
    """Return views of two arrays that have one shape and the same elements in row-major order.

    Both hold equally many, at least one. None where neither side's strides nor common factors of
    the extents allow it: 2 3 to 3 2, say, with gaps between the rows of both.
    """
    shape: list[int] = []
    strides: tuple[list[int], list[int]] = ([], [])
    for a, b in _groups(x, y):
        factors = _group_factors(a, b)
        if factors is None:
            return None
        shape += factors
        for side, group in zip(strides, (a, b)):
            side += _split_strides(group, factors)
    made = [
        np.lib.stride_tricks.as_strided(array, shape, side) for array, side in zip((x, y), strides)
    ]
    return made[0], made[1]


_Axes = list[tuple[int, int]]  # extents and strides


def _groups(x: Array, y: Array) -> Iterator[tuple[_Axes, _Axes]]:
    """Yield the shortest runs of axes of both arrays with equal numbers of elements."""
    left, right = ([axis for axis in zip(a.shape, a.strides) if axis[0] != 1] for a in (x, y))
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        m, n = a[0][0], b[0][0]
        while m != n:
            if m < n:
                a.append(left.pop(0))
                m *= a[-1][0]
            else:
                b.append(right.pop(0))
                n *= b[-1][0]
        yield a, b


def _contiguous(axes: _Axes) -> bool:
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))


def _group_factors(a: _Axes, b: _Axes) -> list[int] | None:
    """Return extents that both groups of axes can be viewed with."""
    sides = [[extent for extent, _ in axes] for axes in (a, b)]
    if _contiguous(a):
        return sides[1]
    if _contiguous(b):
        return sides[0]
    marks = sorted({math.prod(side[i:]) for side in sides for i in range(len(side) + 1)})
    if any(high % low for low, high in itertools.pairwise(marks)):
        return None
    return [high // low for low, high in itertools.pairwise(marks)][::-1]


def _split_strides(axes: _Axes, factors: Sequence[int]) -> list[int]:
    """Return the strides of axes once they are split, or all joined and split, into factors."""
    if _contiguous(axes):
        axes = [(math.prod(factors), axes[-1][1])]
    strides: list[int] = []
    rest = iter(factors)
    for extent, stride in axes:
        own: list[int] = []
        while math.prod(own) < extent:
            own.append(next(rest))
        strides += [stride * math.prod(own[i + 1 :]) for i in range(len(own))]
    return strides
