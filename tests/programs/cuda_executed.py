"""A program on GPUs that are not there, on which kernels are executed.

    python -m programs.cuda_executed MODULE [ARGUMENT ...]     # with libcuda_dry.c as the driver

The code of each kernel carries its PTX behind its end, which the driver executes; without it the
driver would compute only copies and folds.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from cuda.core import ObjectCode
from numba.cuda.codegen import CUDACodeLibrary

_assembled = CUDACodeLibrary.get_cubin


def with_ptx(library: Any, cc: Any = None) -> Any:
    """Return a kernel's machine code, and behind its end the PTX that it was made of."""
    made = _assembled(library, cc)
    if b"//PTX" in bytes(made.code):  # from the disk
        return made
    text = library.get_lto_ptx(cc) if library._lto else library.get_asm_str(cc)
    whole = ObjectCode.from_cubin(bytes(made.code) + b"//PTX\n" + text.strip("\0").encode() + b"\0")
    library._cubin_cache[library._ensure_cc(cc)] = whole
    return whole


def main() -> None:
    """Run a module as a program, with what the driver needs to execute its kernels."""
    CUDACodeLibrary.get_cubin = with_ptx
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
