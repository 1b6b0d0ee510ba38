"""Rows moved (gathered, copied, added at places) and entries run, in order, by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.native.intrinsics import call_entry, f32p, i64p, u8p
from soapstone.native.moves import copy_bytes

# The columns of a move, in this order: source and target, addresses of their first rows; nbytes, of
# a row; rows; places, the address of int64 rows of the source, or of the target of a sum, 0 for
# those in order; room, rows of the target, of which the rest become zero, or ADD. A run of entries
# has the addresses of their functions and of their blocks, how many they are, and RUN as room.
ADD = -1  # to rows of float32
RUN = -2

Move = tuple[int, int, int, int, int, int]


@njit(nogil=True)
def _work(moves: Any) -> int:
    for m in range(moves.shape[0]):
        source, target, nbytes = moves[m, 0], moves[m, 1], moves[m, 2]
        rows, places, room = moves[m, 3], moves[m, 4], moves[m, 5]
        if room == RUN:
            for k in range(nbytes):
                if call_entry(i64p(source)[k], i64p(target)[k]) != 0:
                    return m
        elif room == ADD:
            width = nbytes >> 2
            for r in range(rows):
                row = i64p(places)[r] if places != 0 else r
                x, y = f32p(source + r * nbytes), f32p(target + row * nbytes)
                for k in range(width):
                    y[k] += x[k]
        else:
            if places != 0:
                at = i64p(places)
                for r in range(rows):
                    copy_bytes(target + r * nbytes, source + at[r] * nbytes, nbytes)
            else:
                copy_bytes(target, source, rows * nbytes)
            rest = u8p(target)
            for k in range(rows * nbytes, room * nbytes):
                rest[k] = 0
    return -1


def work(moves: Sequence[Move]) -> int:
    """Do some moves and runs of entries, in order.

    Returns the place of the first run that failed, after which nothing is done, or -1.
    """
    return int(_work(np.array(moves, np.int64)))
