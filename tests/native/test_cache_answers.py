"""Stamps that a process tells later ones, of sources that are as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soapstone.cache.answers import state_of

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
