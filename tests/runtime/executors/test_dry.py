"""GPUs without one: the real Numba CUDA on a driver that orders, checks and copies, and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cuda_compilers import compilers
from helpers.driver_stub import with_driver
from helpers.processes import PROGRAMS, mpiexec, python, rank_environment

from soapstone.runtime.devices.ranks import VARIABLE

DRIVER = PROGRAMS / "libcuda_dry.c"
QUICK = ("second", "random", "folds", "errors", "memory", "narrow", "recurrent", "tiles", "peers")
STEPS = ("resnet", "bert", "graph", "two", "turns", "plan", "resnet answers", "bert answers")


pytestmark = pytest.mark.skipif(
    not compilers("nvJitLink"), reason="NVIDIA's compilers are not installed"
)


def driver(folder: Path) -> dict[str, str]:
    """Return the variables of a process that finds the dry driver; folder: for that."""
    try:
        variables = with_driver(folder, DRIVER)
    except ImportError as error:
        pytest.skip(str(error))
    if "LD_LIBRARY_PATH" not in variables or str(folder) not in variables["LD_LIBRARY_PATH"]:
        pytest.skip("a driver is there: tests marked gpu are what runs on it")
    return variables


def dry(folder: Path, *arguments: str) -> Any:
    """Return what a program prints that runs on the dry driver; folder: for that."""
    variables = driver(folder)
    done = python(["-m", *arguments], False, variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "checks", [QUICK, pytest.param(STEPS, marks=pytest.mark.long)], ids=["programs", "steps"]
)
def test_what_is_asked_of_the_driver_is_allowed(checks: tuple[str, ...], tmp_path: Path) -> None:
    for check, error in dry(tmp_path, "programs.cuda_dry", *checks).items():
        assert error is None, f"{check}: {error}"


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.long)])
def test_whichever_call_of_the_driver_fails_is_named_or_survived(step: int, tmp_path: Path) -> None:
    found = dry(tmp_path, "programs.cuda_faults", "1", str(step))
    assert found["failed"] > 400 // step
    assert found["wrong"] == []
    if step == 1:  # without a CUDA graph, what would be in it is launched one by one
        assert "cuGraphInstantiateWithFlags" in found["survived"]


@pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec")
def test_ranks_send_from_gpu_to_gpu_what_lanes_have_done(tmp_path: Path) -> None:
    """MPI reads a GPU's memory without asking the driver, so what is not done yet is not there."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    program = PROGRAMS / "mpi" / "gpu_ranks.py"
    done = subprocess.run(
        [str(mpiexec()), "-n", "2", sys.executable, str(program), "random", "messages"],
        env={
            **driver(tmp_path),
            **rank_environment(60),
            "LD_LIBRARY_PATH": str(tmp_path),
            "DRY_OPEN": "1",
            VARIABLE: "on",
        },
        cwd=PROGRAMS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as it should be") == 4
