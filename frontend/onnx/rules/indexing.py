"""ONNX operators that read and write by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.frontend.onnx import extent_axes as follow
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.declared import read_declared
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.texts import tabled
from soapstone.frontend.onnx.values import Even, Value, rule
from soapstone.ir.spec import operator


def _places(n: Call, extents: int | Sequence[int]) -> Value:
    """Return input 1, indices into so many places: of one axis, or in its last axis of several.

    Raises:
        OnnxError: one that is known lies outside of them; the others are seen when they are used.
    """
    ids = n.value(1)
    if ids.array is None or ids.array.dtype.kind not in "iu" or not ids.array.size:
        return ids
    most = np.asarray(extents)
    if most.ndim and ids.shape[-1:] != most.shape:
        return ids  # the operator says what is wrong with it
    wrong = (ids.array < -most) | (ids.array >= most)
    if wrong.any():
        found, extent = ids.array[wrong].flat[0], np.broadcast_to(most, wrong.shape)[wrong].flat[0]
        raise OnnxError(f"input 1: index {found} found, {-extent} to {extent - 1} needed")
    return ids


def _in_order(ids: Value, extents: Sequence[int]) -> bool:
    """Return whether indices are known, and name all places of axes, each once and in order."""
    if ids.lasting is None or ids.lasting.size != math.prod(extents) * len(extents):
        return False
    places = ids.lasting.reshape(-1, len(extents))
    return bool((places == np.stack(np.unravel_index(np.arange(len(places)), extents), 1)).all())


@rule("Gather", even=Even(linear="first", places=True, elements=follow.gathered))
def gather(n: Call) -> Value:
    x = n.value(0)
    axis = n.axis(x.rank, 0)
    ids = _places(n, x.shape[axis])
    if ids.lasting is not None and ids.lasting.size == 1:
        # One known place: a slice, which is a view.
        place = n.axis_of(int(ids.lasting.reshape(())), x.shape[axis])
        part = n.part(x, axis, place, place + 1)
        return n.reshape(part, (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]))
    if _in_order(ids, x.shape[axis : axis + 1]):
        return n.reshape(x, (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]))
    return n("gather", x, ids, axis=axis)


@rule("GatherElements", even=Even(places=True))
def gather_elements(n: Call) -> Any:
    x = n.value()
    axis = n.axis(x.rank, 0)
    return n.declared(x, _places(n, x.shape[axis]))


@rule("GatherND", even=Even(places=True))
def gather_nd(n: Call) -> Any:
    x, ids, lead = n.value(0), n.value(1), n.attribute("batch_dims", 0)
    ids = _places(n, x.shape[lead : lead + (ids.shape[-1] if ids.rank else 0)])
    if not lead and ids.rank and ids.spec.size and _in_order(ids, x.shape[: ids.shape[-1]]):
        return n.reshape(x, (*ids.shape[:-1], *x.shape[ids.shape[-1] :]))
    return n.declared(x, ids)


@rule("ScatterElements", "Scatter")
def scatter_elements(n: Call) -> Any:
    x = n.value()
    ids = _places(n, x.shape[n.axis(x.rank, 0)])
    return read_declared(n, operator("scatter_elements"), (x, ids, n.value(2)))


@rule("ScatterND")
def scatter_nd(n: Call) -> Any:
    x, ids = n.value(0), n.value(1)
    return n.declared(x, _places(n, x.shape[: ids.shape[-1] if ids.rank else 0]), n.value(2))


@rule("Trilu")
def trilu(n: Call) -> Any:
    x = n.value()
    if x.rank < 2:
        raise OnnxError(f"input 0 has rank {x.rank}; 2 or more needed")
    if x.is_text:
        raise UnsupportedError(f"input 0 is {x.spec}; numbers needed, which may be zero")
    k = int(n.number("k", 1, 0) or 0)
    k = max(-x.shape[-2], min(x.shape[-1], k))
    return n.declared(k=k)


@rule("OneHot")
def one_hot(n: Call) -> Value:
    ids, values = n.value(0), n.value(2)
    depth = n.array(1)
    if depth.size != 1 or not 0 <= depth.item() < 1 << 62:
        raise OnnxError(f"depth is {depth}; one number of 0 or more needed")
    count = n.room(int(depth.item()))
    axis = n.axis_of(n.attribute("axis", -1), ids.rank + 1)
    if not ids.dtype.startswith("int"):
        ids = n.cast(ids, "int64")
    places = n.known(np.arange(count).reshape(count, *(1,) * (ids.rank - axis)), ids.dtype)
    column = n.reshape(ids, (*ids.shape[:axis], 1, *ids.shape[axis:]))
    column = n("mod", column, n.like(max(count, 1), column))  # negative ones count from the end
    inside = n("logical_and", *_within(n, n.reshape(ids, column.shape), count))
    hit = n("logical_and", n("equal", column, places), inside)
    off, on = (n.row(values, 0, place) for place in range(2))
    return n("where", hit, on, off)


def _within(n: Call, ids: Value, count: int) -> tuple[Value, Value]:
    return (
        n("greater_equal", ids, n.like(-count, ids)),
        n("less", ids, n.like(count, ids)),
    )


@rule("NonZero")
def non_zero(n: Call) -> Value:
    x = np.atleast_1d(n.array(0, apart=True))
    return n.known(np.stack(np.nonzero(x)).astype(np.int64))


@rule("Compress")
def compress(n: Call) -> Value:
    x, axis = n.value(), n.attribute("axis")
    if axis is None:
        x, axis = n.reshape(x, (x.spec.size,)), 0
    axis = n.axis_of(axis, x.rank)
    keep = n.array(1, apart=True).reshape(-1)[: x.shape[axis]]  # as ONNX Runtime takes it
    if x.array is not None:
        return n.known(np.compress(keep, x.array, axis))
    return n("gather", x, n.known(np.flatnonzero(keep)), axis=axis)


@rule("ReverseSequence")
def reverse_sequence(n: Call) -> Value:
    x, lengths = n.value(), n.array(1)
    time, batch = n.attribute("time_axis", 0), n.attribute("batch_axis", 1)
    if {time, batch} != {0, 1} or x.rank < 2 or lengths.shape != (x.shape[batch],):
        raise OnnxError("time and batch axes 0 and 1 needed, and a length for each sample")
    n.room(x.shape[0] * x.shape[1])
    steps = np.arange(x.shape[time])[:, None]
    places = np.where(steps < lengths, lengths - 1 - steps, steps).astype(np.int64)
    if batch == 0:
        places = places.T
    tail = (1,) * (x.rank - 2)
    ids = n.broadcast(n.known(places.reshape(*places.shape, *tail)), x.shape)
    return n("gather_elements", x, ids, axis=time)


@rule("TensorScatter")
def tensor_scatter(n: Call) -> Value:
    cache, update = n.value(0), n.value(1)
    axis = n.axis_of(n.attribute("axis", -2), cache.rank)
    extent, count = cache.shape[axis], update.shape[axis]
    mode = n.text("mode", "linear", ("linear", "circular"))
    if mode == "linear" and axis:
        none = n.known(np.zeros(n.room(cache.shape[0]), np.int64))
        starts = n.value(2) if n.has(2) else none
        return n("write_at", cache, update, n.reshape(starts, cache.shape[:1]), axis=axis)
    place = np.arange(n.room(count)).reshape(1, count).astype(np.int64)
    if n.has(2):
        first = n.reshape(n.value(2), (cache.shape[0], 1))
        places = n("add", first, n.known(place))
    else:
        places = n.broadcast(n.known(place), (cache.shape[0], count))
    if mode == "circular":
        places = n("mod", places, n.like(extent, places))
    shape = [1] * cache.rank
    shape[0], shape[axis] = cache.shape[0], count
    ids = n.broadcast(n.reshape(places, shape), update.shape)
    return n("scatter_elements", cache, ids, update, axis=axis, reduction="none")


@rule("Unique")
def unique(n: Call) -> Any:
    x, axis = n.array(0, apart=True), n.attribute("axis")
    if axis is not None:
        axis = n.axis_of(axis, x.ndim)
    table = None
    if n.value().is_text:
        table, (x,) = tabled([x])
    found, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not n.attribute("sorted", 1):
        order = np.argsort(first)
        place = np.argsort(order)
        found = found[order] if axis is None else np.take(found, order, axis)
        first, counts, inverse = first[order], counts[order], place[inverse]
    rest = (part.astype(np.int64) for part in (first, inverse, counts))
    found = found if table is None else table[found]
    return [n.known(found), *(n.known(part) for part in rest)]
