"""Operators that move elements, as copies between views: nothing is decided while they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from soapstone.ir.ops.movement.rearrange import TO_SPACE, reverse_slices
from soapstone.ir.ops.movement.reshaping import axis_groups, common_factors
from soapstone.ir.ops.movement.slicing import border_maps, slices
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.arrays import strided
from soapstone.native.copies import copies, copy, fill, filling
from soapstone.native.entries import either, noop, sequence

_MOST_BOXES = 256  # copies of a padded border that are worth binding


def _parts(whole: Array, parts: Sequence[Array], axis: int) -> Iterator[tuple[Array, Array]]:
    """Yield each part with the view of the whole that it is concatenated to."""
    bounds = itertools.accumulate((part.shape[axis] for part in parts), initial=0)
    before = (slice(None),) * axis
    for part, (start, stop) in zip(parts, itertools.pairwise(bounds)):
        yield part, whole[(*before, slice(start, stop))]


@variant("store", "numba")
def store(call: Call) -> Entry | None:
    """Next values over old ones; where a flag says otherwise, the old ones stay."""
    pairs = call.inputs[: 2 * len(call.outputs)]
    new, old = (copies(list(zip(call.outputs, pairs[i::2])), call.threads) for i in (0, 1))
    if new is None or old is None or len(call.inputs) % 2 == 0:
        return new
    return either(call.inputs[-1], new, old)


@variant("concat", "numba")
def concat(call: Call) -> Entry | None:
    """The inputs one after the other along the axis."""
    pairs = _parts(call.outputs[0], call.inputs, call.attributes["axis"])
    return copies([(view, part) for part, view in pairs], call.threads)


@variant("split", "numba")
def split(call: Call) -> Entry | None:
    """Stretches of the axis, an output each."""
    pairs = _parts(call.inputs[0], call.outputs, call.attributes["axis"])
    return copies([(part, view) for part, view in pairs], call.threads)


@variant("transpose", "numba")
def transpose(call: Call) -> Entry | None:
    """The axes in another order."""
    x = call.inputs[0].transpose(call.attributes["permutation"])
    return copy(call.outputs[0], x, call.threads)


@variant("slice", "numba")
def strided_slice(call: Call) -> Entry | None:
    """Every so many elements between two bounds of each axis."""
    place: tuple[Any, ...] = (..., *slices(call.attributes))  # `...`: a view at rank 0 too
    return copy(call.outputs[0], call.inputs[0][place], call.threads)


@variant("reverse", "numba")
def reverse(call: Call) -> Entry | None:
    """Axes from their last element to their first."""
    x = call.inputs[0]
    place: tuple[Any, ...] = (..., *reverse_slices(call.attributes, x.ndim))
    return copy(call.outputs[0], x[place], call.threads)


@variant("tile", "numba")
def tile(call: Call) -> Entry | None:
    """The input beside itself, so many times along each axis."""
    x, y, repeats = call.inputs[0], call.outputs[0], call.attributes["repeats"]
    if y.size == 0:
        return noop()
    shape: list[int] = []
    steps: list[int] = []
    for extent, step, count in zip(x.shape, y.strides, repeats):
        shape += [count, extent]
        steps += [step * extent, step]
    once = np.broadcast_to(x.reshape([1, 1]) if x.ndim == 0 else _spaced(x), shape or (1, 1))
    to = strided(y, shape or (1, 1), steps or (0, 0))
    return copy(to, once, call.threads)


def _spaced(x: Array) -> Array:
    """The view of x with an axis of extent 1 before each of its own."""
    return x[tuple(item for _ in range(x.ndim) for item in (None, slice(None)))]


@variant(("depth_to_space", "space_to_depth"), "numba")
def regroup(call: Call) -> Entry | None:
    """Blocks of channels as squares of the image, or the reverse."""
    (x,), (y,), a = call.inputs, call.outputs, call.attributes
    if y.size == 0:
        return noop()
    b, mode = a["blocksize"], a["mode"]
    to_space = call.operator == "depth_to_space"
    deep, wide = (x, y) if to_space else (y, x)
    n, channels, height, width = deep.shape
    split = (n, b, b, channels // (b * b), height, width)
    sn, sc, sh, sw = deep.strides
    steps = (sn, sc * b * split[3], sc * split[3], sc, sh, sw)
    if mode == "CRD":
        split = (n, channels // (b * b), b, b, height, width)
        steps = (sn, sc * b * b, sc * b, sc, sh, sw)
    one = strided(deep, split, steps).transpose(TO_SPACE[mode])
    sn, sc, sh, sw = wide.strides
    other = strided(wide, one.shape, (sn, sc, sh * b, sh, sw * b, sw))
    return copy(other, one, call.threads) if to_space else copy(one, other, call.threads)


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
    if a["mode"] != "constant":
        return _bordered(call)
    inside: list[Any] = []
    dilated = any(between and extent > 1 for between, extent in zip(a["interior"], x.shape))
    pairs: list[tuple[Array, Array]] = []
    for axis, (low, between, extent) in enumerate(zip(a["low"], a["interior"], x.shape)):
        stop = low + extent + max(extent - 1, 0) * between
        if low < 0 or stop > y.shape[axis]:
            return None
        if not dilated:  # the border: two slabs an axis, as long as what earlier axes left inside
            for slab in (slice(0, low), slice(stop, None)):
                pairs.append(filling(y[(*inside, slab)], a["value"]))
        inside.append(slice(low, stop, between + 1))
    pairs.append((y[(..., *inside)], x))
    copied = copies(pairs, call.threads)
    if not dilated:
        return copied
    return sequence([fill(y, a["value"], call.threads), copied])


def _bordered(call: Call) -> Entry | None:
    """The entry of a border made of x itself: one copy for each box that a view of x fills."""
    x, y = call.inputs[0], call.outputs[0]
    if y.size == 0:
        return noop()
    runs = [_runs(places) for places in border_maps(call.attributes, x.shape)]
    if math.prod(map(len, runs)) > _MOST_BOXES:
        return None
    pairs = []
    for box in itertools.product(*runs):
        place: tuple[Any, ...] = (..., *(slice(at, at + count) for at, _, count, _ in box))
        first: tuple[Any, ...] = (..., *(slice(start, start + 1) for _, start, _, _ in box))
        to, source = y[place], x[first]
        strides = [step * stride for (_, _, _, step), stride in zip(box, x.strides)]
        view = strided(source, to.shape, strides)
        pairs.append((to, view))
    return copies(pairs, call.threads)


def _runs(places: Array) -> list[tuple[int, int, int, int]]:
    """Cut indices into runs of equal steps: (position, first index, count, step)."""
    made: list[tuple[int, int, int, int]] = []
    values = places.tolist()
    at = 0
    while at < len(values):
        count, step = 1, 0
        if at + 1 < len(values) and abs(values[at + 1] - values[at]) <= 1:
            step = values[at + 1] - values[at]
            while at + count < len(values) and values[at + count] - values[at + count - 1] == step:
                count += 1
        # The turn of a reflection belongs to the run after it, which is the long one.
        if step and at + count < len(values) and values[at + count] == values[at + count - 2]:
            count -= count > 2
        made.append((at, values[at], count, step))
        at += count
    return made


# ---------------------------------------------------------------------------------------- reshape
def _expected(call: Call) -> float:
    """Return what is expected of a copy: of few bytes it is done while oneDNN prepares."""
    return 0.5 if call.inputs[0].nbytes <= 1 << 14 else 1.0


@variant("reshape", "numba", expected=_expected)
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
    for groups in axis_groups(x.shape, y.shape):
        a, b = (
            [(array.shape[axis], array.strides[axis]) for axis in group]
            for array, group in zip((x, y), groups)
        )
        factors = _group_factors(a, b)
        if factors is None:
            return None
        shape += factors
        for side, group in zip(strides, (a, b)):
            side += _split_strides(group, factors)
    made = [strided(array, shape, side) for array, side in zip((x, y), strides)]
    return made[0], made[1]


_Axes = list[tuple[int, int]]  # extents and strides


def _contiguous(axes: _Axes) -> bool:
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))


def _group_factors(a: _Axes, b: _Axes) -> list[int] | None:
    """Return extents that both groups of axes can be viewed with."""
    sides = [[extent for extent, _ in axes] for axes in (a, b)]
    if _contiguous(a):
        return sides[1]
    if _contiguous(b):
        return sides[0]
    return common_factors(*sides)


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
