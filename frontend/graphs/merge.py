"""Rows of sparse matrices in CSR merged in one pass, where the columns of each row ascend."""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array


@njit(nogil=True)
def _union(indptr: Array, indices: Array, other: Array, more: Array, to: Array, out: Array) -> None:
    """Write offsets; where `out` has room, columns too."""
    write, place = len(out) > 0, 0
    for row in range(len(indptr) - 1):
        a, past_a = indptr[row], indptr[row + 1]
        b, past_b = other[row], other[row + 1]
        last = row  # an edge to the same vertex is left out, as is what was written before
        while a < past_a or b < past_b:
            if b == past_b or (a < past_a and indices[a] <= more[b]):
                column = indices[a]
                a += 1
            else:
                column = more[b]
                b += 1
            if column != last and column != row:
                if write:
                    out[place] = column
                place += 1
                last = column
        to[row + 1] = place


@njit(nogil=True)
def _with_own(indptr: Array, indices: Array, to: Array, out: Array) -> None:
    """Write offsets and columns of rows to which their own number is added where it lacks."""
    place = 0
    for row in range(len(indptr) - 1):
        lacks = True
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            if lacks and column >= row:
                lacks = False
                if column > row:
                    out[place] = row
                    place += 1
            out[place] = column
            place += 1
        if lacks:
            out[place] = row
            place += 1
        to[row + 1] = place


def union(indptr: Array, indices: Array, other: Array, more: Array) -> tuple[Array, Array]:
    """Return the columns that rows have in either of two matrices, each once, and never their own.

    indptr, other: (v + 1) int64; indices, more: int32, ascending in each row.
    """
    offsets, none = np.zeros(len(indptr), np.int64), np.empty(0, np.int32)
    _union(indptr, indices, other, more, offsets, none)
    merged = np.empty(int(offsets[-1]), np.int32)
    if merged.size:
        _union(indptr, indices, other, more, offsets, merged)
    return offsets, merged


def with_own(indptr: Array, indices: Array) -> tuple[Array, Array]:
    """Return the matrix with each row's own number among its columns, once where it was not there.

    indptr: (v + 1) int64; indices: (e) int32, ascending in each row, kept as often as they are.
    """
    offsets = np.zeros(len(indptr), np.int64)
    room = np.empty(len(indices) + len(indptr) - 1, np.int32)
    _with_own(indptr, indices, offsets, room)
    return offsets, room[: offsets[-1]]
