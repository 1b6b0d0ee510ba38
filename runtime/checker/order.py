"""Which operations must be ordered, by brute force, and whether dependences and the clock say so.

Two operations conflict when they touch the same bytes and one of them writes: the same box of one
instance, or of two instances that share memory. And whoever reads follows whoever wrote what it
reads, through whatever copies. A conflict must follow from the recorded dependences (with the order
of a worker's own operations in a trace, and of what had ended before something was issued), not
from luck; and the run must have kept to it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cells import empty
from .records import Box, Operation, Storage

Array = np.ndarray[Any, np.dtype[Any]]
LIMIT = 50_000  # operations between two waits
_BLOCK = 1 << 11


@dataclass(frozen=True)
class Conflict:
    """Two operations, by their places, that must not overlap, and what they share.

    directed: the first must come first.
    """

    first: int
    second: int
    directed: bool
    storage: int
    box: Box


@dataclass(frozen=True)
class _Access:
    place: int
    box: Box
    writes: bool


def _accesses(operations: Sequence[Operation]) -> dict[int, list[_Access]]:
    found: dict[int, list[_Access]] = defaultdict(list)
    for place, operation in enumerate(operations):
        if operation.idle:
            continue
        for use in operation.uses:
            if use.storage is not None and not empty(use.box):
                found[use.storage].append(_Access(place, use.box, "w" in use.access))
    return found


def conflicts(operations: Sequence[Operation], storages: Mapping[int, Storage]) -> list[Conflict]:
    """All pairs of operations (in the order in which they were issued) that conflict."""
    accesses = _accesses(operations)
    found: dict[tuple[int, int], Conflict] = {}
    for number, mine in accesses.items():
        for i, j in _overlapping(mine, mine):
            one, two = mine[i], mine[j]
            if one.place < two.place:
                key = one.place, two.place
                found.setdefault(key, Conflict(*key, True, number, two.box))
    for a, b in _sharing([storages[number] for number in accesses]):
        for one, two in itertools.product(accesses[a.id], accesses[b.id]):
            if (one.writes or two.writes) and one.place != two.place:
                key = min(one.place, two.place), max(one.place, two.place)
                if key not in found and same_bytes(a, one.box, b, two.box):
                    found[key] = Conflict(*key, False, b.id, two.box)
    return list(found.values())


def _overlapping(first: Sequence[_Access], second: Sequence[_Access]) -> list[tuple[int, int]]:
    """The pairs of accesses to one storage that share an element, where one of them writes."""
    found: list[tuple[int, int]] = []
    lows, highs, write = _arrays(second)
    for start in range(0, len(first), _BLOCK):
        a, b, w = _arrays(first[start : start + _BLOCK])
        hit = w[:, None] | write[None, :]
        for axis in range(lows.shape[1]):
            hit &= a[:, None, axis] < highs[None, :, axis]
            hit &= lows[None, :, axis] < b[:, None, axis]
        rows, columns = np.nonzero(hit)
        found += zip((rows + start).tolist(), columns.tolist())
    return found


def _arrays(accesses: Sequence[_Access]) -> tuple[Array, Array, Array]:
    count = len(accesses)
    lows = np.array([access.box[0] for access in accesses], dtype=np.int64).reshape(count, -1)
    highs = np.array([access.box[1] for access in accesses], dtype=np.int64).reshape(count, -1)
    return lows, highs, np.array([access.writes for access in accesses], dtype=bool)


# -- bytes


def span(storage: Storage, box: Box) -> tuple[int, int]:
    """The first byte that a box of a storage touches, and the one after its last."""
    low = high = storage.address
    for a, b, base, stride in zip(*box, storage.box[0], storage.strides):
        low += (a - base) * stride
        high += (b - 1 - base) * stride
    return low, high + storage.itemsize


def _sharing(storages: Sequence[Storage]) -> list[tuple[Storage, Storage]]:
    """The pairs of storages whose bytes overlap."""
    held = [(*span(s, s.box), s) for s in storages if not empty(s.box)]
    held.sort(key=lambda item: item[0])
    found: list[tuple[Storage, Storage]] = []
    open_: list[tuple[int, int, Storage]] = []
    for low, high, storage in held:
        open_ = [item for item in open_ if item[1] > low]
        found += [(item[2], storage) for item in open_]
        open_.append((low, high, storage))
    return found


def same_bytes(one: Storage, first: Box, two: Storage, second: Box) -> bool:
    """Whether boxes of two storages share a byte."""
    (a, b), (c, d) = span(one, first), span(two, second)
    if b <= c or d <= a:
        return False
    mine, theirs = _addresses(one, first), _addresses(two, second)
    after = np.searchsorted(theirs, mine - two.itemsize, side="right")
    inside = after < theirs.size
    near = theirs[np.minimum(after, theirs.size - 1)]
    return bool((inside & (near < mine + one.itemsize)).any())


def _addresses(storage: Storage, box: Box) -> Array:
    """Where the elements of a box begin, in order. Returns int64."""
    found = np.array([storage.address], dtype=np.int64)
    for a, b, base, stride in zip(*box, storage.box[0], storage.strides):
        steps = (np.arange(a, b, dtype=np.int64) - base) * stride
        found = (found[:, None] + steps[None, :]).ravel()
    return np.sort(found)


# -- what follows what


def ancestors(
    operations: Sequence[Operation],
    order: Sequence[int],
    in_turn: bool,
    ends: Sequence[int] | None = None,
) -> list[int]:
    """For each operation, by its place, the set of those that come before it, as bits.

    order: places such that dependences point forward. in_turn: each processor runs its operations
    in that order. ends: when operations ended; those that had before another was issued are before.
    """
    place = {operation.id: number for number, operation in enumerate(operations)}
    found = [0] * len(operations)
    last: dict[int, int] = {}
    ended, bits = 0, 0
    by_end = [] if ends is None else sorted(range(len(operations)), key=lambda n: ends[n])
    for number in order:
        operation = operations[number]
        mine = 0
        for source in operation.after:
            before = place.get(source)
            if before is not None:
                mine |= found[before] | 1 << before
        if in_turn:
            before = last.get(operation.processor)
            if before is not None:
                mine |= found[before] | 1 << before
            last[operation.processor] = number
        if ends is not None:
            while ended < len(by_end) and ends[by_end[ended]] <= operation.issued:
                bits |= 1 << by_end[ended]
                ended += 1
            mine |= bits
        found[number] = mine & ~(1 << number)
    return found
