"""The local executor: one thread a processor, which runs operations or replays native programs.

Untraced operations start as soon as their dependence counts fall to zero.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from soapstone.native.memory import FUNCTION, Array
from soapstone.runtime.agreement import Agreement
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import (
    MapperError,
    MemoryExhausted,
    StoppedError,
    TaskError,
)
from soapstone.runtime.executors.bodies import as_task_error, bound, prepared_body
from soapstone.runtime.executors.stealing import Stealing
from soapstone.runtime.executors.threads import Threads, do_nothing
from soapstone.runtime.forks import FORKED, tell
from soapstone.runtime.machines.machine import PROCESS, Machine
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.task import EntryLike, status_text
from soapstone.runtime.observe.profile import Observer, Profile

if TYPE_CHECKING:
    from soapstone.runtime.devices.enqueues import Enqueues
    from soapstone.runtime.executors.process.processes import WorkerProcess


class LocalExecutor:
    """The worker threads of one runtime, and the untraced operations they are given.

    It is the sink of the untraced analysis: `emit` takes operations, `allocate` gives storages
    their bytes.
    """

    logs = True  # whether all it runs passes here, so that a log would be whole

    def __init__(
        self, machine: Machine, memory: MemoryPool, threads: Threads | None = None
    ) -> None:
        self.machine = machine
        self.fault: BaseException | None = None
        self.told = False  # whether `wait` has raised the fault
        self.profile: Observer | None = None
        self.world = self._world()
        self.agreement: Agreement | None = None  # with the other processes, in safe mode
        self.mine: Sequence[bool] | None = None  # every processor's operations
        self.processors: Sequence[int] = range(len(machine.processors))
        self._memory = memory
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._live: dict[int, Operation] = {}
        self._ready: list[list[tuple[int, int, Operation]]] = [[] for _ in machine.processors]
        self._stepping = [False] * len(machine.processors)  # whether a thread will look at them
        self._steps = [partial(self._step, number) for number in range(len(machine.processors))]
        self._own = threads is None  # whether its threads end with it
        self._threads = Threads(machine) if threads is None else threads
        self._processes: dict[int, WorkerProcess] = {}  # of processors of kind "process"
        self.workers = self._threads.identifiers
        self.here = False  # whether the calling thread does what one processor alone is to do
        self._closed = ""  # why it is of no use any more
        self._stealing: Stealing | None = None  # once there is something to steal
        tell(self)
        tell(memory)

    def beside(self, machine: Machine, memory: MemoryPool) -> LocalExecutor:
        """The executor of another runtime on the same machine, whose work the same threads do.

        It is of no use once this one is closed.
        """
        return LocalExecutor(machine, memory, self._threads)

    def _world(self) -> World:
        """The processes of the run."""
        return World.alone(self.machine)

    # -- threads

    def _start(self) -> None:
        if self._closed:
            raise StoppedError(self._closed)
        self._threads.start(self.processors)

    def run_all(
        self, jobs: Mapping[int, Callable[[], None]], interrupt: Callable[[], None]
    ) -> None:
        """Run one function on each of some processors' threads, and wait for all of them.

        On KeyboardInterrupt `interrupt` is called, the threads are waited for, and it is raised.
        With `here`, one function runs in the calling thread, which saves waking another.

        Raises: what the function of the first processor that failed raised.
        """
        if len(self._threads) < len(self.processors):
            self._start()
        if self.here and len(jobs) == 1:
            next(iter(jobs.values()))()
        else:
            self._threads.run_all(jobs, interrupt)

    # -- untraced operations

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes; when they do not fit, once more after running work ended.

        Raises: MemoryExhausted.
        """
        for make_room in (do_nothing, self.wait, self._memory.relieve):
            make_room()
            with contextlib.suppress(MemoryExhausted):
                self._memory.allocate(storage)
                return
        gc.collect()
        self._memory.allocate(storage)

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take operations; each starts when those it depends on have ended."""
        if len(self._threads) < len(self.processors):
            self._start()
        first = operations[0].id
        with self._lock:
            if self.fault is not None:
                return
            live = self._live
            if operations[0].slice is not None and self._stealing is None:
                self._stealing = Stealing(self.machine, self.processors)
            for operation in operations:
                live[operation.id] = operation
            if sources.size:
                for source, target in zip(sources.tolist(), targets.tolist()):
                    before = live.get(source)
                    if before is not None:
                        after = operations[target - first]
                        before.successors.append(after)
                        after.pending += 1
            for operation in operations:
                if operation.pending == 0:
                    self._push(operation)

    def _push(self, operation: Operation) -> None:
        """Queue a ready operation, and wake its processor's thread; the lock is held."""
        processor = operation.processor
        heapq.heappush(self._ready[processor], (-operation.priority, operation.id, operation))
        if not self._stepping[processor]:
            self._wake(processor)
        elif operation.slice is not None and self._stealing is not None:
            idle = self._stealing.idle_peer(processor, self._stepping)
            if idle is not None:
                self._wake(idle)

    def _wake(self, processor: int) -> None:
        """Let a processor's thread look for ready operations; the lock is held."""
        self._stepping[processor] = True
        self._threads.queues[processor].put(self._steps[processor])

    def _step(self, processor: int) -> None:
        """Run the ready operations of a processor, the most urgent first, until there is none."""
        ready = self._ready[processor]
        operation: Operation | None = None
        while True:
            with self._lock:
                if operation is not None:
                    self._end(operation)
                if self.fault is not None or not (
                    ready or (self._stealing and self._stealing.take(processor, self._ready))
                ):
                    self._stepping[processor] = False
                    return
                operation = heapq.heappop(ready)[2]
            try:
                self._run(operation, processor)
            except BaseException as error:
                self._failed(operation, error)
                operation = None

    def _end(self, operation: Operation) -> None:
        """Count an operation as done, and queue those that waited for it only; the lock is held."""
        if self.fault is not None:
            return
        self._live.pop(operation.id, None)
        for after in operation.successors:
            after.pending -= 1
            if after.pending == 0:
                self._push(after)
        operation.successors = []
        if not self._live:
            self._idle.notify_all()

    def prepared(
        self, operation: Operation, processor: int, arrays: Sequence[Array]
    ) -> Callable[[], object]:
        """The call of an operation's Python body, wherever a processor runs bodies.

        Raises: StoppedError, BodyError.
        """
        place = self.machine.processors[processor]
        process, segments = None, self._memory.segments
        if place.kind == PROCESS and operation.kind == "task" and segments is not None:
            process = self._processes.get(processor)
            if process is None:
                from soapstone.runtime.executors.process.processes import WorkerProcess

                process = WorkerProcess(place.name, place.threads, segments)
                self._processes[processor] = process
        return prepared_body(operation, place, arrays, process)

    def _run(self, operation: Operation, processor: int) -> None:
        profile = self.profile
        start = time.perf_counter_ns() if profile is not None else 0
        self.perform(operation, processor)
        if profile is not None:
            profile.add(operation, start, start, time.perf_counter_ns())

    def perform(self, operation: Operation, processor: int) -> None:
        """Run an operation in the calling thread, as a processor.

        Raises: TaskError for the status of a native entry; what a Python body raises.
        """
        if operation.idle:
            return
        task = operation.launch.task
        place = self.machine.processors[processor]
        arrays = operation.arrays()
        entry = None
        if task.bind is not None and (task.kind == "task" or task.body is None):
            entry = bound(operation, place, arrays)
        if entry is None:
            self.prepared(operation, processor, arrays)()
            return
        status = FUNCTION(entry.address)(entry.block)
        if status:
            reason = status_text(entry, status)
            raise TaskError(operation.launch.name, operation.point, place.name, reason)

    def offer(self, processor: int, function: Callable[[], None]) -> bool:
        """Have a processor's thread call a function that raises nothing, after what it has to do.

        Returns whether there is such a thread.
        """
        inbox = self._threads.queues.get(processor)
        if inbox is not None:
            inbox.put(function)
        return inbox is not None

    def _failed(self, operation: Operation, error: BaseException) -> None:
        """Stop the run with what an operation raised."""
        if not isinstance(error, TaskError | MapperError):
            place = self.machine.processors[operation.processor]
            error = as_task_error(operation, place, error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop the run: nothing queued runs any more, and the error comes out of `wait`."""
        with self._lock:
            if self.fault is None:
                self.fault = error
            self._drop()
            self._idle.notify_all()

    def _drop(self) -> None:
        """Forget what has not begun; the lock is held."""
        self._live.clear()
        for ready in self._ready:
            ready.clear()

    def stop(self, error: BaseException) -> None:
        """Stop the other processes of the run with an error; here there are none."""

    def exchanged(self, value: Any) -> list[Any]:
        """What each process of the run has given here, this one's included; every one must."""
        return [value]

    def gathered(self, profile: Profile) -> Profile | None:
        """The profile of all processes, which the first of them gets; every one must ask."""
        return profile

    def messages(self, operations: Sequence[Operation], control: Array) -> dict[int, EntryLike]:
        """The native entries of a trace's messages, by operation id; here there are none."""
        return {}

    def enqueues(
        self, operations: Sequence[Operation], order: Sequence[int], edges: Array
    ) -> Enqueues | None:
        """What a trace enqueues on GPUs; here there are none."""
        return None

    def check(self) -> None:
        """Raise what stopped the run, or that the runtime is closed.

        Raises: StoppedError, TaskError.
        """
        if self._closed:
            raise StoppedError(self._closed)
        if self.fault is not None:
            raise StoppedError(
                f"the runtime was stopped by an error; call reset() to go on: {self.fault}"
            ) from self.fault

    def wait(self) -> None:
        """Wait until no operation is left.

        Raises: the error of a task that failed, once; StoppedError from then on.
        """
        if not self._live and self.fault is None:
            return
        if self._closed:
            raise StoppedError(self._closed)
        with self._lock:
            while self._live and self.fault is None:
                self._idle.wait()
        self._tell()

    def _tell(self) -> None:
        """Raise the fault, if there is one: once as itself, then that the run was stopped."""
        if self.fault is not None:
            if self.told:
                self.check()
            self.told = True
            raise self.fault

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._closed)

    def forked(self) -> None:
        """In a child process there are no threads: nothing can be run, or waited for."""
        self._closed = self._closed or FORKED
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self.workers.clear()

    @property
    def busy(self) -> bool:
        """Whether operations are waiting or running."""
        return bool(self._live)

    @property
    def lowest_live(self) -> int | None:
        """The smallest id of an operation that has not ended, or None."""
        with self._lock:
            return min(self._live) if self._live else None

    def reset(self) -> None:
        """Forget the error that stopped the run. Operations that were running are waited for."""
        with self._lock:
            if self.fault is None:
                self.fault = StoppedError("the runtime is being reset")
            self._drop()
        if self._threads and not self._closed:
            self.run_all(dict.fromkeys(self.processors, do_nothing), do_nothing)
        with self._lock:
            self._stepping[:] = [False] * len(self._stepping)
            self.fault = None
            self.told = False

    def close(self) -> None:
        """Stop the threads and join them; work that is queued and not started is dropped."""
        if self._closed:
            return
        self._closed = "the runtime is closed"
        with self._lock:
            if self.fault is None:  # what runs now makes nothing else ready
                self.fault, self.told = StoppedError(self._closed), True
            self._drop()
        for process in list(self._processes.values()):
            process.close()  # also ends a body that runs in it
        if self._own:
            self._threads.join()
