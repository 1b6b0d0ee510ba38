"""Memory plans: which tensors are where, step by step, in a memory too small for all of them.

A plan lists the events in one memory (the plans of ROC; Jia, chapter 4): tensors arrive by
allocation or from a backing memory, and leave by being freed or copied there. A plan is only used
after it was replayed against its capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Any

from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields
from soapstone.ir.graph import Graph
from soapstone.records import dataclass

FORMAT, VERSION = "soapstone-memory-plan", 1


class Action(StrEnum):
    """The kind of a step."""

    ALLOCATE = "allocate"  # takes bytes; the contents are undefined
    FREE = "free"  # gives the bytes back; the contents are lost
    FETCH = "fetch"  # takes bytes, and copies the contents from the backing memory
    EVICT = "evict"  # copies the contents to the backing memory, and gives the bytes back
    RUN = "run"  # runs a node on resident tensors


@dataclass(frozen=True)
class Step:
    """One step: of a tensor at [offset, offset + nbytes), or of a node with that workspace.

    clean: bytes of a tensor that a copy leaves out, because they have no contents yet, or the same
    in the backing memory.
    """

    action: Action
    name: str
    nbytes: int = 0
    offset: int = 0
    clean: int = field(default=0, metadata={"optional": True})

    @property
    def copied(self) -> int:
        """The bytes copied from or to the backing memory."""
        return self.nbytes - self.clean if self.action in (Action.FETCH, Action.EVICT) else 0

    def __str__(self) -> str:
        if self.action is Action.RUN and not self.nbytes:
            return f"run {self.name!r}"
        return f"{self.action} {self.name!r} [{self.offset}, {self.offset + self.nbytes})"


@dataclass(frozen=True)
class Uses:
    """The tensors that a node reads and writes, and the bytes of its workspace."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    workspace: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """A sequence of steps in a memory of `capacity_bytes`.

    recomputed: values that the backward pass recomputes (`Keep.RECOMPUTE`); the steps are then
    those of the graph with clones of their nodes.
    """

    capacity_bytes: int
    steps: tuple[Step, ...]
    recomputed: tuple[str, ...] = field(default=(), metadata={"optional": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "recomputed", tuple(self.recomputed))

    @property
    def peak_bytes(self) -> int:
        """The end of the highest block: the memory that the plan needs."""
        return max((step.offset + step.nbytes for step in self.steps), default=0)

    @property
    def moved_bytes(self) -> int:
        """The bytes copied from and to the backing memory."""
        return sum(step.copied for step in self.steps)

    def replay(
        self,
        sizes: Mapping[str, int],
        uses: Mapping[str, Uses] | None = None,
        given: Set[str] | None = None,
    ) -> None:
        """Check the plan step by step.

        Args:
            sizes: the bytes of each tensor.
            uses: what each node reads and writes; None: accesses of nodes are not checked.
            given: what is in the backing memory at first; by default what no node writes.

        Raises:
            GraphError: a step beyond the capacity, over live bytes, with another size, or of a
                tensor that is not there; names the step.
        """
        _Replay(self.capacity_bytes, sizes, uses, given).run(self.steps)

    def check(self, graph: Graph | Footprint) -> None:
        """Check the plan for a graph: it replays, and runs every node after what it reads.

        Raises:
            GraphError: a fault of `replay`, or a node that never runs, does not exist, or reads a
                value before all its writers have run.
        """
        footprint = Footprint.of(graph)
        uses = {
            node.name: Uses(
                tuple(touch.value for touch in node.touches if touch.reads),
                tuple(touch.value for touch in node.touches if touch.written or not touch.reads),
                node.workspace,
            )
            for node in footprint.nodes
        }
        self.replay(footprint.sizes, uses, footprint.given)
        runs = self.runs
        ran = set(runs)
        for node in footprint.nodes:
            if node.name not in ran:
                raise GraphError(f"memory plan: {node.label} never runs; once or more needed")
        by_name = {node.name: node for node in footprint.nodes}
        if len(ran) == len(runs):
            numbers = {name: number for number, name in enumerate(by_name)}
            found = footprint.ordered([numbers[name] for name in runs]).versions
            for (name, value), needed in footprint.versions.items():
                here = found[name, value]
                if here != needed:
                    raise GraphError(
                        f"memory plan: {by_name[name].label} touches {value!r} after {here} writes,"
                        f" {needed} needed"
                    )

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the nodes that are run, in order."""
        return tuple(step.name for step in self.steps if step.action is Action.RUN)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {"format": FORMAT, "version": VERSION, **json_fields.as_data(self)}

    @staticmethod
    def from_json(data: Any) -> MemoryPlan:
        """Return the plan that JSON data describes.

        Raises:
            GraphError: a field is unknown, missing or of the wrong type; names it.
        """
        reader = json_fields.Fields(data, "memory plan", GraphError)
        reader.header(FORMAT, VERSION)
        plan = reader.record(MemoryPlan)
        for number, step in enumerate(plan.steps):
            for name, value in (("nbytes", step.nbytes), ("offset", step.offset)):
                if step.action is Action.RUN and value and not step.nbytes:
                    raise GraphError(
                        f"memory plan: steps[{number}]: field {name!r}: {value} found,"
                        " 0 for a run without workspace needed"
                    )
            if step.clean > step.nbytes:
                raise GraphError(
                    f"memory plan: steps[{number}]: field 'clean': {step.clean} found, at most its"
                    f" {step.nbytes} bytes needed"
                )
        return plan

    def save(self, path: str | Path) -> None:
        """Save the plan as JSON, atomically."""
        json_fields.save(path, json_fields.dump(self.to_json(), GraphError))

    @staticmethod
    def load(path: str | Path) -> MemoryPlan:
        """Return the plan in a file.

        Raises:
            GraphError: it cannot be read, or a field is wrong; names it.
        """
        return json_fields.load(path, GraphError, MemoryPlan.from_json)

    def __str__(self) -> str:
        """The plan as text, one step a line."""
        head = f"memory plan: {self.peak_bytes} of {self.capacity_bytes} bytes"
        lines = [f"{number:6d}  {step}" for number, step in enumerate(self.steps)]
        return "\n".join([head, *lines])


