"""GPUs without one: the real Numba CUDA on a driver that orders, checks and copies, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cuda_compilers import compilers
from helpers.driver_stub import with_driver
from helpers.processes import python

DRIVER = Path(__file__).parents[2] / "programs" / "libcuda_dry.c"
QUICK = ("random", "folds", "errors", "memory", "narrow")
STEPS = ("resnet", "bert", "graph", "two", "turns", "plan", "resnet answers", "bert answers")


@pytest.mark.skipif(not compilers("nvJitLink"), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize(
    "checks", [QUICK, pytest.param(STEPS, marks=pytest.mark.long)], ids=["programs", "steps"]
)
def test_what_is_asked_of_the_driver_is_allowed(checks: tuple[str, ...], tmp_path: Path) -> None:
    try:
        variables = with_driver(tmp_path, DRIVER)
    except ImportError as error:
        pytest.skip(str(error))
    if "LD_LIBRARY_PATH" not in variables or str(tmp_path) not in variables["LD_LIBRARY_PATH"]:
        pytest.skip("a driver is there: tests marked gpu are what runs on it")
    done = python(["-m", "programs.cuda_dry", *checks], False, variables)
    assert done.returncode == 0, done.stderr[-4000:]
    for check, error in json.loads(done.stdout.splitlines()[-1]).items():
        assert error is None, f"{check}: {error}"
