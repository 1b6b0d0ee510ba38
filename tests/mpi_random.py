"""Random task programs on several ranks: `mpiexec -n 2 python mpi_random.py FIRST COUNT`.

Every rank runs the same programs, untraced and traced, and compares with sequential NumPy.
"""

from __future__ import annotations

import sys

import numpy as np
from runtime_programs import ShuffledMapper, random_program

from soapstone.runtime.start import machine_of, start


def check(seed: int) -> None:
    """Run one program; raises AssertionError where a region differs."""
    program = random_program(seed)
    machine = machine_of("mpi", cpus=1 + seed % 2)
    mapper = ShuffledMapper(seed, tiles=seed % 3 == 0, memories=False)
    rng = np.random.default_rng(seed + 1000)
    with start("mpi", machine, mapper) as runtime:

        def same() -> None:
            for region in program.persistent:
                found = runtime.read(region)
                np.testing.assert_array_equal(found, arrays[region], err_msg=region.name)

        arrays = {r: rng.integers(0, 100, size=r.shape, dtype=np.int64) for r in program.persistent}
        live = program.persistent[seed % 4]
        view = runtime.array(live) if seed % 2 else None
        for region, array in arrays.items():
            runtime.write(region, array)
        for _ in range(2):
            program.launch(runtime)
            program.run(arrays)
        same()
        trace = runtime.capture(lambda: program.launch(runtime))
        for round_ in range(4):
            trace.replay()
            program.run(arrays)
            if round_ != 1:
                same()
            if view is not None:
                np.testing.assert_array_equal(view, arrays[live])
                view += round_
                arrays[live] = np.asarray(arrays[live] + round_)
        same()


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            check(seed)
        except BaseException as error:
            raise RuntimeError(f"program {seed}") from error
    print(f"{count} programs equal", flush=True)


if __name__ == "__main__":
    main()
