"""How kernels share out equal-shaped arrays: rows of contiguous floats, a few of them an item.

The cut depends on the shapes alone, never on the threads, so that sums taken item by item and added
in order have the same bits whatever the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from soapstone.kernels.entry import Array
from soapstone.native.entries import helper
from soapstone.native.memory import Block, pack
from soapstone.native.moves import row_offset
from soapstone.native.walks import merge

FLOATS = 8192  # of each array, in one item
_HEADER = 6  # words: rows, length, rows an item, columns an item, items across, rank


class Spans(NamedTuple):
    """The table that `span` and `span_at` read, and how many items of work it makes."""

    block: Block
    items: int


def spans(
    shape: Sequence[int], arrays: Sequence[Array], *, numbers: Sequence[Sequence[int]] = ()
) -> Spans:
    """Return the items over arrays of one shape of float32, walked in the last array's order.

    Where the arrays do not share a contiguous dim, rows hold one element: slow, but right.

    numbers: further tables, of what a step along each dim adds to a number (not to an address).
    """
    order = sorted(range(len(shape)), key=lambda d: -abs(arrays[-1].strides[d]))
    steps = [*(a.strides for a in arrays), *numbers]
    extents, strides = merge([shape[d] for d in order], [[s[d] for d in order] for s in steps])
    if extents[-1] > 1 and any(s[-1] != 4 for s in strides[: len(arrays)]):
        extents, strides = (*extents, 1), tuple((*s, 0) for s in strides)
    length = extents[-1]
    outer = extents[:-1] or (1,)
    rows = math.prod(outer)
    columns = min(length, FLOATS)
    across = -(-length // columns)
    rows_an_item = max(1, FLOATS // length)
    block = pack(
        (rows, length, rows_an_item, columns, across, len(outer)),
        outer,
        [s[:-1] or (0,) for s in strides],
        [s[-1] for s in strides],
    )
    return Spans(block, -(-rows // rows_an_item) * across)


@helper
def span(t: Any, item: int) -> tuple[int, int, int, int]:
    """The first row and the one after the last, the first column and how many, of an item."""
    group = item // t[4]
    column = (item % t[4]) * t[3]
    return group * t[2], min(t[0], (group + 1) * t[2]), column, min(t[3], t[1] - column)


@helper
def span_at(t: Any, array: int, row: int) -> Any:
    """The offset of a row in array (or table of numbers) `array`, counted from 0."""
    rank = t[5]
    return row_offset(t, _HEADER, _HEADER + rank * (1 + array), rank, row)


@helper
def span_step(t: Any, count: int, array: int) -> Any:
    """What a step along the row adds to array `array` of `count`: bytes, or a number."""
    return t[_HEADER + t[5] * (1 + count) + array]
