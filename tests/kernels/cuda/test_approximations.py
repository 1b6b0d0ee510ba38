"""Functions of kernels whose results are rounded to halves, against those of double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest


def test_the_normal_distribution_is_near_enough_to_be_rounded_to_halves() -> None:
    """Also where it is as small as bfloat16 has numbers; beyond it is nothing, or one."""
    pytest.importorskip("numba.cuda")
    from soapstone.kernels.cuda.elementwise.approximations import normal

    distribution, density = normal(np.divide, np.exp, np.float32)
    away = np.geomspace(1e-6, 12.9, 5000).astype(np.float32)
    for x in (*-away, np.float32(0), *away):
        assert distribution(x) == pytest.approx(math.erfc(-x / math.sqrt(2)) / 2, rel=2**-16)
        wanted = math.exp(-0.5 * float(x) ** 2) / math.sqrt(2 * math.pi)
        assert density(x) == pytest.approx(wanted, rel=2**-16)
    with np.errstate(over="ignore"):
        for far in (np.float32(1e30), np.float32(math.inf)):
            assert (distribution(-far), distribution(far), density(far)) == (0, 1, 0)
    assert math.isnan(distribution(np.float32(math.nan)))
