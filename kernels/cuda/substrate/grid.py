"""Walks over elements: axes that may be walked as one, and how a walk is cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, processors
from soapstone.native.walks import Walk, memory_order, merge

THREADS = 64 if SIMULATED else 256  # of a block, at most
RESIDENT, MOST_BLOCKS = 2048, 32  # threads and blocks that a multiprocessor holds


def walk(shape: Sequence[int], strides: Sequence[Sequence[int]], lead: int = 0) -> Walk:
    """Return the shortest walk over a shape: axes are joined where all operands allow it.

    Axes are ordered by the strides of operand `lead`, the largest first, since neighbouring threads
    should touch neighbouring elements of what is written.
    """
    return merge(shape, strides, memory_order(strides[lead]))


def joined(views: Sequence[View], lead: int = 0) -> Walk:
    """Return the walk over views of one shape."""
    return walk(views[lead].shape, [each.strides for each in views], lead)


def rounded(threads: int) -> int:
    """Return the smallest number of whole warps, a power of two of them, with so many threads."""
    count = WARP
    while count < threads and count < THREADS:
        count *= 2
    return count


def resident(threads: int) -> int:
    """Return how many blocks of so many threads are resident at once on the whole GPU."""
    each = (4 * THREADS if SIMULATED else RESIDENT) // threads
    return processors() * max(1, min(MOST_BLOCKS, each))


def blocks_of(items: int, threads: int) -> int:
    """Return how many blocks share items out: no more than are resident at once."""
    return max(1, min(-(-items // threads), resident(threads)))


def flat_launch(items: int, each: int = 1) -> tuple[int, int]:
    """Return blocks and threads for items in one row, `each` a thread at a time.

    Small problems have small blocks, so that they reach more multiprocessors.
    """
    work = -(-items // each)
    threads = rounded(-(-work // processors()))
    return blocks_of(work, threads), threads


def row_launch(
    rows: int, columns: int, at_once: bool = False
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return grid (rows, columns) and block (columns, rows) for rows that lie apart.

    Small problems have small blocks, so that they reach more multiprocessors. at_once: whether what
    a thread has under way is a column; else it is four of them.
    """
    threads = rounded(-(-rows * columns // processors()))
    wide = 1
    while wide < columns and wide < threads:
        wide *= 2
    high = max(1, min(threads // wide, rows))
    if wide * high < WARP:
        high = WARP // wide
    down = blocks_of(rows, high) if rows > high else 1
    most = max(1, 2 * processors() * 8 // down)
    each = wide if at_once else 4 * wide
    across = max(1, min(-(-columns // each), most, 65535))
    return (down, across), (wide, high)
