"""What all tests share: bytecode, threads' waiting, interrupts, which tests are of oneDNN itself.

Without oneDNN (`SOAPSTONE_ONEDNN=off`, or where there is no wheel of it) those are deselected, and
the first line of a run says so; every other test passes there too.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from soapstone.cache.environment import VARIABLE, folder

# Tests start hundreds of processes, each of which would compile all modules to bytecode again where
# none may be written. What that keeps clean are the sources' folders: it goes to the caches'.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(folder().resolve() / "bytecode")
    )

# Processes of tests share the cores: threads that spin while they wait for one of their team would
# take its core from it. OpenMP reads this when it is loaded, which the imports below do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from soapstone.kernels.cpu.onednn import library
from soapstone.kernels.measure import store
from soapstone.native.cuda.device import NoDevice, device_count, simulated
from soapstone.search.cost.database import database
from soapstone.search.rules.rulebook import Rulebook, shipped

BLAS = "test_openblas*.py"  # of what takes oneDNN's place
FILES = "test_onednn*.py"  # of oneDNN alone; single tests elsewhere have the marker `onednn`


def pytest_configure() -> None:
    """Let interrupts through to what tests start, however the tests were started themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector from what all tests stay with: the modules and tests that are collected.

    While they grow it would walk over them again and again, and afterwards in every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _set_aside()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Keep the collector from what a file of tests leaves: modules, caches and compiled code."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _set_aside()


def _set_aside() -> None:
    """Collect garbage, and have what is left never looked through again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Say whether oneDNN is there."""
    if library.available():
        return f"oneDNN {library.version()}; {BLAS} is for runs without it"
    return f"without oneDNN: {FILES} and tests marked onednn are deselected"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of tests of the library that is not used: they need its kernels."""
    return True if collection_path.match(BLAS if library.available() else FILES) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect single tests of what is not there: of oneDNN, and of GPUs."""
    out = [] if library.available() else [i for i in items if i.get_closest_marker("onednn")]
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpus and not _has_gpu():
        out += of_gpus
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _has_gpu() -> bool:
    try:
        return not simulated() and device_count() > 0
    except NoDevice:
        return False


@pytest.fixture(scope="session")
def book() -> Rulebook:
    """Return the shipped rules."""
    return shipped()


@pytest.fixture
def own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all measured anew: for this test nothing is known of other tests and of earlier runs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "measurements"))
    database.cache_clear()
    store.cache_clear()
    yield
    database.cache_clear()
    store.cache_clear()
