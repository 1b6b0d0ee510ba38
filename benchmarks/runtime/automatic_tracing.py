"""Automatic tracing beside untraced launches and explicit traces: the same loop, three ways.

Microseconds a point task, launches included, of a loop of small launches: the best of several runs
after the repeat was found. "no repeat" varies a scalar in every launch, so that the finder works
and gains nothing; "heavy" has tasks of about a millisecond, where launching is no cost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write

from soapstone.native.entries import noop
from soapstone.runtime import Machine, Partition, Read, ReadWrite, Region, Runtime, Task

_ENTRY = noop()
WIDTH, BODY, TURNS = 4, 6, 64
TASKS = {
    "native": Task("native", (Read, ReadWrite), bind=lambda context, arrays: _ENTRY),
    "python": Task("python", (Read, ReadWrite), lambda x, y: None),
    "no repeat": Task("varied", (Read, ReadWrite), lambda a, x, y: None),
    "heavy": Task("heavy", (Read, ReadWrite), lambda x, y: np.sin(x, out=y)),
}


def measure(kind: str, mode: str, workers: int, rounds: int) -> dict[str, Any]:
    """One program in one mode: microseconds a point task and a launch."""
    size, turns = (4 * 100_000, 8) if kind == "heavy" else (64, TURNS)
    with Runtime(Machine.local(workers), automatic=mode == "automatic") as runtime:
        regions = [Region((size,), "f8", f"r{i}") for i in range(BODY + 1)]
        tiles = [Partition.tiled(region, WIDTH) for region in regions]
        task = TASKS[kind]
        count = 0

        def body() -> None:
            nonlocal count
            for i in range(BODY):
                if kind == "no repeat":
                    count += 1
                    runtime.launch(task, count, tiles[i], tiles[i + 1])
                else:
                    runtime.launch(task, tiles[i], tiles[i + 1])

        def loop() -> None:
            for _ in range(turns):
                if mode == "explicit":
                    with runtime.trace("body"):
                        body()
                else:
                    body()
            runtime.wait()

        step: Callable[[], object] = loop
        if mode == "replayed":
            trace = runtime.capture(body)

            def step() -> None:
                for _ in range(turns):
                    trace.replay()

        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            step()
            found.append((time.perf_counter() - begin) * 1e6)
        launches = BODY * turns
        best = min(found[rounds // 2 :])
        traced = runtime.statistics.launches_traced
        return {
            "tasks": kind,
            "mode": mode,
            "workers": workers,
            "us a task": best / (launches * WIDTH),
            "us a launch": best / launches,
            "first loop us a task": found[0] / (launches * WIDTH),
            "launches traced": f"{traced / (launches * rounds):.0%}" if mode == "automatic" else "",
        }


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with Runtime(Machine.local(1)) as runtime:  # what compiles at first use is compiled
        runtime.capture(lambda: runtime.fill(Region((1,), "f8", "x"), 0)).replay()
    rows = []
    for workers in (1, 2):
        for kind in TASKS:
            for mode in ("untraced", "automatic", "explicit", "replayed"):
                if kind == "no repeat" and mode in ("explicit", "replayed"):
                    continue
                rows.append(measure(kind, mode, workers, rounds if kind != "heavy" else 4))
    write(
        "automatic_tracing",
        "Automatic tracing",
        "python benchmarks/runtime/automatic_tracing.py",
        list(rows[0]),
        rows,
    )


if __name__ == "__main__":
    main()
