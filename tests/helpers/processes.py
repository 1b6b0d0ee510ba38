"""Processes that tests start: programs of `tests/programs`, and ranks of mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS = TESTS / "programs"
SIMULATOR = "NUMBA_ENABLE_CUDASIM"


def mpiexec() -> str | None:
    """Return the launcher beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def say(*what: object) -> None:
    """Print one line in one piece: ranks share their output, and would write into each other's."""
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def rank_environment(timeout_s: float, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a program that imports these helpers.

    timeout_s: what its messages may take. variables: the process's without them.
    """
    path = os.pathsep.join([str(TESTS), variables.get("PYTHONPATH", "")])
    return {**variables, "SOAPSTONE_TIMEOUT_S": f"{timeout_s:g}", "PYTHONPATH": path}


def python(
    arguments: Sequence[str], simulated: bool = True, variables: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Return what Python ended with, in Numba's simulator of GPUs, or without it.

    variables: the process's.
    """
    environment = {name: value for name, value in variables.items() if name != SIMULATOR}
    environment |= {SIMULATOR: "1"} if simulated else {}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=600
    )


def ranks(count: int, *command: object, timeout_s: float = 20.0) -> Any:
    """Return what a Python command on several ranks ends with.

    timeout_s: what its messages may take.
    """
    return subprocess.run(
        [str(mpiexec()), "-n", str(count), sys.executable, *map(str, command)],
        env={**rank_environment(timeout_s), "SOAPSTONE_SAFE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
