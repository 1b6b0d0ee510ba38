"""Random task programs and their sequential meaning, for the tests of the runtime core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Partition,
    Privilege,
    Processor,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
)

COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class ShuffledMapper(DefaultMapper):
    """Answers every question by a hash of a seed: legal, and as inconvenient as possible."""

    def __init__(self, seed: int, tiles: bool = True, memories: bool = True) -> None:
        self.seed = seed
        self.tiles = tiles
        self.memories = memories

    def _draw(self, *what: object) -> int:
        value = self.seed * 2654435761
        for letter in repr(what):
            value = (value * 1000003 + ord(letter)) & 0xFFFFFFFF
        return value >> 7

    def place(self, launch: Launch, point: int) -> int:
        return self._draw("place", launch.name, point) % len(self.machine.processors)

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        if not self.memories:
            return processor.memory
        names = [memory.name for memory in self.machine.memories]
        return names[self._draw("memory", launch.name, argument, processor.name) % len(names)]

    def order(self, region: Region) -> tuple[int, ...] | None:
        if region.rank < 2 or self._draw("order", region.name) % 2:
            return None
        return tuple(int(a) for a in np.argsort([self._draw(region.name, a) for a in region.shape]))

    def priority(self, launch: Launch) -> int:
        return self._draw("priority", launch.name) % 3

    def whole_instances(self, region: Region, memory: str) -> bool:
        return not self.tiles or self._draw("whole", region.name) % 3 > 0


def _write_formula(k: int, point: int, given: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
    total = sum(int(array.sum()) for array in given) % 1000003
    ramp = np.arange(out.size, dtype=np.int64).reshape(out.shape)
    return (total * k + ramp * (point + 1)) % 10007


@dataclass(frozen=True)
class Step:
    """One launch: inputs read, one output with a privilege; `k` is its scalar."""

    name: str
    k: int
    inputs: tuple[Partition, ...]
    output: Partition
    privilege: Privilege
    initialise: bool

    def task(self) -> Task:
        privileges = (*[Read] * len(self.inputs), self.privilege)

        def body(context: Any, k: int, *arrays: np.ndarray) -> None:
            *given, out = arrays
            assert all(not array.flags.writeable for array in given)
            value = _write_formula(k, context.point, given, out)
            if self.privilege is ReadWrite:
                value = (value + out * 3) % 10007
            out[...] = value

        return Task(self.name, privileges, body=body, context=True)

    def launch(self, runtime: Runtime) -> None:
        runtime.launch(
            self.task(),
            self.k,
            *self.inputs,
            self.output,
            name=self.name,
            initialise=self.initialise,
        )

    def run(self, arrays: dict[Region, np.ndarray]) -> None:
        """The sequential meaning."""

        def tile(partition: Partition, point: int) -> tuple[slice, ...]:
            low, high = partition.lo[point], partition.hi[point]
            return tuple(slice(int(a), int(b)) for a, b in zip(low, high))

        out = arrays[self.output.region]
        before = out.copy()
        reduction = self.privilege.reduction
        partials = []
        for point in range(self.output.points):
            given = [arrays[p.region][tile(p, point)] for p in self.inputs]
            box = tile(self.output, point)
            value = _write_formula(self.k, point, given, out[box])
            if reduction is not None:
                partials.append((box, value))
                continue
            if self.privilege is ReadWrite:
                value = (value + before[box] * 3) % 10007
            out[box] = value
        if reduction is not None:
            if self.initialise:
                info = np.iinfo(np.int64)
                start = {"sum": 0, "prod": 1, "max": info.min, "min": info.max}[reduction]
                out[...] = start
            with np.errstate(over="ignore"):
                for box, value in partials:
                    out[box] = COMBINE[reduction](out[box], value)


@dataclass
class Program:
    """Regions, the steps on them, and fills of transient regions before their first use."""

    persistent: list[Region]
    transient: list[Region]
    steps: list[Step] = field(default_factory=list)

    def launch(self, runtime: Runtime) -> None:
        for region in self.transient:
            runtime.fill(region, 7)
        for step in self.steps:
            step.launch(runtime)

    def run(self, arrays: dict[Region, np.ndarray]) -> None:
        for region in self.transient:
            arrays[region] = np.full(region.shape, 7, dtype=region.dtype)
        for step in self.steps:
            step.run(arrays)


def random_partition(rng: np.random.Generator, region: Region, points: int, write: bool) -> Any:
    """A partition of a region into `points` tiles; disjoint when it is to be written."""
    kind = int(rng.integers(0, 5))
    rank = region.rank
    if rank == 0 or (not write and kind == 0):
        return Partition.whole(region, (points,))
    degrees = [1] * rank
    rest = points
    while rest > 1:
        factor = next(f for f in range(2, rest + 1) if rest % f == 0)
        degrees[int(rng.integers(0, rank))] *= factor
        rest //= factor
    if kind < 3:
        base = Partition.tiled(region, degrees)
    else:
        cuts = [
            [0, *sorted(int(c) for c in rng.integers(0, n + 1, size=d - 1)), n]
            for n, d in zip(region.shape, degrees)
        ]
        base = Partition.ranges(region, cuts)
    if not write and kind == 1:
        base = Partition.halo(base, int(rng.integers(0, 3)), int(rng.integers(0, 3)))
    if not write and kind == 4:
        corners = np.sort(
            rng.integers(0, np.array(region.shape) + 1, size=(2, points, rank)), axis=0
        )
        base = Partition.of(region, corners[0], corners[1])
    order = rng.permutation(points)
    return Partition.of(region, base.lo[order], base.hi[order], (points,))


def random_program(seed: int, steps: int = 12) -> Program:
    """A program of `steps` launches over a few small regions."""
    rng = np.random.default_rng(seed)
    shapes = [
        tuple(int(n) for n in rng.integers(1, 8, size=int(rng.integers(0, 4)))) for _ in range(4)
    ]
    persistent = [Region(shape, np.int64, f"p{i}") for i, shape in enumerate(shapes)]
    transient = [Region(shape, np.int64, f"t{i}", transient=True) for i, shape in enumerate(shapes)]
    program = Program(persistent, transient)
    everything = [*persistent, *transient]
    for number in range(steps):
        points = int(rng.choice([1, 1, 2, 3, 4, 6]))
        out = everything[int(rng.integers(0, len(everything)))]
        others = [region for region in everything if region is not out]
        inputs = tuple(
            random_partition(rng, others[int(rng.integers(0, len(others)))], points, False)
            for _ in range(int(rng.integers(0, 3)))
        )
        privilege = (Write, ReadWrite, Reduce("sum"), Reduce("max"), Reduce("min"))[
            int(rng.integers(0, 5))
        ]
        direct = privilege.reduction is None
        if direct and out.rank == 0:
            points, inputs = 1, ()
        output = random_partition(rng, out, points, direct)
        initialise = bool(rng.integers(0, 2)) and not direct
        program.steps.append(
            Step(f"step{number}", int(rng.integers(1, 50)), inputs, output, privilege, initialise)
        )
    return program
