"""Steps of random programs that use more of the model: index sets, and values that tasks return."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from runtime_programs import COMBINE, Output, announce, digest

from soapstone.runtime import (
    IndexPartition,
    Partition,
    Privilege,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
    task,
)


@dataclass(frozen=True, eq=False)
class Sparse:
    """A launch that reads index sets of one region, and writes or reduces into another's."""

    name: str
    k: int
    given: IndexPartition
    out: IndexPartition
    privilege: Privilege
    initialise: bool

    @cached_property
    def task(self) -> Task:
        """The task, the same one every time."""

        def body(context: Any, k: int, given: np.ndarray, out: np.ndarray) -> None:
            announce("body", self.name, context.point)
            out[...] = self._value(k, context.point, given, out)

        return Task(self.name, (Read, self.privilege), body=body, context=True)

    def _value(self, k: int, point: int, given: np.ndarray, out: np.ndarray) -> np.ndarray:
        return Output(Partition.whole(self.out.region), self.privilege).value(
            k, point, [given], out
        )

    def launch(self, runtime: Runtime, turn: int = 0) -> None:
        """Launch it."""
        runtime.launch(
            self.task, self.k, self.given, self.out, name=self.name, initialise=self.initialise
        )

    def run(self, arrays: dict[Region, np.ndarray], turn: int = 0) -> None:
        """The sequential meaning."""
        source, target = (arrays[p.region].copy() for p in (self.given, self.out))
        seen, flat = _rows(source, self.given), _rows(target, self.out)
        reduction = self.privilege.reduction
        if reduction is not None and self.initialise:
            flat[...] = Output(Partition.whole(self.out.region), self.privilege).start()
        before = _rows(arrays[self.out.region], self.out)
        for point in range(self.out.points):
            tile = self.out.tile(point)
            value = self._value(self.k, point, seen[self.given.tile(point)], before[tile])
            with np.errstate(over="ignore", invalid="ignore"):
                flat[tile] = value if reduction is None else COMBINE[reduction](flat[tile], value)
        arrays[self.out.region] = target

    def __str__(self) -> str:
        def show(partition: IndexPartition) -> str:
            tiles = [partition.tile(p).tolist() for p in range(partition.points)]
            return f"{partition.region.name} by {' '.join(map(str, tiles))}"

        start = ", initialise" * self.initialise
        return (
            f"launch {self.name} (k={self.k}{start}): reads {show(self.given)}; "
            f"{self.privilege!r} {show(self.out)}"
        )


@dataclass(frozen=True, eq=False)
class Returned:
    """Two launches: one returns a value of a region, the other gets it as its scalar."""

    name: str
    source: Region
    target: Partition

    def launch(self, runtime: Runtime, turn: int = 0) -> None:
        """Launch both."""
        found = runtime.launch(measure, self.source, name=f"{self.name}.measure")
        runtime.launch(put, found, self.target, name=self.name)

    def run(self, arrays: dict[Region, np.ndarray], turn: int = 0) -> None:
        """The sequential meaning."""
        value = digest(arrays[self.source])
        out = arrays[self.target.region]
        for low, high in zip(self.target.lo, self.target.hi):
            box = tuple(slice(int(a), int(b)) for a, b in zip(low, high))
            out[box] = value % 1009

    def __str__(self) -> str:
        boxes = " ".join(map(str, self.target.tiling.boxes))
        return (
            f"launch {self.name}: {self.target.region.name} by {boxes} gets what its other launch "
            f"returns of {self.source.name}"
        )


@task
def measure(x: Read) -> np.int64:
    """A number that depends on all of a region."""
    return np.int64(digest(x))


@task
def put(value: int, y: Write) -> None:
    """Every element becomes a value."""
    y[...] = int(value) % 1009


def _rows(array: np.ndarray, partition: IndexPartition) -> np.ndarray:
    """The array with the axes that the sets index made one."""
    shape = array.shape[len(partition.sets.shape) :]
    return array.reshape(-1, *shape)


def random_sparse(rng: np.random.Generator, name: str, regions: list[Region]) -> Sparse | None:
    """A launch over index sets, if there are regions for it."""
    some = [region for region in regions if region.rank and region.size]
    if len(some) < 2:
        return None
    first, second = rng.choice(len(some), 2, replace=False)
    points = int(rng.choice([1, 2, 3, 4]))
    privileges = (Write, ReadWrite, Reduce("sum"), Reduce("max"), Reduce("prod"))
    privilege = privileges[int(rng.integers(0, len(privileges)))]
    return Sparse(
        name,
        int(rng.integers(1, 50)),
        _sets(rng, some[first], points, False),
        _sets(rng, some[second], points, privilege.reduction is None),
        privilege,
        bool(rng.integers(0, 2)) and privilege.reduction is not None,
    )


def _sets(rng: np.random.Generator, region: Region, points: int, disjoint: bool) -> IndexPartition:
    axes = int(rng.integers(1, region.rank + 1))
    size = int(np.prod(region.shape[:axes]))
    if disjoint:
        colour = rng.integers(0, points + 1, size)
        tiles = [np.nonzero(colour == point)[0] for point in range(points)]
    else:
        tiles = [np.nonzero(rng.integers(0, 3, size) == 0)[0] for _ in range(points)]
    return IndexPartition.of(region, tiles, axes)
