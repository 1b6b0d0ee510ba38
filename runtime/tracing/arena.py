"""The arena planner: offsets for blocks with sizes and lifetimes, packed into one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass

ALIGNMENT = 64
_TRIES = 24  # to place blocks anew so that they stay within a limit


class Block(NamedTuple):
    """A request for `nbytes` of memory, in use from step `start` to step `end`, inclusive."""

    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class ArenaPlan:
    """An offset for each block within one allocation.

    Attributes:
        offsets: int64 (blocks,), in bytes, multiples of 64.
        peak_bytes: the size of the allocation.
        bound_bytes: the largest sum of blocks alive at one step. No plan has a lower peak.
    """

    offsets: Array
    peak_bytes: int
    bound_bytes: int


def _columns(blocks: Sequence[Block]) -> tuple[Array, Array, Array]:
    """The bytes of blocks, padded, their first and their last steps. Returns int64 (blocks,)."""
    sizes, starts, ends = np.array(blocks, dtype=np.int64).reshape(-1, 3).T.copy()
    return (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, starts, ends


def _bound(sizes: Array, starts: Array, ends: Array) -> int:
    steps = np.concatenate([starts, ends + 1])
    changes = np.concatenate([sizes, -sizes])
    order = np.lexsort((changes, steps))  # at one step, frees come before allocations
    return int(np.cumsum(changes[order]).max(initial=0))


def fixed(blocks: Sequence[Block], offsets: Sequence[int]) -> ArenaPlan:
    """The plan of blocks whose offsets are decided already."""
    columns = _columns(blocks)
    at = np.array(offsets, dtype=np.int64)
    peak = max((offset + block.nbytes for offset, block in zip(offsets, blocks)), default=0)
    return ArenaPlan(at, peak, _bound(*columns))


def plan(blocks: Sequence[Block], within: int | None = None) -> ArenaPlan:
    """Offsets such that no two blocks alive at the same step overlap, with a low peak.

    Tries a few placing orders (by size, by start, by length of life, by area) with best fit,
    stops at the lower bound, and keeps the lowest peak; equal blocks always get the same plan.
    within: bytes to stay within; where the lower bound does, what ends beyond them is placed
    first and all is placed anew, until it does or nothing more is tried.

    Raises: ValueError for a negative size or a lifetime that ends before it starts.
    """
    for index, block in enumerate(blocks):
        if block.nbytes < 0 or block.end < block.start:
            raise ValueError(f"arena block {index}: {block}, needed nbytes >= 0 and start <= end")
    if not blocks:
        return ArenaPlan(np.zeros(0, dtype=np.int64), 0, 0)
    from soapstone.runtime.tracing.packing import pack

    sizes, starts, ends = _columns(blocks)
    bound = _bound(sizes, starts, ends)
    areas = sizes * (ends - starts + 1)
    orders = (
        np.lexsort((starts, -sizes)),
        np.lexsort((-sizes, starts)),
        np.lexsort((-sizes, starts - ends)),
        np.lexsort((starts, -areas)),
    )
    best: tuple[Array, int] | None = None
    for each in orders:
        found = pack(each, sizes, starts, ends)
        if best is None or found[1] < best[1]:
            order, best = each, found
        if best[1] == bound:
            break
    assert best is not None
    found = best
    limit = 0 if within is None else within
    for _ in range(_TRIES if bound <= limit else 0):
        beyond = (found[0] + sizes > limit)[order]
        if not beyond.any():
            break
        order = np.concatenate([order[beyond], order[~beyond]])
        found = pack(order, sizes, starts, ends)
        if found[1] < best[1]:
            best = found
    return ArenaPlan(*best, bound)
