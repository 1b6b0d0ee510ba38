"""The frontier of made-up problems, against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.frontier_problems import brute, checked, small

from soapstone.search.parallel.frontier import algebra
from soapstone.search.parallel.frontier.tracking import track


@pytest.mark.parametrize("seed", range(40))
def test_the_frontier_is_that_of_all_strategies(seed: int) -> None:
    problem = small(seed)
    needed = brute(problem)
    for method, prune in itertools.product(("linear", "elimination"), (False, True)):
        result = track(problem, method=method, prune=prune, threads=1 + seed % 2)
        assert checked(problem, list(result)) == needed
        assert result.exact and result.error == 0


@pytest.mark.parametrize("coordinates", [1, 2, 3, 4])
def test_reduce_keeps_one_of_equal_vectors_and_none_that_is_covered(coordinates: int) -> None:
    random = np.random.default_rng(coordinates)
    for count in (0, 1, 7, 60):
        costs = random.integers(0, 9, (count, coordinates))
        rows = sorted({tuple(row) for row in costs.tolist()})
        needed = [
            row
            for row in rows
            if not any(o != row and all(a <= b for a, b in zip(o, row)) for o in rows)
        ]
        assert [tuple(row) for row in costs[algebra.reduce(costs)].tolist()] == needed
