"""The whole model on several ranks: partitions, futures, nested launches, strategies."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import PROGRAMS, mpiexec, ranks
from programs.strategy_training import strategy_of

pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
if mpiexec() is None:
    pytest.skip("there is no mpiexec", allow_module_level=True)


@pytest.mark.long
def test_sparse_partitions_futures_and_subtasks_on_two_ranks() -> None:
    done = ranks(2, PROGRAMS / "mpi" / "model.py", 6, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["6 programs equal"] * 2


@pytest.mark.long
def test_a_fast_memory_on_each_of_two_ranks_trains_to_the_same_numbers() -> None:
    methods = ("dp", "lru", "stream")
    done = ranks(2, PROGRAMS / "planned_training.py", 1, *methods, timeout_s=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.split()[1] in methods]
    moved = {(int(rank), method): int(copied) for rank, method, _, copied, *_ in rows}
    assert len(moved) == 6
    for _, _, planned, copied, fast, held in rows:
        assert 0 < int(copied) <= int(planned)  # what other ranks have sent is no such copy
        assert int(fast) == 60_000 < int(held) / 2
    for rank in range(2):
        assert moved[rank, "dp"] <= moved[rank, "lru"] < moved[rank, "stream"]
        told = [line for line in lines if line.startswith(f"{rank} ")]
        assert any("bytes at once, 3000 found in the memory" in line for line in told)
        assert any("its part in memory" in line for line in told)


@pytest.mark.long
def test_strategies_train_to_the_same_numbers_on_two_ranks(tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.json" for seed in range(3)]
    for seed, file in enumerate(files):
        strategy_of(seed).save(file)
    done = ranks(2, PROGRAMS / "strategy_training.py", "mpi", *files, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 strategies equal"] * 2
