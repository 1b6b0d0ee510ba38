"""Products of matrices by OpenBLAS, cut over the threads, as native entries.

Operands whose rows and columns both have gaps are staged through dense copies. Every part of the
work is one call of the library for a block of rows or columns of one matrix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.cache.deferred import types
from soapstone.kernels.cpu.openblas.library import attempt
from soapstone.kernels.cpu.substrate.layout import merged
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy, fill
from soapstone.native.entries import native, noop, sequence
from soapstone.native.intrinsics import fixed_arity
from soapstone.native.memory import aligned_array
from soapstone.native.moves import row_at
from soapstone.native.threads.parallel import parallel_for

_ROW_MAJOR, _PLAIN, _TURNED = 101, 111, 112  # values of CBLAS's enumerations
_PART_FLOPS = 200_000  # that a thread must have to be worth waking
_MOST = (1 << 31) - 1


def _gemm(real: Any) -> Any:
    """An intrinsic: `cblas_?gemm` at an address, by rows, y = a b, or y += a b with `more`."""

    def typer(typing: Any, *given: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
            wants = [number] * 6 + [real, pointer, number, pointer, number, real, pointer, number]
            address, turned_a, turned_b, m, n, k, a, lda, b, ldb, more, y, ldy = args

            def order(turned: Any) -> Any:
                flag = builder.icmp_signed("!=", turned, turned.type(0))
                return builder.select(flag, number(_TURNED), number(_PLAIN))

            def short(value: Any) -> Any:
                return builder.trunc(value, number)

            keep = builder.icmp_signed("!=", more, more.type(0))
            beta = builder.select(keep, ir.Constant(real, 1.0), ir.Constant(real, 0.0))
            function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), wants).as_pointer())
            places = [builder.inttoptr(value, pointer) for value in (a, b, y)]
            builder.call(
                function,
                [
                    *(number(_ROW_MAJOR), order(turned_a), order(turned_b)),
                    *(short(m), short(n), short(k), ir.Constant(real, 1.0)),
                    *(places[0], short(lda), places[1], short(ldb)),
                    *(beta, places[2], short(ldy)),
                ],
            )
            return context.get_dummy_value()

        return types.void(*([types.int64] * 13)), emit

    return fixed_arity(typer, lambda: 13)


sgemm: Any = _gemm(ir.FloatType())
_dgemm: Any = _gemm(ir.DoubleType())


# size: bytes an element; turned: whether a and b are; lead: leading dimensions; down, across: items
# of so many rows and columns; a_row and so on: bytes from one to the next; more: whether to add.
# Then the walk of the batch, of `rank` dims, in a, b and y.
_PRODUCTS = Fields(
    "gemm size turned(a b) m n k lead(a b y) a b y rows down columns across a_row y_row b_column"
    " y_column more rank"
)
_products_of, _batch_of = _PRODUCTS.at, _PRODUCTS.table


@native("body")
def _products(block: Any, begin: int, end: int) -> int:
    w, table = _products_of(block), _batch_of(block)
    rank = w.rank
    for item in range(begin, end):
        column = item % w.across * w.columns
        row = item // w.across % w.down * w.rows
        matrix = item // w.across // w.down
        rows, columns = min(w.rows, w.m - row), min(w.columns, w.n - column)
        a = w.a + row_at(table, rank, 0, matrix) + row * w.a_row
        b = w.b + row_at(table, rank, 1, matrix) + column * w.b_column
        y = w.y + row_at(table, rank, 2, matrix) + row * w.y_row + column * w.y_column
        if w.size == 4:
            sgemm(
                *(w.gemm, w.turned_a, w.turned_b, rows, columns, w.k),
                *(a, w.lead_a, b, w.lead_b, w.more, y, w.lead_y),
            )
        else:
            _dgemm(
                *(w.gemm, w.turned_a, w.turned_b, rows, columns, w.k),
                *(a, w.lead_a, b, w.lead_b, w.more, y, w.lead_y),
            )
    return 0


def leading(array: Array) -> tuple[bool, int] | None:
    """Return whether the matrices of the last two axes are stored turned, and their leading dim.

    None where neither rows nor columns are contiguous, or they overlap.
    """
    rows, columns = array.shape[-2:]
    if any(step % array.itemsize for step in array.strides):
        return None
    down, across = (step // array.itemsize for step in array.strides[-2:])
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return False, down if rows > 1 else max(1, columns)
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return True, across if columns > 1 else max(1, rows)
    return None


def product(a: Array, b: Array, y: Array, threads: int, more: bool = False) -> Entry | None:
    """Return the entry of y = a b, or y += a b; a and b are broadcast to the batch of y.

    All are float32 or float64, of one rank, two or more. None where a size does not fit the
    library.
    """
    if y.size == 0:
        return noop()
    if a.shape[-1] == 0:
        return noop() if more else fill(y, 0.0, threads)
    library, _ = attempt()
    if library is None or a.dtype not in (np.float32, np.float64):
        return None
    if y.strides[-1] != y.itemsize and y.strides[-2] == y.itemsize:
        a, b, y = b.swapaxes(-1, -2), a.swapaxes(-1, -2), y.swapaxes(-1, -2)
    before: list[Entry | None] = []
    after: list[Entry | None] = []
    ends = [a, b, y]
    for index, array in enumerate(ends):
        placed = leading(array)
        if placed is None or (index == 2 and placed[0]):
            ends[index] = dense = aligned_array(array.shape, array.dtype)
            if index < 2 or more:
                before.append(copy(dense, array, threads))
            if index == 2:
                after.append(copy(array, dense, threads))
    a, b, y = ends
    batch = y.shape[:-2]
    a, b = (np.broadcast_to(array, (*batch, *array.shape[-2:])) for array in (a, b))
    a, b, y = _merged(a, b, y)
    (m, k), n, count = a.shape[-2:], y.shape[-1], math.prod(y.shape[:-2])
    layouts = [leading(array) for array in (a, b, y)]
    known = [layout for layout in layouts if layout is not None]
    if len(known) < 3 or max(m, n, k, *(lead for _, lead in known)) > _MOST:
        return None
    threads = max(1, min(threads, 2 * m * n * k * count // _PART_FLOPS))
    parts = -(-threads // count)
    rows, columns = (-(-m // parts), n) if m >= n else (m, -(-n // parts))
    down, across = -(-m // rows), -(-n // columns)
    block = _PRODUCTS.pack(
        *(y.shape[:-2], [x.strides[:-2] for x in (a, b, y)]),
        gemm=library.sgemm if y.itemsize == 4 else library.dgemm,
        size=y.itemsize,
        turned=[turned for turned, _ in known[:2]],
        m=m,
        n=n,
        k=k,
        lead=[lead for _, lead in known],
        a=a,
        b=b,
        y=y,
        rows=rows,
        down=down,
        columns=columns,
        across=across,
        a_row=a.strides[-2],
        y_row=y.strides[-2],
        b_column=b.strides[-1],
        y_column=y.strides[-1],
        more=more,
        rank=y.ndim - 2,
    )
    made = parallel_for(_products, block, count * down * across, threads)
    return sequence([*before, made, *after])


def _merged(a: Array, b: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the arrays with axes of the batch made rows of one matrix while b is the same."""
    while y.ndim > 2 and (y.shape[-3] == 1 or b.strides[-3] == 0):
        axis = y.ndim - 3
        views = merged(a, axis), merged(y, axis)
        if views[0] is None or views[1] is None or b.shape[-3] != y.shape[-3]:
            break
        placed = leading(views[0]), leading(views[1])
        if placed[0] is None or placed[1] is None or placed[1][0]:
            break
        a, y, b = views[0], views[1], b[..., 0, :, :]
    return a, b, y


class Weights:
    """The right operand of products, taken as it is: see `products.Weights`."""

    def __init__(self, array: Array, threads: int, constant: bool = False) -> None:
        self.prepare: list[Entry] = []
        self._array, self._threads = array, threads

    def product(self, a: Array, y: Array, bias: Array | None = None) -> Entry | None:
        """Return the entry of y = a b + bias."""
        if bias is None:
            return product(a, self._array, y, self._threads)
        first = copy(y, np.broadcast_to(bias, y.shape), self._threads)
        then = product(a, self._array, y, self._threads, more=True)
        return sequence([first, then])
