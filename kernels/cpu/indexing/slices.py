"""Slices of an array gathered by index, and put or added where indices say.

All of these copy or combine one slice an index: `gather` takes indices of one axis, `gather_nd` and
`scatter_nd` several to a slice. An index outside its axis ends the kernel with a status; nothing is
read or written there. Elements of any size are copied; they are combined if they are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.ops.indexing.gather import nd_positions, positions
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.copies import copy, fill
from soapstone.native.entries import (
    helper,
    native,
    noop,
    parallel_for,
    routine,
    sequence,
    useful_threads,
)
from soapstone.native.intrinsics import f32p, i32p, i64p, words
from soapstone.native.memory import Statuses, pack
from soapstone.native.moves import copy_run, move, row_offset, zero_run
from soapstone.native.walks import merge

PUT, ADD, MULTIPLY, MAXIMUM, MINIMUM = range(5)
COMBINATIONS = {"none": PUT, "add": ADD, "mul": MULTIPLY, "max": MAXIMUM, "min": MINIMUM}
_CHUNK = 4096  # elements of slices in one item of a scatter


@helper
def index_at(address: int, wide: int, total: int) -> Any:
    """The index there, counted from 0; -1 where it is outside an axis of `total` elements."""
    index = i64p(address)[0] if wide != 0 else np.int64(i32p(address)[0])
    if index < 0:
        index += total
    return index if 0 <= index < total else -1


@helper
def combine(how: int, to: int, x: int) -> None:
    """Combine the float32 at x with the one at `to`."""
    y, value = f32p(to), f32p(x)[0]
    if how == ADD:
        y[0] += value
    elif how == MULTIPLY:
        y[0] *= value
    elif how == MAXIMUM:
        if value > y[0] or value != value:
            y[0] = value
    elif value < y[0] or value != value:
        y[0] = value


@routine
def combine_run(how: int, to: int, to_step: int, x: int, x_step: int, n: int) -> None:
    """Combine n floats at steps in bytes."""
    if how == ADD and to_step == 4 and x_step == 4:
        y, a = f32p(to), f32p(x)
        for i in range(n):
            y[i] += a[i]
        return
    for i in range(n):
        combine(how, to + i * to_step, x + i * x_step)


# Words of a slice's table: 0 rows, 1 length, 2 and 3 steps of both arrays along it, 4 rank of the
# other dims, 5.. extents, strides of both arrays.
_SLICE_HEAD = 5


def slice_table(shape: Sequence[int], strides: Sequence[Sequence[int]], size: int) -> list[Any]:
    """Return the words by which `slice_run` walks two arrays of one shape."""
    order = sorted(range(len(shape)), key=lambda d: -abs(strides[1][d]))
    extents, (xs, ys) = merge([shape[d] for d in order], [[s[d] for d in order] for s in strides])
    if len(extents) == 1 and extents[0] == 1:
        xs = ys = (size,)
    outer = extents[:-1] or (1,)
    table = [math.prod(outer), extents[-1], xs[-1], ys[-1], len(outer), *outer]
    return [*table, *(xs[:-1] or (0,)), *(ys[:-1] or (0,))]


@helper
def slice_run(w: Any, at: int, size: int, how: int, to: int, x: int, first: int, last: int) -> None:
    """Copy or combine the elements first to last of a slice, whose table is at word `at`.

    `first` and `last` are multiples of the length of a row, or lie in its only row.
    """
    length, rank = w[at + 1], w[at + 4]
    x_step, to_step = w[at + 2], w[at + 3]
    if w[at] == 1:
        target, source, n = to + first * to_step, x + first * x_step, last - first
        if how == PUT:
            copy_run(size, target, to_step, source, x_step, n)
        else:
            combine_run(how, target, to_step, source, x_step, n)
        return
    row = first // length
    begin = first - row * length
    while first < last:
        n = min(last - first, length - begin)
        source = x + row_offset(w, at + 5, at + 5 + rank, rank, row) + begin * x_step
        target = to + row_offset(w, at + 5, at + 5 + 2 * rank, rank, row) + begin * to_step
        if how == PUT:
            copy_run(size, target, to_step, source, x_step, n)
        else:
            combine_run(how, target, to_step, source, x_step, n)
        first += n
        row += 1
        begin = 0


# ----------------------------------------------------------------------------------------- gather
# Words: 0 x, 1 y, 2 ids, 3 whether they are int64, 4 bytes an element, 5 x's step along the axis,
# 6 first element of the tile, 7 how many it has, 8 how many the axis has, 9 ids, 10 their rank,
# 11 outer rank, 12 elements of a slice, 13 where its table is, 14 address of a zero,
# 15.. extents of the ids, their strides, y's; outer extents, x's and y's strides; table of a slice.
@native("body")
def _gather(block: Any, begin: int, end: int) -> int:
    w = words(block)
    size, count, ids_rank, outer_rank = w[4], w[9], w[10], w[11]
    wide, step, base, held, total = w[3], w[5], w[6], w[7], w[8]
    single = w[12] == 1
    outer = 15 + 3 * ids_rank
    item = begin
    while item < end:
        row = item // count
        place = item - row * count
        x = w[0] + row_offset(w, outer, outer + outer_rank, outer_rank, row)
        y = w[1] + row_offset(w, outer, outer + 2 * outer_rank, outer_rank, row)
        stop = min(count, place + end - item)
        item += stop - place
        for j in range(place, stop):
            at = w[2] + row_offset(w, 15, 15 + ids_rank, ids_rank, j)
            to = y + row_offset(w, 15, 15 + 2 * ids_rank, ids_rank, j)
            index = index_at(at, wide, total)
            if index < 0:
                return 1
            index -= base
            if index >= 0 and index < held:
                if single:
                    move(size, to, x + index * step)
                else:
                    slice_run(w, w[13], size, PUT, to, x + index * step, 0, w[12])
            elif single:  # an element of another tile
                zero_run(size, to, size, 1)
            else:
                table = w[13] + 5 + 3 * w[w[13] + 4]
                slice_run(w, table, size, PUT, to, w[14], 0, w[12])
    return 0


def indices_served(ids: Array) -> bool:
    """Return whether the kernels read indices of this type."""
    return ids.dtype in (np.int32, np.int64) and bool(ids.flags.aligned)


def elements_served(*arrays: Array) -> bool:
    """Return whether the kernels move elements between these arrays."""
    size = arrays[0].itemsize
    return size in (1, 2, 4, 8) and all(a.itemsize == size and a.flags.aligned for a in arrays)


@variant("gather", "numba")
def gather(call: Call) -> Entry | None:
    """The elements of an axis that the ids name; zeros for those of other tiles."""
    (x, ids), (y,), a = call.inputs, call.outputs, call.attributes
    if not (indices_served(ids) and elements_served(x, y)):
        return None
    if y.size == 0:
        return noop() if ids.size == 0 else None
    axis, size = a["axis"], x.itemsize
    total = a.get("total", x.shape[axis])
    after, rank = axis + 1, ids.ndim
    ids_extents, ids_strides = merge(ids.shape, [ids.strides, y.strides[axis : axis + rank]])
    outer, outer_strides = merge(x.shape[:axis], [x.strides[:axis], y.strides[:axis]])
    rest = x.shape[after:]
    table = slice_table(rest, [x.strides[after:], y.strides[axis + rank :]], size)
    zeros = slice_table(rest, [(0,) * len(rest), y.strides[axis + rank :]], size)
    head = 15 + 3 * len(ids_extents) + 3 * len(outer)
    block = pack(
        (x, y, ids, ids.dtype == np.int64, size, x.strides[axis]),
        (a.get("base", 0), x.shape[axis], total, ids.size, len(ids_extents), len(outer)),
        (math.prod(rest), head, np.zeros(1, np.int64)),
        (ids_extents, ids_strides, outer, outer_strides, table, zeros),
    )
    items = ids.size * math.prod(outer)
    threads = useful_threads(call.threads, 2 * y.nbytes)
    return parallel_for(
        *(_gather, block, items, threads),
        outside(call.operator, positions, ids, total, axis),
    )


def outside(operator: str, check: Callable[..., object], *arguments: Any) -> Statuses:
    """Return what the status of an index that is outside means, found out when it is asked.

    check: what the reference checks indices with, as `positions`; it is given the arguments.
    """

    def said() -> str:
        try:
            check(operator, *arguments)
        except GraphError as error:
            return str(error)
        return f"{operator}: an index outside its axis, which is overwritten by now"

    return {1: said}


# ---------------------------------------------------------------------------- gather's gradient
# Words: 0 dy, 1 dx, 2 ids, 3 whether they are int64, 4 dx's step along the axis, 5 first element of
# the tile, 6 how many the axis has, 7 ids, 8 their rank, 9 outer rows, 10 outer rank, 11 elements
# of a slice, 12 where its table is, 13.. extents of the ids, their strides, dy's; outer extents,
# dy's and dx's strides; table of a slice.
@native("body")
def _gather_grad(block: Any, begin: int, end: int) -> int:
    # Each part owns a stretch of the axis and looks at all ids, in order: the sums have the same
    # bits however it is cut.
    w = words(block)
    count, ids_rank, rows, rank = w[7], w[8], w[9], w[10]
    outer = 13 + 3 * ids_rank
    for place in range(count):
        index = index_at(w[2] + row_offset(w, 13, 13 + ids_rank, ids_rank, place), w[3], w[6])
        if index < 0:
            return 1
        index -= w[5]
        if index < begin or index >= end:
            continue
        at = w[0] + row_offset(w, 13, 13 + 2 * ids_rank, ids_rank, place)
        for row in range(rows):
            dy = at + row_offset(w, outer, outer + rank, rank, row)
            dx = w[1] + row_offset(w, outer, outer + 2 * rank, rank, row) + index * w[4]
            slice_run(w, w[12], 4, ADD, dx, dy, 0, w[11])
    return 0


@variant("gather_grad", "numba")
def gather_grad(call: Call) -> Entry | None:
    """dy added up by the element of the axis it came from."""
    (dy, ids), (dx,), a = call.inputs, call.outputs, call.attributes
    if not (indices_served(ids) and is_float32(dy, dx)):
        return None
    if dx.size == 0:
        return noop() if ids.size == 0 else None
    axis, rank = a["axis"], ids.ndim
    extents, strides = merge(ids.shape, [ids.strides, dy.strides[axis : axis + rank]])
    outer, outer_strides = merge(dx.shape[:axis], [dy.strides[:axis], dx.strides[:axis]])
    rest = dx.shape[axis + 1 :]
    table = slice_table(rest, [dy.strides[axis + rank :], dx.strides[axis + 1 :]], 4)
    total = a.get("total", a["extent"])
    block = pack(
        (dy, dx, ids, ids.dtype == np.int64, dx.strides[axis], a.get("base", 0), total),
        (ids.size, len(extents), math.prod(outer), len(outer), math.prod(rest)),
        (13 + 3 * len(extents) + 3 * len(outer)),
        (extents, strides, outer, outer_strides, table),
    )
    zero = fill(dx, 0.0, call.threads)
    threads = useful_threads(call.threads, 2 * dy.nbytes)
    status = outside(call.operator, positions, ids, total, axis)
    add = parallel_for(_gather_grad, block, dx.shape[axis], threads, status)
    return None if zero is None else sequence([zero, add])


# ------------------------------------------------------------------- several indices to a slice
# Words: 0 array that is indexed, 1 the other, 2 ids, 3 whether they are int64, 4 bytes an element,
# 5 how slices are combined, 6 whether the indexed array is written, 7 indices, 8 how many make one,
# 9 step of the ids from one to the next, 10 rank, 11 elements of a slice, 12 where its table is,
# 13.. extent and stride of each indexed axis; extents of the indices, strides of the ids, of the
# indexed array (along batch dims) and of the other; table of a slice.
@helper
def _place(w: Any, number: int) -> Any:
    """The offset of slice `number` in the indexed array, or a negative number: not there."""
    each, rank = w[8], w[10]
    table = 13 + 2 * each
    at = w[2] + row_offset(w, table, table + rank, rank, number)
    offset = row_offset(w, table, table + 2 * rank, rank, number)
    for k in range(each):
        index = index_at(at + k * w[9], w[3], w[13 + 2 * k])
        if index < 0:
            return -1
        offset += index * w[14 + 2 * k]
    return offset


@native("body")
def _gather_slices(block: Any, begin: int, end: int) -> int:
    w = words(block)
    table = 13 + 2 * w[8]
    for number in range(begin, end):
        offset = _place(w, number)
        if offset < 0:
            return 1
        y = w[1] + row_offset(w, table, table + 3 * w[10], w[10], number)
        slice_run(w, w[12], w[4], PUT, y, w[0] + offset, 0, w[11])
    return 0


@native("body")
def _scatter_slices(block: Any, begin: int, end: int) -> int:
    # Each part owns a stretch of the slices and puts it for all indices, in order.
    w = words(block)
    table = 13 + 2 * w[8]
    length = w[w[12] + 1]
    chunk = length if w[w[12]] > 1 else 4096
    first, last = begin * chunk, min(end * chunk, w[11])
    for number in range(w[7]):
        offset = _place(w, number)
        if offset < 0:
            return 1
        updates = w[1] + row_offset(w, table, table + 3 * w[10], w[10], number)
        slice_run(w, w[12], w[4], w[5], w[0] + offset, updates, first, last)
    return 0


def _slices(
    call: Call, indexed: Array, other: Array, ids: Array, batch: int, how: int, written: bool
) -> Entry | None:
    """The entry that goes through all slices, or None where the kernel does not serve them."""
    if not indices_served(ids) or any(stride < 0 for stride in indexed.strides):
        return None
    each, lead = ids.shape[-1], ids.ndim - 1
    size = indexed.itemsize
    fixed = indexed.strides[:batch] + (0,) * (lead - batch)
    extents, strides = merge(ids.shape[:-1], [ids.strides[:-1], fixed, other.strides[:lead]])
    axes = list(zip(indexed.shape[batch:], indexed.strides[batch:]))[:each]
    rest = indexed.shape[batch + each :]
    sides = [indexed.strides[batch + each :], other.strides[lead:]]
    table = slice_table(rest, sides[::-1] if written else sides, size)
    count = math.prod(ids.shape[:-1])
    block = pack(
        (indexed, other, ids, ids.dtype == np.int64, size, how, written, count, each),
        (ids.strides[-1], len(extents), math.prod(rest)),
        (13 + 2 * each + 4 * len(extents)),
        (axes, extents, strides, table),
    )
    status = outside(call.operator, nd_positions, ids, indexed.shape, batch)
    threads = useful_threads(call.threads, 2 * other.nbytes)
    if not written:
        return parallel_for(_gather_slices, block, count, threads, status)
    items = table[0] if table[0] > 1 else -(-table[1] // _CHUNK)
    return parallel_for(_scatter_slices, block, items, threads, status)


@variant("gather_nd", "numba")
def gather_nd(call: Call) -> Entry | None:
    """The slices that several indices each name."""
    (x, ids), (y,) = call.inputs, call.outputs
    if not elements_served(x, y):
        return None
    if y.size == 0:
        return noop() if ids.size == 0 else None
    return _slices(call, x, y, ids, call.attributes["batch_dims"], PUT, False)


@variant("scatter_nd", "numba")
def scatter_nd(call: Call) -> Entry | None:
    """x with updates put at the slices that several indices each name, or combined with them."""
    (x, ids, updates), (y,) = call.inputs, call.outputs
    how = COMBINATIONS[call.attributes["reduction"]]
    if not elements_served(x, y) or (how != PUT and not is_float32(x, updates, y)):
        return None
    copied = copy(y, x, call.threads)
    if updates.size == 0:
        return copied if ids.size == 0 else None
    put = _slices(call, y, updates, ids, 0, how, True)
    return sequence([copied, put]) if copied and put else None


@variant("gather_nd_grad", "numba")
def gather_nd_grad(call: Call) -> Entry | None:
    """dy added up by the slice it came from."""
    (dy, ids), (dx,) = call.inputs, call.outputs
    if not is_float32(dy, dx):
        return None
    zero = fill(dx, 0.0, call.threads)
    if dy.size == 0:
        return zero if ids.size == 0 else None
    add = _slices(call, dx, dy, ids, call.attributes["batch_dims"], ADD, True)
    return sequence([zero, add]) if zero and add else None
