"""Offsets in a memory that is too small for everything: gaps found first-fit, bytes given back."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np

from soapstone.runtime.tracing.arena import ALIGNMENT

Array = np.ndarray[Any, np.dtype[Any]]


class Space:
    """The byte ranges of one memory that are taken; offsets are multiples of 64.

    Bytes that were given back may still be in use: by operations that have been launched and have
    not ended. Whoever takes them learns their ids.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []  # (begin, end), sorted; none empty, none overlap
        self._used: list[tuple[int, int, Array]] = []  # given back: by whom they may be used still

    def take(self, nbytes: int) -> tuple[int, Array] | None:
        """The offset of the first gap that fits, now taken, and who may be using it still.

        None where there is no gap. The users are ids, int64.
        """
        none = np.zeros(0, dtype=np.int64)
        size = _padded(nbytes)
        if not size:
            return 0, none
        begin = 0
        for low, high in self._taken:
            if low - begin >= size:
                break
            begin = high
        end = begin + size
        if begin + nbytes > self.capacity_bytes:
            return None
        insort(self._taken, (begin, end))
        users = [ids for low, high, ids in self._used if low < end and high > begin]
        self._used = [
            (max(low, a), min(high, b), ids)
            for low, high, ids in self._used
            for a, b in ((0, begin), (end, high))
            if max(low, a) < min(high, b)
        ]
        return begin, np.unique(np.concatenate([none, *users]))

    def give(self, offset: int, nbytes: int, users: Array | None = None) -> None:
        """Give back what `take` gave. users: the ids of the operations that use it, int64."""
        size = _padded(nbytes)
        if size:
            del self._taken[bisect_left(self._taken, (offset, offset + size))]
            if users is not None and users.size:
                self._used.append((offset, offset + size, users))


def _padded(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
