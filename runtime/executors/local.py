"""The local executor: one thread a processor, which runs operations or replays native programs.

Untraced operations start as soon as their dependence counts fall to zero. A thread waits in a
queue between steps, sets its OpenMP thread count once, and is a daemon, so that a crash exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from soapstone import system
from soapstone.native import memory
from soapstone.native.memory import FUNCTION, Entry
from soapstone.runtime.agreement import Agreement
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import (
    BodyError,
    MapperError,
    MemoryExhausted,
    StoppedError,
    TaskError,
)
from soapstone.runtime.executors.process.processes import WorkerProcess
from soapstone.runtime.executors.stealing import Stealing
from soapstone.runtime.forks import FORKED, tell
from soapstone.runtime.machines.machine import PROCESS, Machine, Processor
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.scalar import captured
from soapstone.runtime.model.task import EntryLike, PointContext, identity, status_text
from soapstone.runtime.observe.profile import Observer, Profile

Array = np.ndarray[Any, np.dtype[Any]]


def set_openmp_threads(threads: int) -> None:
    """Set the calling thread's OpenMP thread count, where its library is there to be set."""
    library = system.openmp()
    if library is not None:
        library.omp_set_num_threads(ctypes.c_int(threads))


def context_of(operation: Operation, processor: Processor) -> PointContext:
    """What the task of an operation may know."""
    launch = operation.launch
    return PointContext(
        launch.task,
        operation.point,
        launch.grid,
        processor,
        launch.scalars,
        operation.variant,
    )


def bound(operation: Operation, processor: Processor, arrays: Sequence[Array]) -> EntryLike | None:
    """The native entry of an operation's task on arrays, or None where its Python body runs.

    In checked mode it runs on fenced copies of them; see `native.checked`.
    """
    task = operation.launch.task
    if task.bind is None:
        return None
    context = context_of(operation, processor)
    if not memory.CHECKED:
        return task.bind(context, arrays)
    from soapstone.native.checked import Argument, fenced

    arguments = [
        Argument(f"argument {number} ({use})", array, use.reads, use.writes)
        for number, (array, use) in enumerate(zip(arrays, task.privileges, strict=True))
    ]
    found: EntryLike | None = fenced(arguments, partial(task.bind, context))
    return found


def checked_message(entry: EntryLike) -> EntryLike:
    """The entry of a message that also checks the memory it was given."""
    from soapstone.native.checked import watched

    return watched(entry) if isinstance(entry, Entry) else entry


def prepared_body(
    operation: Operation,
    processor: Processor,
    arrays: Sequence[Array],
    process: WorkerProcess | None = None,
) -> Callable[[], object]:
    """The call of an operation's Python body on its arrays (read-only views where it only reads).

    It may be called many times: reduce buffers are set to the identity before each. process: where
    the body runs, if not in the calling thread.

    Raises: StoppedError for a task without a body; BodyError for one that no process can run.
    """
    launch = operation.launch
    task = launch.task
    body = task.body
    if body is None:
        raise StoppedError(f"task {task.name!r} has no body, and its bind function gave no entry")
    views = []
    partials: list[tuple[Array, Any]] = []
    for array, privilege in zip(arrays, task.privileges):
        if not privilege.writes:
            array = array.view()
            array.setflags(write=False)
        elif privilege.reduction is not None:
            partials.append((array, identity(privilege.reduction, array.dtype)))
        views.append(array)
    given: list[Any] = [context_of(operation, processor)] if task.context else []
    if launch.scalars:
        regions, scalars = iter(views), iter(launch.scalars)
        given += [next(regions) if region else next(scalars) for region in launch.layout]
    else:
        given += views
    call: Callable[[], object] = partial(body, *given)
    if process is not None:
        call = process.prepared(task.name, body, given)
    elif launch.changeable:
        scalar = [False] * task.context + [not region for region in launch.layout]

        def call() -> object:
            return body(*[captured(x) if mine else x for x, mine in zip(given, scalar)])

    if not partials:
        return call

    def reduce() -> None:
        for array, value in partials:
            array[...] = value
        call()

    return reduce


def as_task_error(operation: Operation, processor: Processor, error: BaseException) -> TaskError:
    """The error of a point task, caused by what its body raised."""
    reason = error.reason if isinstance(error, BodyError) else f"{type(error).__name__}: {error}"
    found = TaskError(operation.launch.name, operation.point, processor.name, reason)
    found.__cause__ = error
    return found


class _Round:
    """Functions running on several threads; the last to end says so."""

    __slots__ = ("_tokens", "done", "errors")

    def __init__(self, count: int) -> None:
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.errors: dict[int, BaseException] = {}
        self._tokens = [None] * (count - 1)

    def run(self, processor: int, function: Callable[[], None]) -> None:
        """Run one function in the calling thread, and keep what it raises."""
        try:
            function()
        except BaseException as error:
            self.errors[processor] = error
        try:
            self._tokens.pop()  # atomic: only the last finds the list empty
        except IndexError:
            self.done.put(None)


