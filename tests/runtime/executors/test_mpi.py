"""The MPI executor: ranks of mpiexec compute what one process computes, and fail together."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import PROGRAMS, mpiexec, ranks
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.frontend.training import checkpoint
from soapstone.runtime import Region
from soapstone.runtime.agreement import Agreement
from soapstone.runtime.observe.checker import check_log

pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
if mpiexec() is None:
    pytest.skip("there is no mpiexec", allow_module_level=True)

# What mpiexec ends with where all ranks end with 1: it joins their codes by "or", and may kill
# (9) a rank that comes to its end after another.
FAILED = (1, 1 | 9)


@pytest.mark.parametrize(
    ("count", "first", "programs", "how"),
    [
        pytest.param(2, 40, 12, "beside", marks=pytest.mark.long),
        (3, 500, 2, "beside"),
        (2, 900, 3, "apart"),
    ],
)
def test_random_programs_equal_sequential_numpy_and_are_accepted(
    count: int, first: int, programs: int, how: str, tmp_path: Path
) -> None:
    command = (PROGRAMS / "mpi" / "random_programs.py", first, programs, tmp_path / "run.log", how)
    done = ranks(count, *command, timeout_s=60)
    assert done.returncode == 0, done.stderr
    *said, edits = sorted(done.stdout.splitlines(), key=lambda line: "equal" not in line)
    assert said == [f"{programs} programs equal"] * count
    assert programs < 12 or set(edits.split()) >= {"drop_message", "drop_dependence", "drop_launch"}


def train(*arguments: object, count: int = 1) -> Any:
    if count > 1:
        return ranks(count, "-m", "soapstone.cli.main", "train", *arguments, timeout_s=60)
    done = CliRunner().invoke(app, ["train", *map(str, arguments)])
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.mark.long
def test_training_gives_the_numbers_of_one_process_and_checkpoints_resume(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone.npz", tmp_path / "together.npz"
    for count, file in ((1, alone), (2, together)):
        done = train("digits", "--epochs", 1, "--checkpoint", file, count=count)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained 1 epochs") == 1  # one rank speaks
    one, _ = checkpoint.load(alone)
    two, _ = checkpoint.load(together)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    crossed = [
        train("digits", "--epochs", 2, "--resume", file, "--checkpoint", out, count=count)
        for count, file, out in (
            (2, alone, tmp_path / "a.npz"),
            (1, together, tmp_path / "b.npz"),
        )
    ]
    assert all(done.returncode == 0 for done in crossed), [done.stderr for done in crossed]
    one, position = checkpoint.load(tmp_path / "a.npz")
    two, other = checkpoint.load(tmp_path / "b.npz")
    assert position["position"]["step"] == other["position"]["step"]
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("traced", ["traced", "untraced"])
@pytest.mark.parametrize(
    ("kind", "said", "silence_s"),
    [
        ("raise", "task 'work', point 2, on processor 'rank1.cpu0': ValueError: it broke", 60.0),
        ("stop", "has not ended after 2 s|has not come to the same place", 2.0),
        ("kill", "igned|died|illed", 60.0),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_error(
    kind: str, said: str, silence_s: float, traced: str
) -> None:
    done = ranks(2, PROGRAMS / "mpi" / "faults.py", kind, traced, timeout_s=silence_s)
    assert done.returncode != 0
    assert "ended" not in done.stdout
    everything = done.stderr + done.stdout
    assert any(part in everything for part in said.split("|")), everything
    assert everything.count("TaskError: ") <= 1, everything
    shared = re.findall(r"mpich_shm_\w+", done.stdout)
    assert shared
    assert not any(Path("/dev/shm", name).exists() for name in shared)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("program", "the program itself failed"),
        ("memory", "region 'huge' needs"),
        ("early", "the program failed before it started"),
        ("exit", "process 1: it left its program, by SystemExit(nothing more)"),
        ("leave", "process 1: it left its program, by SystemExit(nothing more)"),
        ("left", "the start of the runtime: process 1 has left its program before it"),
    ],
)
def test_an_error_outside_of_tasks_ends_all(kind: str, said: str) -> None:
    longer_than_any_wait = 300
    done = ranks(2, PROGRAMS / "mpi" / "faults.py", kind, "traced", timeout_s=longer_than_any_wait)
    assert done.returncode != 0
    assert said in done.stderr
    assert "ended" not in done.stdout


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("write", "write of region 'x', the contents: rank 0 has float64 (6,) with contents"),
        ("fill", "fill of region 'y', the contents: rank 0 has np.float64(0.0), rank 1 has"),
        ("array", "array of region 'y', the contents: rank 0 has float64 (6,) with contents"),
        ("scalar", "launch of task 'scale', argument 0: rank 0 has 2.0, rank 1 has 2.5"),
        ("tiles", "argument 1: rank 0 has region 0 'x' float64 (6,) in 2 tiles"),
        ("task", "rank 0 has the launch of task 'look', rank 1 the launch of task 'scale'"),
        ("mapper", "captured step, task 'scale', point 0: rank 0 has processor 0"),
        ("untraced", "'Moody', task 'look': place_all, the answer: rank 0 has list(0, 0), rank 1"),
        ("end", "rank 0 has the launch of task 'look', rank 1 the read of region 'x'"),
        ("read", "rank 0 has the read of region 'x', rank 1 the read of region 'y'"),
    ],
)
def test_safe_mode_names_the_first_difference_between_ranks(kind: str, said: str) -> None:
    done = ranks(2, PROGRAMS / "mpi" / "disagreements.py", kind)
    assert done.returncode != 0
    assert "ended" not in done.stdout
    assert done.stderr.count("ReplicationError: step") == 1, done.stderr
    assert said in done.stderr


def test_safe_mode_accepts_ranks_that_agree() -> None:
    done = ranks(2, PROGRAMS / "mpi" / "disagreements.py", "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"ended {[8.0 * x for x in range(6)]}"] * 2


@pytest.mark.long
def test_regions_have_the_same_numbers_whenever_they_are_collected() -> None:
    told = []
    for keep in (True, False):
        heard: list[object] = []
        held: list[Region] = []

        def exchange(value: Any, heard: list[object] = heard) -> list[Any]:
            heard.append(value)
            return [value, value]

        agreement = Agreement(exchange, pytest.fail)
        for _ in range(3):
            region = Region((2,), "f8", "x")
            agreement.host("read", region)
            if keep:
                held.append(region)
            del region
            gc.collect()
        told.append(heard)
    assert told[0] == told[1] and len(told[0]) == 3


def test_ranks_find_the_same_room_whenever_they_collect_a_region(tmp_path: Path) -> None:
    done = ranks(2, PROGRAMS / "mpi" / "collected.py", tmp_path / "run.log")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"2 left, {[10.0 * x for x in range(8)]}"] * 2
    report = check_log(tmp_path / "run.log")
    assert report.accepted and report.messages, report.violations


def test_sums_of_bfloat16_over_ranks_round_once() -> None:
    done = ranks(2, PROGRAMS / "mpi" / "narrow.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["bfloat16 768.0"] * 2


def test_a_runtime_that_is_closed_gives_its_communicators_back() -> None:
    done = ranks(2, PROGRAMS / "mpi" / "many.py", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ended"] * 2


def test_a_rank_may_end_long_after_another_has_said_that_it_does() -> None:
    code = """
