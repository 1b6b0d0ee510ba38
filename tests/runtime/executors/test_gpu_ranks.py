"""GPUs of several ranks of MPI: in Numba's simulator, and on devices where each rank has one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers.processes import PROGRAMS, mpiexec, rank_environment

from soapstone.runtime.machines.machine import COPIER, CUDA, Machine, Memory, Processor

VARIABLE = "SOAPSTONE_MPI_GPU"
SIMULATOR = "NUMBA_ENABLE_CUDASIM"
pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(find_spec("numba_cuda") is None, reason="no numba-cuda here"),
]


@pytest.mark.simulator
@pytest.mark.parametrize("check", ["random", "training", "messages", "errors"])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_ranks_with_gpus_compute_what_one_process_computes(check: str, direct: str) -> None:
    command = [str(mpiexec()), "-n", "2", sys.executable, str(PROGRAMS / "mpi" / "gpu_ranks.py")]
    done = subprocess.run(
        [*command, check],
        env={**rank_environment(60), SIMULATOR: "1", "SOAPSTONE_SAFE": "1", VARIABLE: direct},
        cwd=PROGRAMS.parent,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"{check} as it should be"] * 2, done.stderr[-4000:]


def test_gpus_are_numbered_on_each_node() -> None:
    gpus = [(f"rank{rank}.gpu{n}", f"node{rank // 2}") for rank in range(4) for n in range(2)]
    machine = Machine(
        "ranks",
        (
            *(Processor(name, CUDA, memory=f"{name}.memory", node=node) for name, node in gpus),
            *(
                Processor(f"{name}.{way}", COPIER, memory=f"{name}.memory", node=node)
                for name, node in gpus
                for way in ("in", "out")
            ),
        ),
        (Memory("host", 1 << 20), *(Memory(f"{name}.memory", 1 << 20) for name, _ in gpus)),
    )
    assert list(machine.devices.items()) == [(n + 1, n % 4) for n in range(8)]


@pytest.mark.skipif(SIMULATOR in os.environ, reason="the simulator has GPUs")
def test_a_rank_without_a_gpu_is_named() -> None:
    program = (
        "import sys\n"
        "from soapstone.runtime.machines.start import machine_of\n"
        "try: machine_of('mpi', gpus=1)\n"  # a line is written at once, for both ranks write some
        "except Exception as error: sys.stdout.write(f'{type(error).__name__} {error}\\n')"
    )
    done = subprocess.run(
        [str(mpiexec()), "-n", "2", sys.executable, "-c", program],
        env={**rank_environment(60), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all(line.startswith("MachineError executor 'mpi': process 0 on ") for line in said), said
    assert all("1 gpus asked for" in line and "no NVIDIA GPU found" in line for line in said), said
