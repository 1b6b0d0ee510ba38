"""Conflicts between operations, found by brute force, and what recorded dependences imply.

Two operations conflict when they touch the same bytes and one of them writes: overlapping boxes of
one instance, or of two instances that share memory. Also, a reader must follow the writer of what
it reads, through whatever copies. The order of a conflicting pair must be implied by what the
runtime enforces, and not only be the order that this run happened to have. What it enforces is the
recorded dependences, the order of a worker's own operations in a trace, and that whatever had ended
before an operation was issued comes before it. `check.py` also compares with the times of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.observe.checker.cells import empty
from soapstone.runtime.observe.checker.records import Box, Operation, Storage

LIMIT = 50_000  # operations between two waits
_BLOCK = 1 << 11


@dataclass(frozen=True)
class Access:
    """The use of a box of a storage by one operation. place: of the operation in its segment."""

    place: int
    storage: int
    box: Box
    writes: bool


@dataclass(frozen=True, eq=False)
class Conflicts:
    """Pairs of accesses, of two operations each, that must not overlap in time.

    first, second: places of the operations, int64 (pairs,). by: the access of each. same: whether
    it is of the same storage; then the first must come first. Where it is not, the pair may share
    no byte after all (`same_bytes`), and any order will do.
    """

    accesses: list[Access]
    first: Array
    second: Array
    by: tuple[Array, Array]
    same: Array


def conflicts(operations: Sequence[Operation], storages: Mapping[int, Storage]) -> Conflicts:
    """All pairs of operations (in the order in which they were issued) that conflict."""
    accesses = [
        Access(place, use.storage, use.box, "w" in use.access)
        for place, operation in enumerate(operations)
        if not operation.idle
        for use in operation.uses
        if use.storage is not None and not empty(use.box)
    ]
    one, two = _in_one_storage(accesses)
    three, four = _in_two_storages(accesses, storages)
    same = np.arange(one.size + three.size) < one.size
    one, two = np.concatenate([one, three]), np.concatenate([two, four])
    places = np.array([access.place for access in accesses], dtype=np.int64)
    swapped = places[one] > places[two]
    one, two = np.where(swapped, two, one), np.where(swapped, one, two)
    keep = places[one] != places[two]
    one, two, same = one[keep], two[keep], same[keep]
    keys = places[one] * len(operations) + places[two]
    _, kept = np.unique(keys, return_index=True)  # of each pair the first: in one storage if any
    one, two = one[kept], two[kept]
    return Conflicts(accesses, places[one], places[two], (one, two), same[kept])


def _in_one_storage(accesses: Sequence[Access]) -> tuple[Array, Array]:
    """The pairs of accesses to one storage that share an element, where one of them writes."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, access in enumerate(accesses):
        groups[access.storage].append(number)
    found: list[tuple[Array, Array]] = [(np.zeros(0, dtype=np.int64),) * 2]
    for numbers in groups.values():
        mine = np.array(numbers, dtype=np.int64)
        some = [accesses[number] for number in numbers]
        lows = np.array([access.box[0] for access in some], dtype=np.int64).reshape(mine.size, -1)
        highs = np.array([access.box[1] for access in some], dtype=np.int64).reshape(mine.size, -1)
        writes = np.array([access.writes for access in some], dtype=bool)
        for start in range(0, mine.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            hit = writes[part, None] | writes[None, :]
            for axis in range(lows.shape[1]):
                hit &= lows[part, None, axis] < highs[None, :, axis]
                hit &= lows[None, :, axis] < highs[part, None, axis]
            rows, columns = np.nonzero(hit)
            later = rows + start < columns
            found.append((mine[rows[later] + start], mine[columns[later]]))
    return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])


def _in_two_storages(
    accesses: Sequence[Access], storages: Mapping[int, Storage]
) -> tuple[Array, Array]:
    """The pairs of accesses to two storages whose bytes may overlap, where one of them writes."""
    spans = [span(storages[access.storage], access.box) for access in accesses]
    lows = np.array([low for low, _ in spans], dtype=np.int64)
    order = np.argsort(lows, kind="stable")
    highs = np.array([high for _, high in spans], dtype=np.int64)[order]
    storage = np.array([access.storage for access in accesses], dtype=np.int64)[order]
    writes = np.array([access.writes for access in accesses], dtype=bool)[order]
    reach = np.searchsorted(lows[order], highs)  # those that begin before this one ends
    count = np.maximum(reach - np.arange(order.size) - 1, 0)
    one = np.repeat(np.arange(order.size), count)
    two = one + 1 + np.arange(one.size) - np.repeat(np.cumsum(count) - count, count)
    keep = (storage[one] != storage[two]) & (writes[one] | writes[two])
    return order[one[keep]], order[two[keep]]


# -- bytes


def span(storage: Storage, box: Box) -> tuple[int, int]:
    """The first byte that a box of a storage touches, and the one after its last."""
    low = high = storage.address
    for a, b, base, stride in zip(*box, storage.box[0], storage.strides):
        low += (a - base) * stride
        high += (b - 1 - base) * stride
    return low, high + storage.itemsize


def same_bytes(one: Storage, first: Box, two: Storage, second: Box) -> bool:
    """Whether boxes of two storages share a byte."""
    (a, b), (c, d) = span(one, first), span(two, second)
    if b <= c or d <= a:
        return False
    mine, theirs = addresses(one, first), addresses(two, second)
    after = np.searchsorted(theirs, mine - two.itemsize, side="right")
    inside = after < theirs.size
    near = theirs[np.minimum(after, theirs.size - 1)]
    return bool((inside & (near < mine + one.itemsize)).any())


def addresses(storage: Storage, box: Box) -> Array:
    """The addresses of a box's elements, ascending: int64 (elements,)."""
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
    """For each operation, by its place, the set of its ancestors: an integer with a bit for each.

    operations: a segment's. order: their places, topologically sorted. in_turn: whether each
    processor runs its operations in that order. ends: the times at which operations ended; those
    that a rank had ended before it issued another are ancestors of this one, as are their own.
    """
    place = {operation.id: number for number, operation in enumerate(operations)}
    found = [0] * len(operations)
    last: dict[int, int] = {}
    by_end: dict[int, list[int]] = {operation.rank: [] for operation in operations}
    ended = dict.fromkeys(by_end, 0)  # the set of those of each rank that have ended by now
    if ends is not None:
        for number in sorted(range(len(operations)), key=lambda n: -ends[n]):
            by_end[operations[number].rank].append(number)
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
            running = by_end[operation.rank]
            while running and ends[running[-1]] <= operation.issued:
                before = running.pop()
                ended[operation.rank] |= found[before] | 1 << before
            mine |= ended[operation.rank]
        found[number] = mine & ~(1 << number)
    return found


def bit_rows(sets: Sequence[int]) -> Array:
    """Sets, given as integers, as rows of bits: uint8 (sets, bytes), the lowest bit first."""
    width = (len(sets) + 7) // 8
    rows = b"".join(each.to_bytes(width, "little") for each in sets)
    return np.frombuffer(rows, dtype=np.uint8).reshape(len(sets), width)


def holds(rows: Array, owner: Array, member: Array) -> Array:
    """Whether `member[i]` is in the set in row `owner[i]` of `bit_rows`: bool (pairs,)."""
    found: Array = (rows[owner, member >> 3] >> (member & 7).astype(np.uint8) & 1).astype(bool)
    return found
