"""Sums of bfloat16 whose parts lie on other ranks: `mpiexec -n 2 python narrow.py`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from helpers.processes import say

from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import Launch, Partition, Read, ReadWrite, Reduce, Region, task
from soapstone.runtime.machines.start import machine_of, start


@task
def add(total: Reduce("sum"), x: Read) -> None:  # type: ignore[valid-type]
    """Adds what it reads to a part of a sum."""
    total += x


@task
def double(x: ReadWrite) -> None:
    """Doubles what it reads."""
    x += x


class Alternate(BoundedMemoryMapper):
    """Places every other point on the other rank."""

    def place(self, launch: Launch, point: int) -> int:
        return point % 2

    def place_all(self, launch: Launch) -> np.ndarray:
        return np.arange(launch.points) % 2


def main() -> None:
    with start("mpi", machine_of("mpi", cpus=1), Alternate()) as runtime:
        x = Region((256,), np.dtype(ml_dtypes.bfloat16), "x")
        total = Region((1,), np.dtype(ml_dtypes.bfloat16), "total")
        runtime.write(x, np.full(256, 1.5, ml_dtypes.bfloat16))
        tiles = Partition.tiled(x, (256,))
        runtime.launch(double, tiles)
        runtime.launch(add, Partition.whole(total, (256,)), tiles, initialise=True)
        found = runtime.read(total)
    say(f"{found.dtype} {float(found[0])}")


if __name__ == "__main__":
    main()
