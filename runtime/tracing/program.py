"""The native loops that replay a trace: each worker runs its entries in order, without Python.

Order between workers is kept by progress words, not by counters: each worker publishes how many
of its entries are done, and an entry that depends on another worker waits until that worker's
word is large enough. Because every worker runs its own entries in order, one wait covers all
earlier entries of the other worker; `waits` (compile time) leaves out those already implied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.native.intrinsics import (
    call_entry,
    clock_ns,
    load_acquire,
    pause,
    store_release,
    yield_processor,
)

Array = np.ndarray[Any, np.dtype[Any]]

LINE = 8  # int64 words of a cache line: progress words are kept apart
ABORT = 0  # control[0]: any other value than 0 stops all workers
SPINS = 256  # polls before a waiting worker lets other threads run


@njit(nogil=True)
def run_alone(fn: Any, block: Any, control: Any, result: Any) -> None:
    """Run all entries in order; the only worker, so nothing is waited for."""
    for k in range(fn.size):
        if control[0] != 0:
            return
        status = call_entry(fn[k], block[k])
        if status != 0:
            result[0] = k
            result[1] = status
            control[0] = 1
            return


@njit(nogil=True)
def run_worker(
    fn: Any,
    block: Any,
    first_wait: Any,
    wait_word: Any,
    wait_value: Any,
    publish: Any,
    progress: Any,
    word: int,
    control: Any,
    result: Any,
    spins: int,
    stamps: Any = None,
) -> None:
    """Run one worker's entries in order, each once the workers it waits for have come far enough.

    On a non-zero status the position and the status go to `result`, and the abort word is set;
    every wait and every entry looks at it. stamps: if given, when each entry began to wait,
    started and ended (ns); what it takes to note that is compiled only then.
    """
    for k in range(fn.size):
        if load_acquire(control, 0) != 0:
            return
        if stamps is not None:
            stamps[k, 0] = clock_ns()
        for e in range(first_wait[k], first_wait[k + 1]):
            polls = 0
            while load_acquire(progress, wait_word[e]) < wait_value[e]:
                if load_acquire(control, 0) != 0:
                    return
                polls += 1
                if polls < spins:
                    pause()
                else:
                    yield_processor()
        if stamps is not None:
            stamps[k, 1] = clock_ns()
        status = call_entry(fn[k], block[k])
        if stamps is not None:
            stamps[k, 2] = clock_ns()
        if status != 0:
            result[0] = k
            result[1] = status
            store_release(control, 0, 1)
            return
        if publish[k]:
            store_release(progress, word, k + 1)


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
        mine = self.workers[number]
        result = self.result[number]
        if stamps is None and len(self.workers) == 1:
            run_alone(mine.fn, mine.block, self.control, result)
            return
        shared = (
            mine.fn,
            mine.block,
            mine.first_wait,
            mine.wait_word,
            mine.wait_value,
            mine.publish,
            self.progress,
            number * LINE,
            self.control,
            result,
            self.spins,
        )
        if stamps is None:
            run_worker(*shared)
        else:
            run_worker(*shared, stamps)

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
    spins: int = SPINS,
) -> NativeProgram:
    """The native program of operations with entries, on workers that follow one global order.

    processors, addresses, blocks, predecessors: by operation. Processors without operations get
    no worker. Everything the loops need is allocated here, but `control` where that is given.
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
        spins=spins,
    )
