"""Processes that share a list of tasks; results are in the tasks' order, however many there are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int, "int | None"], None]  # stage, done, total
_CHUNK = 8  # tasks that travel together
_TOLD = 256  # tasks between two reports of progress


@contextmanager
def spawned(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes as long as the block runs; if it raises, they end in mid-work.

    Spawned: a fork of a process with thread pools may hang, and starting anew takes 1 or 2 s.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _ignore_interrupts)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Workers:
    """A pool of spawned processes, or this process where one is enough."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._ends = ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    def map(self, function: Callable[..., R], tasks: Sequence[T], *given: Any) -> list[R]:
        """Return `function(task, *given)` of each task."""
        if self._processes <= 1 or len(tasks) <= _CHUNK:
            return [function(task, *given) for task in tasks]
        if self._pool is None:
            self._pool = self._ends.enter_context(spawned(self._processes))
        repeated = [[value] * len(tasks) for value in given]
        return list(self._pool.map(function, tasks, *repeated, chunksize=_CHUNK))

    def each(
        self,
        function: Callable[..., R],
        tasks: Sequence[T],
        *given: Any,
        stage: str,
        progress: Progress | None,
        results: list[R] | None = None,
    ) -> list[R]:
        """Return `function(task, *given)` of each task, and say how many of a stage are done.

        results: those of the first tasks, to which the others are added as they come.
        """
        results = [] if results is None else results
        for first in range(len(results), len(tasks), _TOLD):
            if progress is not None:
                progress(stage, first, len(tasks))
            results += self.map(function, tasks[first : first + _TOLD], *given)
        return results


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
