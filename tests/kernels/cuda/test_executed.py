"""Kernels' machine code as PTX, executed without a GPU: what executes it, and every operator's."""

from __future__ import annotations

import json
import random

import pytest
from helpers.dry_driver import needs_compilers, printed
from helpers.operator_families import families

SAMPLE, SEED = 5, 8  # families of which the plain suite runs one operator, and which
TOGETHER = 16  # operators of a family in one test

pytestmark = needs_compilers


def test_instructions_compute_what_they_should_and_mistakes_are_said() -> None:
    (line,) = printed("programs.cuda_instructions", DRY_RACES="1")
    found = json.loads(line)
    assert len(found) > 200
    for name, error in found.items():
        assert error is None, f"{name}: {error}"


def check(names: list[str]) -> None:
    """Run the first case of each operator, plain, in a tile and in halves, and larger ones."""
    lines = printed("programs.cuda_simulator", "--device", "--few", *names, DRY_RACES="1")
    found = [json.loads(line) for line in lines]
    assert [each["operator"] for each in found] == names
    assert [each for each in found if each["wrong"]] == []


def test_kernels_of_some_operators_equal_the_reference() -> None:
    drawn = random.Random(SEED)
    check([drawn.choice(names) for _, names in drawn.sample([*families()], SAMPLE)])


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names[first : first + TOGETHER], id=f"{of} {first}")
        for of, names in families()
        for first in range(0, len(names), TOGETHER)
    ],
)
def test_kernels_equal_the_reference(names: list[str]) -> None:
    check(names)


@pytest.mark.long
def test_products_are_right_by_every_shape_of_tile_and_in_parts() -> None:
    found = list(map(json.loads, printed("programs.cuda_products", "--device", DRY_RACES="1")))
    assert len(found) == 24
    kernels = {"product", "product_few", "product_large", "staged", "staged_small"}
    assert {kernel for *_, kernel, _, _ in found} == kernels
    assert max(parts for *_, parts, _ in found) > 1
