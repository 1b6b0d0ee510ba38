"""Slices of an array gathered by index, and put or added where indices say.

All of these copy or combine one slice an index: `gather` takes indices of one axis, `gather_nd` and
`scatter_nd` several to a slice. An index outside its axis ends the kernel with a status; nothing is
read or written there. Elements of any size are copied; they are combined if they are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.ops.indexing.gather import nd_positions, positions
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy, fill
from soapstone.native.entries import helper, native, noop, routine, sequence
from soapstone.native.intrinsics import f32p, i64p
from soapstone.native.memory import Block, Statuses, pack
from soapstone.native.moves import copy_run, move, row_at, zero_run
from soapstone.native.promises import held, lying
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

PUT, ADD, MULTIPLY, MAXIMUM, MINIMUM = range(5)
COMBINATIONS = {"none": PUT, "add": ADD, "mul": MULTIPLY, "max": MAXIMUM, "min": MINIMUM}
_CHUNK = 4096  # elements of slices in one item of a scatter


@helper
def index_at(address: int, wide: int, total: int) -> Any:
    """The index there, counted from 0; -1 where it is outside an axis of `total` elements."""
    index = integer_at(address, wide)
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


# step: along a row, then the walk of the rows, of `rank` dims, in x and the target.
_SLICE = Fields("rows length step(x to) rank")
_slice_of, _slice_table = _SLICE.at, _SLICE.table


class Slice(NamedTuple):
    """Two arrays of one shape: `length` elements each, in so many rows, walked by the block."""

    block: Block
    rows: int
    length: int

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[Sequence[int]], size: int) -> Slice:
        """Return the slices of this shape in a source and a target of these strides."""
        walked = merge(shape, strides, memory_order(strides[1]))
        length, outer = walked.extents[-1], walked.rows
        rows = outer.size
        block = _SLICE.pack(
            outer,
            rows=rows,
            length=length,
            step=(size, size) if walked.extents == (1,) else walked.steps,
            rank=outer.rank,
        )
        return Slice(block, rows, length)


@helper
def slice_run(place: int, size: int, how: int, to: int, x: int, first: int, last: int) -> None:
    """Copy or combine the elements first to last of a slice, whose block is at an address.

    `first` and `last` are multiples of the length of a row, or lie in its only row.
    """
    w, table = _slice_of(place), _slice_table(place)
    length, rank, x_step, to_step = w.length, w.rank, w.step_x, w.step_to
    if w.rows == 1:
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
        source = x + row_at(table, rank, 0, row) + begin * x_step
        target = to + row_at(table, rank, 1, row) + begin * to_step
        if how == PUT:
            copy_run(size, target, to_step, source, x_step, n)
        else:
            combine_run(how, target, to_step, source, x_step, n)
        first += n
        row += 1
        begin = 0


# ----------------------------------------------------------------------------------------- gather
# wide: ids are int64; size: bytes an element; step: of x along the axis; base, held: the tile's
# first element and how many it has, of `total`; elements: of a slice; each, none: blocks of a
# slice of x, and of zeros; zero: an address; outer: the walk of what lies before the axis, in x and
# y. Then the walk of the ids, of `rank` dims, in ids and y.
_GATHER = Fields(
    "x y ids wide size step base held total count rank outer_rank outer elements each none zero"
)
_gather_of, _gather_table = _GATHER.at, _GATHER.table


@native("body")
def _gather(block: Any, begin: int, end: int) -> int:
    w, table = _gather_of(block), _gather_table(block)
    size, count, ids_rank, outer_rank = w.size, w.count, w.rank, w.outer_rank
    wide, step, base, held, total = w.wide, w.step, w.base, w.held, w.total
    single = w.elements == 1
    outer = i64p(w.outer)
    item = begin
    while item < end:
        row = item // count
        place = item - row * count
        x = w.x + row_at(outer, outer_rank, 0, row)
        y = w.y + row_at(outer, outer_rank, 1, row)
        stop = min(count, place + end - item)
        item += stop - place
        for j in range(place, stop):
            at = w.ids + row_at(table, ids_rank, 0, j)
            to = y + row_at(table, ids_rank, 1, j)
            index = index_at(at, wide, total)
            if index < 0:
                return 1
            index -= base
            if index >= 0 and index < held:
                if single:
                    move(size, to, x + index * step)
                else:
                    slice_run(w.each, size, PUT, to, x + index * step, 0, w.elements)
            elif single:  # an element of another tile
                zero_run(size, to, size, 1)
            else:
                slice_run(w.none, size, PUT, to, w.zero, 0, w.elements)
    return 0


def elements_served(*arrays: Array) -> bool:
    """Return whether the kernels move elements between these arrays."""
    size = arrays[0].itemsize
    return size in (1, 2, 4, 8) and all(a.itemsize == size and a.flags.aligned for a in arrays)


@variant("gather", "numba", promises=True)
def gather(call: Call) -> Entry | None:
    """The elements of an axis that the ids name; zeros for those of other tiles."""
    (x, ids), (y,), a = call.inputs, call.outputs, call.attributes
    if not (is_integer(ids) and elements_served(x, y)):
        return None
    if y.size == 0:
        return noop() if ids.size == 0 else None
    ids = held(ids)
    axis, size = a["axis"], x.itemsize
    total = a.get("total", x.shape[axis])
    after, rank = axis + 1, ids.ndim
    ids_extents, ids_strides = merge(ids.shape, [ids.strides, y.strides[axis : axis + rank]])
    outer, outer_strides = merge(x.shape[:axis], [x.strides[:axis], y.strides[:axis]])
    rest = x.shape[after:]
    to = y.strides[axis + rank :]
    block = _GATHER.pack(
        *(ids_extents, ids_strides),
        x=lying(x),
        y=y,
        ids=ids,
        wide=ids.dtype == np.int64,
        size=size,
        step=x.strides[axis],
        base=a.get("base", 0),
        held=x.shape[axis],
        total=total,
        count=ids.size,
        rank=len(ids_extents),
        outer_rank=len(outer),
        outer=pack(outer, outer_strides),
        elements=math.prod(rest),
        each=Slice.of(rest, [x.strides[after:], to], size).block,
        none=Slice.of(rest, [(0,) * len(rest), to], size).block,
        zero=np.zeros(1, np.int64),
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
# step: of dx along the axis; base: the tile's first element, of `total`; outer: the walk of the
# `rows` before the axis, in dy and dx; elements, each: of a slice, and its block. Then the walk of
# the ids, of `rank` dims, in ids and dy.
_GRAD = Fields("dy dx ids wide step base total count rank rows outer_rank outer elements each")
_grad_of, _grad_table = _GRAD.at, _GRAD.table


@native("body")
def _gather_grad(block: Any, begin: int, end: int) -> int:
    # Each part owns a stretch of the axis and looks at all ids, in order: the sums have the same
    # bits however it is cut.
    w, table = _grad_of(block), _grad_table(block)
    rank, outer = w.outer_rank, i64p(w.outer)
    for place in range(w.count):
        index = index_at(w.ids + row_at(table, w.rank, 0, place), w.wide, w.total)
        if index < 0:
            return 1
        index -= w.base
        if index < begin or index >= end:
            continue
        at = w.dy + row_at(table, w.rank, 1, place)
        for row in range(w.rows):
            dy = at + row_at(outer, rank, 0, row)
            dx = w.dx + row_at(outer, rank, 1, row) + index * w.step
            slice_run(w.each, 4, ADD, dx, dy, 0, w.elements)
    return 0


@variant("gather_grad", "numba")
def gather_grad(call: Call) -> Entry | None:
    """dy added up by the element of the axis it came from."""
    (dy, ids), (dx,), a = call.inputs, call.outputs, call.attributes
    if not (is_integer(ids) and is_float32(dy, dx)):
        return None
    if dx.size == 0:
        return noop() if ids.size == 0 else None
    axis, rank = a["axis"], ids.ndim
    extents, strides = merge(ids.shape, [ids.strides, dy.strides[axis : axis + rank]])
    outer, outer_strides = merge(dx.shape[:axis], [dy.strides[:axis], dx.strides[:axis]])
    rest = dx.shape[axis + 1 :]
    total = a.get("total", a["extent"])
    block = _GRAD.pack(
        *(extents, strides),
        dy=dy,
        dx=dx,
        ids=ids,
        wide=ids.dtype == np.int64,
        step=dx.strides[axis],
        base=a.get("base", 0),
        total=total,
        count=ids.size,
        rank=len(extents),
        rows=math.prod(outer),
        outer_rank=len(outer),
        outer=pack(outer, outer_strides),
        elements=math.prod(rest),
        each=Slice.of(rest, [dy.strides[axis + rank :], dx.strides[axis + 1 :]], 4).block,
    )
    zero = fill(dx, 0.0, call.threads)
    threads = useful_threads(call.threads, 2 * dy.nbytes)
    status = outside(call.operator, positions, ids, total, axis)
    add = parallel_for(_gather_grad, block, dx.shape[axis], threads, status)
    return sequence([zero, add])


# ------------------------------------------------------------------- several indices to a slice
# x: the array that is indexed, y the other; how: slices are combined; count: indices to slices,
# each of `depth` ids at equal steps; axes: extent and step of each indexed axis; elements, each: of
# a slice, and its block; chunk: how many of them an item has. Then the walk of the indices, of
# `rank` dims, in ids, in x (along batch dims) and in y.
_SLICES = Fields("x y ids wide size how count depth step axes rank elements each chunk")
_AXIS = Fields("extent step")
_slices_of, _slices_table, _axis_of = _SLICES.at, _SLICES.table, _AXIS.at
_AXIS_BYTES = 8 * _AXIS.words


@helper
def _place(w: Any, table: Any, number: int) -> Any:
    """The offset of slice `number` in the indexed array, or a negative number: not there."""
    at = w.ids + row_at(table, w.rank, 0, number)
    offset = row_at(table, w.rank, 1, number)
    for k in range(w.depth):
        axis = _axis_of(w.axes + k * _AXIS_BYTES)
        index = index_at(at + k * w.step, w.wide, axis.extent)
        if index < 0:
            return -1
        offset += index * axis.step
    return offset


@native("body")
def _gather_slices(block: Any, begin: int, end: int) -> int:
    w, table = _slices_of(block), _slices_table(block)
    for number in range(begin, end):
        offset = _place(w, table, number)
        if offset < 0:
            return 1
        y = w.y + row_at(table, w.rank, 2, number)
        slice_run(w.each, w.size, PUT, y, w.x + offset, 0, w.elements)
    return 0


@native("body")
def _scatter_slices(block: Any, begin: int, end: int) -> int:
    # Each part owns a stretch of the slices and puts it for all indices, in order.
    w, table = _slices_of(block), _slices_table(block)
    first, last = begin * w.chunk, min(end * w.chunk, w.elements)
    for number in range(w.count):
        offset = _place(w, table, number)
        if offset < 0:
            return 1
        updates = w.y + row_at(table, w.rank, 2, number)
        slice_run(w.each, w.size, w.how, w.x + offset, updates, first, last)
    return 0


def _slices(
    call: Call, indexed: Array, other: Array, ids: Array, batch: int, how: int, written: bool
) -> Entry | None:
    """The entry that goes through all slices, or None where the kernel does not serve them."""
    if not is_integer(ids) or any(stride < 0 for stride in indexed.strides):
        return None
    each, lead = ids.shape[-1], ids.ndim - 1
    size = indexed.itemsize
    fixed = indexed.strides[:batch] + (0,) * (lead - batch)
    extents, strides = merge(ids.shape[:-1], [ids.strides[:-1], fixed, other.strides[:lead]])
    axes = zip(indexed.shape[batch : batch + each], indexed.strides[batch:])
    rest = indexed.shape[batch + each :]
    sides = [indexed.strides[batch + each :], other.strides[lead:]]
    one = Slice.of(rest, sides[::-1] if written else sides, size)
    count = math.prod(ids.shape[:-1])
    block = _SLICES.pack(
        *(extents, strides),
        x=indexed,
        y=other,
        ids=ids,
        wide=ids.dtype == np.int64,
        size=size,
        how=how,
        count=count,
        depth=each,
        step=ids.strides[-1],
        axes=pack([_AXIS.row(extent=extent, step=step) for extent, step in axes]),
        rank=len(extents),
        elements=math.prod(rest),
        each=one.block,
        chunk=one.length if one.rows > 1 else _CHUNK,
    )
    status = outside(call.operator, nd_positions, ids, indexed.shape, batch)
    threads = useful_threads(call.threads, 2 * other.nbytes)
    if not written:
        return parallel_for(_gather_slices, block, count, threads, status)
    items = one.rows if one.rows > 1 else -(-one.length // _CHUNK)
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
    return sequence([copied, _slices(call, y, updates, ids, 0, how, True)])


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
    return sequence([zero, add])
