"""Programs on GPUs that are not there, by a driver that executes kernels (`libcuda_dry.c`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.cuda_compilers import compilers
from helpers.driver_stub import with_driver
from helpers.processes import PROGRAMS, SIMULATOR, TESTS

DRIVER = PROGRAMS / "libcuda_dry.c"
EXECUTED = ("-m", "programs.cuda_executed")
needs_compilers = pytest.mark.skipif(
    not compilers("nvJitLink"), reason="NVIDIA's compilers are not installed"
)


@cache
def _built() -> TemporaryDirectory[str]:
    """Return the folder of the driver, which is built once in a process."""
    return TemporaryDirectory()


@cache
def driver() -> Mapping[str, str]:
    """Return the variables of a process that finds the driver; skips where it cannot be built."""
    folder = Path(_built().name)
    try:
        found = with_driver(folder, DRIVER)
    except ImportError as error:
        pytest.skip(str(error))
    if str(folder) not in found.get("LD_LIBRARY_PATH", ""):
        pytest.skip("a driver is there: tests marked gpu are what runs on it")
    return {name: value for name, value in found.items() if name != SIMULATOR}


def run(*command: object, **variables: str) -> Any:
    """Return what a command ended with that is run beside the driver, in the folder of tests.

    variables: of its environment, beside this process's.
    """
    done = subprocess.run(
        list(map(str, command)),
        env={**driver(), **variables},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def printed(module: str, *arguments: object, **variables: str) -> list[str]:
    """Return the lines that a module of tests prints whose kernels the driver executes."""
    out: str = run(sys.executable, *EXECUTED, module, *arguments, **variables).stdout
    return out.splitlines()
