"""Folds of partial results on a device: element by element in the order of the parts.

Each element is combined in the same order, and by the same rules, as by the host's folds
(`native/folds.py`): its sum has the same bits, however it is cut over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.native.cuda.copies import Several, copied, filled, strided
from soapstone.native.cuda.device import Enqueued
from soapstone.native.memory import Array
from soapstone.native.walks import FIRST, IDENTITY


def folded(
    reduction: str,
    mode: int,
    start: Any,
    out: Array,
    parts: Sequence[tuple[Array, Array]],
) -> Enqueued:
    """Return the fold of partial results into `out`; parts: (its part of `out`, a partial) pairs.

    mode: of `native.walks`. start: the reduction's identity, for the mode that begins with it.
    """
    from soapstone.native.cuda.kernels import fold

    steps: list[Enqueued] = [filled(out, start)] if mode == IDENTITY else []
    for number, (target, part) in enumerate(parts):
        if number == 0 and mode == FIRST:
            steps.append(copied(target, part))
        elif target.size:
            steps.append(strided(fold(reduction), (target, part)))
    return Several(tuple(steps))
