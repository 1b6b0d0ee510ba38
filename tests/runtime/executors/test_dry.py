"""GPUs without one: the real Numba CUDA on a driver that orders, checks and copies, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cuda_compilers import compilers
from helpers.driver_stub import with_driver
from helpers.processes import python

DRIVER = Path(__file__).parents[2] / "programs" / "libcuda_dry.c"
QUICK = ("second", "random", "folds", "errors", "memory", "narrow", "tiles", "peers")
STEPS = ("resnet", "bert", "graph", "two", "turns", "plan", "resnet answers", "bert answers")


pytestmark = pytest.mark.skipif(
    not compilers("nvJitLink"), reason="NVIDIA's compilers are not installed"
)


def dry(folder: Path, *arguments: str) -> Any:
    """Return what a program prints that runs on the dry driver; folder: for that."""
    try:
        variables = with_driver(folder, DRIVER)
    except ImportError as error:
        pytest.skip(str(error))
    if "LD_LIBRARY_PATH" not in variables or str(folder) not in variables["LD_LIBRARY_PATH"]:
        pytest.skip("a driver is there: tests marked gpu are what runs on it")
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
