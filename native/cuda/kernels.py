"""The kernels of copies and folds: over arrays of four axes and any strides.

A module of its own, since it imports `numba.cuda`: the simulator finds it by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from soapstone.native.cuda.kernel_cache import kept

SUM, PROD, MAX, MIN = range(4)


def _kept(function: Callable[..., Any]) -> Any:
    """Return the kernel of a function of this module, which is kept on disk."""
    made = cuda.jit(function)
    return kept(made, "", {"function": made})


@_kept
def copy(to: Any, x: Any) -> None:
    """Copy elements of one dtype."""
    n1, n2, n3 = to.shape[1], to.shape[2], to.shape[3]
    for at in range(np.int64(cuda.grid(1)), np.int64(to.size), cuda.gridsize(1)):
        d = at % n3
        c = at // n3 % n2
        b = at // n3 // n2 % n1
        a = at // n3 // n2 // n1
        to[a, b, c, d] = x[a, b, c, d]


@cache
def fold(reduction: str) -> Any:
    """Return the kernel that combines elements with others.

    A maximum or minimum of equal numbers, and of NaN, is the first.
    """
    wanted = ("sum", "prod", "max", "min").index(reduction)

    def combine(to: Any, x: Any) -> None:
        n1, n2, n3 = to.shape[1], to.shape[2], to.shape[3]
        for at in range(np.int64(cuda.grid(1)), np.int64(to.size), cuda.gridsize(1)):
            d = at % n3
            c = at // n3 % n2
            b = at // n3 // n2 % n1
            a = at // n3 // n2 // n1
            one, two = to[a, b, c, d], x[a, b, c, d]
            if wanted == SUM:
                to[a, b, c, d] = one + two
            elif wanted == PROD:
                to[a, b, c, d] = one * two
            else:
                keep = one >= two if wanted == MAX else one <= two
                to[a, b, c, d] = one if keep or one != one else two

    combine.__name__ = combine.__qualname__ = f"fold_{reduction}"  # as profilers show it
    return _kept(combine)
