"""Random programs on several ranks: `mpiexec -n 2 python mpi_random.py FIRST COUNT`.

Every rank runs the same programs and compares what it reads with sequential NumPy.
"""

from __future__ import annotations

import sys

from runtime_scenarios import execute, scenario


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            execute(scenario(seed, "mpi"))
        except BaseException as error:
            raise RuntimeError(f"program {seed}") from error
    print(f"{count} programs equal", flush=True)


if __name__ == "__main__":
    main()
