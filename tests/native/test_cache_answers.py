"""Stamps that a process tells later ones, of sources that are as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soapstone.cache import report, sources
from soapstone.cache.answers import state_of
from soapstone.engine import ahead_of_time

# The stamps of a kernel that chooses among all, and what was read for them.
PROGRAM = """
import json
from soapstone.cache import sources
read, of = [], sources._source
sources._source = lambda module: read.append(module) or of(module)
from soapstone.kernels.measure import made_of
from soapstone.kernels.registry import variants
print(json.dumps([made_of(variants("with_epilogue")), len(read)]))
"""


def _made(cache: Path) -> tuple[list[list[str]], int]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "SOAPSTONE_CACHE": str(cache)},
        check=True,
        capture_output=True,
        text=True,
    )
    stamps, read = json.loads(ran.stdout)
    return stamps, read


def test_a_second_process_reads_no_sources_for_its_stamps(tmp_path: Path) -> None:
    first, read = _made(tmp_path)
    assert len(first) > 1 and read > 50
    assert _made(tmp_path) == (first, 0)
    told = tmp_path / "sources"
    assert sum(report._told(told, "stamps").entries.values()) >= len(first)
    for file in told.iterdir():
        file.write_text('{"with_epilogue panels')
    assert _made(tmp_path) == (first, read)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_answers_that_were_changed_on_disk_are_asked_again(tmp_path: Path, place: float) -> None:
    """Also where they are still answers: nothing else would tell that they are wrong."""
    first, _ = _made(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*/*.json")}
    assert len(kept) > 2
    for path, held in kept.items():
        text = bytearray(held)
        letters = [at for at, byte in enumerate(text) if chr(byte).isalpha()]
        text[letters[int(place * len(letters))]] ^= 1
        path.write_bytes(text)
    assert _made(tmp_path)[0] == first
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*.json")} == kept


def test_the_state_of_sources_is_that_of_their_times_and_sizes(tmp_path: Path) -> None:
    file, inner = tmp_path / "one.py", tmp_path / "inner"
    inner.mkdir()
    for each in (file, inner / "two.py"):
        each.write_text("x = 1\n")
        os.utime(each, (1, 1))
    before, shallow = state_of(tmp_path), state_of(tmp_path, within=False)
    assert state_of(tmp_path) == before
    os.utime(inner / "two.py", (2, 2))
    assert state_of(tmp_path) != before
    assert state_of(tmp_path, within=False) == shallow
    file.write_text("x = 12\n")
    # Written while this process runs, which may have imported something else.
    assert state_of(tmp_path, within=False) != state_of(tmp_path, within=False)


# What is asked of operators, variants and sources, how many sources are read, and what is imported.
ASKED = """
import json, sys
from pathlib import Path
from soapstone.cache import answers
answers.PACKAGED = Path(sys.argv[1])
from soapstone.cache import sources
read, of = [], sources._source
sources._source = lambda module: read.append(module) or of(module)
from soapstone.ir import ops
from soapstone.kernels.registry import variants
told = [ops.declared(), ops.of_onnx(), ops.having("formula")]
told.append([each.name for each in variants("with_epilogue")])
from soapstone.kernels.cpu.elementwise import machine
told.append(sources.stamp(machine.__name__, compiled=True))
print(json.dumps([told, len(read), sum(name.startswith("soapstone.") for name in sys.modules)]))
"""


def _asked(place: Path, cache: Path) -> tuple[object, int, int]:
    ran = subprocess.run(
        [sys.executable, "-c", ASKED, str(place)],
        env={**os.environ, "SOAPSTONE_CACHE": str(cache)},
        check=True,
        capture_output=True,
        text=True,
    )
    told, read, modules = json.loads(ran.stdout)
    return told, read, modules


def test_what_is_asked_of_sources_may_come_with_the_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    ahead_of_time.tell(package)
    told, read, modules = _asked(package, tmp_path / "cache")
    assert read == 0
    found = (tmp_path / "cache").glob("*")
    assert {each.name for each in found} <= {"processor"}  # where only LLVM tells its features
    asked, *more = _asked(tmp_path / "none", tmp_path / "cache")
    assert told == asked and more[0] > 10 and more[1] > modules + 100
    # Of other sources, or damaged, it is not used.
    for file in package.glob("*/*.json"):
        file.rename(file.with_name("0" * 32 + ".json"))
    again = _asked(package, tmp_path / "other")
    assert again == (told, *more)


def test_contents_are_of_names_and_bytes_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(top: Path, late: bool = False) -> str:
        monkeypatch.setattr(sources, "_folder", lambda name: top.joinpath(*name.split(".")[1:]))
        for file in top.rglob("*.py"):
            if not late:
                os.utime(file, (len(top.name), 1))
        return sources.contents.__wrapped__()

    def made(name: str, text: str = "x = 1\n", file: str = "one.py", of: str = "kernels") -> Path:
        top = tmp_path / name
        for package in ("cache", "ir", "kernels", "native", "runtime/tracing"):
            (top / package / "inner").mkdir(parents=True)
            (top / package / "__init__.py").write_text("")
        (top / of / "inner" / file).write_text(text)
        (top / "system.py").write_text("")
        (top / "frontend").mkdir()
        return top

    first = made("first")
    known = found(first)
    assert found(made("elsewhere")) == known
    (first / "kernels" / "cuda").mkdir()
    for folder in ("frontend", "runtime", "kernels/cuda"):  # of which no package tells anything
        (first / folder / "one.py").write_text("x = 1\n")
    assert found(first) == known
    others = [
        made("text", "x = 2\n"),
        made("name", file="two.py"),
        made("folder", of="ir"),
        made("moved", "", "two.py"),
    ]
    assert len({known, *map(found, others)}) == 5
    (first / "system.py").write_text("y = 2\n")
    assert found(first) != known
    (first / "system.py").write_text("")
    assert found(first) == known
    (first / "system.py").write_text("")  # while this process runs, which may have imported another
    assert found(first, late=True) != known


def test_contents_are_of_all_that_kernels_are_made_of() -> None:
    modules = {m for each in ahead_of_time.kernels() for m in sources.modules_of(each.function)}
    for module in sources.closure(modules, compiled=True):
        _, *inner = module.split(".")
        told = len(inner) < 2 or ".".join(inner).startswith(tuple(f"{n}." for n in sources._TOLD))
        assert told and not set(sources._UNTOLD) & set(inner), module


TABLE = """
import json
from soapstone.kernels import cpu
print(json.dumps(cpu._all()))
"""


@pytest.mark.parametrize("cpu", ["generic", "x86-64-v3"])
def test_the_table_of_variants_is_that_of_all_processors(tmp_path: Path, cpu: str) -> None:
    told = []
    for settings in ({}, {"NUMBA_CPU_NAME": cpu, "ONEDNN_MAX_CPU_ISA": "AVX2"}):
        ran = subprocess.run(
            [sys.executable, "-c", TABLE],
            env={**os.environ, **settings, "SOAPSTONE_CACHE": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        )
        told.append(json.loads(ran.stdout))
    assert told[0] == told[1]
