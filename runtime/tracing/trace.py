"""Traces: a captured step compiled into native programs, and replayed.

Compiling plans the arena, orders whoever reuses bytes, binds the entries at their final addresses
and builds the arrays of the native loops. A replay runs no Python between native entries.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.native import memory as native_memory
from soapstone.native.memory import Array
from soapstone.runtime.analysis import eviction
from soapstone.runtime.analysis.instance import Cells, Instance, Instances, each_once
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import BodyError, MapperError, RuntimeCoreError, TaskError
from soapstone.runtime.executors.bodies import as_task_error, bound, checked_message
from soapstone.runtime.executors.threads import do_nothing
from soapstone.runtime.model.task import EntryLike, status_text
from soapstone.runtime.observe.profile import Observer, Profile
from soapstone.runtime.tracing.capture import (
    CaptureAnalysis,
    Recorder,
    install_results,
    restore_needs,
)
from soapstone.runtime.tracing.lifetime import ArenaLayout
from soapstone.runtime.tracing.ordering import Part
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.runtime.core import Runtime
    from soapstone.runtime.machines.memory import Arena
    from soapstone.runtime.model.region import Region
    from soapstone.runtime.tracing.step import Request

STOPPED = -2  # of an entry that waits for another process: something else has failed


class Trace:
    """A compiled step of a runtime; a capture makes it, of an analysis and the sink it filled.

    operations: everything a replay runs, by id. copied_bytes: what it copies between memories.
    edges: int64 (edges, 2), the dependences of the analysis and of reused bytes, each once. order:
    ids in the order in which workers run theirs.
    """

    def __init__(self, runtime: Runtime, name: str, analysis: CaptureAnalysis, sink: Recorder):
        self.name = name
        self._runtime = runtime
        self._analysis = analysis
        self._regions = analysis.persistent()
        self._raised: dict[int, BaseException] = {}
        self._left: list[tuple[Instances, int, list[tuple[Instance, Cells]]]] | None = None
        self._entries: list[EntryLike | None] = [None] * len(sink.operations)
        part = Part(sink.operations, sink.edges(), runtime.executor.world)
        memories = len(runtime.machine.memories)
        free = [runtime.memory.free(memory) for memory in range(memories)]
        self.layout: ArenaLayout = part.lay_out(free)
        self.operations, self.order = part.operations, part.order
        pairs = np.concatenate([part.edges, self.layout.edges])
        self.edges: Array = each_once(pairs)
        self._arenas = self._allocate()
        self.copied_bytes = sum(_between(operation) for operation in self.operations)
        self._enqueues = runtime.executor.enqueues(self.operations, self.order, self.edges)
        self._program = self._assemble()
        analysis.forget()  # only compiling needed the users

    # -- compiling

    def _allocate(self) -> dict[int, tuple[Arena, Array]]:
        """Return the arena of each memory and what of it this trace uses."""
        arenas: dict[int, tuple[Arena, Array]] = {}
        pool = self._runtime.memory
        for memory, plan in enumerate(self.layout.plans):
            placed = self.layout.placed[memory]
            if memory in self._analysis.spaces:
                for storage, _ in placed:
                    pool.allocate(storage)
            elif plan.peak_bytes:
                held = sorted(placed, key=lambda item: -item[0].nbytes)
                most = ", ".join(f"{s.name or '?'} {s.nbytes} bytes" for s, _ in held[:5])
                what = f"the arena of trace {self.name!r} (largest: {most})"
                arena = pool.arena(memory, plan.peak_bytes, what)
                arenas[memory] = arena, arena.buffer[: plan.peak_bytes]
                for storage, offset in placed:
                    storage.attach(arena.buffer[offset : offset + storage.nbytes])
            else:
                for storage, _ in placed:
                    storage.attach(np.zeros(0, dtype=np.uint8))
        return arenas

    def _assemble(self) -> Any:
        from soapstone.native.entries import noop
        from soapstone.runtime.tracing import program, python_entry

        by_processor: dict[int, list[Operation]] = {}
        for operation in self.operations:
            by_processor.setdefault(operation.processor, []).append(operation)
        addresses = [0] * len(self.operations)
        blocks = [0] * len(self.operations)
        idle = noop().address
        control = program.control_words()
        self._messages = self._runtime.executor.messages(self.operations, control)
        calls = self._calls = python_entry.Calls(len(self.operations))
        enqueues = self._enqueues
        tell = self._runtime.binding and partial(self._runtime.binding, len(self.operations))

        def bind(mine: Sequence[Operation]) -> Callable[[], None]:
            def work() -> None:
                with native_memory.one_at_a_time() as workspace:
                    for operation in mine:
                        workspace.next_entry()
                        place(operation)

            return work

        def place(operation: Operation) -> None:
            number = operation.id
            if tell is not None:
                tell()
            if enqueues is not None and number in enqueues:
                enqueues.bind(operation)
                addresses[number] = idle  # the first of its segment enqueues all of it
                return
            entry = self._bind(operation)
            self._entries[number] = entry
            ready = None if enqueues is None else enqueues.waits(number)
            if entry is not None and ready is None:
                addresses[number], blocks[number] = entry.address, entry.block
            elif operation.idle:
                addresses[number] = idle
            else:
                call = self._prepare(operation) if entry is None else _called(entry)
                made = self._guarded(number, call if ready is None else _after(ready, call))
                addresses[number] = python_entry.entry_address()
                blocks[number] = calls.block(number, made)

        jobs = {processor: bind(mine) for processor, mine in by_processor.items()}
        self._runtime.executor.run_all(jobs, do_nothing)
        processors = [operation.processor for operation in self.operations]
        if enqueues is not None:
            for number, start in enqueues.starts.items():
                addresses[number] = python_entry.entry_address()
                blocks[number] = calls.block(number, self._guarded(number, start))
            for operation in self.operations:
                if operation.id in enqueues:
                    processors[operation.id] = enqueues.lead
        predecessors: list[list[int]] = [[] for _ in self.operations]
        for source, target in self.edges.tolist():
            predecessors[target].append(source)
        threads = sum(each.threads for each in self._runtime.machine.workers)
        crowded = threads * self._runtime.executor.world.size > usable_cores()
        return program.assemble(
            self.order, processors, predecessors, addresses, blocks, control, crowded
        )

    def _prepare(self, operation: Operation) -> Callable[[], object]:
        """The call of an operation's Python body, its arrays and context made once."""
        number = operation.processor
        try:
            return self._runtime.executor.prepared(operation, number, operation.arrays())
        except BodyError as error:
            processor = self._runtime.machine.processors[number]
            raise as_task_error(operation, processor, error) from error

    def _guarded(self, number: int, call: Callable[[], object]) -> Callable[[], bool]:
        """A function that tells whether a call succeeded, and keeps what it raises.

        number: the id of the operation that it is of.
        """
        raised = self._raised

        def guarded() -> bool:
            try:
                call()
            except BaseException as error:
                raised[number] = error
                return False
            return True

        return guarded

    def _bind(self, operation: Operation) -> EntryLike | None:
        """The entry of an operation, or None when its Python body (or nothing) runs.

        Raises: TaskError when binding fails.
        """
        message = self._messages.get(operation.id)
        if message is not None:
            return checked_message(message) if native_memory.CHECKED else message
        task = operation.launch.task
        if task.bind is None or operation.idle:
            return None
        processor = self._runtime.machine.processors[operation.processor]
        try:
            entry = bound(operation, processor, operation.arrays())
        except MapperError:
            raise
        except Exception as error:
            raise as_task_error(operation, processor, error) from error
        if entry is None and task.body is None:
            raise TaskError(
                operation.launch.name,
                operation.point,
                processor.name,
                "bind gave no entry, and the task has no Python body",
            )
        return entry

    # -- replaying

    @property
    def requests(self) -> list[Request]:
        """The launches and fills that were captured."""
        return self._analysis.requests

    @property
    def regions(self) -> Mapping[Region, Instances]:
        """The regions that the step uses, and their instances."""
        return self._analysis.regions

    def replay(self, profile: bool | Profile | None = False) -> Profile | None:
        """Run the step once, after all that was launched and before what other threads launch.

        Args:
            profile: True for a timeline of this replay, or a timeline to add it to. Returns it.

        Raises: TaskError when an entry fails (the trace can be replayed again); StoppedError when
        the runtime is closed or stopped; KeyboardInterrupt, after all workers have stopped.
        """
        runtime = self._runtime
        with runtime.turn:
            runtime.quiet("replay")
            if runtime.agreement is not None:
                runtime.agreement.event(f"replay of trace {self.name!r}")
            if profile is True:
                profile = Profile.here(runtime.machine, runtime.executor.world, self.name)
            timeline = profile or None
            settled = not runtime.many_instances
            try:
                if runtime.many_instances:
                    self._restore()
                try:
                    self._run(runtime.observed(timeline))
                except BaseException:
                    runtime.failed(self.name)
                    with contextlib.suppress(RuntimeCoreError):  # of what follows from the first
                        if runtime.many_instances:
                            self._install()
                            settled = True
                    raise
                if runtime.many_instances:
                    self._install()
                    settled = True
            except KeyboardInterrupt as error:
                if not settled:
                    runtime.interrupted(error)
                raise
            runtime.statistics.steps_replayed += 1
            runtime.statistics.bytes_replayed += self.copied_bytes
            return timeline

    @property
    def entries(self) -> tuple[Array, Array] | None:
        """The functions and blocks of a replay that is nothing but to run them in order, or None.

        Addresses, int64 (entries): where one worker of this process runs all, and nobody watches.
        """
        runtime, workers = self._runtime, self._program.workers
        watched = runtime.observed(None) is not None or runtime.agreement is not None
        if len(workers) != 1 or runtime.many_instances or watched or native_memory.CHECKED:
            return None
        return workers[0].fn, workers[0].block

    @property
    def in_order(self) -> list[native_memory.Entry] | None:
        """What a replay runs, one after another, or None where that is not all that it does."""
        if self.entries is None or self._enqueues is not None:
            return None
        mine = [self._entries[i] for i in self.order if not self.operations[i].idle]
        found = [entry for entry in mine if isinstance(entry, native_memory.Entry)]
        return found if len(found) == len(mine) else None

    @property
    def transient(self) -> list[Array]:
        """The bytes in which nothing outlives a replay."""
        return [used for _, used in self._arenas.values()]

    def fits(self) -> bool:
        """Whether the instances it was compiled for are still those of the runtime."""
        main = self._runtime.analysis
        for region in self._regions:
            mine = main.state(region).by_key
            for key, instance in self._analysis.regions[region].by_key.items():
                now = mine.get(key)
                if now is None or now.storage is not instance.storage:
                    return False
        return True

    def _restore(self) -> None:
        """Make the precondition hold, unless nothing has changed since the last replay."""
        runtime = self._runtime
        runtime.claim_live()
        if eviction.leave_all(runtime.analysis):
            runtime.executor.wait()
        if self._left is not None and all(
            len(state.by_key) == count and all(i.valid is valid for i, valid in instances)
            for state, count, instances in self._left
        ):
            return
        made = restore_needs(runtime.analysis, self._analysis, self._regions)
        runtime.statistics.fixup_copies += made
        runtime.executor.wait()
        self._left = None

    def _install(self) -> None:
        """Record what the step wrote, and how it left the validity of every region."""
        runtime = self._runtime
        if self._left is None:
            install_results(runtime.analysis, self._analysis, self._regions)
            runtime.publish_live()
            states = {region: runtime.analysis.state(region) for region in self._regions}
            theirs = self._analysis.regions
            if all(not state.live or theirs[region].live for region, state in states.items()):
                self._left = [
                    (
                        state,
                        len(state.by_key),
                        [] if state.sole else [(instance, instance.valid) for instance in state],
                    )
                    for state in states.values()
                ]

    def _run(self, timeline: Observer | None) -> None:
        program = self._program
        if not program.workers:  # of several processes, this one has nothing to do
            if timeline is not None:
                timeline.add_replay(self, [])
            return
        program.reset()
        self._raised.clear()
        enqueues = self._enqueues
        if enqueues is not None:
            enqueues.timed = timeline is not None
        if native_memory.CHECKED:
            devices = self._runtime.machine.devices
            for memory, (_, used) in self._arenas.items():  # nothing outlives a replay there
                if memory not in devices:
                    native_memory.spoil(used)
        stamps: list[Array | None] = [
            np.zeros((mine.fn.size, 3), dtype=np.int64) if timeline is not None else None
            for mine in program.workers
        ]

        def worker(number: int) -> Callable[[], None]:
            return lambda: program.run(number, stamps[number])

        try:
            jobs = {mine.processor: worker(n) for n, mine in enumerate(program.workers)}
            self._runtime.executor.run_all(jobs, program.abort)
        finally:
            if enqueues is not None:
                enqueues.wait()
            said = enqueues.failure() if enqueues is not None else None
        failures = program.failures()
        if failures:
            self._fail(failures)
        if said is not None:
            raise said
        if timeline is None:
            return
        if enqueues is not None:
            for mine, stamped in zip(program.workers, stamps):
                if stamped is not None:
                    enqueues.stamps(mine.operations.tolist(), stamped)
        workers = [
            ([self.operations[i] for i in mine.operations.tolist()], stamped)
            for mine, stamped in zip(program.workers, stamps)
            if stamped is not None
        ]
        timeline.add_replay(self, workers)

    def _fail(self, failures: list[tuple[int, int]]) -> None:
        executor = self._runtime.executor
        place = {number: position for position, number in enumerate(self.order)}
        own = [(number, status) for number, status in failures if status != STOPPED]
        if not own and executor.fault is not None:
            executor.check()
        number, status = min(own or failures, key=lambda failure: place[failure[0]])
        operation = self.operations[number]
        processor = self._runtime.machine.processors[operation.processor]
        raised = self._raised.get(number)
        if isinstance(raised, TaskError):
            error = raised
        elif raised is not None:
            error = as_task_error(operation, processor, raised)
        else:
            entry = self._entries[number]
            reason = status_text(entry, status) if entry is not None else f"status {status}"
            error = TaskError(operation.launch.name, operation.point, processor.name, reason)
        executor.stop(error)
        raise error

    # -- reporting

    @property
    def peak_bytes(self) -> int:
        """The bytes of all arenas together."""
        return sum(plan.peak_bytes for plan in self.layout.plans)

    def describe(self) -> dict[str, Any]:
        """What the trace holds: operations by kind, dependences, waits, bytes in each memory."""
        program = self._program
        python = sum(
            entry is None
            and not operation.idle
            and not (self._enqueues is not None and operation.id in self._enqueues)
            for entry, operation in zip(self._entries, self.operations)
        )
        names = [memory.name for memory in self._runtime.machine.memories]
        return {
            "name": self.name,
            "operations": dict(Counter(operation.kind for operation in self.operations)),
            "python_entries": python,
            "edges": len(self.edges),
            "reuse_edges": len(self.layout.edges),
            "waits": int(sum(mine.wait_word.size for mine in program.workers)),
            "workers": [
                {
                    "processor": self._runtime.machine.processors[mine.processor].name,
                    "entries": int(mine.fn.size),
                }
                for mine in program.workers
            ],
            "memories": {
                name: {
                    "peak_bytes": plan.peak_bytes,
                    "bound_bytes": plan.bound_bytes,
                    "blocks": len(plan.offsets),
                }
                for name, plan in zip(names, self.layout.plans)
            },
            "peak_bytes": self.peak_bytes,
            "copied_bytes": self.copied_bytes,
        }

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}: {len(self.operations)} operations on "
            f"{len(self._program.workers)} workers, arena {self.peak_bytes} bytes)"
        )


def _between(operation: Operation) -> int:
    """The bytes that an operation copies from one memory to another."""
    if operation.kind != "copy":
        return 0
    source, target = (use.storage for use in operation.uses)
    if source is None or target is None or source.memory == target.memory:
        return 0
    return operation.touched_bytes // 2


def _called(entry: EntryLike) -> Callable[[], object]:
    """A call of a native entry that raises what its status means."""

    def call() -> None:
        status = native_memory.call(entry.address, entry.block)
        if status:
            raise RuntimeError(status_text(entry, status))

    return call


def _after(ready: Callable[[], None], call: Callable[[], object]) -> Callable[[], object]:
    """A call that waits first."""

    def late() -> None:
        ready()
        call()

    return late
