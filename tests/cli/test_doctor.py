"""`soapstone doctor`: what it says is what is there, and its exit code is whether that works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soapstone.ir.spec import operators
from soapstone.kernels.cpu.openblas import library as openblas

# Each package is imported in a process of its own, which takes most of the time: without them.
_ALONE = "import soapstone.frontend.doctor as doctor; doctor._packages = tuple; "
_RUN = "from soapstone.cli.main import app; app(['doctor', '--json'])"


def _doctor(packages: bool = True, **environment: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", _RUN if packages else _ALONE + _RUN]
    given = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _states(found: dict[str, Any]) -> dict[str, str]:
    return {library["name"]: library["state"] for library in found["libraries"]}


@pytest.mark.long
@pytest.mark.parametrize("off", ["onednn", "both"])
def test_libraries_that_are_off_are_told_and_the_self_test_passes_without_them(off: str) -> None:
    more = {openblas.VARIABLE: openblas.OFF} if off == "both" else {}
    code, found = _doctor(SOAPSTONE_ONEDNN="off", **more)
    states = _states(found)
    assert states["oneDNN"] == "off"
    assert states["OpenBLAS"] == ("off" if more else "works")
    variants = {check["operator"]: check["variant"] for check in found["checks"]}
    assert variants["matmul"] == ("reference" if more else "openblas")
    assert [check["problem"] for check in found["checks"]] == ["", ""]
    served = set(found["kernels"])
    assert "onednn" not in served and ("openblas" in served) != bool(more)
    names = {name for family in found["reference"].values() for name in family}
    assert names < {spec.name for spec in operators()}
    assert ("conv3d" in names) == bool(more) and ("lstm" in names) == bool(more)
    assert code == bool(found["problems"])


def test_a_fallback_is_named_once_with_where_the_library_was_looked_for() -> None:
    script = "import soapstone.kernels.cpu as a; from soapstone.kernels.registry import variants"
    script += "; variants('matmul'); variants('conv2d')"
    given = {**os.environ, "SOAPSTONE_ONEDNN": "/nowhere/libdnnl.so"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("FallbackWarning") == 1
    assert "looked in /nowhere/libdnnl.so): products and convolutions by OpenBLAS" in done.stderr
    quiet = {**os.environ, "SOAPSTONE_ONEDNN": "off"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0 and "Warning" not in done.stderr  # it was asked for


def test_a_library_that_is_named_and_does_not_load_is_a_problem() -> None:
    code, found = _doctor(SOAPSTONE_ONEDNN=__file__)
    assert _states(found)["oneDNN"] == "broken"
    assert any(__file__ in problem for problem in found["problems"])
    assert code == 1


def test_numba_without_numba_cuda_is_no_way_to_gpus(tmp_path: Path) -> None:
    """Numba has a `numba.cuda` of its own, older than what kernels are written for."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numba_cuda'] = None\n")
    code, found = _doctor(packages=False, PYTHONPATH=str(tmp_path))
    assert found["on_host"] is None
    assert code == bool(found["problems"])
    script = "from soapstone.native.cuda.device import device_count; device_count()"
    given = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=given)
    assert "NoDevice: numba-cuda found missing" in done.stderr
    assert "pip install 'soapstone[cuda]'" in done.stderr
