"""Which of the boxes that a detector proposes lie apart, as a compiled loop."""

from __future__ import annotations

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array


@njit(nogil=True)
def apart(low: Array, high: Array, overlap: float, chosen: Array) -> int:
    """Choose boxes none of which covers more than a share of an earlier one; return how many.

    low, high: (boxes, 2), the corners, the best box first. overlap: of intersection by union.
    chosen: their places are written here, as many as there is room for.
    """
    found = 0
    for box in range(len(low)):
        if found == len(chosen):
            break
        area = (high[box, 0] - low[box, 0]) * (high[box, 1] - low[box, 1])
        free = True
        for place in range(found):
            other = chosen[place]
            height = min(high[box, 0], high[other, 0]) - max(low[box, 0], low[other, 0])
            width = min(high[box, 1], high[other, 1]) - max(low[box, 1], low[other, 1])
            if height > 0 and width > 0:
                covered = (high[other, 0] - low[other, 0]) * (high[other, 1] - low[other, 1])
                if height * width > overlap * (area + covered - height * width):
                    free = False
                    break
        if free:
            chosen[found] = box
            found += 1
    return found
