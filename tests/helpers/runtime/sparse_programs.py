"""Random launches over partitions of index sets, and their sequential meaning in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.runtime import (
    IndexPartition,
    Partition,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
)


def _formula(k: int, point: int, arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    seen = sum(int((a.ravel() * (np.arange(a.size) % 7 + 1)).sum()) for a in arrays) % 1000003
    ramp = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return (seen * k + ramp * (point + 3)) % 10007


def _task(privileges: tuple[Any, ...]) -> Task:
    """Writes a formula of all it reads into all it writes."""

    def body(context: Any, k: int, *arrays: np.ndarray) -> None:
        given = [a.copy() for a, p in zip(arrays, privileges) if p.reads]
        for array, privilege in zip(arrays, privileges):
            assert array.flags.writeable == privilege.writes
            if privilege.writes:
                array[...] = _formula(k, context.point, given, array.shape)

    return Task("formula", privileges, body, context=True)


class Cases:
    """Random launches over a few regions, and what each does to NumPy arrays."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 20))
        self.regions = [
            Region((n,), np.int64, "a"),
            Region((n, 3), np.int64, "b"),
            Region((int(rng.integers(1, 5)), int(rng.integers(1, 5))), np.int64, "c"),
        ]
        self.arrays = {r: rng.integers(0, 100, r.shape) for r in self.regions}
        self.points = int(rng.choice([1, 2, 3, 5]))
        self.steps = [self._step(number) for number in range(8)]

    def _partition(self, region: Region, disjoint: bool) -> Partition | IndexPartition:
        rng, points = self.rng, self.points
        axes = int(rng.integers(1, region.rank + 1))
        size = int(np.prod(region.shape[:axes]))
        kind = int(rng.integers(0, 5))
        rows = Partition.tiled(region, (points,) + (1,) * (region.rank - 1))
        if kind == 0:
            cuts = [np.sort(rng.integers(0, size + 1, points - 1)), [size]]
            tiles: Any = np.split(np.arange(size), cuts[0])
        elif kind == 1 and not disjoint:
            halo = Partition.halo(rows, 1, 1)
            return Partition.of(region, halo.lo, halo.hi)
        elif kind == 2:
            return Partition.of(region, rows.lo, rows.hi)
        elif disjoint or kind == 3:
            colour = rng.integers(-1, points, size)
            tiles = [np.flatnonzero(colour == p) for p in range(points)]
        else:
            tiles = [rng.integers(0, size, int(rng.integers(0, size + 1))) for _ in range(points)]
        return IndexPartition.of(region, tiles, axes)

    def _step(self, number: int) -> tuple[int, Task, list[Any], bool]:
        rng = self.rng
        chosen = [self.regions[i] for i in rng.permutation(3)[: int(rng.integers(1, 4))]]
        privileges = []
        for _ in chosen:
            privileges.append(
                (Read, Write, ReadWrite, Reduce("sum"), Reduce("max"), Reduce("min"))[
                    int(rng.integers(0, 6))
                ]
            )
        partitions = [
            self._partition(r, p.writes and p.reduction is None) for r, p in zip(chosen, privileges)
        ]
        initialise = bool(rng.integers(0, 2))
        return int(rng.integers(1, 50)), _task(tuple(privileges)), partitions, initialise

    def launch(self, runtime: Runtime) -> None:
        for k, made, partitions, initialise in self.steps:
            runtime.launch(made, k, *partitions, initialise=initialise)

    def run(self) -> None:
        """The launches, one after another, point after point."""
        for k, made, partitions, initialise in self.steps:
            pairs = list(zip(partitions, made.privileges))
            old = {p.region: self.arrays[p.region].copy() for p in partitions}
            for partition, privilege in pairs:
                if initialise and privilege.reduction is not None:
                    info = np.iinfo(np.int64)
                    start = {"sum": 0, "max": info.min, "min": info.max}[privilege.reduction]
                    self.arrays[partition.region][...] = start
            for point in range(self.points):
                given = [
                    old[p.region][self._index(p, point)]
                    for p, privilege in pairs
                    if privilege.reads
                ]
                for partition, privilege in pairs:
                    if privilege.writes:
                        array, index = self.arrays[partition.region], self._index(partition, point)
                        value = _formula(k, point, given, array[index].shape)
                        if privilege.reduction is not None:
                            combine: Callable[..., Any] = {
                                "sum": np.add,
                                "max": np.maximum,
                                "min": np.minimum,
                            }[privilege.reduction]
                            value = combine(array[index], value)
                        array[index] = value

    @staticmethod
    def _index(partition: Partition | IndexPartition, point: int) -> Any:
        if isinstance(partition, IndexPartition):
            return np.unravel_index(partition.tile(point), partition.sets.shape)
        low, high = partition.tiling.boxes[point]
        return tuple(slice(a, b) for a, b in zip(low, high))

    def same(self, runtime: Runtime) -> None:
        for region in self.regions:
            np.testing.assert_array_equal(runtime.read(region), self.arrays[region], region.name)
