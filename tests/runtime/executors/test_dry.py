"""GPUs without one: the real Numba CUDA on a driver that orders, checks and executes kernels."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.dry_driver import EXECUTED, needs_compilers, printed, run
from helpers.processes import mpiexec, rank_environment

from soapstone.runtime.devices.ranks import VARIABLE

QUICK = (
    *("second", "random", "folds", "errors", "kernels", "memory", "mappers", "inference", "narrow"),
    *("status", "recurrent", "peers"),
)
STEPS = (
    ("resnet step", "resnet", "resnet answers", "plan", "tiles"),
    ("bert", "bert answers", "bert in halves", "attention"),
    ("lstm", "lstm answers", "dlrm", "graph", "two", "turns", "parts"),
    ("training", "trainings", "graphs"),
)


pytestmark = needs_compilers


@pytest.mark.parametrize(
    "checks",
    [QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in STEPS)],
    ids=["programs", *(each[0] for each in STEPS)],
)
def test_programs_on_gpus_compute_what_those_on_cpus_do(checks: tuple[str, ...]) -> None:
    """Kernels are executed; what a driver refuses, and races, are errors: see `cuda_dry`."""
    (line,) = printed("programs.cuda_dry", *checks, DRY_RACES="1")
    for check, error in json.loads(line).items():
        assert error is None, f"{check}: {error}"


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.long)])
def test_whichever_call_of_the_driver_fails_is_named_or_survived(step: int) -> None:
    found = json.loads(printed("programs.cuda_faults", 1, step)[-1])
    assert found["failed"] > 400 // step
    assert found["wrong"] == []
    if step == 1:  # without a CUDA graph, what would be in it is launched one by one
        assert "cuGraphInstantiateWithFlags" in found["survived"]


@pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec")
@pytest.mark.parametrize("direct", ["on", pytest.param("off", marks=pytest.mark.long)])
def test_ranks_send_from_gpu_to_gpu_what_lanes_have_done(direct: str) -> None:
    """MPI reads a GPU's memory without asking the driver, so what is not done yet is not there."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    checks = ("random", "messages", "training", "errors")
    program = (sys.executable, *EXECUTED, "programs.mpi.gpu_ranks", *checks)
    more = {"DRY_OPEN": "1"} if direct == "on" else {}
    path = rank_environment(60)
    names = ("SOAPSTONE_TIMEOUT_S", "PYTHONPATH")
    more |= {VARIABLE: direct, **{name: path[name] for name in names}}
    done = run(mpiexec(), "-n", 2, *program, **more)
    assert done.stdout.count("as it should be") == 2 * len(checks)
