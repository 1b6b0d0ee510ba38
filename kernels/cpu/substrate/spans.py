"""How kernels share out equal-shaped arrays: rows of contiguous floats, a few of them an item.

The cut depends on the shapes alone, never on the threads, so that sums taken item by item and added
in order have the same bits whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from soapstone.kernels.entry import Array
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import helper
from soapstone.native.memory import Block, Entry, Scratch, aligned_array
from soapstone.native.moves import row_at
from soapstone.native.walks import Walk, in_places, memory_order, merge

FLOATS = 8192  # of each array, in one item
# A table: group: rows an item; columns: of an item; across: items beside each other. Then a walk of
# `rank` dims, and the steps along a row.
_SPANS = Fields("rows length group columns across rank")
_spans_of, _walk_of = _SPANS.at, _SPANS.table


class Spans(NamedTuple):
    """The table that `span` and `span_at` read, and how many items of work it makes."""

    block: Block
    items: int


def spans(
    shape: Sequence[int], arrays: Sequence[Array], *, numbers: Sequence[Sequence[int]] = ()
) -> Spans:
    """Return the items over arrays of one shape of float32, walked in the last array's order.

    Where the arrays do not share a contiguous dim, rows hold one element: slow, but right, and
    `laid_as` is what changes it.

    numbers: further tables, of what a step along each dim adds to a number (not to an address).
    """
    steps = [*(a.strides for a in arrays), *numbers]
    walked = merge(shape, steps, memory_order(arrays[-1].strides))
    if walked.extents[-1] > 1 and any(step != 4 for step in walked.steps[: len(arrays)]):
        walked = Walk((*walked.extents, 1), tuple((*s, 0) for s in walked.strides))
    length, outer = walked.extents[-1], walked.rows
    rows = outer.size
    columns = min(length, FLOATS)
    across = -(-length // columns)
    rows_an_item = max(1, FLOATS // length)
    block = _SPANS.pack(
        *(outer, walked.steps),
        rows=rows,
        length=length,
        group=rows_an_item,
        columns=columns,
        across=across,
        rank=outer.rank,
    )
    return Spans(block, -(-rows // rows_an_item) * across)


def turned(x: Array, y: Array) -> bool:
    """Whether the dim that is contiguous in y lies apart in x: `spans` would find no rows."""
    return any(n > 1 and to == y.itemsize != at for n, to, at in zip(x.shape, y.strides, x.strides))


def laid_as(x: Array, y: Array, threads: int) -> tuple[Array, list[Entry | None]]:
    """Return an operand as y, of its shape, lies in memory, and the copy which that takes, if any.

    Such operands are an image in C order and one that is stored channels-last.
    """
    if not turned(x, y):
        return x, []
    order = memory_order(y.strides)
    room = aligned_array(tuple(x.shape[axis] for axis in order), x.dtype).view(Scratch)
    beside = in_places(room, order)
    return beside, [copy(beside, x, threads)]


@helper
def span(table: int, item: int) -> tuple[int, int, int, int]:
    """The first row and the one after the last, the first column and how many, of an item."""
    t = _spans_of(table)
    group = item // t.across
    column = (item % t.across) * t.columns
    n = min(t.columns, t.length - column)
    return group * t.group, min(t.rows, (group + 1) * t.group), column, n


@helper
def span_at(table: int, array: int, row: int) -> Any:
    """The offset of a row in array (or table of numbers) `array`, counted from 0."""
    return row_at(_walk_of(table), _spans_of(table).rank, array, row)


@helper
def span_step(table: int, count: int, array: int) -> Any:
    """What a step along the row adds to array `array` of `count`: bytes, or a number."""
    return _walk_of(table)[_spans_of(table).rank * (1 + count) + array]
