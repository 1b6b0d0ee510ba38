"""Costs of the model beyond boxes: sparse tiles, futures, subtasks.

Sparse: microseconds to analyse a launch of 1,024 points over tiles of random colours, read and
written; nanoseconds an element to gather and to scatter in a replay, beside NumPy's take and put on
one thread. Futures: microseconds for a task that returns a value and one that uses it. Nested:
microseconds a subtask. All are the shortest of several runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import best, write

from soapstone.native.entries import noop
from soapstone.runtime import (
    Machine,
    Partition,
    Read,
    ReadWrite,
    Region,
    Runtime,
    Scope,
    Task,
    by_field,
    task,
)

_ENTRY = noop()
NOOP = Task("noop", (ReadWrite,), bind=lambda context, arrays: _ENTRY)
MOVE = Task("move", (ReadWrite,), lambda x: None)


@task
def value(x: Read) -> float:
    return 1.0


@task
def use(x: ReadWrite, k: float) -> None:
    pass


@task
def one(x: ReadWrite) -> None:
    pass


@task
def parent(scope: Scope, x: ReadWrite, launches: int) -> None:
    tiles = Partition.tiled(scope.region("x"), 4)
    for _ in range(launches):
        scope.launch(one, tiles)


def analysis(points: int = 1024) -> dict[str, float]:
    """Milliseconds to analyse a sparse launch, and a launch over as many boxes."""
    with Runtime(Machine.local(2)) as runtime:
        x, colours = Region((64 * points,), "f4", "x"), Region((64 * points,), "i4", "colours")
        rng = np.random.default_rng(0)
        runtime.write(colours, rng.integers(0, points, colours.shape).astype("i4"))
        mine = by_field(runtime, colours, points, x)
        boxes = Partition.tiled(x, points)
        found = {}
        with runtime.capture("wide"):
            runtime.launch(MOVE, mine)
            found["sparse launch of 1,024 points, ms"] = (
                best(lambda: runtime.launch(MOVE, mine), 10) * 1e3
            )
        with runtime.capture("wide"):
            runtime.launch(MOVE, boxes)
            found["launch of 1,024 boxes, ms"] = best(lambda: runtime.launch(MOVE, boxes), 10) * 1e3
        return found


def movement(elements: int = 1 << 20, points: int = 8) -> dict[str, float]:
    """Nanoseconds an element, to gather and scatter it, on one worker and on two."""
    rng = np.random.default_rng(0)
    colour = rng.integers(0, points, elements).astype("i4")
    found = {}
    for cpus in (1, 2):
        with Runtime(Machine.local(cpus)) as runtime:
            x, colours = Region((elements,), "f4", "x"), Region((elements,), "i4", "colours")
            runtime.write(colours, colour)
            mine = by_field(runtime, colours, points, x)
            trace = runtime.capture(lambda mine=mine: runtime.launch(NOOP, mine))
            trace.replay()
            found[f"gather and scatter, {cpus} workers, ns an element"] = (
                best(trace.replay, 10) / elements * 1e9
            )
    data = np.zeros(elements, "f4")
    sets = [np.flatnonzero(colour == point) for point in range(points)]
    packed = [np.zeros(tile.size, "f4") for tile in sets]

    def numpy() -> None:
        for tile, part in zip(sets, packed):
            np.take(data, tile, out=part, mode="clip")
        for tile, part in zip(sets, packed):
            data[tile] = part

    found["NumPy take and put, ns an element"] = best(numpy, 10) / elements * 1e9
    return found


def futures(count: int = 500) -> dict[str, float]:
    """Microseconds for a future made and used."""
    with Runtime(Machine.local(1)) as runtime:
        x, y = Region((4,), "f4", "x"), Region((4,), "f4", "y")

        def plain() -> None:
            for _ in range(count):
                runtime.launch(one, x)
                runtime.launch(use, y, 1.0)
            runtime.wait()

        def passed() -> None:
            for _ in range(count):
                runtime.launch(use, y, runtime.launch(value, x))
            runtime.wait()

        return {
            "two launches, us": best(plain, 5) / count * 1e6,
            "two launches, a future between them, us": best(passed, 5) / count * 1e6,
        }


def nested(launches: int = 50) -> dict[str, float]:
    """Microseconds a subtask."""
    with Runtime(Machine.local(1)) as runtime:
        x = Region((64,), "f4", "x")
        tiles = Partition.tiled(x, 8)

        def run() -> None:
            runtime.launch(parent, tiles, launches)
            runtime.wait()

        def empty() -> None:
            runtime.launch(parent, tiles, 0)
            runtime.wait()

        return {
            "a subtask, us": best(run, 5) / (8 * 4 * launches) * 1e6,
            "a parent without subtasks, us": best(empty, 5) / 8 * 1e6,
        }


def main() -> None:
    """Measure, and write the table."""
    figures = {**analysis(), **movement(), **futures(), **nested()}
    write(
        "runtime_model",
        "Costs of the model beyond boxes",
        "python benchmarks/runtime/runtime_model.py",
        ["figure", "measured"],
        [{"figure": name, "measured": figure} for name, figure in figures.items()],
    )


if __name__ == "__main__":
    main()
