"""A program for several ranks: it opens and closes more runtimes than communicators are left."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from helpers.processes import say
from mpi4py import MPI

from soapstone.runtime import DefaultMapper, Partition, ReadWrite, Region, task
from soapstone.runtime.machines.start import machine_of, start


@task
def double(x: ReadWrite) -> None:
    x *= 2


def main() -> None:
    machine = machine_of("mpi", cpus=1)
    others: list[MPI.Comm] = []
    with suppress(MPI.Exception):  # that there are no more: of about 2,000
        while len(others) < 4000:
            others.append(MPI.COMM_WORLD.Dup())
    for _ in range(16):
        others.pop().Free()
    for _ in range(20):
        x = Region((2,), "f8", "x")
        with start("mpi", machine, DefaultMapper()) as runtime:
            runtime.write(x, np.ones(2))
            runtime.launch(double, Partition.tiled(x, 2))
            assert runtime.read(x).tolist() == [2.0, 2.0]
    for other in others:
        other.Free()
    say("ended")


if __name__ == "__main__":
    main()
