"""The calls of a step as arrays, so that after recording no Python runs for each of them.

A call is a row of numbers: that of its cell, and a code for each operand. The results of calls are
numbered in order within a step. The row that holds a result is known once its call has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array

RESULTS = 1 << 16  # of one call, and types of values in a session, at most


def code_of(row: int, store: int) -> int:
    """Return the code of a value that no call makes, from its row and its array's number."""
    return ~(row * RESULTS + store)


@dataclass(frozen=True)
class Units:
    """What runs, in topological order: calls, or tiles that stand for several calls.

    Attributes:
        cells: int64 (units,), the number of each unit's cell.
        first: (units + 1,), where each unit's operands begin.
        operands: numbers of results, or codes that `code_of` returns.
        outs: (units + 1,), where each unit's results begin.
        results: the numbers of results.
    """

    cells: Array
    first: Array
    operands: Array
    outs: Array
    results: Array

    def __len__(self) -> int:
        return len(self.cells)

    def taken(self, which: Array) -> Units:
        """Return the units at some places."""
        first, operands = _rows_of(self.first, which)
        outs, results = _rows_of(self.outs, which)
        return Units(self.cells[which], first, self.operands[operands], outs, self.results[results])

    def joined(self, others: Units) -> Units:
        """Return these units followed by others."""
        return Units(
            np.concatenate((self.cells, others.cells)),
            np.concatenate((self.first, self.first[-1] + others.first[1:])),
            np.concatenate((self.operands, others.operands)),
            np.concatenate((self.outs, self.outs[-1] + others.outs[1:])),
            np.concatenate((self.results, others.results)),
        )

    def places(self, results: int) -> Array:
        """Return where each result of the step is in `self.results`, or -1. results: how many."""
        places = np.full(results, -1, np.int64)
        places[self.results] = np.arange(len(self.results))
        return places

    def makers(self, results: int) -> Array:
        """Return the unit that makes each operand, or -1. results: how many the step has."""
        place = self.places(results + 1)[np.maximum(self.operands, -1)]  # the last is of none
        unit = np.repeat(np.arange(len(self)), np.diff(self.outs))
        return np.where(place < 0, -1, unit[place]) if len(unit) else place


def _rows_of(first: Array, which: Array) -> tuple[Array, Array]:
    """Return where rows that are taken begin, and the places of their elements."""
    sizes = first[which + 1] - first[which]
    begins = np.zeros(len(which) + 1, np.int64)
    np.cumsum(sizes, out=begins[1:])
    return begins, np.arange(begins[-1]) + np.repeat(first[which] - begins[:-1], sizes)


class Tape:
    """All calls of a step.

    Attributes:
        units: the calls in the order in which they were recorded.
        rows: int64 (results,), the row of each result, or -1 if it has not been computed.
    """

    def __init__(self) -> None:
        none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        self.units = Units(none, zero, none, zero, none)
        self.rows = none

    def extend(self, calls: Sequence[tuple[int, ...]], results_of: Array) -> None:
        """Add calls, each its cell and its operands' codes. results_of: their number, by cell."""
        sizes = np.fromiter(map(len, calls), np.int64, len(calls))
        words = np.fromiter(chain.from_iterable(calls), np.int64, int(sizes.sum()))
        begins = np.cumsum(sizes) - sizes
        cells, operands = words[begins], np.delete(words, begins)
        first, outs = np.zeros(len(calls) + 1, np.int64), np.zeros(len(calls) + 1, np.int64)
        np.cumsum(sizes - 1, out=first[1:])
        np.cumsum(results_of[cells], out=outs[1:])
        results = len(self.rows) + np.arange(outs[-1])
        self.units = self.units.joined(Units(cells, first, operands, outs, results))
        self.rows = np.concatenate((self.rows, np.full(outs[-1], -1, np.int64)))
        new = self.units.operands[len(self.units.operands) - len(operands) :]
        made = new >= 0
        new[made] = self.results_of(new[made])

    def results_of(self, codes: Any) -> Array:
        """Return the numbers of the results that values' codes stand for."""
        codes = np.asarray(codes, np.int64)
        found: Array = self.units.outs[codes // RESULTS] + codes % RESULTS
        return found

    def needed(self, begin: int, asked: Array) -> Array:
        """Return, in order, the calls from `begin` on and all that these and some results need.

        Results that have been computed already need no call.

        asked: the numbers of these results.
        """
        makers = self.units.makers(len(self.rows))
        asked = asked[self.rows[asked] < 0]
        wanted = np.zeros(len(self.units), np.bool_)
        wanted[begin:] = True
        wanted[np.searchsorted(self.units.outs, asked, "right") - 1] = True
        _want(wanted, self.units.first, self.units.operands, makers, self.rows)
        return np.flatnonzero(wanted)


@njit(nogil=True)
def _want(wanted: Any, first: Any, operands: Any, makers: Any, rows: Any) -> None:
    """Mark the calls that make what marked ones read, where it is not there."""
    for call in range(wanted.size - 1, -1, -1):
        if wanted[call]:
            for e in range(first[call], first[call + 1]):
                if makers[e] >= 0 and rows[operands[e]] < 0:
                    wanted[makers[e]] = True


@njit(nogil=True)
def placed(
    order: Any,
    starts: Any,
    cells: Any,
    first: Any,
    operands: Any,
    outs: Any,
    results: Any,
    stores: Any,
    sizes: Any,
    rows: Any,
) -> tuple[Any, Any]:
    """Give rows to all results of units that run in some order, and find those of operands.

    order, starts: units, and where each run begins in it. stores: int64 (cells, …), the array that
    each result of a cell is in; sizes, rows of each array, and rows, of results, are changed.

    Returns: the rows of all operands, those of a run's first operand first; and of each run the
    first row of each result.
    """
    places = np.empty(operands.size, np.int64)
    firsts = np.zeros((starts.size - 1, stores.shape[1]), np.int64)
    at = 0
    for run in range(starts.size - 1):
        begin, end = starts[run], starts[run + 1]
        unit = order[begin]
        for k in range(first[unit + 1] - first[unit]):
            for j in range(begin, end):
                code = operands[first[order[j]] + k]
                places[at] = rows[code] if code >= 0 else ~code // RESULTS
                at += 1
        for k in range(outs[unit + 1] - outs[unit]):
            store = stores[cells[unit], k]
            firsts[run, k] = sizes[store]
            for j in range(begin, end):
                rows[results[outs[order[j]] + k]] = sizes[store]
                sizes[store] += 1
    return places, firsts
