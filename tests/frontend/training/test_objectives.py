"""What models are trained for, over processors, ranks, Legate and under strategies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import legate_environment
from helpers.processes import PROGRAMS, mpiexec, ranks
from programs import objective_training

from soapstone.ir.strategy import Configuration, Strategy


def drawn(seed: int, precision: str = "float32") -> Strategy:
    """Return a random legal configuration of up to two points for each operator of the step."""
    random = np.random.default_rng(seed)
    with objective_training.network(cpus=2, precision=precision) as model:
        graph = model.trainer.training_graph(6)
        return Strategy(
            configurations={
                node.name: Configuration(
                    random.choice(list(graph.signature(node).configurations(2)))
                )
                for node in graph.nodes
            },
        )


@pytest.mark.parametrize("seed", [None, 0, 2, 9])
def test_processors_and_strategies_change_no_number(seed: int | None) -> None:
    objective_training.compare("local", 2, None if seed is None else drawn(seed))


@pytest.mark.parametrize("seed", [None, 3])
def test_mixed_precision_is_the_same_over_processors(seed: int | None) -> None:
    mixed = "mixed_float16"
    objective_training.compare("local", 2, None if seed is None else drawn(seed, mixed), mixed)


@pytest.mark.long
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: pip install 'soapstone[mpi]'")
def test_two_ranks_train_and_measure_the_same(tmp_path: Path) -> None:
    drawn(2).save(tmp_path / "2.json")
    program = PROGRAMS / "objective_training.py"
    done = ranks(2, program, "mpi", tmp_path / "2.json", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 runs equal"] * 2


@pytest.mark.long
def test_legate_trains_and_measures_the_same(tmp_path: Path) -> None:
    output = legate_environment.printed(tmp_path, "objective_training", "legate")
    assert "2 runs equal" in output
