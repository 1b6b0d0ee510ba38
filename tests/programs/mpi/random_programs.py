"""Random programs on ranks: `mpiexec -n 2 python random_programs.py FIRST COUNT LOG [apart]`.

Every rank runs the same programs and compares what it reads with sequential NumPy. The offline
checker accepts the logs of all ranks, and refuses them once they are edited. apart: no rank sees
the memory of another, as if each were on a computer of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.processes import say
from helpers.runtime.log_edits import refuse_an_edit
from helpers.runtime.scenarios import execute, scenario

from soapstone.runtime import core
from soapstone.runtime.executors.mpi.executor import connect, rank
from soapstone.runtime.executors.mpi.intra_node import IntraNode


def main() -> None:
    first, count, log = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    edits = set()
    core._FORGET_EVERY = 4  # often, so that much is ordered by having ended alone
    if "apart" in sys.argv:
        IntraNode.sees = staticmethod(lambda mine, other: False)  # type: ignore[method-assign]
    for seed in range(first, first + count):
        try:
            execute(scenario(seed, "mpi"), log)
            if rank() == 0:
                edits.add(refuse_an_edit(log, connect().Get_size(), seed))
        except BaseException as error:
            raise RuntimeError(f"program {seed}") from error
    say(f"{count} programs equal")
    if rank() == 0:
        say(" ".join(sorted(edits)))


if __name__ == "__main__":
    main()
