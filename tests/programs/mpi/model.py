"""Sparse partitions, futures and nested launches on the ranks of mpiexec; run by test_mpi_model.py.

model.py PROGRAMS
"""

from __future__ import annotations

import sys

import numpy as np
from helpers.processes import say
from helpers.runtime.programs import ShuffledMapper
from helpers.runtime.sparse_programs import Cases

from soapstone.runtime import Partition, Read, ReadWrite, Region, Runtime, Scope, by_field, task
from soapstone.runtime.machines.start import machine_of, start


@task
def add(x: ReadWrite, k: float) -> None:
    x += k


@task
def total(x: Read) -> float:
    return x.sum()


@task
def halves(scope: Scope, x: ReadWrite, k: float) -> float:
    tiles = Partition.tiled(scope.region("x"), 2)
    scope.launch(add, tiles, k)
    return scope.launch(total, tiles).sum()


def sparse(seed: int) -> None:
    cases = Cases(seed)
    mapper = ShuffledMapper(seed, memories=False)
    with start("mpi", machine_of("mpi", 1 + seed % 2), mapper) as runtime:
        for region, array in cases.arrays.items():
            runtime.write(region, array)
        cases.launch(runtime)
        cases.run()
        cases.same(runtime)
        for _ in range(2):
            with runtime.trace("all"):
                cases.launch(runtime)
            cases.run()
        cases.same(runtime)


def futures(runtime: Runtime) -> None:
    x, colours = Region((24,), "f8", "x"), Region((24,), "i4", "colours")
    want = np.arange(24.0)
    colour = (np.arange(24) * 7 % 5).astype("i4")
    runtime.write(x, want)
    runtime.write(colours, colour)
    mine = by_field(runtime, colours, 4, x)
    last, value = runtime.launch(total, x), want.sum()
    for _ in range(3):
        with runtime.trace("step"):
            sums = runtime.launch(halves, Partition.tiled(x, 4), last)
            runtime.launch(add, mine, sums.max())
        want = want + value
        parts = want.reshape(4, 6).sum(axis=1)
        want = want + parts.max() * (colour < 4)
        np.testing.assert_allclose(sums.get(), parts)
        np.testing.assert_allclose(runtime.read(x), want)
        last, value = sums.min(), parts.min()
    assert runtime.statistics.captures == 1


def main() -> None:
    count = int(sys.argv[1])
    for seed in range(count):
        sparse(seed)
    with start("mpi", machine_of("mpi", 2), ShuffledMapper(0, memories=False)) as runtime:
        futures(runtime)
    say(f"{count} programs equal")


if __name__ == "__main__":
    main()
