"""Random programs on several ranks: `mpiexec -n 2 python mpi_random.py FIRST COUNT [apart]`.

Every rank runs the same programs and compares what it reads with sequential NumPy. apart: no rank
sees the memory of another, as if each were on a computer of its own.
"""

from __future__ import annotations

import sys

from runtime_scenarios import execute, scenario

from soapstone.runtime.executors.neighbours import Neighbours


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    if "apart" in sys.argv:
        Neighbours.sees = staticmethod(lambda mine, other: False)  # type: ignore[method-assign]
    for seed in range(first, first + count):
        try:
            execute(scenario(seed, "mpi"))
        except BaseException as error:
            raise RuntimeError(f"program {seed}") from error
    print(f"{count} programs equal", flush=True)


if __name__ == "__main__":
    main()
