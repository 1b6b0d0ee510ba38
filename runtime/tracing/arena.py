"""The arena planner: offsets for blocks with sizes and lifetimes, packed into one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass

ALIGNMENT = 64
_TRIES = 24  # to place blocks anew so that they stay within a limit


class Block(NamedTuple):
    """`nbytes` needed from step `start` to step `end`, both included."""

    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class ArenaPlan:
    """Where each block lies. offsets: int64 (blocks,) bytes, multiples of 64.

    `bound_bytes` is the largest sum of blocks alive at one step: no plan can have a lower peak.
    """

    offsets: Array
    peak_bytes: int
    bound_bytes: int


def _columns(blocks: Sequence[Block]) -> tuple[Array, Array, Array]:
    """The bytes of blocks, padded, their first and their last steps. Returns int64 (blocks,)."""
    sizes, starts, ends = np.array(blocks, dtype=np.int64).reshape(-1, 3).T
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


def _pack(order: Sequence[int], sizes: Array, starts: Array, ends: Array) -> tuple[Array, int]:
    """Offsets when blocks are placed in this order, each into the smallest gap that fits."""
    offsets = np.zeros(sizes.size, dtype=np.int64)
    placed = np.zeros(sizes.size, dtype=np.int64)
    count = peak = 0
    for block in order:
        size = int(sizes[block])
        if size == 0:
            continue
        others = placed[:count]
        alive = others[(starts[others] <= ends[block]) & (ends[others] >= starts[block])]
        best_gap, best, top = -1, 0, 0
        if alive.size:
            lows = offsets[alive]
            by_offset = np.argsort(lows, kind="stable")
            lows = lows[by_offset]
            tops = np.maximum.accumulate(lows + sizes[alive][by_offset])
            gaps = lows - np.concatenate([[0], tops[:-1]])
            fitting = np.nonzero(gaps >= size)[0]
            top = int(tops[-1])
            if fitting.size:
                chosen = int(fitting[np.argmin(gaps[fitting])])
                best_gap, best = int(gaps[chosen]), int(tops[chosen - 1]) if chosen else 0
        offsets[block] = best if best_gap >= 0 else top
        placed[count] = block
        count += 1
        peak = max(peak, int(offsets[block]) + size)
    return offsets, peak


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
    sizes, starts, ends = _columns(blocks)
    bound = _bound(sizes, starts, ends)
    keys: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda b: (-int(sizes[b]), int(starts[b]), b),
        lambda b: (int(starts[b]), -int(sizes[b]), b),
        lambda b: (int(starts[b] - ends[b]), -int(sizes[b]), b),
        lambda b: (-int(sizes[b] * (ends[b] - starts[b] + 1)), int(starts[b]), b),
    )
    order: list[int] = []
    best: tuple[Array, int] = np.zeros(0, dtype=np.int64), 0
    for key in keys:
        given = sorted(range(len(blocks)), key=key)
        found = _pack(given, sizes, starts, ends)
        if not order or found[1] < best[1]:
            order, best = given, found
        if best[1] == bound:
            break
    found = best
    limit = 0 if within is None else within
    for _ in range(_TRIES if bound <= limit else 0):
        beyond = found[0] + sizes > limit
        if not beyond.any():
            break
        order = [b for b in order if beyond[b]] + [b for b in order if not beyond[b]]
        found = _pack(order, sizes, starts, ends)
        if found[1] < best[1]:
            best = found
    return ArenaPlan(*best, bound)