class _Replay:
    """The state of the memory while a plan is checked."""

    def __init__(
        self,
        capacity: int,
        sizes: Mapping[str, int],
        uses: Mapping[str, Uses] | None,
        given: Set[str] | None,
    ) -> None:
        self.capacity, self.sizes, self.uses = capacity, sizes, uses
        self.resident: dict[str, Step] = {}
        self.defined: set[str] = set()  # resident tensors that have contents
        self.ranges: list[tuple[int, int, str]] = []  # live bytes, by offset; none of them empty
        written = {name for use in (uses or {}).values() for name in use.writes}
        self.backed = set(sizes) - written if given is None else set(given)

    def run(self, steps: Sequence[Step]) -> None:
        for number, step in enumerate(steps):
            fault = self._fault(step)
            if fault is not None:
                raise GraphError(f"memory plan: step {number} ({step}): {fault}")

    def _fault(self, step: Step) -> str | None:
        """Perform one step, or return what is wrong with it."""
        if step.action is Action.RUN:
            return self._run(step)
        if step.name not in self.sizes:
            return "tensor does not exist"
        if step.nbytes != self.sizes[step.name]:
            return f"{step.nbytes} bytes found, {self.sizes[step.name]} needed"
        if step.action in (Action.ALLOCATE, Action.FETCH):
            return self._take(step)
        held = self.resident.pop(step.name, None)
        if held is None:
            return "tensor is not resident"
        if held.offset != step.offset:
            return f"offset {step.offset} found, {held.offset} needed, where it was put"
        if step.action is Action.EVICT:
            if self.uses is not None and step.name not in self.defined:
                return "tensor has no contents to move"
            self.backed.add(step.name)
        self.defined.discard(step.name)
        if held.nbytes:
            self.ranges.remove((held.offset, held.offset + held.nbytes, step.name))
        return None

    def _take(self, step: Step) -> str | None:
        if step.name in self.resident:
            return "tensor is resident already"
        fault = self._taken(step)
        if fault is not None:
            return fault
        if step.nbytes:
            insort(self.ranges, (step.offset, step.offset + step.nbytes, step.name))
        if step.action is Action.FETCH:
            if step.name not in self.backed:
                return "tensor is not in the backing memory"
            self.defined.add(step.name)
        self.resident[step.name] = step
        return None

    def _taken(self, step: Step) -> str | None:
        """Return why bytes cannot be allocated, or None."""
        begin, end = step.offset, step.offset + step.nbytes
        if begin < 0 or end > self.capacity:
            return f"bytes up to {end} found, {self.capacity} there are"
        if step.nbytes:
            place = bisect_left(self.ranges, (begin, begin, ""))
            for low, high, name in self.ranges[max(place - 1, 0) : place + 1]:
                if low < end and begin < high:
                    return f"overlaps {name!r} [{low}, {high}), which is live"
        return None

    def _run(self, step: Step) -> str | None:
        fault = self._taken(step)
        if fault is not None or self.uses is None:
            return fault
        if step.name not in self.uses:
            return "node does not exist"
        use = self.uses[step.name]
        if step.nbytes < use.workspace:
            return f"workspace of {step.nbytes} bytes found, {use.workspace} needed"
        for tensor in (*use.reads, *use.writes):
            if tensor not in self.resident:
                return f"uses {tensor!r}, which is not resident"
        for tensor in use.reads:
            if tensor not in self.defined and self.sizes[tensor]:
                return f"reads {tensor!r}, which has no contents yet"
        self.defined.update(use.writes)
        self.backed.difference_update(use.writes)
        return None
