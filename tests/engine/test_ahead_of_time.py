"""Kernels that are compiled ahead: all that there are, for a processor that is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from soapstone.cache.objects import LEVELS, features, held
from soapstone.engine import ahead_of_time
from soapstone.engine.ahead_of_time import kernels, settings_of, ship
from soapstone.kernels.cpu.reduction.reduce import MONOIDS, reducing
from soapstone.kernels.cpu.substrate.runs import LOOPS, POWERS, SUM


def test_kernels_of_modules_that_are_imported_late_are_compiled_ahead_too() -> None:
    names = {f"{each.function.__module__}.{each.function.__name__}" for each in kernels()}
    assert {
        "soapstone.kernels.cpu.onednn.steps.primitive",
        "soapstone.runtime.tracing.program._run",
        "soapstone.kernels.cpu.elementwise.lane_loops.instruction_relu",
        "soapstone.kernels.cpu.recurrent.gates.gates_lstm",
        "soapstone.kernels.cpu.recurrent.gates.gates_lstm_within",
    } <= names


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level: 'x86-64-v9' found; one of x86-64-v4"):
        ship("x86-64-v9")


@pytest.mark.parametrize(("level", "vectors"), list(zip(LEVELS, (32, 32, 8, 4), strict=True)))
def test_blocks_of_a_level_fit_its_registers(
    level: str, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings_of(level).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert features() == frozenset(LEVELS[level])
    assert held.__wrapped__() == vectors


@pytest.mark.parametrize(
    ("name", "told", "has"),
    [
        ("generic", "", ()),
        ("generic", "+avx2,+fma,-avx512f", ("avx2", "fma")),
        ("", "-avx512f", ()),
        ("x86-64-v3", "-prefer-256-bit,-fma,+avxvnni", {*LEVELS["x86-64-v3"], "avxvnni"} - {"fma"}),
    ],
)
def test_kernels_use_what_settings_of_numba_ask_for(
    name: str, told: str, has: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", told)
    assert features() == frozenset(has)


_MODULES = (
    *(f"soapstone.kernels.cpu.products.{name}" for name in ("nbits", "quads")),
    "soapstone.native.lanes",
)
_PACKAGE = f"""
import sys
from pathlib import Path
from soapstone.engine.ahead_of_time import kernels
mine = [each for each in kernels() if each.function.__module__ in {_MODULES}]
for each in mine:
    each.package(Path(sys.argv[1]))
print(len(mine))
"""


def test_a_reduction_has_the_loops_of_its_monoid_alone() -> None:
    made = {each.function.__name__: each for each in kernels()}
    for monoid, name in MONOIDS.items():
        kernel, own = made[f"reduce_{name}"], SUM if monoid == POWERS else monoid
        held = [cell.cell_contents for cell in kernel.function.__closure__ or ()]
        found = {of for of, loops in LOOPS.items() if any(loop in held for loop in loops)}
        assert kernel is reducing(monoid) and found == {own}


@pytest.mark.long
@pytest.mark.parametrize("level", [*LEVELS, "generic"])
def test_kernels_use_what_their_level_has(level: str, tmp_path: Path) -> None:
    """LLVM aborts on instructions that it is asked for and the level lacks."""
    command = [sys.executable, "-c", _PACKAGE, str(tmp_path)]
    environment = {**os.environ, **settings_of(level)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-400:]
    assert int(done.stdout) == len(list(tmp_path.iterdir())) > 0


# Processes compile the smallest kernels, or all, and the parent says how far they are.
_SHARED = """
import json, os, signal, sys
from soapstone.engine import ahead_of_time
every = ahead_of_time.kernels()
small = ("soapstone.native.entries", "soapstone.native.folds", "soapstone.native.relocation")
mine = [n for n, each in enumerate(every) if each.function.__module__ in small]
told = []
def progress(stage, done, total):
    told.append((stage, done, total))
    if sys.argv[1] == "interrupt" and done == 2:
        os.killpg(0, signal.SIGINT)
before = [n for n in mine if every[n].kept]
try:
    ahead_of_time._compile(mine if sys.argv[1] == "some" else range(len(every)), progress)
except KeyboardInterrupt:
    told.append("interrupted")
try:
    os.waitpid(-1, os.WNOHANG)
    told.append("some are left")
except ChildProcessError:
    pass
after = [n for n in mine if every[n].kept]
if sys.argv[1] == "some":
    assert [every[n].address for n in mine]
    from soapstone.cache.objects import FOUND
    assert FOUND["cache"] == len(mine) and not FOUND["compiled"]
print(json.dumps([len(mine), len(before), len(after), told]))
"""


def _shared(how: str, cache: Path) -> tuple[int, int, int, list[object]]:
    here = cache / "here"  # which has the names of modules that these processes import
    (here / "soapstone").mkdir(parents=True, exist_ok=True)
    (here / "queue.py").write_text("raise ImportError('of the folder that a process begins in')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SHARED, how],
        cwd=here,
        env={**os.environ, "SOAPSTONE_CACHE": str(cache), "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    mine, before, after, told = json.loads(done.stdout)
    return mine, before, after, told


def test_processes_share_what_is_compiled_and_others_find_it(tmp_path: Path) -> None:
    mine, before, after, told = _shared("some", tmp_path)
    assert mine > 2 and (before, after) == (0, mine)
    assert told == [["compiling kernels", done, mine] for done in range(mine + 1)]


@pytest.mark.skipif(sys.platform == "win32", reason="interrupts of a group are POSIX's")
def test_an_interrupt_ends_what_compiles_without_a_word(tmp_path: Path) -> None:
    *_, told = _shared("interrupt", tmp_path)
    assert told[-1] == "interrupted" and len(told) == 4


def test_a_kernel_that_cannot_be_compiled_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(subprocess.CalledProcessError):
        ahead_of_time._compile([0], None, str(tmp_path / "file"))


_LISTED = """
from soapstone.engine.ahead_of_time import kernels
print(*(each.function.__module__ for each in kernels()))
"""


def test_processes_number_kernels_as_their_settings_have_them() -> None:
    """Of a level without conversions of half precision there are fewer."""
    told = []
    for command in (["-c", _LISTED], ["-m", "soapstone.engine.ahead_of_time", "all"]):
        ran = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
            input="",
            check=True,
            capture_output=True,
            text=True,
        )
        told.append(ran.stdout.split())
    assert told[0] == told[1] != []