from soapstone.runtime.executors.mpi.executor import connect
comm = connect()
while comm.Get_rank() == 0 and not comm.Iprobe():  # what the others say at their end
    pass
"""
    done = ranks(3, "-c", code, timeout_s=60)
    assert done.returncode == 0, done.stderr


def test_wrong_use_is_told_once() -> None:
    done = train("nothing", count=2)
    assert done.returncode in FAILED
    assert done.stderr.count("app 'nothing' found") == 1
    done = train("digits", "--executor", "clouds")
    assert done.returncode == 1
    assert "executor 'clouds' found; one of" in done.stderr
    done = train("digits", "--optimize", count=2)
    assert done.returncode in FAILED
    assert "optimize: found with executor 'mpi'" in done.stderr


SMALL = """
from soapstone import SGD, Model
from soapstone.frontend.data.sets import synthetic_images

OPTIONS = {"optimizer": SGD(0.1), "epochs": 1, "batch_size": 16}

def build(batch_size):
    model = Model("small")
    x = model.input("sample", (batch_size, 12))
    for width in (24, 32, 24):
        x = model.dense(x, width, activation="relu")
    model.output(model.dense(x, 3))
    return model

def data():
    return synthetic_images(70, (12,), 3)
"""


@pytest.mark.long
def test_a_memory_smaller_than_the_model_changes_no_number(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    states = []
    for mapper in ((), ("--mapper", "bounded_memory", "--memory-bytes", 10_000)):
        file = tmp_path / "state.npz"
        done = train(tmp_path / "small.py", *mapper, "--checkpoint", file, count=2)
        assert done.returncode == 0, done.stderr
        states.append(checkpoint.load(file)[0])
    wanted, found = states
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_messages_are_measured_by_who_takes_part_and_size() -> None:
    done = ranks(2, PROGRAMS / "mpi" / "messages.py", timeout_s=60)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one == two  # all ranks have the same
    text, links = one.rsplit(" ", 1)
    times = ast.literal_eval(text)
    assert {kind for kind, _ in times} == {"copy", "scatter", "sum"} and links == "2"
    for by_size in times.values():
        assert list(by_size) == [8, 1 << 16, 1 << 20]
        assert 0 < by_size[8] <= by_size[1 << 16] <= by_size[1 << 20]
