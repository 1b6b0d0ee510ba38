"""Mappers decide every policy and no result: who runs a point, where its instances live.

The runtime asks; a mapper answers with indices and names; wrong answers are refused. A mapper
subclasses `DefaultMapper` and overrides what it wants to decide; what it leaves alone is not even
asked. The questions are those of Legion's mapper interface (Bauer 2014, chapter 5), over regions.

Every process of a distributed run asks its mapper the same questions in the same order, and needs
the same answers: an answer may depend on the launch, on the answers before it and on the view, and
not on time, on random numbers without a fixed seed, or on what one process alone has measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.machines.machine import Machine, Processor
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.observe.view import View
from soapstone.runtime.tracing.step import Request

Order = tuple[int, ...] | None


@dataclass(frozen=True)
class Layout:
    """How the instance of a region argument lies in its memory.

    order: its axes, outermost first; None is C order. whole: one instance of the whole region, or
    one of each tile's box. An instance that is there already, holds the box and has the order is
    used either way. extent: where not whole, a larger box that one instance has for all tiles
    inside it; others have one each.
    """

    order: Order = None
    whole: bool = True
    extent: Box | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """What a mapper sees of an instance: a box of a region in a memory.

    order: its axes, outermost first; None is C order. nbytes: its size.
    """

    region: Region
    memory: str
    box: Box
    order: Order
    nbytes: int

    def __str__(self) -> str:
        low, high = self.box
        return f"{self.region.name!r} {list(low)}..{list(high)} in {self.memory!r}"


def by_point(mapper: DefaultMapper) -> bool:
    """Whether a mapper places point by point: `place` is overridden, and `place_all` not after it.

    Of the two, the one that the more derived class defines is what the mapper says.
    """
    kind: type = type(mapper)
    return "place_all" not in getattr(mapper, "__dict__", {}) and _by_point(kind)


@lru_cache(maxsize=256)
def _by_point(kind: type) -> bool:
    owner = next(one for one in kind.__mro__ if vars(one).keys() & {"place", "place_all"})
    return "place_all" not in vars(owner)


@lru_cache(maxsize=256)
def _blocks(points: int, processors: int) -> Array:
    """Blocks of consecutive points on each processor. Returns int64 (points,)."""
    found: Array = np.arange(points, dtype=np.int64) * processors // points
    return found


class DefaultMapper:
    """The policy questions of the runtime, with the answers of a mapper that decides nothing.

    Unless a subclass says otherwise, each processor gets a block of consecutive points, and
    everything is in the processor's memory.

    launch: what is launched, with its task, partitions, name and tag. point: one of its points, by
    its number in row-major order. argument: one of its region arguments, by position. processor: a
    processor of the machine. memory: one of its memories, by name. region: what an instance is of.
    """

    machine: Machine
    view: View

    # Where points run

    def attach(self, machine: Machine) -> None:
        """Learn the machine; called once by each runtime that uses this mapper."""
        self.machine = machine

    def observe(self, view: View) -> None:
        """Learn where the runtime can be looked at (view); called once, after `attach`."""
        self.view = view

    def place(self, launch: Launch, point: int) -> int:
        """The index of the processor that runs a point: `i * processors // n` for i of n."""
        return point * len(self.machine.workers) // launch.points

    def place_all(self, launch: Launch) -> Array:
        """The processor index of every point: what `place` says, where a subclass overrides it.

        Returns int64 (points,).
        """
        if by_point(self):
            answers = [self.place(launch, point) for point in range(launch.points)]
            return np.array(answers, dtype=np.int64)
        return _blocks(launch.points, len(self.machine.workers)).copy()

    def slices(self, launch: Launch) -> Array | None:
        """The slice of every point, int64 (points,); None: each point is one of its own.

        The points of a slice are on one processor; an idle processor takes them together.
        """
        return None

    def stealable(self, launch: Launch) -> bool:
        """Whether an idle processor may take ready points of a launch from the one placed: no."""
        return False

    def variant(self, launch: Launch, point: int, processor: Processor) -> str | None:
        """The kernel variant of a point, or None to leave it to the task."""
        return None

    def priority(self, launch: Launch) -> int:
        """The priority of a launch among those that are ready; higher runs first. All are 0."""
        return 0

    # Where instances live

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        """The memory that holds region argument `argument` of points on a processor: its own."""
        return processor.memory

    def layout(self, launch: Launch, argument: int, memory: str) -> Layout:
        """How the instance of a region argument lies in a memory.

        That is what `order` and `whole_instances` say of the region.
        """
        region = launch.partitions[argument].region
        return Layout(self.order(region), self.whole_instances(region, memory))

    def order(self, region: Region) -> Order:
        """The axis order of a region's instances, where no launch asks for another: C order."""
        return None

    def whole_instances(self, region: Region, memory: str) -> bool:
        """Whether a memory holds one instance of the whole region, or one of each tile's box."""
        return True

    def copy_source(
        self, launch: Launch | None, target: Held, sources: tuple[Held, ...]
    ) -> int | None:
        """Which of the valid instances to copy from (an index into sources).

        None is the nearest: of the same memory, else over the fastest link. Asked again as long as
        something of the target is still missing. launch: None for a copy that the runtime makes
        for itself or for the host.
        """
        return None

    def backing(self, memory: str) -> str | None:
        """The memory that instances return to when a memory is full.

        None: they stay, and a memory that is full is an error. Asked once. Not asked of the memory
        that the host reads and writes: what is there stays.
        """
        return None

    def evict(self, launch: Launch | None, memory: str, nbytes: int, held: tuple[Held, ...]) -> int:
        """Which instance (an index into `held`) leaves a memory where `nbytes` are needed.

        held: those that the launch does not use, least recently used first: the first goes. Asked
        again as long as the bytes do not suffice. Never asked where there is no backing memory.
        """
        return 0

    def arrive(self, launch: Launch | None, region: Region, memory: str, nbytes: int) -> int | None:
        """Where a new instance begins in a memory that has a backing one; None: in the first gap.

        A multiple of 64, from where `nbytes` must be free. An instance that a mapper places so
        comes with all contents that its region has, unless the launch writes over all of it.
        """
        return None

    def leave(self, launch: Launch, memory: str, held: tuple[Held, ...]) -> Sequence[int]:
        """Which instances leave a memory that has a backing one, after a launch (indices of held).

        held: all that are there. What is valid nowhere else is copied to the backing memory.
        """
        return ()

    # What is compiled

    def trace(self, sequence: Sequence[Request], seen: int) -> bool:
        """Whether a sequence of launches and fills that was found to repeat becomes a trace: yes.

        seen: how often it has been found so far.
        """
        return True


Mapper = DefaultMapper  # whoever answers the questions
