"""How long threads of OpenMP look for work: what decides it, and what makes the difference."""

from __future__ import annotations

import subprocess
import sys

import pytest

from soapstone import system
from soapstone.runtime.executors.waiting import Waiting


def _told(
    lost_in_a_run: list[int], seconds: float = 1 / 64, idle: float = 0.0
) -> list[tuple[int, bool]]:
    """Return after which runs, one after another, threads were told to look little, or long."""
    lost, told, now = 0, list[tuple[int, bool]](), 0.0
    waiting = Waiting(lambda: lost, lambda brief: told.append((number, brief)))
    for number, more in enumerate(lost_in_a_run):  # noqa: B007
        lost += more
        now += seconds + idle
        waiting.ran(seconds, now)
    number = -1
    waiting.rest()
    return told


def test_threads_look_little_while_they_are_taken_off_their_cores() -> None:
    assert _told([0, 0, 1, 0, 0] * 100) == []  # sixteen times a second at most
    # The first run begins a window, of four; it is tried again after 0.5 s, then 1 s, then 2 s.
    changes = (4, True), (36, False), (41, True), (105, False), (110, True), (238, False)
    assert _told([2] * 300) == [*changes, (243, True), (-1, False)]
    assert _told([2] * 20 + [0] * 200) == [(4, True), (36, False)]


def test_long_runs_are_windows_of_their_own() -> None:
    assert _told([9, 9], seconds=0.2) == [(1, True), (-1, False)]
    assert _told([9, 0, 0], seconds=0.2) == []  # what was lost before the first run has ended


def test_what_is_lost_between_runs_is_spread_over_that_time() -> None:
    assert _told([0, 0, 0, 1] * 50, seconds=0.001, idle=0.1) == []


_CROWDS = """
import threading
from pathlib import Path
from soapstone.runtime.executors.waiting import Crowd
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
crowd, before = Crowd(lambda: 0), threads()
crowd(True)
while threads() < before + 2:  # its leader, and one more at least
    pass
crowd(False)
print(threading.active_count())
while threads() > before:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_team_that_does_nothing_comes_and_goes() -> None:
    if system.openmp() is None:
        pytest.skip("no OpenMP")
    done = subprocess.run(
        [sys.executable, "-c", _CROWDS], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1\n", done.stderr
