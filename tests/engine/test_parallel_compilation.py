"""Kernels that other processes compile while a graph is bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from soapstone.cache import objects
from soapstone.engine import parallel_compilation
from soapstone.engine.parallel_compilation import ParallelCompilation

# One kernel is asked for; others compile what else the operators may need, here small kernels.
_SHARED = """
import json, os, threading, time
from soapstone import system
from soapstone.cache import objects
from soapstone.engine import parallel_compilation
from soapstone.native import entries
from soapstone.native.threads import openmp
parallel_compilation.usable_cores = lambda: 3
made = parallel_compilation.ParallelCompilation(["adam", "conv2d", "attention", "adam"])
predicted = made._kernels()
small = [each for each in entries.MADE if each.function.__module__ == openmp.__name__]
small += [each for each in entries.MADE if each.function.__name__ == "grouped"][:2]
names = [each.name for each in small]
made._kernels = lambda: [entries._nothing.name, *names]
def ask():  # as a worker that is kept on a core
    system.pin((system.core_numbers() or [0])[-1])
    made.asked(entries._nothing.name)
affinity = getattr(os, "sched_getaffinity", lambda process: 0)
with made:
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    end = time.monotonic() + 300
    while not made._processes or made._waiting or made._running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(affinity(each.pid) == affinity(0) for each in made._processes)
ready = [each.name for each in small if each.kept]
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
mine = entries._nothing.kept
entries._nothing.address, [each.address for each in small]
print(json.dumps([predicted, names, ready, mine, left, objects.SHARED, dict(objects.FOUND)]))
"""


def test_others_compile_what_the_operators_may_need(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHARED],
        env={**os.environ, "SOAPSTONE_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    predicted, small, ready, mine, left, shared, found = json.loads(done.stdout)
    named = [each.removeprefix("soapstone.kernels.cpu.").rpartition("_")[0] for each in predicted]
    assert named[0] == "training.updates:_adam"
    assert {"winograd.loops:parts_of_tiles", "attention.heads:forward"} <= set(named)
    assert named.count("products.grouped:grouped") > 1  # of one name, in a table: they come last
    assert named.index("products.grouped:grouped") > named.index("attention.heads:forward")
    assert "attention.heads:backward" not in named
    assert ready == small and len(small) > 6
    assert not mine and not left and not shared
    assert found == {"cache": len(small), "compiled": 1}


def test_what_another_is_compiling_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_compilation, "usable_cores", lambda: 2)
    monkeypatch.setattr(ParallelCompilation, "_begin", lambda self: None)
    ready, said = threading.Event(), list[str]()
    with ParallelCompilation(["relu"]) as made:
        assert objects.SHARED[-1] == made.asked
        made._running["a kernel"] = ready
        asking = threading.Thread(target=lambda: (made.asked("a kernel"), said.append("goes on")))
        asking.start()
        said.append("compiled")
        ready.set()
        asking.join()
        assert said == ["compiled", "goes on"]
        made._waiting = ["a kernel"]
        del made._running["a kernel"]
        made.asked("a kernel")
        assert not made._waiting  # this process compiles it
    assert made.asked not in objects.SHARED


def test_one_core_compiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_compilation, "usable_cores", lambda: 1)
    before = list(objects.SHARED)
    with ParallelCompilation(["relu"]):
        assert before == objects.SHARED
