"""The native loops that replay a trace: each worker runs its entries in order, without Python.

Order between workers is kept by progress words, not by counters: each worker publishes how many
of its entries are done, and an entry that depends on another worker waits until that worker's
word is large enough. Because every worker runs its own entries in order, one wait covers all
earlier entries of the other worker; `waits` (compile time) leaves out those already implied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.native.blocks import Fields
from soapstone.native.entries import native
from soapstone.native.intrinsics import (
    call_entry,
    clock_ns,
    i64p,
    load_acquire,
    pause,
    rest,
    store_release,
    u8p,
    yield_processor,
)
from soapstone.native.memory import Array, Block, call
from soapstone.records import dataclass

LINE = 8  # int64 words of a cache line: progress words are kept apart
ABORT = 0  # control[0]: any other value than 0 stops all workers
SPINS = 256  # polls before a waiting worker lets other threads run
LONG = 8000  # where each has a core: some 0.2 ms, before it sleeps for 0.05 ms at a time


# count: of entries; number: the worker's word of `progress`; stamps: an address, or 0: when each
# entry began to wait, started and ended (ns).
_WORKER = Fields(
    "count fn block first_wait wait_word wait_value publish progress word control result spins"
    " rests stamps"
)
_worker_of = _WORKER.at


@native()
def _run(block: Any) -> int:
    """Run one worker's entries in order, each once the workers it waits for have come far enough.

    On a non-zero status the position and the status go to `result`, and the abort word is set;
    every wait and every entry looks at it.
    """
    w = _worker_of(block)
    stamps = i64p(w.stamps)
    for k in range(w.count):
        if load_acquire(w.control, 0) != 0:
            return 0
        if w.stamps != 0:
            stamps[3 * k] = clock_ns()
        for e in range(i64p(w.first_wait)[k], i64p(w.first_wait)[k + 1]):
            polls = 0
            while load_acquire(w.progress, i64p(w.wait_word)[e]) < i64p(w.wait_value)[e]:
                if load_acquire(w.control, 0) != 0:
                    return 0
                polls += 1
                if polls < w.spins:
                    pause()
                elif w.rests == 0:
                    yield_processor()
                else:
                    rest()
        if w.stamps != 0:
            stamps[3 * k + 1] = clock_ns()
        status = call_entry(i64p(w.fn)[k], i64p(w.block)[k])
        if w.stamps != 0:
            stamps[3 * k + 2] = clock_ns()
        if status != 0:
            i64p(w.result)[0] = k
            i64p(w.result)[1] = status
            store_release(w.control, 0, 1)
            return 0
        if u8p(w.publish)[k] != 0:
            store_release(w.progress, w.word, k + 1)
    return 0


def control_words() -> Array:
    """The words by which a program is stopped."""
    return np.zeros(LINE, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class WorkerProgram:
    """One worker's arrays, in the order it runs them. operations: the trace's operation ids."""

    processor: int
    operations: Array
    fn: Array
    block: Array
    first_wait: Array
    wait_word: Array
    wait_value: Array
    publish: Array


@dataclass(frozen=True, eq=False)
class NativeProgram:
    """The arrays of all workers and the words they share; a worker's number is its place here.

    control: int64, [0] is the abort word. result: (workers, LINE) position and status of the
    entry that failed on each worker (-1: none). progress: one cache line a worker.
    """

    workers: tuple[WorkerProgram, ...]
    control: Array
    progress: Array
    result: Array
    spins: int
    rests: bool

    def reset(self) -> None:
        """Make the program ready to run: no progress, no failure, no abort."""
        self.control[:] = 0
        self.progress[:] = 0
        self.result[:, 0] = -1

    def abort(self, reason: int = 2) -> None:
        """Stop all workers at their next entry or wait."""
        self.control[ABORT] = reason

    def run(self, number: int, stamps: Array | None = None) -> None:
        """Run one worker's part in the calling thread, without the interpreter lock.

        stamps: int64 (entries, 3) to fill with nanoseconds, or None.
        """
        block = self._blocks[number] if stamps is None else self._of(number, stamps)
        call(_run.address, block.address)

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return tuple(self._of(number, 0) for number in range(len(self.workers)))

    def _of(self, number: int, stamps: Array | int) -> Block:
        """Return the block of a worker's run; stamps: see `run`."""
        mine = self.workers[number]
        return _WORKER.pack(
            count=mine.fn.size,
            fn=mine.fn,
            block=mine.block,
            first_wait=mine.first_wait,
            wait_word=mine.wait_word,
            wait_value=mine.wait_value,
            publish=mine.publish,
            progress=self.progress,
            word=number * LINE,
            control=self.control,
            result=self.result[number],
            spins=self.spins,
            rests=self.rests,
            stamps=stamps,
        )

    def failures(self) -> list[tuple[int, int]]:
        """The operations that failed in the last run, with their statuses."""
        found = []
        for number, mine in enumerate(self.workers):
            position = int(self.result[number, 0])
            if position >= 0:
                found.append((int(mine.operations[position]), int(self.result[number, 1])))
        return found


