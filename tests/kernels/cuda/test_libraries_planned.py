"""NVIDIA's own libraries, where they are installed (extra `cuda-libs`); no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.driver_stub import with_driver

PROGRAMS = Path(__file__).parents[2] / "programs"


def installed() -> bool:
    """Return whether the extra is there."""
    return all(importlib.util.find_spec(name) is not None for name in ("nvmath", "cudnn"))


@pytest.mark.skipif(not installed(), reason="the extra cuda-libs is not installed")
def test_libraries_take_what_they_are_asked_for(tmp_path: Path) -> None:
    try:
        variables = with_driver(tmp_path, PROGRAMS / "libcuda_described.c")
    except ImportError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "cuda_library_plans.py")],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "descriptions": [],
        "planned": 7 * 3 * 2 * 3,
        "unplanned": [],
        "attentions": 2 * 2 * 3 * 2,
        "unknown": [],
    }
