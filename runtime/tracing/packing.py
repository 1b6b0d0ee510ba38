"""Placing blocks with lifetimes one after another, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.native.blocks import Fields
from soapstone.native.entries import native
from soapstone.native.intrinsics import i64p
from soapstone.native.memory import Array, call

# count: of blocks; placed: room for the numbers of blocks; peak: what is needed, written last.
_BLOCKS = Fields("count order sizes starts ends offsets placed peak")
_blocks_of = _BLOCKS.at


@native()
def _place(block: Any) -> int:
    """Give each block, in order, the smallest gap that fits between those alive meanwhile."""
    w = _blocks_of(block)
    sizes, starts, ends, offsets = i64p(w.sizes), i64p(w.starts), i64p(w.ends), i64p(w.offsets)
    placed = i64p(w.placed)  # by offset
    count = peak = 0
    for k in range(w.count):
        mine = i64p(w.order)[k]
        size = sizes[mine]
        if size == 0:
            continue
        best, least, top = -1, 0, 0
        for other in range(count):
            it = placed[other]
            if starts[it] > ends[mine] or ends[it] < starts[mine]:
                continue
            gap = offsets[it] - top
            if gap >= size and (best < 0 or gap < least):
                best, least = top, gap
            top = max(top, offsets[it] + sizes[it])
        offset = best if best >= 0 else top
        offsets[mine] = offset
        peak = max(peak, offset + size)
        at = count
        while at > 0 and offsets[placed[at - 1]] > offset:
            placed[at] = placed[at - 1]
            at -= 1
        placed[at] = mine
        count += 1
    i64p(w.peak)[0] = peak
    return 0


def pack(order: Array, sizes: Array, starts: Array, ends: Array) -> tuple[Array, int]:
    """Return the offsets of blocks that are placed in an order, and the bytes they need.

    order: numbers of blocks. sizes: of each, in bytes. starts, ends: its first and last step. All
    int64 (blocks,), contiguous.
    """
    offsets, placed, peak = np.zeros_like(sizes), np.empty_like(sizes), np.zeros(1, np.int64)
    block = _BLOCKS.pack(
        count=sizes.size,
        order=order,
        sizes=sizes,
        starts=starts,
        ends=ends,
        offsets=offsets,
        placed=placed,
        peak=peak,
    )
    call(_place.address, block.address)
    return offsets, int(peak[0])


__all__ = ["pack"]
