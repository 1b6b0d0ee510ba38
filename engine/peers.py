"""The processes that measure together: those of a run over MPI, or this one alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.tensor import Array


class Peers:
    """The processes of a run, all of which make the same calls in the same order.

    Args:
        executor: "mpi" for all ranks of the launcher; otherwise this process is alone.

    Raises:
        MachineError: "mpi" without mpi4py or an MPI library.
    """

    def __init__(self, executor: str = "local") -> None:
        self._comm: Any = None
        if executor == "mpi":
            from soapstone.runtime.executors.mpi.executor import connect

            self._comm = connect()

    def meet(self) -> None:
        """Wait until every process has called this."""
        if self._comm is not None:
            self._comm.Barrier()

    def all(self, array: Array) -> Array:
        """Return the arrays of all processes, stacked: float64 (processes, *shape)."""
        mine = np.ascontiguousarray(array, np.float64)
        if self._comm is None:
            return mine[None]
        result = np.zeros((self._comm.Get_size(), *mine.shape))
        self._comm.Allgather(mine, result)
        return result

    def first(self, array: Array | None) -> Array:
        """Return the array of the first process; those of others are ignored."""
        result: Array | None = array if self._comm is None else self._comm.bcast(array)
        assert result is not None
        return result

    def agreed(self, mine: bool) -> bool:
        """Return the first process' answer, so that differences between clocks do not matter."""
        return bool(self.all(np.array([mine]))[0, 0])
