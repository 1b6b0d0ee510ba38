"""Functions whose results are rounded to halves: fewer instructions, relative errors below 2^-16.

Half a unit of float16 is 2^-12 of a number at least, and one of bfloat16 more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.kernels.cuda.substrate.target import SIMULATED, cuda, device

# The normal distribution below -x, over e to the power of -x^2 / 2, is this polynomial of
# 1 / (1 + NEAR x), with no constant term: the least relative error for x from 0 to 14, where
# bfloat16 ends.
NEAR = 0.3
BELOW = (0.12007416, 0.11374268, 0.14419325, -0.01694198, 0.21603141, -0.07709542)


def normal(
    divide: Callable[[Any, Any], Any], exp: Callable[[Any], Any], number: Callable[[float], Any]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the normal distribution, and its density; `number` makes a number of their type."""
    half, one, near = number(0.5), number(1), number(NEAR)
    scale = number(1 / math.sqrt(2 * math.pi))
    c1, c2, c3, c4, c5, c6 = (number(each) for each in BELOW)

    def density(x: Any) -> Any:
        return exp(-half * x * x) * scale

    def distribution(x: Any) -> Any:
        t = divide(one, one + near * abs(x))
        below = t * (c1 + t * (c2 + t * (c3 + t * (c4 + t * (c5 + t * c6)))))
        below = below * exp(-half * x * x)
        return one - below if x > 0 else below

    return distribution, density


if SIMULATED:
    _distribution, _density = normal(np.divide, np.exp, np.float32)
else:
    _distribution, _density = map(
        device,
        normal(
            device(lambda a, b: cuda.libdevice.fast_fdividef(a, b)),
            device(lambda x: cuda.libdevice.fast_expf(x)),
            np.float32,
        ),
    )
APPROXIMATIONS = {"normal_cdf_of_halves": _distribution, "normal_density_of_halves": _density}
