"""A sample of benchmarks/correctness/random_shapes.py: computed shapes, for many inputs."""

from __future__ import annotations

import pytest
from helpers.random_shapes import differences


@pytest.mark.parametrize("seed", range(12))
def test_random_models_answer_many_shapes_as_onnx_runtime(seed: int) -> None:
    compared, wrong = differences(seed)
    assert not wrong
    assert compared
