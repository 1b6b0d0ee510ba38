"""Legate's processors as the workers of a step whose instances are placed here, not by Legate.

Where a mapper bounds the memory that processors work in, it also says what is where and when it is
copied. So launches are analysed as on the local executor, and a replay is one task of Legate a
processor, which runs that processor's part of the native program: its tasks, and its copies between
the bounded memory and the one behind it. The latter is Legate's, the former this process' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from soapstone.native.memory import Array
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import MachineError
from soapstone.runtime.executors.legate.executor import LegateExecutor
from soapstone.runtime.executors.legate.stores import store_bytes
from soapstone.runtime.executors.threads import do_nothing
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool


class LegateWorkers(LegateExecutor):
    """Runs what a local executor would, in tasks of Legate; regions are in stores of Legate.

    Raises: MachineError where Legate has several nodes, whose tasks share no memory.
    """

    logs = True

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        if self.legate.nodes > 1:
            raise MachineError(
                f"executor 'legate': {self.legate.nodes} nodes found; one needed where a mapper"
                " bounds the memory of the processors, since these wait for each other in it"
            )
        memory.sources[self.world.home] = partial(store_bytes, self.legate)

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Run operations, each on its processor. What they depend on has ended: it was waited for.

        sources, targets: their dependences.
        """
        by_processor: dict[int, list[Operation]] = {}
        for operation in operations:
            by_processor.setdefault(operation.processor, []).append(operation)
        self.run_all({p: partial(self._each, mine) for p, mine in by_processor.items()}, do_nothing)

    def _each(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if self.fault is not None:
                return
            try:
                self._run(operation, operation.processor)
            except BaseException as error:
                self._failed(operation, error)
