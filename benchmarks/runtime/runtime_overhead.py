"""Overheads of the runtime core, as JSON on standard output.

Traced: nanoseconds a no-op entry of a four-wide stencil on one and two workers, the same with
Python bodies, and the fixed cost of a replay. Untraced: microseconds a Python point task, and the
bytes of 100,000 tasks in flight. Analysis: microseconds for a launch of 1,024 points, the first
time and once its partitions are known. Processes: how many times faster two processors run bodies
that hold the interpreter lock than one, as processes and as threads. Targets are in the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import best, serve, write

from soapstone.native.entries import noop
from soapstone.runtime import Machine, Partition, Read, ReadWrite, Region, Runtime, Task, Write
from soapstone.system import resident_bytes

_ENTRY = noop()
NOOP = Task("noop", (Read, ReadWrite), bind=lambda context, arrays: _ENTRY)
PYTHON = Task("python", (Read, ReadWrite), lambda x, y: None)
MOVE = Task("move", (Read, Write), lambda x, y: None)


TARGETS = {
    ("traced_1_worker", "ns_per_task"): "<= 200",
    ("traced_2_workers", "ns_per_task"): "<= 200",
    ("traced_python_ns_per_task", "1_worker"): "<= 3000",
    ("traced_python_ns_per_task", "2_workers"): "<= 3000",
    ("untraced_us_per_point", "1_worker"): "<= 30",
    ("untraced_us_per_point", "2_workers"): "<= 30",
    ("untraced_us_per_point", "2_workers_64_points"): "<= 30",
    ("in_flight_100000_tasks", "megabytes"): "<= 1000",
    ("analysis_1024_points", "first_us"): "<= 5000",
    ("analysis_1024_points", "again_us"): "<= 5000",
}


def traced(workers: int, steps: int, task: Task = NOOP, width: int = 4) -> dict[str, float]:
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
                    runtime.launch(task, halo, tiles)
            analysed = time.perf_counter()
        compiled = time.perf_counter()
        small = runtime.capture(lambda: runtime.launch(task, *pairs[0]))
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


def in_flight(tasks: int = 100_000, width: int = 100) -> dict[str, float]:
    """Megabytes and microseconds a task of launches that wait for one task to end."""
    go = threading.Event()
    hold = Task("hold", (ReadWrite,), lambda x: go.wait())
    with Runtime(Machine.local(2)) as runtime:
        x, y = Region((width,), "f4", "x"), Region((width,), "f4", "y")
        a, b = Partition.tiled(x, width), Partition.tiled(y, width)
        runtime.launch(hold, a)
        before, start = resident_bytes(), time.perf_counter()
        for _ in range(tasks // width):
            runtime.launch(PYTHON, a, b)
        launched_s = time.perf_counter() - start
        held = resident_bytes() - before
        go.set()
        runtime.wait()
        return {"megabytes": held / 1e6, "launch_us_per_task": launched_s / tasks * 1e6}


def analysis(points: int = 1024, samples: int = 5) -> dict[str, float]:
    """Microseconds to analyse one wide launch whose halo meets the tiles of the last one.

    The median of several numbers of points that differ a little, so that each is a first time.
    """
    found: dict[str, list[float]] = {"first_us": [], "again_us": []}
    for count in range(points, points + samples):
        with Runtime(Machine.local(2)) as runtime:
            x, y = Region((4 * count,), "f4", "x"), Region((4 * count,), "f4", "y")
            tiles, out = Partition.tiled(x, count), Partition.tiled(y, count)
            halo = Partition.halo(tiles, 1, 1)
            with runtime.capture("wide"):
                runtime.fill(x, 0)
                runtime.launch(MOVE, out, tiles)
                for times in found.values():
                    start = time.perf_counter()
                    runtime.launch(MOVE, halo, out)
                    times.append((time.perf_counter() - start) * 1e6)
                    runtime.launch(MOVE, out, tiles)
    return {name: statistics.median(times) for name, times in found.items()}


def spin(x: Any) -> None:
    """A body that holds the interpreter lock, some 50 ms."""
    value = 0.25
    for _ in range(1_000_000):
        value = value * value - 0.5
    x[0] = value


SPIN = Task("spin", (ReadWrite,), spin)


def speedup(processes: bool) -> float:
    """How many times faster two processors run eight such bodies than one."""
    seconds = []
    for cpus in (1, 2):
        with Runtime(Machine.local(cpus, processes=processes)) as runtime:
            x = Region((8,), "f8", "x")
            tiles = Partition.tiled(x, 8)

            def run(runtime: Runtime = runtime, tiles: Partition = tiles) -> None:
                runtime.launch(SPIN, tiles)
                runtime.wait()

            run()  # starts the processes
            seconds.append(best(run, 5))
    return seconds[0] / seconds[1]


def peer(what: str, steps: int) -> None:
    """Be a process that measures "traced 2 workers" or the like, in rounds: ms for 1,000 tasks."""
    kind, workers = what.split()[:2]

    def one() -> dict[str, float]:
        if kind == "traced":
            return {"ms": traced(int(workers), steps)["ns_per_task"] * 1e-3}
        return {"ms": untraced(int(workers), 8, 100)}

    serve(one)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="stencil steps of a traced run")
    parser.add_argument("--peer", help="measure this alone, in rounds: traced 1 worker")
    options = parser.parse_args()
    steps = options.steps
    if options.peer:
        peer(options.peer, steps)
        return
    python = [traced(workers, steps // 4, PYTHON)["ns_per_task"] for workers in (1, 2)]
    result: dict[str, dict[str, float]] = {
        "traced_1_worker": traced(1, steps),
        "traced_2_workers": traced(2, steps),
        "traced_python_ns_per_task": {"1_worker": python[0], "2_workers": python[1]},
        "untraced_us_per_point": {
            "1_worker": untraced(1, 8, 100),
            "2_workers": untraced(2, 8, 100),
            "2_workers_64_points": untraced(2, 64, 20),
        },
        "in_flight_100000_tasks": in_flight(),
        "analysis_1024_points": analysis(),
        "two_processors_over_one": {"processes": speedup(True), "threads": speedup(False)},
    }
    rows = [
        {"what": what, "figure": name, "measured": value, "target": TARGETS.get((what, name), "")}
        for what, figures in result.items()
        for name, value in figures.items()
    ]
    write(
        "runtime_overhead",
        "Overhead of the task runtime",
        "python benchmarks/runtime/runtime_overhead.py",
        ["what", "figure", "measured", "target"],
        rows,
    )


if __name__ == "__main__":
    main()
