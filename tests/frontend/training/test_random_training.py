"""Random models, trained in many ways; and that the comparison would see a fault."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.random_training import draw
from helpers.training_ways import SELVES, WAYS, expected, failure, stepped

BLOCK = 9


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n * BLOCK, marks=pytest.mark.long) for n in range(1, 4))]
)
def test_every_way_of_training_equals_the_reference(first: int) -> None:
    """A sample of what `benchmarks/correctness/random_graphs.py --training` runs."""
    found = {seed: failure(draw(seed)) for seed in range(first, first + BLOCK)}
    assert not {seed: text for seed, text in found.items() if text}


def test_a_block_has_every_way() -> None:
    assert len({*WAYS, *SELVES}) <= BLOCK


def test_a_seed_is_a_training() -> None:
    assert str(draw(3)) == str(draw(3)) != str(draw(4))


def test_almost_all_is_compared_and_small_faults_are_seen() -> None:
    certain = states = seen = 0
    for seed in range(10):
        case = draw(seed)
        allowed = expected(case)
        certain += allowed.certain
        if not allowed.certain:
            continue
        losses, state = allowed.losses, allowed.state
        assert not allowed.misfit((losses, state))
        assert allowed.misfit((losses[:-1], state))
        for name, value in state.items():
            if value.dtype.kind != "f" or not value.size:
                continue
            wrong = value + np.float32(0.01 * max(1.0, float(np.abs(value).max())))
            states += 1
            seen += bool(allowed.misfit((losses, {**state, name: wrong})))
    assert certain >= 7 and seen > 0.9 * states > 0


def test_a_step_that_is_left_out_is_seen() -> None:
    case = draw(3)
    losses, state = stepped(case, case.compiled(cpus=1))
    assert not expected(case).misfit((losses, state))
    with case.compiled(cpus=1) as model:
        (inputs, labels, _), *_ = case.batches
        model.train_on_batch(inputs, labels)
        assert expected(case).misfit((losses, model.trainer.state()))
