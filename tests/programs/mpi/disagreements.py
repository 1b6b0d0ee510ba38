"""Ranks that do different things: `mpiexec -n 2 python disagreements.py KIND`, in safe mode."""

from __future__ import annotations

import sys

import numpy as np
from helpers.processes import say

from soapstone.runtime import DefaultMapper, Partition, Read, ReadWrite, Region, Runtime, task
from soapstone.runtime.machines.start import machine_of, rank_of, start

KIND = sys.argv[1]
OTHER = rank_of("mpi") == 1


@task
def scale(factor: float, x: ReadWrite) -> None:
    x *= factor


@task
def look(x: Read) -> None:
    """Reads."""


class Moody(DefaultMapper):
    """Places points by who it is."""

    def place_all(self, launch):  # type: ignore[no-untyped-def]
        wrong = {"mapper": "scale", "untraced": "look"}.get(KIND) == launch.name
        return np.full(launch.points, int(OTHER and wrong))


def step(runtime: Runtime, x: Region) -> None:
    parts = Partition.tiled(x, 3 if OTHER and KIND == "tiles" else 2)
    runtime.launch(scale, 2.5 if OTHER and KIND == "scalar" else 2.0, parts)
    if OTHER and KIND == "task":
        runtime.launch(scale, 1.0, parts)
    else:
        runtime.launch(look, parts)


def main() -> None:
    x, y = Region((6,), "f8", "x"), Region((6,), "f8", "y")
    with start("mpi", machine_of("mpi", cpus=1), Moody()) as runtime:
        runtime.write(x, np.arange(6.0) + (OTHER and KIND == "write"))
        runtime.fill(y, 1.0 if OTHER and KIND == "fill" else 0.0)
        live = runtime.array(y)
        live[2] = 7.0 if OTHER and KIND == "array" else 3.0
        runtime.launch(look, Partition.tiled(y, 2))
        for _ in range(3):
            with runtime.trace("step"):
                step(runtime, x)
        if not (OTHER and KIND == "end"):
            runtime.launch(look, Partition.tiled(x, 2))
        if OTHER and KIND == "read":
            runtime.read(y)
        found = runtime.read(x)
    say(f"ended {found.tolist()}")


if __name__ == "__main__":
    main()
