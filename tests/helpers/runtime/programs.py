"""Random task programs and their sequential meaning, for the tests of the runtime core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.runtime import (
    DefaultMapper,
    Held,
    Launch,
    Layout,
    Partition,
    PointContext,
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
from soapstone.runtime.analysis.transfer import copy_entry

BEFORE: list[Callable[[str], None]] = []  # called with what comes: a body, a bind, a question
VARIANTS = ("first", "second")  # of native tasks
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def announce(*what: object) -> None:
    """Tell whoever listens what comes next."""
    for listener in BEFORE:
        listener(" ".join(map(str, what)))


class ShuffledMapper(DefaultMapper):
    """Answers every question by a hash of a seed: legal, and as inconvenient as possible."""

    def __init__(
        self, seed: int, tiles: bool = True, memories: bool = True, ranks: bool = False
    ) -> None:
        self.seed = seed
        self.ranks = ranks
        self.tiles = tiles
        self.memories = memories

    def _draw(self, *what: object) -> int:
        announce("question", *what)
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
        if self.ranks:  # a point's instances are in the memories of its own process
            own = processor.memory.partition(".")[0]
            names = [name for name in names if name.partition(".")[0] == own]
        return names[self._draw("memory", launch.name, argument, processor.name) % len(names)]

    def order(self, region: Region) -> tuple[int, ...] | None:
        if region.rank < 2 or self._draw("order", region.name) % 2:
            return None
        return tuple(int(a) for a in np.argsort([self._draw(region.name, a) for a in region.shape]))

    def priority(self, launch: Launch) -> int:
        return self._draw("priority", launch.name) % 3

    def whole_instances(self, region: Region, memory: str) -> bool:
        return not self.tiles or self._draw("whole", region.name) % 3 > 0

    def slices(self, launch: Launch) -> np.ndarray | None:
        if self._draw("slices", launch.name) % 2:
            return None
        return self.place_all(launch) + len(self.machine.processors) * np.array(
            [self._draw("slice", launch.name, point) % 2 for point in range(launch.points)]
        )

    def stealable(self, launch: Launch) -> bool:
        return self._draw("steal", launch.name) % 2 == 0

    def copy_source(
        self, launch: Launch | None, target: Held, sources: tuple[Held, ...]
    ) -> int | None:
        draw = self._draw("source", launch and launch.name, target.memory, len(sources))
        return None if draw % 4 == 0 else draw % len(sources)


class ContraryMapper(ShuffledMapper):
    """Answers the rest too: another layout with every argument, variants, evictions, traces.

    It streams through memories that have a backing one.
    """

    def layout(self, launch: Launch, argument: int, memory: str) -> Layout:
        region = launch.partitions[argument].region
        order = [self._draw("layout", launch.name, argument, axis) for axis in range(region.rank)]
        draw = self._draw("tile", launch.name, argument)
        whole = not self.tiles or (self.seed % 3 > 0 and draw % 2 > 0)  # some want tiles alone
        return Layout(tuple(int(axis) for axis in np.argsort(order)), whole)

    def variant(self, launch: Launch, point: int, processor: Processor) -> str | None:
        names = (None, *(launch.task.variants or ()))
        return names[self._draw("variant", launch.name, point, processor.name) % len(names)]

    def trace(self, sequence: Sequence[Any], seen: int) -> bool:
        return self._draw("trace", len(sequence), seen) % 3 > 0

    def backing(self, memory: str) -> str | None:
        return memory.removesuffix(".bounded") if memory.endswith(".bounded") else None

    def evict(self, launch: Launch | None, memory: str, nbytes: int, held: tuple[Held, ...]) -> int:
        return self._draw("evict", launch and launch.name, len(held)) % len(held)


def digest(array: np.ndarray) -> int:
    """A number that depends on every element of an array and not on their order in memory."""
    if array.dtype.kind == "f":
        array = np.where(np.abs(array) < 1e9, array, 5)
    return int(array.astype(np.int64).sum()) % 1000003


def _write_formula(k: int, point: int, given: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
    total = sum(digest(array) for array in given)
    ramp = np.arange(out.size, dtype=np.int64).reshape(out.shape)
    found: np.ndarray = (total * k + ramp * (point + 1)) % 10007
    return found


def boxes(partition: Partition, point: int) -> tuple[slice, ...]:
    """Where a point's tile is in its region."""
    low, high = partition.lo[point], partition.hi[point]
    return tuple(slice(int(a), int(b)) for a, b in zip(low, high))


def value_of(
    privilege: Privilege, k: int, point: int, given: Sequence[np.ndarray], out: np.ndarray
) -> np.ndarray:
    """What a point writes, or combines, into its tile, which holds `out` before."""
    value = _write_formula(k, point, given, out)
    if privilege == ReadWrite:
        value = (value + np.where(np.abs(out) < 1e9, out, 7).astype(np.int64) * 3) % 10007
    if privilege.reduction == "prod":
        value = value % 3 + 1
    return value.astype(out.dtype)


