"""A sparse matrix in CSR transposed by counting: linear in its entries, and stable."""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array


@njit(nogil=True)
def _counted(ids: Array, offsets: Array) -> None:
    for number in ids:
        offsets[number + 1] += 1
    for number in range(1, len(offsets)):
        offsets[number] += offsets[number - 1]


@njit(nogil=True)
def _placed(
    indptr: Array, indices: Array, places: Array, rows: Array, origins: Array, tracked: bool
) -> None:
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            to = places[indices[entry]]
            places[indices[entry]] += 1
            rows[to] = row
            if tracked:
                origins[to] = entry


def offsets_of(ids: Array, count: int) -> Array:
    """Return where each of `count` rows begins and the last one ends, given the row of each entry.

    ids: (e) integers from 0 to count - 1, in any order; result: (count + 1) int64.
    """
    offsets = np.zeros(count + 1, np.int64)
    _counted(ids, offsets)
    return offsets


def transposed(
    indptr: Array, indices: Array, columns: int, tracked: bool = False
) -> tuple[Array, Array, Array]:
    """Return offsets and indices of the transpose, and which entry each of its entries was.

    indptr: (v + 1) int64; indices: (e) int32 below `columns`; results: (columns + 1) int64, (e)
    int32, in the order of rows, and (e) int64, empty unless entries are to be tracked.
    """
    offsets = offsets_of(indices, columns)
    rows = np.empty(len(indices), np.int32)
    origins = np.empty(len(indices) if tracked else 0, np.int64)
    _placed(indptr, indices, offsets[:-1].copy(), rows, origins, tracked)
    return offsets, rows, origins
