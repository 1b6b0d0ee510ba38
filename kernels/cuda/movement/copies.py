"""Operators that move elements, as copies between views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from soapstone.ir.ops.movement.rearrange import TO_SPACE, reverse_slices
from soapstone.ir.ops.movement.slicing import slices
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.indexing.taps import bordered
from soapstone.kernels.cuda.movement.transposition import transposition
from soapstone.kernels.cuda.substrate.arrays import View, scratch, views
from soapstone.kernels.entry import Call, Declined
from soapstone.kernels.registry import variant


def copy(source: View, target: View) -> DeviceEntry:
    """Return the entry that copies elements of one shape, or broadcasts them to it, and casts."""
    moved = transposition(source, target)
    return moved or pointwise(lambda text, values: values, (source,), (target,))


def fill(target: View, value: float) -> DeviceEntry:
    """Return the entry that writes one value everywhere."""
    kind = wide(target.dtype)
    return pointwise(lambda text, _: [text.set(literal(value, kind), kind)], (), (target,))


def _parts(whole: View, parts: Sequence[View], axis: int) -> list[tuple[View, View]]:
    bounds = itertools.accumulate((part.shape[axis] for part in parts), initial=0)
    return [(part, whole.cut(axis, at, part.shape[axis])) for part, at in zip(parts, bounds)]


@variant("concat", "numba", processor="cuda")
def concat(call: Call) -> DeviceEntry:
    """Return the entry of the inputs one after the other along the axis."""
    inputs, (y,) = views(call)
    pairs = _parts(y, inputs, call.attributes["axis"])
    return sequence(tuple(copy(part, place) for part, place in pairs))


@variant("split", "numba", processor="cuda")
def split(call: Call) -> DeviceEntry:
    """Return the entry of stretches of the axis, an output each."""
    (x,), outputs = views(call)
    pairs = _parts(x, outputs, call.attributes["axis"])
    return sequence(tuple(copy(place, part) for part, place in pairs))


@variant("transpose", "numba", processor="cuda")
def transpose(call: Call) -> DeviceEntry:
    """Return the entry of the axes in another order."""
    (x,), (y,) = views(call)
    return copy(x.through(lambda a: a.transpose(call.attributes["permutation"])), y)


@variant("slice", "numba", processor="cuda")
def strided_slice(call: Call) -> DeviceEntry:
    """Return the entry of every so many elements between two bounds of each axis."""
    (x,), (y,) = views(call)
    return copy(x.box(slices(call.attributes)), y)


@variant("reverse", "numba", processor="cuda")
def reverse(call: Call) -> DeviceEntry:
    """Return the entry of axes from their last element to their first."""
    (x,), (y,) = views(call)
    return copy(x.box(reverse_slices(call.attributes, len(x.shape))), y)


@variant("broadcast", "numba", processor="cuda")
def broadcast(call: Call) -> DeviceEntry:
    """Return the entry of elements repeated along new axes and those of extent 1."""
    (x,), (y,) = views(call)
    return copy(x, y)


@variant("full", "numba", processor="cuda")
def full(call: Call) -> DeviceEntry:
    """Return the entry of one value everywhere."""
    return fill(views(call)[1][0], call.attributes["value"])


@variant("reshape", "numba", processor="cuda")
def reshape(call: Call) -> DeviceEntry:
    """Return the entry of the same elements in row-major order under another shape."""
    (x,), (y,) = views(call)
    for one, other, forward in ((x, y, True), (y, x, False)):
        try:
            seen = one.reshaped(other.shape)
        except Declined:
            continue
        return copy(seen, y) if forward else copy(x, seen)
    flat = scratch(x.size, x.dtype, call.inputs[0])
    return sequence((copy(x, flat.reshaped(x.shape)), copy(flat.reshaped(y.shape), y)))


@variant("tile", "numba", processor="cuda")
def tile(call: Call) -> DeviceEntry:
    """Return the entry of the input beside itself, so many times along each axis."""
    (x,), (y,) = views(call)
    if y.size == 0:
        return DeviceEntry(())
    pairs = [(count, extent) for extent, count in zip(x.shape, call.attributes["repeats"])]
    shape = tuple(each for pair in pairs for each in pair)
    once = x.reshaped(tuple(each for _, extent in pairs for each in (1, extent)))
    return copy(once, y.reshaped(shape))


@variant(("depth_to_space", "space_to_depth"), "numba", processor="cuda")
def regroup(call: Call) -> DeviceEntry:
    """Return the entry of blocks of channels as squares of the image, or the reverse."""
    (x,), (y,) = views(call)
    if y.size == 0:
        return DeviceEntry(())
    to_space = call.operator == "depth_to_space"
    deep, broad = (x, y) if to_space else (y, x)
    b, mode = call.attributes["blocksize"], call.attributes["mode"]
    n, channels, height, width = deep.shape
    c = channels // (b * b)
    parts = (n, b, b, c, height, width) if mode == "DCR" else (n, c, b, b, height, width)
    one = deep.reshaped(parts).through(lambda a: a.transpose(TO_SPACE[mode]))
    other = broad.reshaped((n, c, height, b, width, b))
    return copy(one, other) if to_space else copy(other, one)


@variant("pad", "numba", processor="cuda")
def pad(call: Call) -> DeviceEntry | None:
    """Return the entry of a border around x, and a value between its elements."""
    (x,), (y,) = views(call)
    a = call.attributes
    if y.size == 0:
        return DeviceEntry(())
    if a["mode"] != "constant":
        return bordered(call, x, y)
    inside: list[slice] = []
    for axis, (low, between, extent) in enumerate(zip(a["low"], a["interior"], x.shape)):
        stop = low + extent + max(extent - 1, 0) * between
        if low < 0 or stop > y.shape[axis]:
            return None
        inside.append(slice(low, stop, between + 1))
    place = y.box(inside)
    return sequence((fill(y, a["value"]), copy(x, place)))


def _triangle(x: View, y: View, upper: bool, k: int, rest: float) -> DeviceEntry:
    """Return the entry of the last axes on and above (or below) diagonal k; elsewhere `rest`."""
    sign = ">=" if upper else "<="
    lead = (0,) * (len(x.shape) - 2)
    # Places whose strides are those of column - row: the number of an element's diagonal.
    diagonal = View(None, x.shape, (*lead, -1, 1), "int64")

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        one, at = values
        kept = f"({one.name} if {at.name} {sign} {k} else {literal(rest, one.type)})"
        return [text.set(kept, one.type)]

    return pointwise(write, (x,), (y,), diagonal)


@variant("trilu", "numba", processor="cuda")
def trilu(call: Call) -> DeviceEntry:
    """Return the entry of the upper or the lower triangle, zeros elsewhere."""
    (x,), (y,) = views(call)
    return _triangle(x, y, call.attributes["upper"], call.attributes["k"], 0)


@variant("hide_later", "numba", processor="cuda")
def hide_later(call: Call) -> DeviceEntry:
    """Return the entry of scores, minus infinity where the key stands after the query."""
    (x,), (y,) = views(call)
    return _triangle(x, y, False, call.attributes.get("ahead", 0), -math.inf)
