"""Offsets in a memory that is too small for everything: gaps found first-fit, bytes given back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.tracing.arena import ALIGNMENT


class Space:
    """The byte ranges of one memory that are taken; offsets are multiples of 64.

    Bytes that were given back may still be in use: by operations that have been launched and have
    not ended. Whoever takes them learns their ids.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []  # (begin, end), sorted; none empty, none overlap
        self._used: list[tuple[int, int, Array]] = []  # given back: by whom they may be used still

    def take(self, nbytes: int, at: int | None = None) -> tuple[int, Array] | None:
        """The offset of the first gap that fits, now taken, and who may be using it still.

        at: take these bytes instead. None where there is no gap, or they are taken. The users are
        ids, int64.
        """
        none = np.zeros(0, dtype=np.int64)
        size = _padded(nbytes)
        if not size:
            return 0, none
        begin = self._first(size) if at is None else at
        end = begin + size
        if begin + nbytes > self.capacity_bytes or (at is not None and self._meets(begin, end)):
            return None
        insort(self._taken, (begin, end))
        users, left = [], []
        for used in self._used:
            low, high, ids = used
            if low < end and high > begin:
                users.append(ids)
                if low < begin:
                    left.append((low, begin, ids))
                if high > end:
                    left.append((end, high, ids))
            else:
                left.append(used)
        self._used = left
        return begin, np.unique(np.concatenate([none, *users]))

    def _first(self, size: int) -> int:
        begin = 0
        for low, high in self._taken:
            if low - begin >= size:
                break
            begin = high
        return begin

    def _meets(self, begin: int, end: int) -> bool:
        """Whether any of these bytes is taken."""
        place = bisect_right(self._taken, (begin, begin))
        near = self._taken[max(place - 1, 0) : place + 1]
        return any(low < end and high > begin for low, high in near)

    def give(self, offset: int, nbytes: int, users: Array | None = None) -> None:
        """Give back what `take` gave. users: the ids of the operations that use it, int64."""
        size = _padded(nbytes)
        if size:
            del self._taken[bisect_left(self._taken, (offset, offset + size))]
            if users is not None and users.size:
                self._used.append((offset, offset + size, users))


def _padded(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
