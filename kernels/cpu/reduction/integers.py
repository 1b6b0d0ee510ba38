"""Sums, maxima and minima of integers, exactly: sums wrap as NumPy's do."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop
from soapstone.native.intrinsics import i32p, i64p
from soapstone.native.memory import pack
from soapstone.native.moves import row_at
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

_SUM, _MAX = 0, 1
FOLDS = {"reduce_sum": _SUM, "reduce_max": _MAX, "reduce_min": 2}

# count: of numbers of a result, in rows of `length` at steps of `inner` bytes; reduced: the walk of
# those rows, of so many dims. Then the walk of the results, of `rank`, in x and y.
_FOLD = Fields("x y wide fold count length inner reduced reduced_rank rank")
_fold_of, _fold_table = _FOLD.at, _FOLD.table


@native("body")
def _fold(block: Any, begin: int, end: int) -> int:
    w, table = _fold_of(block), _fold_table(block)
    fold, wide = w.fold, w.wide
    for item in range(begin, end):
        x = w.x + row_at(table, w.rank, 0, item)
        total = np.int64(0) if fold == _SUM else integer_at(x, wide)
        for row in range(w.count // w.length):
            at = x + row_at(i64p(w.reduced), w.reduced_rank, 0, row)
            for i in range(w.length):
                value = integer_at(at + i * w.inner, wide)
                if fold == _SUM:
                    total += value
                elif fold == _MAX:
                    total = max(total, value)
                else:
                    total = min(total, value)
        y = w.y + row_at(table, w.rank, 1, item)
        if wide != 0:
            i64p(y)[0] = total
        else:
            i32p(y)[0] = np.int32(total)
    return 0


def folded(fold: int, x: Array, y: Array, axes: tuple[int, ...], threads: int) -> Entry | None:
    """Return the entry of one of `FOLDS` over axes, or None where the arrays are not integers.

    y: of x's rank, with extent 1 along the axes.
    """
    if not (is_integer(x) and is_integer(y)) or x.dtype != y.dtype:
        return None
    if y.size == 0:
        return noop()
    if x.size == 0 and fold != _SUM:
        return None
    kept = [d for d in memory_order(y.strides) if d not in axes]
    outer = merge(x.shape, [x.strides, y.strides], kept)
    inner = merge(x.shape, [x.strides], [d for d in memory_order(x.strides) if d in axes])
    rows = inner.rows
    block = _FOLD.pack(
        outer,
        x=x,
        y=y,
        wide=x.dtype == np.int64,
        fold=fold,
        count=inner.size,
        length=max(1, inner.extents[-1]),
        inner=inner.steps[0],
        reduced=pack(rows),
        reduced_rank=rows.rank,
        rank=outer.rank,
    )
    return parallel_for(_fold, block, y.size, useful_threads(threads, x.nbytes))
