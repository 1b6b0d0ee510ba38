"""What a replay enqueues: the operations of all lanes, in segments between those of the host.

One worker of a trace, that of the first lane, enqueues for all of them, in the order of the trace.
A segment is what it can enqueue without the host doing anything in between: it begins where an
operation needs one of the host's that no earlier one needed. Inside, lanes follow each other's
marks; one segment follows all of the one before. On a device a segment is a CUDA graph from its
second replay on, launched as one, unless some of its operations are run by the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soapstone.native.cuda.device import Enqueued, Lane, simulated
from soapstone.native.cuda.graphs import Graph, captured
from soapstone.native.memory import Array
from soapstone.runtime.analysis.message import ENDS, MESSAGES, STARTS
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.devices.calls import Kernel, OnHost, device_call, give
from soapstone.runtime.errors import MapperError, TaskError
from soapstone.runtime.executors.bodies import as_task_error
from soapstone.runtime.machines.machine import Machine, Processor


def failure(call: object, operation: Operation, place: Processor) -> TaskError | None:
    """Return what a kernel that has ended says is wrong, which is forgotten then, or None."""
    reason = call.failure() if isinstance(call, Kernel) else ""
    return TaskError(operation.launch.name, operation.point, place.name, reason) if reason else None


def enqueued_by(lanes: Mapping[int, Lane], operation: Operation) -> bool:
    """Whether an operation is enqueued on a lane: all on its processor but messages of the host."""
    return operation.processor in lanes and operation.kind not in (*MESSAGES, *STARTS, *ENDS)


@dataclass(eq=False, slots=True)
class _Step:
    """An operation of a lane in a segment: the marks of others that it follows, and its own."""

    operation: Operation
    place: Processor
    lane: Lane
    follows: list[Any] = field(default_factory=list)
    mark: Any = None
    call: Enqueued | OnHost | None = None
    begun: Any = None
    ended: Any = None
    host_ns: tuple[int, int] = (0, 0)

    def enqueue(self, timed: bool) -> None:
        """Enqueue it, after what it follows.

        Raises: TaskError where that fails.
        """
        try:
            self._enqueue(timed)
        except TaskError:
            raise
        except Exception as error:
            raise as_task_error(self.operation, self.place, error) from error

    def _enqueue(self, timed: bool) -> None:
        lane = self.lane
        lane.after(self.follows)
        if timed:
            self.begun = lane.mark(self.begun)
        start = time.perf_counter_ns()
        if self.call is not None:
            give(lane, self.call)
        self.host_ns = start, time.perf_counter_ns()
        if timed:
            self.ended = lane.mark(self.ended)
        if self.mark is not None:
            lane.mark(self.mark)


class _Segment:
    """Steps that are enqueued at once. done: occurs when all of them have ended."""

    def __init__(self, lead: Lane) -> None:
        self.steps: list[_Step] = []
        self.done = lead.event()
        self._lead = lead
        self._begin = lead.event()
        self._ends: dict[Lane, Any] = {}
        self._graph: Graph | None = None
        self._ran = self._tried = False

    def enqueue(self, timed: bool) -> None:
        """Enqueue all of it: launched as one graph where there is one, otherwise one by one.

        Raises: TaskError of what cannot be enqueued.
        """
        if self._ran and not self._tried and not timed and self._capturable:
            self._tried = True
            self._graph = captured(self._lead, lambda: self._enqueue(False))
        if self._graph is not None and not timed:
            self._graph.launch()
        else:
            self._enqueue(timed)
        self._ran = True
        self._lead.mark(self.done)

    @property
    def _capturable(self) -> bool:
        return not simulated() and not any(isinstance(step.call, OnHost) for step in self.steps)

    def _enqueue(self, timed: bool) -> None:
        others = dict.fromkeys(step.lane for step in self.steps if step.lane is not self._lead)
        self._lead.mark(self._begin)
        for lane in others:
            lane.after((self._begin,))
        for step in self.steps:
            step.enqueue(timed)
        for lane in others:
            self._ends[lane] = lane.mark(self._ends.get(lane))
        self._lead.after(self._ends.values())


class Enqueues:
    """What a trace's replays enqueue on lanes.

    Args:
        operations: of the trace, by id; order: ids, in the order in which workers run theirs.
            edges: int64 (edges, 2), dependences.

    Attributes:
        lead: the processor whose worker enqueues. timed: whether the next replay is timed.
    """

    def __init__(
        self,
        machine: Machine,
        lanes: Mapping[int, Lane],
        operations: Sequence[Operation],
        order: Sequence[int],
        edges: Array,
    ) -> None:
        self._lanes = lanes
        self._steps = {
            number: _Step(operations[number], machine.processors[where], lanes[where])
            for number in order
            if enqueued_by(lanes, operations[number])
            for where in (operations[number].processor,)
        }
        self.lead = min(step.operation.processor for step in self._steps.values())
        self.timed = False
        self._segment_of: dict[int, _Segment] = {}
        self._segments: list[_Segment] = []
        self._awaited: dict[int, list[_Segment]] = {}  # by operation of the host
        self._waited_ns: dict[int, int] = {}  # until when each did, in the last replay
        before: dict[int, list[int]] = {}
        for source, target in edges.tolist():
            before.setdefault(target, []).append(source)
        known: set[int] = set()  # operations of the host that the worker has waited for
        for number in order:
            step, sources = self._steps.get(number), before.get(number, [])
            if step is None:
                mine = {self._segment_of[s]: None for s in sources if s in self._steps}
                if mine:
                    self._awaited[number] = list(mine)
                continue
            hosted = {source for source in sources if source not in self._steps}
            if not self._segments or hosted - known:
                self._segments.append(_Segment(lanes[self.lead]))
            known |= hosted
            segment = self._segments[-1]
            segment.steps.append(step)
            self._segment_of[number] = segment
            for source in sources:
                other = self._steps.get(source)
                if other is None or other.lane is step.lane:
                    continue
                if self._segment_of[source] is segment:
                    other.mark = other.lane.event() if other.mark is None else other.mark
                    step.follows.append(other.mark)

    def __contains__(self, number: int) -> bool:
        """Whether an operation, by id, is of a lane."""
        return number in self._steps

    def bind(self, operation: Operation) -> None:
        """Make what is enqueued for an operation.

        Raises: TaskError when that fails.
        """
        if operation.idle:
            return
        step = self._steps[operation.id]
        try:
            step.call = device_call(operation, step.place, step.lane.device)
        except (TaskError, MapperError):
            raise
        except Exception as error:
            raise as_task_error(operation, step.place, error) from error

    @property
    def starts(self) -> Mapping[int, Callable[[], None]]:
        """By the id of the first operation of each segment: what enqueues it."""
        return {segment.steps[0].operation.id: self._start(segment) for segment in self._segments}

    def _start(self, segment: _Segment) -> Callable[[], None]:
        return lambda: segment.enqueue(self.timed)

    def waits(self, number: int) -> Callable[[], None] | None:
        """What an operation of the host has to wait for before it runs, or None."""
        segments = self._awaited.get(number)
        if segments is None:
            return None
        lead = self._lanes[self.lead]

        def wait() -> None:
            for segment in segments:
                lead.wait(segment.done)
            self._waited_ns[number] = time.perf_counter_ns()

        return wait

    def wait(self) -> None:
        """Wait until all that a replay has enqueued is done."""
        for lane in dict.fromkeys(step.lane for step in self._steps.values()):
            lane.wait()

    def failure(self) -> TaskError | None:
        """Return the error of the first operation whose kernel says that something is wrong.

        All are asked, so that the next replay finds nothing of this one.
        """
        steps = self._steps.values()
        found = [failure(step.call, step.operation, step.place) for step in steps]
        return next(filter(None, found), None)

    def stamps(self, operations: Sequence[int], stamped: Array) -> None:
        """Say when the operations of a timed replay ran.

        operations: ids, of rows of stamped, int64 (operations, 3) ns; those of the host stay, but
            begin once they have waited.
        """
        for row, number in enumerate(operations):
            found = self._steps.get(number)
            if found is None or found.begun is None:
                stamped[row, 1] = max(stamped[row, 1], self._waited_ns.get(number, 0))
                continue
            start, end = found.host_ns
            if not simulated():
                start, end = found.lane.times_ns(found.begun, found.ended)
            stamped[row] = start, start, end
