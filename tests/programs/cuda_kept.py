"""CUDA kernels compiled for sm_90 without a GPU, or found on disk; prints JSON of what was done.

    python tests/programs/cuda_kept.py OPERATOR ...

Dispatchers of Numba's are asked to compile as they do at a first launch, but for giving a device
its code. Printed are how many kernels were compiled and found, the hash of all code, and seconds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

from cuda_ptx import launches
from numba.cuda import dispatcher

from soapstone.ir.spec import operator
from soapstone.kernels.cuda.substrate.compiling import pretended, signature
from soapstone.native.cuda.kernel_cache import FOUND


def main(names: list[str]) -> None:
    """Compile the kernels of each operator's first case, twice as a second launch would."""
    whole, seconds = hashlib.sha256(), time.process_time()
    dispatcher._Kernel.bind = lambda kernel: kernel._codelibrary.get_cubin()
    with pretended((9, 0)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in names:
            spec = operator(name)
            for launch in launches(spec, spec.cases[0]):
                for _ in range(2):
                    made = launch.kernel.dispatcher.compile(signature(launch.arguments))
                code = made._codelibrary.get_cubin().code
                whole.update(bytes(code) + made.entry_name.encode())
    print(
        json.dumps(
            {
                **FOUND,
                "hash": whole.hexdigest(),
                "seconds": time.process_time() - seconds,
                "told": [str(each.message) for each in told if "cache" in str(each.message)],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