def waits(
    processors: Sequence[int], order: Sequence[int], predecessors: Sequence[Sequence[int]]
) -> tuple[list[list[tuple[int, int]]], list[bool]]:
    """The waits each operation needs, by vector clocks, and who must publish progress.

    processors: worker of each operation. order: operations in one global order that respects
    `predecessors`. Returns, for each operation, the (worker, count) pairs it must wait for, none
    of which is implied by the others or by what its worker knows already; and whether some other
    worker waits for it.
    """
    workers = max(processors, default=0) + 1
    done = [0] * workers  # operations placed on each worker so far
    placed: list[list[int]] = [[] for _ in range(workers)]
    known = [[0] * workers for _ in range(workers)]  # what each worker knows of each other
    clocks: list[list[int]] = [[] for _ in processors]
    position = [0] * len(processors)
    found: list[list[tuple[int, int]]] = [[] for _ in processors]
    publish = [False] * len(processors)
    for operation in order:
        worker = processors[operation]
        mine = known[worker]
        needed: dict[int, int] = {}
        for source in predecessors[operation]:
            other = processors[source]
            if other != worker and position[source] > max(mine[other], needed.get(other, 0)):
                needed[other] = position[source]
        if needed:
            pairs = list(needed.items())
            seen = {other: clocks[placed[other][count - 1]] for other, count in pairs}
            for other, count in pairs:
                implied = any(seen[third][other] >= count for third in seen if third != other)
                if not implied:
                    found[operation].append((other, count))
                    publish[placed[other][count - 1]] = True
            for other in seen:
                mine[:] = [max(a, b) for a, b in zip(mine, seen[other])]
        done[worker] += 1
        position[operation] = done[worker]
        placed[worker].append(operation)
        mine[worker] = done[worker]
        clocks[operation] = mine.copy() if workers > 1 else mine
    return found, publish


def assemble(
    order: Sequence[int],
    processors: Sequence[int],
    predecessors: Sequence[Sequence[int]],
    addresses: Sequence[int],
    blocks: Sequence[int],
    control: Array | None = None,
    crowded: bool = True,
) -> NativeProgram:
    """The native program of operations with entries, on workers that follow one global order.

    processors, addresses, blocks, predecessors: by operation. Processors without operations get
    no worker. Everything the loops need is allocated here, but `control` where that is given.
    crowded: whether there may be more threads than cores: a worker that waits then soon yields to
    others. Else it sleeps, since who it would yield to is another process, for milliseconds.
    """
    used = sorted(set(processors))
    number = {processor: place for place, processor in enumerate(used)}
    local = [number[processor] for processor in processors]
    needed, publish = waits(local, order, predecessors)
    lists: list[list[int]] = [[] for _ in used]
    for operation in order:
        lists[local[operation]].append(operation)
    workers = []
    for processor, mine in zip(used, lists):
        first = np.zeros(len(mine) + 1, dtype=np.int64)
        first[1:] = np.cumsum([len(needed[operation]) for operation in mine])
        pairs = [pair for operation in mine for pair in needed[operation]]
        workers.append(
            WorkerProgram(
                processor=processor,
                operations=np.array(mine, dtype=np.int64),
                fn=np.array([addresses[operation] for operation in mine], dtype=np.int64),
                block=np.array([blocks[operation] for operation in mine], dtype=np.int64),
                first_wait=first,
                wait_word=np.array([other * LINE for other, _ in pairs], dtype=np.int64),
                wait_value=np.array([count for _, count in pairs], dtype=np.int64),
                publish=np.array([publish[operation] for operation in mine], dtype=bool),
            )
        )
    return NativeProgram(
        workers=tuple(workers),
        control=control if control is not None else control_words(),
        progress=np.zeros(max(1, len(used)) * LINE, dtype=np.int64),
        result=np.full((max(1, len(used)), LINE), -1, dtype=np.int64),
        spins=SPINS if crowded else LONG,
        rests=not crowded,
    )
