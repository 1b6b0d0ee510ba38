"""Overheads of the runtime core, as JSON on standard output.

Traced: nanoseconds a no-op entry of a four-wide stencil on one and two workers, and the fixed
cost of a replay. Untraced: microseconds a Python point task. Analysis: microseconds for a launch
of 1,024 points, the first time and once its partitions are known.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from harness import write

from soapstone.runtime import Machine, Partition, Read, ReadWrite, Region, Runtime, Task, Write
from soapstone.runtime.program import nothing_address
from soapstone.runtime.transfer import NativeEntry

_ENTRY = NativeEntry(nothing_address(), 0, None)
NOOP = Task("noop", (Read, ReadWrite), bind=lambda context, arrays: _ENTRY)
PYTHON = Task("python", (Read, ReadWrite), lambda x, y: None)
MOVE = Task("move", (Read, Write), lambda x, y: None)


def best(function: Callable[[], Any], repeats: int) -> float:
    """The shortest of several runs, in seconds."""
    found = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        found = min(found, time.perf_counter() - start)
    return found


def traced(workers: int, steps: int, width: int = 4) -> dict[str, float]:
    """Costs of a replayed stencil of no-ops, and of capturing and compiling it."""
    with Runtime(Machine.local(workers)) as runtime:
        x, y = Region((width,), "f4", "x"), Region((width,), "f4", "y")
        pairs = [
            (Partition.halo(Partition.tiled(a, width), 1, 1), Partition.tiled(b, width))
            for a, b in ((x, y), (y, x))
        ]
        points = 2 * width * steps
        start = time.perf_counter()
        with runtime.capture("stencil") as recording:
            for _ in range(steps):
                for halo, tiles in pairs:
                    runtime.launch(NOOP, halo, tiles)
            analysed = time.perf_counter()
        compiled = time.perf_counter()
        small = runtime.capture(lambda: runtime.launch(NOOP, *pairs[0]))
        return {
            "ns_per_task": best(recording.trace.replay, 10) / points * 1e9,
            "us_per_replay": best(small.replay, 200) * 1e6,
            "capture_us_per_task": (analysed - start) / points * 1e6,
            "compile_us_per_task": (compiled - analysed) / points * 1e6,
        }


def untraced(workers: int, width: int, steps: int) -> float:
    """Microseconds a Python point task, launched and run."""
    with Runtime(Machine.local(workers)) as runtime:
        x, y = Region((width,), "f4", "x"), Region((width,), "f4", "y")
        a, b = Partition.tiled(x, width), Partition.tiled(y, width)

        def run() -> None:
            for _ in range(steps):
                runtime.launch(PYTHON, a, b)
            runtime.wait()

        return best(run, 5) / (width * steps) * 1e6


def analysis(points: int = 1024) -> dict[str, float]:
    """Microseconds to analyse one wide launch whose halo meets the tiles of the last one."""
    with Runtime(Machine.local(2)) as runtime:
        x, y = Region((4 * points,), "f4", "x"), Region((4 * points,), "f4", "y")
        tiles, out = Partition.tiled(x, points), Partition.tiled(y, points)
        halo = Partition.halo(tiles, 1, 1)
        found = {}
        with runtime.capture("wide"):
            runtime.fill(x, 0)
            runtime.launch(MOVE, out, tiles)
            for name in ("first_us", "again_us"):
                start = time.perf_counter()
                runtime.launch(MOVE, halo, out)
                found[name] = (time.perf_counter() - start) * 1e6
                runtime.launch(MOVE, out, tiles)
        return found


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="stencil steps of a traced run")
    steps = parser.parse_args().steps
    result = {
        "traced_1_worker": traced(1, steps),
        "traced_2_workers": traced(2, steps),
        "untraced_us_per_point": {
            "1_worker": untraced(1, 8, 100),
            "2_workers": untraced(2, 8, 100),
            "2_workers_64_points": untraced(2, 64, 20),
        },
        "analysis_1024_points": analysis(),
    }
    rows = [
        {"what": what, "figure": name, "measured": value}
        for what, figures in result.items()
        for name, value in figures.items()
    ]
    write(
        "runtime_overhead",
        "Overhead of the task runtime",
        "python benchmarks/runtime_overhead.py",
        ["what", "figure", "measured"],
        rows,
    )


if __name__ == "__main__":
    main()