class LocalExecutor:
    """The worker threads of one runtime, and the untraced operations they are given.

    It is the sink of the untraced analysis: `emit` takes operations, `allocate` gives storages
    their bytes.
    """

    logs = True  # whether all it runs passes here, so that a log would be whole

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        self.machine = machine
        self.fault: BaseException | None = None
        self.told = False  # whether `wait` has raised the fault
        self.profile: Observer | None = None
        self.world = World.alone(machine)
        self.agreement: Agreement | None = None  # with the other processes, in safe mode
        self.mine: Sequence[bool] | None = None  # every processor's operations
        self.processors: Sequence[int] = range(len(machine.processors))
        self._memory = memory
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._live: dict[int, Operation] = {}
        self._ready: list[list[tuple[int, int, Operation]]] = [[] for _ in machine.processors]
        self._stepping = [False] * len(machine.processors)  # whether a thread will look at them
        self._steps = [partial(self._step, number) for number in range(len(machine.processors))]
        self._queues: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, WorkerProcess] = {}  # of processors of kind "process"
        self._ticket = itertools.count()
        self.workers: set[int] = set()  # the threads, by their identifiers
        self._closed = ""  # why it is of no use any more
        self._stealing: Stealing | None = None  # once there is something to steal
        tell(self)
        tell(memory)

    # -- threads

    def _start(self) -> None:
        if self._closed:
            raise StoppedError(self._closed)
        cores = _cores(self.machine)
        for number in self.processors:
            if number in self._queues:
                continue  # an interrupt came between this one and the next
            processor = self.machine.processors[number]
            inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox, processor.threads, cores[number] if cores else None),
                daemon=True,
                name=f"soapstone-{processor.name}-{number}",
            )
            thread.start()
            self.workers.add(thread.ident or 0)
            self._queues[number] = inbox
            self._threads.append(thread)

    def run_all(
        self, jobs: Mapping[int, Callable[[], None]], interrupt: Callable[[], None]
    ) -> None:
        """Run one function on each of some processors' threads, and wait for all of them.

        On KeyboardInterrupt `interrupt` is called, the threads are waited for, and it is raised.

        Raises: what the function of the first processor that failed raised.
        """
        if len(self._threads) < len(self.processors):
            self._start()
        round_ = _Round(len(jobs))
        try:
            for processor, function in jobs.items():
                self._queues[processor].put(partial(round_.run, processor, function))
            if jobs:
                round_.done.get()
        except KeyboardInterrupt:
            interrupt()
            self._drain(list(jobs))
            raise
        if round_.errors:
            raise round_.errors[min(round_.errors)]

    def _drain(self, processors: Sequence[int]) -> None:
        """Wait until some threads have run everything they were given, whatever interrupts."""
        ended: set[int] = set()
        for processor in processors:
            self._queues[processor].put(partial(ended.add, processor))
        while len(ended) < len(processors):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.001)

    # -- untraced operations

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes; when they do not fit, once more after running work ended.

        Raises: MemoryExhausted.
        """
        for make_room in (_pass, self.wait, self._memory.relieve):
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
        self._queues[processor].put(self._steps[processor])

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
                described = (
                    error
                    if isinstance(error, TaskError | MapperError)
                    else as_task_error(operation, self.machine.processors[processor], error)
                )
                self._fail(described)
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
        inbox = self._queues.get(processor)
        if inbox is not None:
            inbox.put(function)
        return inbox is not None

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
        with self._idle:
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
        self._lock = threading.Lock()
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
            self.run_all(dict.fromkeys(self.processors, _pass), _pass)
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
        for inbox in self._queues.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()


def _pass() -> None:
    """Do nothing: shows that a thread is free."""


def _cores(machine: Machine) -> list[int] | None:
    """The core of each worker when single-threaded workers fill this computer exactly, or None.

    Two workers that wait for each other on one core, while another is idle, are 30 times slower,
    and the operating system may leave them there. With fewer workers than cores nothing is
    pinned: another process may be using the first ones.
    """
    cores = system.core_numbers()
    if cores is None:
        return None
    single = all(processor.threads == 1 for processor in machine.processors)
    fits = len(cores) == len(machine.processors) > 1
    return cores if fits and single else None


def _serve(
    inbox: queue.SimpleQueue[Callable[[], None] | None], threads: int, core: int | None
) -> None:
    """A worker thread: run what arrives until None does."""
    if core is not None:
        system.pin(core)
    set_openmp_threads(threads)
    while True:
        item = inbox.get()
        if item is None:
            return
        item()
        del item  # an idle thread keeps nothing alive
