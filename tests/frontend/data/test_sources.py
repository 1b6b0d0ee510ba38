"""Each source of data gives the same losses: as the others do, over ranks, and under Legate."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import legate_environment
from helpers.processes import PROGRAMS, mpiexec, ranks
from programs import data_training

COUNT = len(data_training.SOURCES) + len(data_training.DRAWN) + 1  # buckets
EQUAL = [f"{COUNT} sources, {what}" for what in ("no strategy", "a strategy")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data_training.write(tmp_path)
    return tmp_path


def test_the_same_samples_give_the_same_losses_whatever_they_come_from(folder: Path) -> None:
    found = data_training.histories(folder, shuffle=False, cpus=1)
    for source in data_training.SOURCES:
        for name, values in found[source].items():
            assert values == found["arrays"][name][: len(values)], (source, name)


def test_processors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_training.compare("local", folder)
    assert capsys.readouterr().out.splitlines() == EQUAL


@pytest.mark.long
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: pip install 'soapstone[mpi]'")
def test_two_ranks(folder: Path) -> None:
    done = ranks(2, PROGRAMS / "data_training.py", "mpi", folder, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(EQUAL * 2)


@pytest.mark.long
def test_legate(folder: Path) -> None:
    output = legate_environment.printed(folder, "data_training", "legate", str(folder))
    told = [line for line in output.splitlines() if "strategy" in line]
    assert told == EQUAL
