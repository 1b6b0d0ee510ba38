"""How subtasks run: on the processors that share their parent's memory, the deepest first.

A parent ends when its subtasks have ended. While it waits it runs ready subtasks, its own or others
of at least the same depth, so workers that all wait for subtasks never deadlock. The same holds
inside a trace, where other workers run their own parts, and for executors without workers.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

from soapstone.native.memory import Array, aligned
from soapstone.records import dataclass
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import TaskError
from soapstone.runtime.executors.bodies import as_task_error
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.model.task import PointContext

if TYPE_CHECKING:
    from soapstone.runtime.observe.log import Log, ScopeLog


@dataclass(eq=False)
class _Team:
    """The processors of one memory, and the subtasks that are ready to run on any of them."""

    machine: Machine
    memory: int
    processors: list[int]
    ready: list[tuple[int, int, int, Operation, Family]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # processors that will come and look
    inside: set[int] = field(default_factory=set)  # those in a body that does not wait: they won't


class Nest:
    """The subtasks of one runtime, at all depths.

    stores: for each memory, the memory that holds regions made by subtasks: an evictable memory has
    room only for what the runtime's analysis places there.
    """

    def __init__(
        self, executor: LocalExecutor, memory: MemoryPool, backing: Sequence[int | None]
    ) -> None:
        self.executor = executor
        self.memory = memory
        self.stores = [i if other is None else other for i, other in enumerate(backing)]
        self.changed = threading.Condition()
        self.tickets = itertools.count()
        self.families = itertools.count(1)
        self._teams: dict[int, _Team] = {}
        self.log: Log | None = None  # of the runtime, while there is one

    def team(self, context: PointContext) -> _Team:
        """The processors that share the memory of the processor on which a point runs."""
        machine = self.executor.machine
        names = [memory.name for memory in machine.memories]
        memory = names.index(context.processor.memory)
        with self.changed:
            found = self._teams.get(memory)
            if found is None:
                name = names[memory]
                members = [i for i, p in enumerate(machine.workers) if p.memory == name]
                part = Machine(
                    machine.name,
                    tuple(machine.processors[i] for i in members),
                    (machine.memories[memory],),
                )
                found = self._teams[memory] = _Team(part, memory, members)
            return found

    def push(self, family: Family, operation: Operation) -> None:
        """Offer a ready subtask to the processors of its team. The caller holds `changed`."""
        team = family.team
        key = (-family.depth, -operation.priority, next(self.tickets))
        heapq.heappush(team.ready, (*key, operation, family))
        count = len(team.processors)
        first = team.processors.index(operation.processor)
        for step in range(count):
            processor = team.processors[(first + step) % count]
            if processor not in team.asked and processor not in team.inside:
                visit = partial(self._visit, team, processor)
                if self.executor.offer(processor, visit):
                    team.asked.add(processor)
                    return

    def _visit(self, team: _Team, processor: int) -> None:
        """Run ready subtasks until there are none; called on a free processor."""
        with self.changed:
            team.asked.discard(processor)
        while self._run_one(team, processor, 0, self.executor.profile is not None):
            pass

    def wait(self, family: Family, processor: int) -> None:
        """Wait until a family has ended, running subtasks meanwhile."""
        team = family.team
        with self.changed:
            team.inside.discard(processor)
        while True:
            with self.changed:
                while family.busy and not self._eligible(team, family.depth):
                    self.changed.wait()
                if not family.busy:
                    team.inside.add(processor)
                    return
            self._run_one(team, processor, family.depth, False)

    @staticmethod
    def _eligible(team: _Team, depth: int) -> bool:
        return bool(team.ready) and -team.ready[0][0] >= depth

    def _run_one(self, team: _Team, processor: int, depth: int, profiled: bool) -> bool:
        """Run the deepest ready subtask if it is deep enough; return whether there was one."""
        with self.changed:
            if not self._eligible(team, depth):
                return False
            operation, family = heapq.heappop(team.ready)[-2:]
            if family.error is not None:
                return True
            family.running += 1
        operation.processor = processor
        start = time.perf_counter_ns() if family.log is not None else 0
        try:
            run = self.executor._run if profiled else self.executor.perform
            run(operation, processor)
            if family.log is not None:
                family.log.ran(operation, start, time.perf_counter_ns())
        except BaseException as error:
            place = self.executor.machine.processors[processor]
            known = isinstance(error, TaskError)
            family.fail(error if known else as_task_error(operation, place, error))
        with self.changed:
            family.end(operation)
            self.changed.notify_all()
        return True


class Family:
    """The subtasks of one point task, and the sink of its analysis."""

    mine: Sequence[bool] | None = None  # all of its operations run in this process

    def __init__(self, nest: Nest, team: _Team, depth: int) -> None:
        self.nest = nest
        self.team = team
        self.depth = depth
        self.error: BaseException | None = None
        self.running = 0
        self.log: ScopeLog | None = None
        self.live: dict[int, Operation] = {}

    @property
    def busy(self) -> bool:
        """Whether subtasks are running or waiting to run."""
        return bool(self.running or (self.live and self.error is None))

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes.

        Raises: MemoryExhausted.
        """
        what = f"region {storage.name!r}"
        memory = self.nest.stores[self.team.memory]
        self.nest.memory.claim(storage, memory, storage.nbytes, what)
        storage.attach(aligned(storage.nbytes, zero=not storage.transient))

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations; each starts when those that it depends on have ended."""
        first = operations[0].id
        with self.nest.changed:
            if self.error is not None:
                return
            for operation in operations:
                operation.processor = self.team.processors[operation.processor]
                self.live[operation.id] = operation
            for source, target in zip(sources.tolist(), targets.tolist()):
                before = self.live.get(source)
                if before is not None:
                    before.successors.append(operations[target - first])
                    operations[target - first].pending += 1
            for operation in operations:
                if operation.pending == 0:
                    self.nest.push(self, operation)
            self.nest.changed.notify_all()

    def end(self, operation: Operation) -> None:
        """Count a subtask as done; offer those that waited for it. The caller holds `changed`."""
        self.running -= 1
        self.live.pop(operation.id, None)
        if self.error is None:
            for after in operation.successors:
                after.pending -= 1
                if after.pending == 0:
                    self.nest.push(self, after)
        operation.successors = []

    def fail(self, error: BaseException) -> None:
        """Run no more subtasks; the parent raises the first error."""
        with self.nest.changed:
            if self.error is None:
                self.error = error
