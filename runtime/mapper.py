"""Mappers decide every policy and no result: who runs a point, where its instances live.

The runtime asks; a mapper answers with indices and names; wrong answers are refused. A mapper
subclasses `DefaultMapper` and overrides what it wants to decide.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from .launch import Launch
from .machine import Machine, Processor
from .region import Region

Array = np.ndarray[Any, np.dtype[Any]]


@runtime_checkable
class Mapper(Protocol):
    """The policy questions of the runtime."""

    def attach(self, machine: Machine) -> None:
        """Learn the machine; called once by each runtime that uses this mapper."""

    def place(self, launch: Launch, point: int) -> int:
        """The index of the processor that runs a point."""

    def place_all(self, launch: Launch) -> Array:
        """The processor index of every point. Returns int64 (points,)."""

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        """The memory that holds region argument `argument` of points on a processor."""

    def order(self, region: Region) -> tuple[int, ...] | None:
        """The axis order of a region's instances, outermost first; None is C order."""

    def variant(self, launch: Launch, point: int, processor: Processor) -> str | None:
        """The kernel variant of a point, or None to leave it to the task."""

    def priority(self, launch: Launch) -> int:
        """The priority of a launch among those that are ready; higher runs first."""

    def whole_instances(self, region: Region, memory: str) -> bool:
        """Whether a memory holds one instance of the whole region, or one of each tile's box."""


class DefaultMapper:
    """Blocks of consecutive points on each processor; everything in the processor's memory."""

    machine: Machine

    def attach(self, machine: Machine) -> None:
        """Learn the machine."""
        self.machine = machine

    def place(self, launch: Launch, point: int) -> int:
        """Point i of n goes to processor `i * processors // n`."""
        return point * len(self.machine.processors) // launch.points

    def place_all(self, launch: Launch) -> Array:
        """The processor of every point; asks `place` when a subclass overrides it."""
        if type(self).place is not DefaultMapper.place:
            answers = [self.place(launch, point) for point in range(launch.points)]
            return np.array(answers, dtype=np.int64)
        points = launch.points
        found: Array = np.arange(points, dtype=np.int64) * len(self.machine.processors) // points
        return found

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        """The processor's own memory."""
        return processor.memory

    def order(self, region: Region) -> tuple[int, ...] | None:
        """C order."""
        return None

    def variant(self, launch: Launch, point: int, processor: Processor) -> str | None:
        """No choice: the task decides."""
        return None

    def priority(self, launch: Launch) -> int:
        """All launches are equal."""
        return 0

    def whole_instances(self, region: Region, memory: str) -> bool:
        """One instance of the whole region in each memory."""
        return True
