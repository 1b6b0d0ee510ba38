"""Asking a mapper: the questions it answers itself, and the checks of its answers.

A question whose answer is the default's is not asked, so that a mapper costs what it decides.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import MapperError
from .instance import Instance
from .launch import Launch
from .machine import Machine
from .mapper import DefaultMapper, Held, Layout, Mapper, Order
from .region import Region
from .step import Request
from .world import World

Array = np.ndarray[Any, np.dtype[Any]]


class Policy:
    """A mapper's checked answers on one machine.

    Raises (all questions): MapperError that names the task, what was asked, the answer and what was
    needed.
    """

    def __init__(self, machine: Machine, mapper: Mapper, world: World) -> None:
        self.machine = machine
        self.world = world
        self.mapper = mapper
        self._memory_index = {memory.name: i for i, memory in enumerate(machine.memories)}
        self.homes = [self._memory_index[p.memory] for p in machine.processors]
        self.one_memory = len(machine.memories) == 1
        kind = type(mapper)

        def asks(*questions: str) -> bool:
            return any(
                getattr(kind, question) is not getattr(DefaultMapper, question)
                for question in questions
            )

        self._asks_memory = asks("memory")
        self._asks_layout = asks("layout")
        self._asks_order = asks("order")
        self._asks_whole = asks("whole_instances")
        self._asks_slices = asks("slices")
        self._asks_stealable = asks("stealable")
        self._asks_variant = asks("variant")
        self._asks_priority = asks("priority")
        self._asks_source = asks("copy_source")
        self.backing = self._backings()
        self.many_instances = not self.one_memory or self._asks_layout or self._asks_whole

    # -- where points run

    def processors(self, launch: Launch) -> list[int]:
        """The processor index of every point."""
        answer = np.asarray(self.mapper.place_all(launch))
        count = len(self.machine.processors)
        if answer.shape != (launch.points,) or answer.dtype.kind not in "iu":
            raise MapperError(
                f"task {launch.name!r}: place_all returned {answer.dtype} {answer.shape}, "
                f"needed integers ({launch.points},)"
            )
        placed: list[int] = answer.tolist()
        if placed and (min(placed) < 0 or max(placed) >= count):
            wrong = next(point for point, where in enumerate(placed) if not 0 <= where < count)
            raise MapperError(
                f"task {launch.name!r}: place put point {wrong} on processor "
                f"{placed[wrong]}, needed 0..{count - 1}"
            )
        return placed

    def slices(self, launch: Launch, processors: Sequence[int]) -> list[int] | None:
        """The slice of every point, or None where each is one of its own."""
        answer = self.mapper.slices(launch) if self._asks_slices else None
        if answer is None:
            return None
        found = np.asarray(answer)
        if found.shape != (launch.points,) or found.dtype.kind not in "iu":
            raise MapperError(
                f"task {launch.name!r}: slices returned {found.dtype} {found.shape}, "
                f"needed integers ({launch.points},) or None"
            )
        labels: list[int] = found.tolist()
        owner: dict[int, int] = {}
        for point, (label, processor) in enumerate(zip(labels, processors)):
            if owner.setdefault(label, processor) != processor:
                raise MapperError(
                    f"task {launch.name!r}: slice {label} has point {point} on processor "
                    f"{processor}, needed {owner[label]}, where its other points are"
                )
        return labels

    def stealable(self, launch: Launch) -> bool:
        """Whether idle processors may take points of a launch."""
        return self._asks_stealable and bool(self.mapper.stealable(launch))

    def variants(self, launch: Launch, processors: Sequence[int]) -> list[str | None] | None:
        """The variant of every point; None where no one chooses."""
        if not self._asks_variant:
            return None
        found: list[str | None] = []
        known = launch.task.variants
        for point, processor in enumerate(processors):
            place = self.machine.processors[processor]
            answer = self.mapper.variant(launch, point, place)
            if answer is not None and not isinstance(answer, str):
                raise MapperError(
                    f"task {launch.name!r}: variant of point {point} on processor "
                    f"{place.name!r} is {answer!r}, needed a name or None"
                )
            if answer is not None and known is not None and answer not in known:
                raise MapperError(
                    f"task {launch.name!r}: variant of point {point} on processor "
                    f"{place.name!r} is {answer!r}, needed one of {sorted(known)} or None"
                )
            found.append(answer)
        return found

    def priority(self, launch: Launch) -> int:
        """The priority of a launch."""
        if not self._asks_priority:
            return 0
        answer = self.mapper.priority(launch)
        try:
            return operator.index(answer)
        except TypeError:
            raise MapperError(
                f"task {launch.name!r}: priority is {answer!r}, needed an integer"
            ) from None

    # -- where instances live

    def memories(self, launch: Launch, argument: int, processors: Sequence[int]) -> list[int]:
        """The memory index of each point's instance of one argument."""
        if not self._asks_memory:
            if self.one_memory:
                return [0] * len(processors)
            return [self.homes[processor] for processor in processors]
        answers: dict[int, int] = {}
        for processor in sorted(set(processors)):
            place = self.machine.processors[processor]
            name = self.mapper.memory(launch, argument, place)
            if name not in self._memory_index:
                raise MapperError(
                    f"task {launch.name!r}: memory of argument {argument} on processor "
                    f"{place.name!r} is {name!r}, needed one of {sorted(self._memory_index)}"
                )
            answers[processor] = self._memory_index[name]
            if self.world.apart(answers[processor], self.homes[processor]):
                raise MapperError(
                    f"task {launch.name!r}: memory of argument {argument} on processor "
                    f"{place.name!r} is {name!r}, which belongs to another process; one of its "
                    "own needed"
                )
        return [answers[processor] for processor in processors]

    def layout(self, launch: Launch, argument: int, region: Region, memory: int) -> Layout | None:
        """The layout of a region argument in a memory; None where no launch asks for its own."""
        if not self._asks_layout:
            return None
        name = self.machine.memories[memory].name
        answer = self.mapper.layout(launch, argument, name)
        if not isinstance(answer, Layout):
            raise MapperError(
                f"task {launch.name!r}: layout of argument {argument} in memory {name!r} is "
                f"{answer!r}, needed a Layout"
            )
        asked = f"task {launch.name!r}: layout of argument {argument} (region {region.name!r})"
        return Layout(_order(answer.order, region.rank, asked), bool(answer.whole))

    def whole(self, region: Region, memory: int) -> bool:
        """Whether a memory holds whole instances of a region."""
        if not self._asks_whole:
            return True
        return bool(self.mapper.whole_instances(region, self.machine.memories[memory].name))

    def order(self, region: Region) -> Order:
        """The axis order of a region's instances, None for C order."""
        if not self._asks_order:
            return None
        return _order(self.mapper.order(region), region.rank, f"region {region.name!r}")

    def copy_source(
        self, launch: Launch | None, region: Region, target: Instance, sources: Sequence[Instance]
    ) -> int | None:
        """The index of the instance to copy from, or None for the nearest."""
        if not self._asks_source:
            return None
        seen = tuple(self.held(region, source) for source in sources)
        answer = self.mapper.copy_source(launch, self.held(region, target), seen)
        if answer is None:
            return None
        who = f"task {launch.name!r}" if launch is not None else "the runtime"
        return _index(
            answer, seen, f"{who}: copy source of region {region.name!r}", "None or an index of"
        )

    def _backings(self) -> list[int | None]:
        """The index of each memory's backing memory, or None."""
        found: list[int | None] = []
        for memory, place in enumerate(self.machine.memories):
            answer = None if memory in self.world.hosts else self.mapper.backing(place.name)
            others = {
                other: index
                for other, index in self._memory_index.items()
                if index != memory and not self.world.apart(index, memory)
            }
            if answer is not None and answer not in others:
                raise MapperError(
                    f"backing of memory {place.name!r} is {answer!r}, needed None or one of "
                    f"{sorted(others)}"
                )
            found.append(None if answer is None else others[answer])
        for memory, backing in enumerate(found):
            if backing is not None and found[backing] is not None:
                raise MapperError(
                    f"backing of memory {self.machine.memories[memory].name!r} is "
                    f"{self.machine.memories[backing].name!r}, needed one whose instances stay"
                )
        return found

    def evict(self, launch: Launch | None, memory: int, nbytes: int, held: tuple[Held, ...]) -> int:
        """The index of the instance that makes room."""
        name = self.machine.memories[memory].name
        answer = self.mapper.evict(launch, name, nbytes, held)
        who = f"task {launch.name!r}" if launch is not None else "the runtime"
        return _index(answer, held, f"{who}: evict from memory {name!r}", "an index of")

    def held(self, region: Region, instance: Instance) -> Held:
        """What a mapper sees of an instance."""
        storage = instance.storage
        name = self.machine.memories[storage.memory].name
        return Held(region, name, storage.box, storage.order, storage.nbytes)

    # -- what is compiled

    def trace(self, sequence: Sequence[Request], seen: int) -> bool:
        """Whether a repeating sequence becomes a trace."""
        return bool(self.mapper.trace(sequence, seen))


def _order(answer: object, rank: int, asked: str) -> Order:
    """A checked axis order; C order is None."""
    if answer is None:
        return None
    try:
        found = tuple(operator.index(axis) for axis in answer)  # type: ignore[attr-defined]
    except TypeError:
        found = ()
    if sorted(found) != list(range(rank)):
        raise MapperError(
            f"{asked}: order {answer!r}, needed a permutation of its {rank} axes or None"
        )
    return None if found == tuple(range(rank)) else found


def _index(answer: object, held: Sequence[Held], asked: str, needed: str) -> int:
    if isinstance(answer, int | np.integer) and 0 <= int(answer) < len(held):
        return int(answer)
    choices = "; ".join(f"{i}: {item}" for i, item in enumerate(held[:8]))
    more = "; ..." if len(held) > 8 else ""
    raise MapperError(f"{asked} is {answer!r}, needed {needed} {choices}{more}")
