"""Steps of random programs that use more of the model.

Index sets, values that tasks return, and tasks that launch tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from helpers.runtime.programs import (
    COMBINE,
    Body,
    Output,
    Step,
    announce,
    boxes,
    digest,
    random_partition,
    random_step,
    value_of,
)

from soapstone.runtime import (
    IndexPartition,
    Partition,
    Privilege,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Scope,
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

        body = Body(self.name, (self.privilege,))
        return Task(self.name, (Read, self.privilege), body=body, context=True)

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
            given = [seen[self.given.tile(point)]]
            value = value_of(self.privilege, self.k, point, given, before[tile])
            with np.errstate(over="ignore", invalid="ignore"):
                flat[tile] = value if reduction is None else COMBINE[reduction](flat[tile], value)
        arrays[self.out.region] = target

    @property
    def partitions(self) -> list[IndexPartition]:
        """Every partition it uses."""
        return [self.given, self.out]

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

    @property
    def partitions(self) -> list[Partition]:
        """Every partition it uses."""
        return [Partition.whole(self.source), self.target]

    def __str__(self) -> str:
        boxes = " ".join(map(str, self.target.tiling.boxes))
        return (
            f"launch {self.name}: {self.target.region.name} by {boxes} gets what its other launch "
            f"returns of {self.source.name}"
        )


@dataclass(frozen=True, eq=False)
class Nested:
    """A launch whose points launch random steps on their own tiles, to some depth.

    They read `given`'s tile and write `out`'s, or what they reduce into it, and regions of their
    own. What a point launches follows from the seed and the extents of its tiles.
    """

    name: str
    seed: int
    depth: int
    given: Partition
    out: Partition
    privilege: Privilege

    @cached_property
    def task(self) -> Task:
        """The task, the same one every time."""

        def body(scope: Scope, given: np.ndarray, out: np.ndarray) -> None:
            announce("body", self.name, scope.context.point)
            reduces = self.privilege.reduction is not None
            inside = _Inside(self, out.shape, out.dtype, scope.region(0), scope.make)
            mine = inside.scratch if reduces else scope.region(1)
            if self.privilege is Write:
                scope.fill(mine, 5)
            steps = inside.steps([mine, inside.other])
            for number, step in enumerate(steps):
                step.launch(scope)
                if number % 3 == 1:
                    scope.wait()
                    if not reduces:
                        out += 1
            found = scope.read(inside.other)
            if reduces:
                found = scope.read(mine)
                out[...] = value_of(self.privilege, digest(found), 0, [found], out)
            else:
                out += (digest(found) % 1009) if found.size else 0

        names = ("given", "out")
        return Task(self.name, (Read, self.privilege), body=body, names=names, nested=True)

    def launch(self, runtime: Any, turn: int = 0) -> None:
        """Launch it."""
        runtime.launch(self.task, self.given, self.out, name=self.name)

    def run(self, arrays: dict[Region, np.ndarray], turn: int = 0) -> None:
        """The sequential meaning."""
        before = arrays[self.given.region].copy()
        target = arrays[self.out.region]
        reduction = self.privilege.reduction
        for point in range(self.out.points):
            box = boxes(self.out, point)
            if not target[box].size:
                continue
            read = np.array(before[boxes(self.given, point)])
            old = np.array(target[box])
            given = Region(read.shape, read.dtype, "given")
            inside = _Inside(self, old.shape, old.dtype, given, Region)
            mine = inside.scratch
            held = {given: read, mine: old}
            held[inside.other] = np.zeros(inside.other.shape, inside.other.dtype)
            if reduction is not None:
                held[mine] = np.zeros_like(old)
            elif self.privilege is Write:
                held[mine][...] = 5
            for number, step in enumerate(inside.steps([mine, inside.other])):
                step.run(held)
                if number % 3 == 1 and reduction is None:
                    held[mine] = np.asarray(held[mine] + 1, dtype=target.dtype)
            found = held[inside.other]
            with np.errstate(over="ignore", invalid="ignore"):
                if reduction is not None:
                    value = value_of(
                        self.privilege, digest(held[mine]), 0, [held[mine]], held[mine]
                    )
                    target[box] = COMBINE[reduction](target[box], value)
                else:
                    target[box] = held[mine] + ((digest(found) % 1009) if found.size else 0)

    @property
    def partitions(self) -> list[Partition]:
        """Every partition it uses, but those of what its points launch."""
        return [self.given, self.out]

    def __str__(self) -> str:
        tiles = " ".join(map(str, self.out.tiling.boxes))
        theirs = " ".join(map(str, self.given.tiling.boxes))
        return (
            f"launch {self.name}, which launches (seed {self.seed}, depth {self.depth}): reads "
            f"{self.given.region.name} by {theirs}; {self.privilege!r} {self.out.region.name} "
            f"by {tiles}"
        )


class _Inside:
    """What a point of a nested launch launches: steps on its tiles and on regions of its own."""

    def __init__(
        self, owner: Nested, shape: tuple[int, ...], dtype: Any, given: Region, make: Any
    ) -> None:
        self.owner = owner
        self.given = given
        self.rng = np.random.default_rng([owner.seed, *shape, *given.shape])
        self.scratch: Region = make(shape, dtype, "mine")
        self.other: Region = make(shape[:1], np.int64, "other")

    def steps(self, regions: list[Region]) -> list[Step | Returned | Nested]:
        """The steps, in order. regions: that they may write."""
        found: list[Step | Returned | Nested] = []
        for number in range(int(self.rng.integers(1, 5))):
            name, kind = f"{self.owner.name}.{number}", int(self.rng.integers(0, 6))
            if kind == 0:
                tiles = random_partition(self.rng, regions[0], 1 + bool(regions[0].rank), True)
                found.append(Returned(name, self.given, tiles))
            elif kind == 1 and self.owner.depth > 1:
                depth = self.owner.depth - 1
                found.append(random_nested(self.rng, name, [self.given, *regions], regions, depth))
            else:
                found.append(random_step(self.rng, name, regions, readable=[self.given]))
        return found


def random_nested(
    rng: np.random.Generator,
    name: str,
    readable: list[Region],
    regions: list[Region],
    depth: int = 2,
) -> Nested:
    """A launch whose points launch others, which reads one region and writes another."""
    target = regions[int(rng.integers(0, len(regions)))]
    source = [region for region in readable if region is not target]
    privileges = (Write, ReadWrite, ReadWrite, Reduce("sum"), Reduce("max"))
    privilege = privileges[int(rng.integers(0, len(privileges)))]
    points = int(rng.choice([1, 2, 3]))
    direct = privilege.reduction is None
    if direct and not target.rank:
        points = 1
    return Nested(
        name,
        int(rng.integers(0, 1 << 20)),
        depth,
        random_partition(rng, source[int(rng.integers(0, len(source)))], points, False),
        random_partition(rng, target, points, direct),
        privilege,
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
