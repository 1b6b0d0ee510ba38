"""What a process needs to run Legate here.

Legate's wheel needs the library of NVIDIA's driver, also where there is no GPU: where it is absent
a stub, built here, stands in for it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.driver_stub import with_driver

from soapstone.runtime.executors.legate.start import LAUNCHERS

STUB = Path(__file__).resolve().parents[1] / "programs" / "libcuda_stub.c"


def environment(folder: Path, driver: Path = STUB) -> dict[str, str]:
    """The variables of a process under Legate. folder: for the stub. driver: its source.

    Raises: ImportError when Legate is not installed, or cannot be run here.
    """
    if importlib.util.find_spec("legate") is None:
        raise ImportError("Legate is not installed: pip install 'soapstone[legate]'")
    found = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    found["LEGATE_CONFIG"] = "--cpus 2 --gpus 0 --omps 0 --sysmem 512 --logging gpu=6,threads=5"
    found["LEGATE_AUTO_CONFIG"] = "0"
    return with_driver(folder, driver, found)


def printed(folder: Path, program: str, *arguments: object) -> str:
    """What a program of tests/programs prints under Legate; skips where that cannot be run here."""
    try:
        variables = environment(folder)
    except ImportError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", f"programs.{program}", *map(str, arguments)],
        env=variables,
        cwd=STUB.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