@dataclass(frozen=True)
class Body:
    """What the points of a step do, also in another process: the privileges of what they write."""

    name: str
    privileges: tuple[Privilege, ...]

    def __call__(self, context: PointContext, given_k: Any, *arrays: np.ndarray) -> None:
        announce("body", self.name, context.point)
        k = int(np.asarray(given_k[0] if isinstance(given_k, tuple) else given_k).item())
        count = len(arrays) - len(self.privileges)
        given, out = arrays[:count], arrays[count:]
        assert all(not array.flags.writeable for array in given)
        for privilege, array in zip(self.privileges, out, strict=True):
            array[...] = value_of(privilege, k, context.point, given, array)


@dataclass(frozen=True)
class Output:
    """One region that a step writes or reduces into."""

    partition: Partition
    privilege: Privilege

    def value(self, k: int, point: int, given: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
        """What a point writes, or combines, into its tile, which holds `out` before."""
        return value_of(self.privilege, k, point, given, out)

    def start(self) -> Any:
        """The identity of the reduction."""
        dtype = self.partition.region.dtype
        least, most = -np.inf, np.inf
        if dtype.kind != "f":
            least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        return {"sum": 0, "prod": 1, "max": least, "min": most}[self.privilege.reduction or ""]


@dataclass(frozen=True, eq=False)
class Step:
    """One launch: inputs read, outputs with privileges; `k` is its scalar.

    varies: the scalar is another one each time. native: a copy of the first input, bound natively.
    """

    name: str
    k: int
    inputs: tuple[Partition, ...]
    outputs: tuple[Output, ...]
    initialise: bool = False
    varies: bool = False
    native: bool = False

    @property
    def partitions(self) -> list[Partition]:
        """Every partition it uses."""
        return [*self.inputs, *[output.partition for output in self.outputs]]

    @property
    def regions(self) -> list[Region]:
        """Every region it uses."""
        return [partition.region for partition in self.partitions]

    @cached_property
    def task(self) -> Task:
        """The task, the same one every time."""
        privileges = (*[Read] * len(self.inputs), *[o.privilege for o in self.outputs])
        if self.native:

            def bind(context: Any, arrays: Sequence[np.ndarray]) -> Any:
                announce("bind", self.name, context.point)
                assert context.variant in (None, *VARIANTS)
                return copy_entry(arrays[1], arrays[0])

            return Task(self.name, privileges, bind=bind, variants=VARIANTS)

        body = Body(self.name, tuple(output.privilege for output in self.outputs))
        return Task(self.name, privileges, body=body, context=True)

    @cached_property
    def held(self) -> Any:
        """What holds its scalar, the same object every time, which changes after each launch."""
        return [[0], np.array(0), (np.array([0]), "k")][self.k % 3]

    def scalar(self, value: int) -> Any:
        """A value as a scalar of a launch: a number, or in an array, a list or a tuple."""
        if self.k % 4 == 0:
            return value
        array = self.held[0] if isinstance(self.held, tuple) else self.held
        if isinstance(array, list):
            array[0] = value
        else:
            array.fill(value)
        return self.held

    def launch(self, runtime: Runtime, turn: int = 0) -> None:
        """Launch it. turn: how often it was launched before, for scalars that vary."""
        scalars = () if self.native else (self.scalar(self.k + self.varies * turn),)
        runtime.launch(
            self.task,
            *scalars,
            *self.inputs,
            *[output.partition for output in self.outputs],
            name=self.name,
            initialise=self.initialise,
        )
        self.scalar(-1)  # what the program does to it now is not seen

    def run(self, arrays: dict[Region, np.ndarray], turn: int = 0) -> None:
        """The sequential meaning."""
        k = self.k + self.varies * turn
        found = []
        before = {o.partition.region: arrays[o.partition.region].copy() for o in self.outputs}
        with np.errstate(over="ignore", invalid="ignore"):
            for point in range(self.outputs[0].partition.points):
                given = [arrays[p.region][boxes(p, point)] for p in self.inputs]
                for output in self.outputs:
                    partition = output.partition
                    box = boxes(partition, point)
                    old = before[partition.region][box]
                    value = given[0] if self.native else output.value(k, point, given, old)
                    found.append((output, box, value))
            for output in self.outputs:
                if output.privilege.reduction is not None and self.initialise:
                    arrays[output.partition.region][...] = output.start()
            for output, box, value in found:
                out = arrays[output.partition.region]
                reduction = output.privilege.reduction
                out[box] = value if reduction is None else COMBINE[reduction](out[box], value)

    def __str__(self) -> str:
        def show(partition: Partition) -> str:
            tiles = [
                "[" + ", ".join(f"{a}:{b}" for a, b in zip(low, high)) + "]"
                for low, high in zip(partition.lo.tolist(), partition.hi.tolist())
            ]
            return f"{partition.region.name} by {' '.join(tiles)}"

        kind = "copy" if self.native else f"k={self.k}{'+turn' * self.varies}"
        read = "; ".join(show(p) for p in self.inputs)
        write = "; ".join(f"{o.privilege!r} {show(o.partition)}" for o in self.outputs)
        start = ", initialise" * self.initialise
        return f"launch {self.name} ({kind}{start}): reads {read or 'nothing'}; {write}"


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

    def compare(self, runtime: Runtime, seed: int) -> None:
        """Compare runs from random numbers with sequential NumPy, untraced and then replayed."""
        rng = np.random.default_rng(seed)
        arrays = {
            region: rng.integers(0, 100, size=region.shape).astype(region.dtype)
            for region in self.persistent
        }
        for region, array in arrays.items():
            runtime.write(region, array)
        for _ in range(2):
            self.launch(runtime)
            self.run(arrays)
        trace = runtime.capture(lambda: self.launch(runtime))
        for _ in range(3):
            trace.replay()
            self.run(arrays)
        for region in self.persistent:
            np.testing.assert_array_equal(runtime.read(region), arrays[region], str(seed))


def random_partition(
    rng: np.random.Generator, region: Region, points: int, write: bool
) -> Partition:
    """A partition of a region into `points` tiles; disjoint when it is to be written.

    Tiled, by ranges, halo, any boxes, whole; in any order; sometimes with elements left out.
    """
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
    lo, hi = base.lo[order], base.hi[order].copy()
    if rng.integers(0, 5 if points > 1 else 2) == 0:  # one tile is often all there is of a region
        hi = np.maximum(lo, hi - rng.integers(0, 2, size=hi.shape))
    return Partition.of(region, lo, hi, (points,))


PRIVILEGES = (Write, ReadWrite, Reduce("sum"), Reduce("max"), Reduce("min"), Reduce("prod"))


def random_step(
    rng: np.random.Generator,
    name: str,
    regions: Sequence[Region],
    varies: bool = False,
    readable: Sequence[Region] = (),
) -> Step:
    """A legal launch on some of the regions. readable: more of them, only to be read."""

    def draw(some: Sequence[Region]) -> Region:
        return some[int(rng.integers(0, len(some)))]

    points = int(rng.choice([1, 1, 2, 3, 4, 6]))
    if rng.integers(0, 8) == 0 and (found := _random_copy(rng, name, regions, points)):
        return found
    outputs: list[Output] = []
    for _ in range(1 + int(rng.integers(0, 4) == 0)):
        region = draw([r for r in regions if all(o.partition.region is not r for o in outputs)])
        privilege = PRIVILEGES[int(rng.integers(0, len(PRIVILEGES)))]
        direct = privilege.reduction is None
        if direct and region.rank == 0 and points > 1:
            privilege, direct = Reduce("sum"), False
        outputs.append(Output(random_partition(rng, region, points, direct), privilege))
    inputs = []
    for _ in range(int(rng.integers(0, 3))):
        partition = random_partition(rng, draw([*regions, *readable]), points, False)
        same = [o for o in outputs if o.partition.region is partition.region]
        if all(o.privilege.reduction or _apart(o.partition, partition) for o in same):
            inputs.append(partition)
    reduces = any(output.privilege.reduction for output in outputs)
    return Step(
        name,
        int(rng.integers(1, 50)),
        tuple(inputs),
        tuple(outputs),
        bool(rng.integers(0, 2)) and reduces,
        varies,
    )


def _random_copy(
    rng: np.random.Generator, name: str, regions: Sequence[Region], points: int
) -> Step | None:
    """A native copy between two regions of one shape and dtype, if there are any."""
    pairs = [
        (a, b)
        for a in regions
        for b in regions
        if a is not b and a.shape == b.shape and a.dtype == b.dtype and a.rank
    ]
    if not pairs:
        return None
    source, target = pairs[int(rng.integers(0, len(pairs)))]
    tiles = random_partition(rng, target, points, True)
    theirs = Partition.of(source, tiles.lo, tiles.hi, tiles.grid)
    return Step(name, 0, (theirs,), (Output(tiles, Write),), native=True)


def _apart(one: Partition, other: Partition) -> bool:
    """Whether no box of one overlaps a box of the other."""
    for p in range(one.points):
        for q in range(other.points):
            low = np.maximum(one.lo[p], other.lo[q])
            if (low < np.minimum(one.hi[p], other.hi[q])).all():
                return False
    return True


def random_regions(rng: np.random.Generator, count: int = 4) -> tuple[list[Region], list[Region]]:
    """Persistent regions, and transient ones of the same shapes."""
    dtypes = [np.int64, np.int64, np.int32, np.float64]
    persistent, transient = [], []
    for i in range(count):
        shape = tuple(int(n) for n in rng.integers(1, 8, size=int(rng.integers(0, 4))))
        dtype = dtypes[int(rng.integers(0, len(dtypes)))]
        persistent.append(Region(shape, dtype, f"p{i}"))
        transient.append(Region(shape, dtype, f"t{i}", transient=True))
    return persistent, transient


def random_program(seed: int, steps: int = 12) -> Program:
    """A program of `steps` launches over a few small regions."""
    rng = np.random.default_rng(seed)
    persistent, transient = random_regions(rng)
    program = Program(persistent, transient)
    program.steps += [
        random_step(rng, f"step{number}", [*persistent, *transient]) for number in range(steps)
    ]
    return program
