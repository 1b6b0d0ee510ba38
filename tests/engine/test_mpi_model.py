"""The whole model on several ranks: partitions, futures, nested launches, strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")

from test_mpi import ranks


def test_sparse_partitions_futures_and_subtasks_on_two_ranks() -> None:
    done = ranks(2, Path(__file__).parents[1] / "mpi_model.py", 6, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["6 programs equal"] * 2


def test_strategies_train_to_the_same_numbers_on_two_ranks() -> None:
    done = ranks(2, Path(__file__).parents[1] / "strategy_training.py", "mpi", 3, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 strategies equal"] * 2
