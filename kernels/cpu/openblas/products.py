"""Products of matrices by OpenBLAS, cut over the threads, as native entries.

Operands whose rows and columns both have gaps are staged through dense copies. Every part of the
work is one call of the library for a block of rows or columns of one matrix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from soapstone.kernels.cpu.openblas.library import attempt
from soapstone.kernels.cpu.substrate.layout import merged
from soapstone.kernels.entry import Array, Entry
from soapstone.native.copies import copy, fill
from soapstone.native.entries import native, noop, parallel_for, sequence
from soapstone.native.intrinsics import fixed_arity, words
from soapstone.native.memory import aligned_array, pack
from soapstone.native.moves import row_offset

_ROW_MAJOR, _PLAIN, _TURNED = 101, 111, 112  # values of CBLAS's enumerations
_PART_FLOPS = 200_000  # that a thread must have to be worth waking
_MOST = (1 << 31) - 1


def _gemm(real: Any, kind: Any) -> Any:
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

    return fixed_arity(typer, 13)


sgemm: Any = _gemm(ir.FloatType(), types.float32)
_dgemm: Any = _gemm(ir.DoubleType(), types.float64)


# Words: 0 function, 1 bytes an element; 2, 3 whether a and b are turned; 4, 5, 6 rows, columns and
# depth; 7, 8, 9 leading dimensions of a, b, y; 10, 11, 12 their addresses; 13 rows an item,
# 14 items down; 15 columns an item, 16 items across; bytes from one row of a (17) and y (18) to the
# next, and from one column of b (19) and y (20); 21 whether to add; 22 rank of the batch, 23.. its
# extents, strides of a, b and y.
@native("body")
def _products(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank = w[22]
    for item in range(begin, end):
        column = item % w[16] * w[15]
        row = item // w[16] % w[14] * w[13]
        matrix = item // w[16] // w[14]
        rows, columns = min(w[13], w[4] - row), min(w[15], w[5] - column)
        a = w[10] + row_offset(w, 23, 23 + rank, rank, matrix) + row * w[17]
        b = w[11] + row_offset(w, 23, 23 + 2 * rank, rank, matrix) + column * w[19]
        y = w[12] + row_offset(w, 23, 23 + 3 * rank, rank, matrix) + row * w[18] + column * w[20]
        if w[1] == 4:
            sgemm(w[0], w[2], w[3], rows, columns, w[6], a, w[7], b, w[8], w[21], y, w[9])
        else:
            _dgemm(w[0], w[2], w[3], rows, columns, w[6], a, w[7], b, w[8], w[21], y, w[9])
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
    block = pack(
        (library.sgemm if y.itemsize == 4 else library.dgemm, y.itemsize),
        ([turned for turned, _ in known[:2]], m, n, k, [lead for _, lead in known], a, b, y),
        (rows, down, columns, across, a.strides[-2], y.strides[-2], b.strides[-1]),
        (y.strides[-1], more, y.ndim - 2, y.shape[:-2], [x.strides[:-2] for x in (a, b, y)]),
    )
    made = parallel_for(_products, block, count * down * across, threads)
    entries = [entry for entry in (*before, made, *after) if entry is not None]
    return sequence(entries) if len(entries) == len(before) + 1 + len(after) else None


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
        return None if first is None or then is None else sequence([first, then])


__all__ = ["Weights", "leading", "product", "sgemm"]
