"""A region that one rank collects later than the other: `mpiexec -n 2 python collected.py LOG`.

Its task on rank 1 runs until rank 1 has launched everything. So rank 1 has it still when room is
needed in a full memory, where rank 0, which only knows of that task, has it no more. Both must find
the same room, and let the same instance leave.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from helpers.processes import say

from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import Launch, Read, ReadWrite, Region, Runtime, task
from soapstone.runtime.machines.start import machine_of, start

launched = threading.Event()


@task
def look(out: ReadWrite, x: Read) -> None:
    """Adds what it reads."""
    out += x


@task
def stay(x: ReadWrite) -> None:
    """Ends once everything has been launched."""
    launched.wait(60)


class Named(BoundedMemoryMapper):
    """Places a launch on the rank that its name ends with; what is oldest leaves."""

    def place(self, launch: Launch, point: int) -> int:
        return int(launch.name[-1])

    def place_all(self, launch: Launch) -> np.ndarray:
        return np.full(launch.points, self.place(launch, 0))


def main() -> None:
    machine = machine_of("mpi", cpus=1).bounded(4 * 64)
    with start("mpi", machine, Named()) as runtime, runtime.log(sys.argv[1]):
        kept, out, other, last = (
            region(runtime, name) for name in ("kept", "out", "other", "last")
        )
        runtime.launch(look, kept, other, name="add0")  # of rank 0 alone
        runtime.launch(look, out, kept, name="first1")
        gone = region(runtime, "gone")
        runtime.launch(stay, gone, name="stay1")
        del gone
        for x in (other, last, kept, other, kept):  # with `out` and `gone` one too many
            runtime.launch(look, out, x, name="look1")
        launched.set()
        found = runtime.read(out)
        evictions = runtime.statistics.evictions
    say(f"{evictions} left, {found.tolist()}")


def region(runtime: Runtime, name: str) -> Region:
    found = Region((8,), "f8", name)
    runtime.write(found, np.arange(8.0))
    return found


if __name__ == "__main__":
    main()
