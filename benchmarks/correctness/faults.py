"""Faults injected into running programs: no hang, no wrong result, one error that names the place.

Kinds: an exception in a task body, in a bind function, in a mapper's answer; delays; memories that
are too small; interrupts; a killed writer of checkpoints; and on one rank of two an exception, an
exception outside of tasks, SIGKILL, SIGSTOP, exhausted memory, and messages of the wrong size. Each
follows from its seed, and runs in a process that counts as hung after 30 seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write
from helpers.process_faults import LIMIT_S, killed, rank_fault
from helpers.processes import mpiexec
from helpers.runtime.faults import KINDS, inject

_SLACK_S = 60.0  # a whole injection runs its program three times


def one(kind: str, seed: int, folder: str) -> str:
    """Inject one fault; what happened.

    Raises: Wrong.
    """
    if kind == "kill a writer":
        return killed(seed, Path(folder)).happened
    if kind == "rank":
        return rank_fault(seed).happened
    return inject(kind, seed).happened


def serve(pipe: Connection, folder: str) -> None:
    """Inject the faults that are asked for, and answer with what failed and what happened."""
    while True:
        kind, seed = pipe.recv()
        begin = time.perf_counter()
        try:
            failed, happened = "", one(kind, seed, folder)
        except Exception as error:
            failed, happened = f"{type(error).__name__}: {error}", "failed"
        pipe.send((failed, happened, time.perf_counter() - begin))


class Child:
    """A process that injects faults, and is replaced when it hangs or dies."""

    def __init__(self, folder: str) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._folder = folder
        self._begin()

    def _begin(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs, self._folder))
        self._process.start()
        theirs.close()

    def ask(self, kind: str, seed: int) -> tuple[str, str, float]:
        """What failed (nothing: ""), what happened, and how long it took."""
        self._pipe.send((kind, seed))
        try:
            if self._pipe.poll(LIMIT_S + _SLACK_S):
                answer: tuple[str, str, float] = self._pipe.recv()
                return answer
            failed = "hung"
        except EOFError:
            failed = "died"
        self.close()
        self._begin()
        return failed, failed, LIMIT_S + _SLACK_S

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def main() -> None:
    """Inject faults, print those that failed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    kinds = [*KINDS, "kill a writer"]
    if mpiexec() is not None:
        kinds += ["rank"] * 3  # a third of all
    found: dict[str, list[tuple[str, str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        child = Child(folder)
        for number in range(given.count):
            kind, seed = kinds[number % len(kinds)], given.first + number
            answer = child.ask(kind, seed)
            found[kind].append(answer)
            if answer[0]:
                print(f"{kind}, seed {seed}: {answer[0]}", flush=True)
        child.close()
    rows: list[dict[str, Any]] = [
        {
            "fault": kind,
            "injected": len(answers),
            "struck": sum(happened != "no effect" for _, happened, _ in answers),
            "wrong": sum(bool(failed) for failed, _, _ in answers),
            "longest s": max(seconds for _, _, seconds in answers),
        }
        for kind, answers in found.items()
    ]
    write(
        "faults",
        "Injected faults",
        f"python benchmarks/correctness/faults.py --count {given.count}",
        ["fault", "injected", "struck", "wrong", "longest s"],
        rows,
    )
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
