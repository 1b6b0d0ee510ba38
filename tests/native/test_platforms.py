"""Calls that are not on every operating system are in one file, and what stands in for them works.

The scan looks at the syntax of the whole tree; the runs take the calls away from `os` and other
modules, as on a system that lacks them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from soapstone.cache.places import root
from soapstone.files import write

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "benchmarks", *(each.parent for each in ROOT.glob("*/__init__.py"))]
HOME = ROOT / "soapstone" / "system.py"
ABSENT = {  # what some system lacks, by module
    "os": (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "sysconf", "fork", "getuid"),
        *("getloadavg", "killpg", "setsid"),
    ),
    "mmap": ("MADV_HUGEPAGE", "MADV_DONTNEED"),
    "time": ("CLOCK_MONOTONIC", "clock_gettime", "clock_gettime_ns"),
}
ONLY_BENCHMARKS = {"os.killpg", "fork"}  # they end launchers of ranks, and try graphs that crash
MODULES = frozenset({"resource", "fcntl", "pwd", "grp", "termios"})
PATHS = ("/proc/", "/sys/", "/dev/")
LIBRARIES = ("libgomp", "libc.so", "libomp")
WORDS = ("fork", "forkserver", "clock_gettime", "sched_yield")
# A file in whose text none of it is has no offence: most need not be parsed.
SUSPECT = re.compile(
    "|".join([*sum(ABSENT.values(), ()), *MODULES, *PATHS, *LIBRARIES, *WORDS, "madvise"])
)


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        for file in sorted(folder.rglob("*.py")):
            if file != HOME:
                yield file


def _offences(file: Path) -> Iterator[str]:
    text = file.read_text()
    if not SUSPECT.search(text):
        return
    tree = ast.parse(text)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in ABSENT.get(node.value.id, ()):
                found = f"{node.value.id}.{node.attr}"
            elif node.attr == "madvise":
                found = "madvise"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            module = getattr(node, "module", None)
            found = ", ".join(sorted((names | {module}) & MODULES)) or None
            if module in ABSENT:
                found = ", ".join(sorted(names & set(ABSENT[module]))) or found
        elif isinstance(node, ast.Constant) and id(node) not in docs:
            value = node.value if isinstance(node.value, str) else ""
            named = value.startswith(PATHS) or any(name in value for name in LIBRARIES)
            if named or value in WORDS:
                found = value
        if found and not (found in ONLY_BENCHMARKS and file.is_relative_to(ROOT / "benchmarks")):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {found}"


def test_calls_that_some_system_lacks_are_in_one_file() -> None:
    assert [offence for file in _files() for offence in _offences(file)] == []


WITHOUT = """
    import builtins, ctypes, io, mmap, os, sys, time
    import pathlib

    ABSENT = {absent!r}
    for name in ("resource", "fcntl"):
        sys.modules[name] = None  # an import of it is an ImportError
    import multiprocessing, numpy, tempfile  # the standard library's own use of them
    for module in ("os", "mmap"):  # not the clock: native code must have one
        for name in ABSENT[module]:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)
    real, load = io.open, ctypes.CDLL.__init__

    def opened(file, *given, **named):
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "no such file", str(file))
        return real(file, *given, **named)

    io.open = builtins.open = opened

    def loaded(self, name, *given, **named):
        if name is not None and "gomp" in str(name) and "dnnl" not in str(name):
            raise OSError("no such library")
        load(self, name, *given, **named)

    ctypes.CDLL.__init__ = loaded
"""
WORK = """
    import numpy as np
    import soapstone
    from soapstone import Model, SGD, system
    from soapstone.native.threads import openmp

    assert system.core_numbers() is None and system.usable_cores() >= 1
    assert system.resident_bytes() == 0 and system.group_limits() == []
    assert not openmp.available() and system.preemptions() == 0
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 3, 8, 8), np.float32), rng.integers(0, 4, 16)

    model = Model("net", seed=0)
    image = model.input("x", (8, 3, 8, 8))
    hidden = model.conv2d(image, 16, kernel=3, padding=1, activation="relu")
    model.output(model.dense(model.flatten(model.max_pool2d(hidden, 2)), 4))
    model.compile(SGD(0.01), loss="cross_entropy", cpus=2)
    first = model.evaluate(x, y)["loss"]
    model.fit(x, y, epochs=3)
    assert model.evaluate(x, y)["loss"] < first
    with model.inference() as session:
        made = session.run({"x": x[:8]})
        np.testing.assert_allclose(next(iter(made.values())), model.predict(x[:8]), rtol=1e-4)
    result = soapstone.optimize(model, candidates=5, seconds=5)
    print(result)
"""


def test_training_inference_and_optimize_run_without_them(tmp_path: Path) -> None:
    script = textwrap.dedent(WITHOUT.replace("{absent!r}", repr(ABSENT))) + textwrap.dedent(WORK)
    environment = {**os.environ, "SOAPSTONE_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(root())}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"contents")
    reader.join(10)
    assert found == [b"contents"] and pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_archives_are_written_to_a_device_that_has_no_places() -> None:
    write(os.devnull, lambda stream: np.savez(stream, x=np.zeros(3), y=np.ones(2)))
