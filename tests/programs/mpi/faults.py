"""A program that goes wrong on rank 1: `mpiexec -n 2 python faults.py KIND MODE [AFTER]`.

MODE: traced, untraced or automatic. AFTER: the point tasks that rank 1 runs before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from helpers.processes import say

from soapstone.runtime import DefaultMapper, Partition, Read, ReadWrite, Region, task
from soapstone.runtime.machines.start import machine_of, rank_of, start

KIND, MODE = sys.argv[1:3]
AFTER = int(sys.argv[3]) if len(sys.argv) > 3 else 8
STEPS = max(4, AFTER // 4 + 2)
RANK = rank_of("mpi")
done = 0


@task
def work(x: Read, y: ReadWrite) -> None:
    """Adds; and on rank 1, in the third step, goes wrong as was asked."""
    global done
    done += 1
    if RANK == 1 and done > AFTER:
        if KIND == "raise":
            raise ValueError("it broke")
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if KIND == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if KIND == "sleep":
            time.sleep(600)
    y += x.sum() % 7


def main() -> None:
    length = 960 if KIND == "size" and RANK == 1 else 1000
    x, y = Region((length,), "f8", "x"), Region((length,), "f8", "y")
    automatic = MODE == "automatic"
    machine = machine_of("mpi", cpus=1)
    if KIND == "early" and RANK == 1:
        raise RuntimeError("the program failed before it started")
    if KIND == "left" and RANK == 1:
        sys.exit("nothing to start")
    with start("mpi", machine, DefaultMapper(), automatic=automatic) as runtime:
        say(f"shared {Path(_mpi_file()).name}")
        runtime.fill(x, 1.0)
        for _ in range(STEPS):
            if MODE == "traced":
                with runtime.trace():
                    step(runtime, x, y)
            else:
                step(runtime, x, y)
        say(f"rank {RANK}: {runtime.read(x).sum()}")
        if KIND == "program" and RANK == 1:
            raise RuntimeError("the program itself failed")
        if KIND == "exit" and RANK == 1:
            try:
                sys.exit("nothing more")
            except SystemExit as error:
                runtime.executor.stop(error)  # as what trains does
                raise
        if KIND == "leave" and RANK == 1:
            sys.exit("nothing more")
        if KIND == "memory":
            huge = Region((1 << 45,), "f8", "huge")
            runtime.launch(work, Partition.whole(x, (2,)), Partition.tiled(huge, (2,)))
        step(runtime, x, y)
        runtime.wait()
    say(f"rank {RANK}: ended")


def _mpi_file() -> str:
    """The file of MPI's own shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return next(word for word in maps.split() if "mpich_shm_" in word)


def step(runtime: object, x: Region, y: Region) -> None:
    runtime.launch(work, Partition.whole(x, (4,)), Partition.tiled(y, (4,)))  # type: ignore[attr-defined]
    runtime.launch(work, Partition.whole(y, (4,)), Partition.tiled(x, (4,)))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
