"""A program on GPUs that are not there, on which kernels are executed.

    python -m programs.cuda_executed MODULE [ARGUMENT ...]     # with libcuda_dry.c as the driver

The code of each kernel carries its PTX behind its end, which the driver executes; without it the
driver would compute only copies and folds. What the driver says is wrong is also printed at the
end, since Numba tells only the number of an error.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import runpy
import sys
from typing import Any

from cuda.core import ObjectCode
from numba.cuda.codegen import CUDACodeLibrary

from soapstone.native.cuda import kernel_cache

BEHIND = b"//PTX\n"
MOST_SAID = 4000
_DECLARED = re.compile(r"^\.func\b[^;{]*;", re.M)
_FUNCTION = re.compile(
    r"^\.func\s*(?:\(([^)]*)\)\s*)?(\w+)\s*\(([^)]*)\)\s*\{(.*?)^\}", re.M | re.S
)
_CALL = re.compile(r"\bcall(?:\.uni)?\s*(?:\(([^)]*)\)\s*,\s*)?(\w+)\s*,\s*\(([^)]*)\)\s*;")
_GIVEN = re.compile(r"\bst\.param\.(\w+)\s+\[((?:param|retval)\d+)(?:\+0)?\],")
_TAKEN = re.compile(r"\bld\.param\.(\w+)\s+(%\w+),\s*\[((?:param|retval)\d+)(?:\+0)?\]")
_assembled = CUDACodeLibrary.get_cubin


def inlined(text: str) -> str:
    """Return PTX in which functions are part of the kernel that calls them; they call none.

    What a call gives and takes are registers, and what a function names has its call's number.
    """
    text = _DECLARED.sub("", text)
    functions = {
        name: ([*re.findall(r"\w+", re.sub(r"\.\w+", "", f"{given} {result or ''}"))], body)
        for result, name, given, body in _FUNCTION.findall(text)
    }
    calls = 0

    def called(match: re.Match[str]) -> str:
        nonlocal calls
        result, name, given = match.groups()
        (theirs, body), calls = functions[name], calls + 1
        body = re.sub(r"(\$\w+)", rf"\1_{calls}", re.sub(r"%(\w)", rf"%call{calls}_\1", body))
        body = re.sub(r"\bret(\.uni)?;", f"bra.uni $end_{calls};", body)
        for mine, other in zip(re.findall(r"\w+", f"{given} {result or ''}"), theirs, strict=True):
            body = re.sub(rf"\b{other}\b", mine, body)
        return f"{body}\n$end_{calls}:\n"

    text = _CALL.sub(called, _FUNCTION.sub("", text))
    text = _TAKEN.sub(r"mov.\1 \2, %\3", _GIVEN.sub(r"mov.\1 %\2,", text))
    return re.sub(r"\.param (\.b\d+) ((?:param|retval)\d+);", r".reg \1 %\2;", text)


def with_ptx(library: Any, cc: Any = None) -> Any:
    """Return a kernel's machine code, and behind its end the PTX that it was made of."""
    made = _assembled(library, cc)
    if BEHIND in bytes(made.code):  # from the disk
        return made
    text = library.get_lto_ptx(cc) if library._lto else library.get_asm_str(cc)
    whole = ObjectCode.from_cubin(
        bytes(made.code) + BEHIND + inlined(text.strip("\0")).encode() + b"\0"
    )
    library._cubin_cache[library._ensure_cc(cc)] = whole
    return whole


def say() -> None:
    """Print what the driver said, which Numba's errors leave out."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.dry_said.restype = ctypes.c_char_p
    sys.stderr.write(driver.dry_said().decode()[-MOST_SAID:])


def main() -> None:
    """Run a module as a program, with what the driver needs to execute its kernels."""
    CUDACodeLibrary.get_cubin = with_ptx
    kernel_cache._COMPILERS += (__file__,)  # what is kept with its PTX is not for a device
    atexit.register(say)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
