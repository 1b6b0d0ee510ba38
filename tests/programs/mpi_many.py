"""A program for several ranks: it opens and closes more runtimes than MPI has communicators."""

from __future__ import annotations

import numpy as np
from helpers.processes import say

from soapstone.runtime import DefaultMapper, Partition, ReadWrite, Region, task
from soapstone.runtime.machines.start import machine_of, start


@task
def double(x: ReadWrite) -> None:
    x *= 2


def main() -> None:
    machine = machine_of("mpi", cpus=1)
    for _ in range(600):
        x = Region((2,), "f8", "x")
        with start("mpi", machine, DefaultMapper()) as runtime:
            runtime.write(x, np.ones(2))
            runtime.launch(double, Partition.tiled(x, 2))
            assert runtime.read(x).tolist() == [2.0, 2.0]
    say("ended")


if __name__ == "__main__":
    main()
