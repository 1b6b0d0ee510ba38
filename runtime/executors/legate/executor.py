"""Works issued to Legate and waited for; errors of their tasks, which all nodes agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np

from soapstone.runtime.errors import TaskError
from soapstone.runtime.executors.legate.lanes import Faults, use_threads
from soapstone.runtime.executors.legate.start import Legate, start_legate
from soapstone.runtime.executors.legate.tasks import Running
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool

_ERROR_BYTES = 4096  # of an error's text that other nodes learn


class LegateExecutor(LocalExecutor):
    """Issues works to Legate, and waits for them. It is where errors of untraced tasks are kept."""

    logs = False

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        self.places = self._places()
        self.legate = start_legate(max(self.places) + 1)
        self.faults = Faults()
        self._waiting: set[int] = set()  # numbers of calls that may still be run

    def _places(self) -> list[int]:
        """Which of Legate's processors does what each processor has to do."""
        return list(range(len(self.machine.processors)))

    def submit(self, running: Running) -> None:
        """Issue a bundle; its call is kept until the next wait."""
        self._waiting.add(running.number)
        profile = self.profile
        if profile is not None:
            running.record = lambda operation, start, end: profile.add(operation, start, start, end)
        running.issue()

    def agreed(self, faults: Faults) -> BaseException | None:
        """The error of the first operation that failed on any node, or None."""
        return agreed(self.legate, self.machine, faults)

    @property
    def busy(self) -> bool:
        """Whether anything was issued since the last wait."""
        return bool(self._waiting)

    def settle(self) -> None:
        """Wait until Legate has run everything, and forget the calls of single launches."""
        self._finish()
        if self.fault is None:
            self.fault = self.agreed(self.faults)

    def _finish(self) -> None:
        self.legate.fence()
        self.legate.forget(self._waiting)
        self._waiting.clear()

    def wait(self) -> None:
        """Wait until no task is left.

        Raises: the error of a task that failed, once; StoppedError from then on.
        """
        if self._waiting:
            self.settle()
        self._tell()

    def check(self) -> None:
        """Raise what stopped the run, or that the runtime is closed.

        Raises: StoppedError, TaskError.
        """
        if self.fault is None and self.faults and self.legate.nodes == 1:
            self.fault = self.faults.first
        super().check()

    def run_all(
        self, jobs: Mapping[int, Callable[[], None]], interrupt: Callable[[], None]
    ) -> None:
        """Run one function on each of some processors, and wait for all of them.

        What was launched before has ended by then: functions may wait for each other, which those
        of a task that does so too would never let them.

        Raises: what the function of the first processor that failed raised.
        """
        legate = self.legate
        errors: dict[int, BaseException] = {}

        def run(processor: int) -> None:
            self.workers.add(get_ident())
            use_threads(self.machine.processors[processor].threads)
            try:
                jobs[processor]()
            except BaseException as error:
                errors[processor] = error

        number = legate.add(lambda context: partial(run, int(context.scalars[1].value())))
        legate.fence()
        legate.begin()
        for processor in jobs:
            with legate.core.Scope(machine=legate.cpus[self.places[processor]]):
                task = legate.task_of(number, (1,))
                task.add_scalar_arg(processor, legate.core.int64)
                task.execute()
        legate.fence()
        legate.forget([number])
        if errors:
            raise errors[min(errors)]

    def reset(self) -> None:
        """Forget the error that stopped the run."""
        self._finish()
        self.faults.clear()
        self.fault = None
        self.told = False

    def close(self) -> None:
        """Wait for what is running; nothing can be launched afterwards."""
        if not self._closed:
            self._closed = "the runtime is closed"
            self.settle()


def agreed(
    legate: Legate, machine: Machine, faults: Faults, nodes: int | None = None
) -> BaseException | None:
    """The error of the first operation that failed anywhere, or None; the same on every node.

    On several nodes each processor writes its node's error to a row of a store that all read.
    """
    if (legate.nodes if nodes is None else nodes) == 1:
        return faults.first
    count = len(machine.processors)
    store = legate.runtime.create_store(legate.core.uint8, (count, _ERROR_BYTES))

    def tell(context: Any) -> None:
        row = np.asarray(context.outputs[0])
        row[...] = 0
        error = faults.first
        if error is not None:
            parts = [str(getattr(error, name, "")) for name in ("task", "point", "processor")]
            text = json.dumps([*parts, str(error.__cause__ or error)[: _ERROR_BYTES // 8]])
            written = np.frombuffer(text.encode()[:_ERROR_BYTES], np.uint8)
            row[0, : written.size] = written

    number = legate.add(tell)
    legate.begin()
    task = legate.task_of(number, (count, 1))
    task.add_output(store.partition_by_tiling((1, _ERROR_BYTES)))
    task.execute()
    rows = np.array(store.get_physical_store())
    legate.fence()
    legate.forget([number])
    if faults.first is not None:
        return faults.first
    for row in rows:
        if row[0]:
            task_name, point, processor, reason = json.loads(row.tobytes().rstrip(b"\0"))
            return TaskError(task_name, int(point or 0), processor, reason)
    return None
