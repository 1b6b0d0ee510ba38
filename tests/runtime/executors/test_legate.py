"""The Legate executor: one process under Legate that checks much, and what needs no Legate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import legate_environment
from helpers.cuda_compilers import compilers
from helpers.processes import PROGRAMS, SIMULATOR, TESTS, rank_environment

from soapstone.runtime import MachineError, Partition, Region
from soapstone.runtime.executors.legate.start import (
    CONFIGURATION,
    LAUNCHERS,
    refuse_copies,
    start_legate,
)
from soapstone.runtime.executors.legate.tasks import form_of

CHECKS = (
    "tilings",
    "aliases",
    "reductions",
    "placement",
    "errors",
    "memory",
    "arrays",
    "futures",
    "interchange",
    "agreement",
    "scenarios",
    "inputs",
    "apps",
    "strategies",
    "plans",
    "end",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process needs to run Legate here."""
    try:
        return legate_environment.environment(tmp_path_factory.mktemp("driver"))
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outcomes(environment: dict[str, str]) -> dict[str, str | None]:
    """The error of each check, or None; checks a crash kept from running are absent."""
    done = subprocess.run(
        [sys.executable, "-m", "programs.legate_checks", *CHECKS],
        env=environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=600,
    )
    mark = '{"check"'
    lines = [line[line.find(mark) :] for line in done.stdout.splitlines() if mark in line]
    found = {line["check"]: line["error"] for line in map(json.loads, lines)}
    for name in CHECKS:
        found.setdefault(name, f"ended with {done.returncode}: {done.stderr[-2000:]}")
    if done.returncode:
        found["end"] = f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return found


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
def test_under_legate(outcomes: dict[str, str | None], check: str) -> None:
    assert outcomes[check] is None, outcomes[check]


@pytest.mark.parametrize(
    ("simulated", "checks"),
    [
        pytest.param(
            True,
            ("random", "folds", "errors", "kernels", "training", "mappers"),
            marks=pytest.mark.simulator,
        ),
        (False, ("random", "folds", "errors")),
    ],
    ids=["simulator", "dry driver"],
)
def test_gpus_under_its_launcher(simulated: bool, checks: tuple[str, ...], tmp_path: Path) -> None:
    """The checks of GPUs, with lanes of tasks of Legate: see `test_gpus` and `test_dry`."""
    if not simulated and not compilers("nvJitLink"):
        pytest.skip("NVIDIA's compilers are not installed")
    try:
        variables = legate_environment.environment(
            tmp_path, legate_environment.STUB if simulated else PROGRAMS / "libcuda_dry.c"
        )
    except ImportError as error:
        pytest.skip(str(error))
    driver = Path(sys.executable).with_name("legate")
    sizes = ["--cpus", "2", "--gpus", "0", "--omps", "0", "--sysmem", "512"]
    program = str(PROGRAMS / "gpu_checks.py")
    environment = rank_environment(60, variables) | ({SIMULATOR: "1"} if simulated else {})
    del environment["LEGATE_CONFIG"]
    environment["PATH"] = f"{driver.parent}:{environment.get('PATH', '')}"
    done = subprocess.run(
        [str(driver), *sizes, program, "--executor", "legate", *checks],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for check, error in json.loads(done.stdout.splitlines()[-1]).items():
        assert error is None, f"{check}: {error}"


@pytest.mark.parametrize("how", ["started by legate", "one of two copies"])
def test_train(environment: dict[str, str], how: str) -> None:
    options = ["--executor", "legate", "--epochs", "0", "--batch-size", "120"]
    script = str(TESTS.parent / "apps" / "images" / "digits.py")
    command = [sys.executable, script, *options]
    if how == "started by legate":
        driver = Path(sys.executable).with_name("legate")
        sizes = ["--cpus", "2", "--gpus", "0", "--omps", "0", "--sysmem", "512"]
        command = [str(driver), *sizes, script, *options]
        environment = {k: v for k, v in environment.items() if k != "LEGATE_CONFIG"}
        environment["PATH"] = f"{driver.parent}:{environment.get('PATH', '')}"
    elif how == "one of two copies":
        environment = {**environment, "PMI_SIZE": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if how == "one of two copies":
        assert done.returncode != 0
        assert "PMI_SIZE=2 found: 2 processes were started" in " ".join(done.stderr.split())
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert "test accuracy" in done.stdout


def test_more_cpus_than_legate_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIGURATION, raising=False)
    with pytest.raises(MachineError, match="63 cpus found, Legate has 62 in a process at most"):
        start_legate(63)


def test_unrelated_copies_are_refused() -> None:
    for name in LAUNCHERS:
        with pytest.raises(MachineError, match=f"{name}=3 found: 3 processes"):
            refuse_copies({name: "3"}, nodes=1)
        refuse_copies({name: "3"}, nodes=3)
        refuse_copies({name: "1"}, nodes=1)


def test_regular_cuts_give_each_point_its_box() -> None:
    """A cut that is found says the same boxes as the partition it was found for."""
    region = Region((12, 10), np.float32, "r")
    regular = [
        Partition.tiled(region, (3, 5)),
        Partition.tiled(region, (1, 2)),
        Partition.ranges(region, [[0, 5, 10, 12], [0, 10]]),
        Partition.whole(region, (4,)),
        Partition.of(region, [[2, 0], [4, 0]], [[4, 3], [6, 3]]),
    ]
    for partition in regular:
        boxes = partition.tiling.boxes
        form = form_of(boxes, partition.grid)
        assert form is not None
        for point, index in enumerate(np.ndindex(partition.grid)):
            low, high = [], []
            for axis, dim in enumerate(form.dims):
                step = form.tile[axis] * index[dim] if dim >= 0 else 0
                low.append(form.box[0][axis] + step)
                high.append(min(low[-1] + form.tile[axis], form.box[1][axis]))
            assert (tuple(low), tuple(high)) == boxes[point]
    irregular = [
        Partition.ranges(region, [[0, 2, 12], [0, 10]]),
        Partition.halo(Partition.tiled(region, (3, 1)), 1, 1),
        Partition.of(region, [[4, 0], [0, 0]], [[8, 10], [4, 10]]),
    ]
    for partition in irregular:
        assert form_of(partition.tiling.boxes, partition.grid) is None
