"""Faults of whole processes: a writer of checkpoints is killed, a rank of two goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from helpers.processes import PROGRAMS, mpiexec, rank_environment
from helpers.runtime.faults import Outcome, Wrong

from soapstone.frontend.training import checkpoint

STEPS = 12  # of a training that is killed
LIMIT_S = 30.0  # nothing may take longer to end after a fault
SILENCE_S = 3.0  # after which a rank that says nothing counts as hung
RANK_KINDS = ("raise", "kill", "stop", "memory", "size", "program")
MODES = ("untraced", "traced", "automatic")
_SAID = {
    "raise": ("task 'work', point", "ValueError: it broke"),
    "kill": ("died", "illed", "igned"),
    "stop": ("has not ended after 3 s", "has not come to the same place of the program within 3 s"),
    "memory": ("region 'huge' needs",),
    "size": ("bytes", "task 'receive"),
    "program": ("the program itself failed",),
}


def trained() -> np.ndarray:
    """What an undisturbed training ends with."""
    weight = np.zeros(40000)
    for step in range(STEPS):
        weight = weight * (1.0 + 1.0 / (step + 2))
        weight += np.sin(weight) + (step == 0)
    return weight


def killed(seed: int, folder: Path) -> Outcome:
    """Kill a training that writes checkpoints, then let it go on from what is there.

    Raises: Wrong for a broken checkpoint, or other numbers than those of one undisturbed run.
    """
    rng = np.random.default_rng([seed, 13])
    path = folder / f"killed{seed}{checkpoint.SUFFIXES[seed % 2]}"
    command = [sys.executable, str(PROGRAMS / "fault_training.py"), str(path), str(STEPS)]
    after = int(rng.integers(0, STEPS))
    pause_s = float(rng.uniform(0, 0.012))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        time.sleep(pause_s)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    done = int(rest[-1]) if rest else after
    there = 0
    if path.exists():
        try:
            there = checkpoint.load(path)[1]["step"]
        except checkpoint.CheckpointError as error:
            raise Wrong(f"seed {seed}: the checkpoint is broken: {error}") from error
    if not done <= there <= done + 1:
        raise Wrong(f"seed {seed}: the checkpoint is of step {there}, {done} or the next needed")
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if again.returncode:
        raise Wrong(f"seed {seed}: training does not go on: {again.stderr}")
    arrays, metadata = checkpoint.load(path)
    if metadata["step"] != STEPS or not np.array_equal(arrays["weight"], trained()):
        raise Wrong(f"seed {seed}: training went on from step {there} to other numbers")
    return Outcome("kill a writer", seed, f"killed after step {done}")


def rank_fault(seed: int) -> Outcome:
    """Two ranks, the second of which goes wrong somewhere.

    Raises: Wrong for ranks that do not end, end well, or do not say what went wrong.
    """
    rng = np.random.default_rng([seed, 17])
    kind = RANK_KINDS[seed % len(RANK_KINDS)]
    mode = MODES[int(rng.integers(0, len(MODES)))]
    after = int(rng.integers(0, 200 if mode == "automatic" else 24))
    launcher = mpiexec()
    if launcher is None:
        return Outcome("no mpiexec", seed, "no effect")
    command = [launcher, "-n", "2", sys.executable, str(PROGRAMS / "mpi" / "faults.py")]
    what = f"{kind}, {mode}, after {after} points"
    # A rank that is only slow, on a busy computer, is not silent.
    silence_s = SILENCE_S if kind == "stop" else 2 * LIMIT_S
    begin = time.monotonic()
    with subprocess.Popen(
        [*command, kind, mode, str(after)],
        env=rank_environment(silence_s),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Wrong(f"ranks ({what}): nothing ended after {LIMIT_S:g} s") from None
    seconds = time.monotonic() - begin
    said = {line.partition(": ")[2] for line in told.splitlines() if line.startswith("rank ")}
    if process.returncode == 0 or "ended" in said:
        raise Wrong(f"ranks ({what}): the fault was not noticed: {told[-1500:]}")
    if not any(part in told for part in _SAID[kind]):
        raise Wrong(f"ranks ({what}): the error does not say what went wrong: {told[-1500:]}")
    if len(said) > 1 or (kind == "size" and said):
        raise Wrong(f"ranks ({what}): wrong results came out: {said}")
    return Outcome(f"rank: {kind}", seed, f"{mode}, ended in {seconds:.1f} s")
