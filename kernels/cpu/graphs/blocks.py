"""Sums over the entries of a sparse matrix, by blocks of rows of x that stay in a cache.

Rows that are gathered from memory take as long as so many lines take to arrive; from the last-level
cache they come several times faster. So some columns of a block of rows of x are copied to one
place that fills half of that cache, and each row of the matrix adds its entries of that block to
what it has, the next block following. A row's entries are added in their order, whatever that is:
those of one block are a run of them where columns ascend, and what no block has held in its turn is
added last, from x itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.graphs.tiles import (
    LINE,
    WIDTH,
    leading,
    request,
    weighted_sum,
    weighted_sum_near,
)
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.entry import Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, sequence
from soapstone.native.intrinsics import i32p, i64p
from soapstone.native.lanes import LANES
from soapstone.native.memory import Statuses, aligned_array
from soapstone.native.simd import load_first, store
from soapstone.native.threads.parallel import parallel_for

RUN = 8  # entries of a row in a block from which on blocks pay
_SOON = 4  # entries of the next row that are asked for while one is summed

# A tile of the matrix as of `spmm`, and a block: rows of x from low to before high, of which n
# columns are in `held`. cursors: of each row of the matrix, the first entry that is not yet added.
_BLOCK = Fields(
    "indptr indices weights by_entry by_column rows entries columns parts x x_step y y_step n mean"
    " held held_step low high cursors"
)
_block_of = _BLOCK.at


@helper
def first_row(w: Any, part: int) -> Any:
    """The first row of a part: rows and entries before it are its share of both together."""
    p = i64p(w.indptr)
    if part == 0:
        return np.int64(0)
    if part == w.parts:
        return np.int64(w.rows)
    share = (p[w.rows] - p[0] + w.rows) * part // w.parts
    low, high = np.int64(0), np.int64(w.rows)
    while low < high:
        middle = (low + high) // 2
        if p[middle] - p[0] + middle < share:
            low = middle + 1
        else:
            high = middle
    return low


@native("body")
def _hold(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    for row in range(begin, end):
        x, to = w.x + (w.low + row) * w.x_step, w.held + row * w.held_step
        for at in range(0, w.n, LANES):
            store(to, at, load_first(x, at, w.n - at))
    return 0


@helper
def _soon(w: Any, entry: int) -> None:
    """Ask for what the row whose entries begin there gathers first."""
    column = i32p(w.indices)
    for at in range(entry, min(entry + _SOON, w.entries)):
        source = min(max(np.int64(column[at]), w.low), w.high - 1)  # no branch: few are outside
        place = w.held + (source - w.low) * w.held_step
        for line in range(0, 4 * w.n, LINE):
            request(place + line)


@native("body")
def _add(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    p, column, cursor = i64p(w.indptr), i32p(w.indices), i64p(w.cursors)
    low, high, last = w.low, w.high, np.int64(w.entries - 1)
    held, one = w.held - low * w.held_step, np.float32(1)
    past_row = first_row(w, end)
    for row in range(first_row(w, begin), past_row):
        first, past = p[row], p[row + 1]
        if low == 0:
            if first < 0 or past < first or past > w.entries:
                return 1
            cursor[row] = first
        entry = cursor[row]
        if row + 1 < past_row:
            _soon(w, past if low == 0 else cursor[row + 1])
        stop, run = entry, np.int64(LANES)
        while run == LANES:
            run = leading(w.indices, stop, past, low, high)
            stop += run
        y, onto, scale = w.y + row * w.y_step, np.int64(low != 0), one
        more = high == w.columns and stop < past  # columns that do not ascend
        if more:
            for at in range(stop, past):
                if column[at] < 0 or column[at] >= w.columns:
                    return 1
        elif high == w.columns and w.mean != 0 and past > first:
            scale = one / np.float32(past - first)
        weighted_sum_near(
            y,
            held,
            w.n,
            w.held_step,
            w.indices,
            entry,
            stop,
            last,
            w.weights,
            w.by_entry,
            w.by_column,
            scale,
            onto,
        )
        if more:
            if w.mean != 0:
                scale = one / np.float32(past - first)
            weighted_sum(
                y,
                w.x,
                w.n,
                w.x_step,
                w.indices,
                stop,
                past,
                last,
                w.weights,
                w.by_entry,
                w.by_column,
                scale,
                np.int64(1),
            )
        cursor[row] = stop
    return 0


def rows_at_once(rows: int, columns: int, entries: int, n: int, cache_bytes: int) -> int:
    """Return how many rows of x a block has for a matrix of so many entries; 0: blocks do not pay.

    n: columns of x. They pay where x is beyond the cache and rows have `RUN` entries in a block. A
    tile of rows is taken to have its share of the entries of a square matrix.
    """
    width = 4 * LANES * -(-min(n, WIDTH) // LANES)
    blocks = -(-columns * width // max(cache_bytes // 2, width))
    if blocks < 2 or entries < RUN * blocks * max(rows, columns):
        return 0
    return -(-columns // blocks)


def sums_by_blocks(values: dict[str, Any], at_once: int, statuses: Statuses) -> Entry:
    """Return the entry of weighted sums by blocks of as many rows.

    values: the fields of `spmm`, as they are without blocks.
    """
    x, y, columns, parts = values["x"], values["y"], values["columns"], values["parts"]
    kept = {name: values[name] for name in _BLOCK.names if name in values}
    held = private(at_once, LANES * -(-min(values["n"], WIDTH) // LANES))
    cursors = aligned_array((values["rows"],), np.int64)
    entries = []
    for at in range(0, values["n"], WIDTH):
        for low in range(0, columns, at_once):
            high = min(low + at_once, columns)
            kept |= {"x": x[:, at : at + WIDTH], "y": y[:, at : at + WIDTH]}
            kept |= {"n": min(values["n"] - at, WIDTH), "low": low, "high": high}
            block = _BLOCK.pack(**kept, held=held, held_step=held.strides[0], cursors=cursors)
            entries.append(parallel_for(_hold, block, high - low, parts))
            entries.append(parallel_for(_add, block, parts, parts, statuses))
    return sequence(entries)
