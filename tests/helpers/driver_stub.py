"""A stub of NVIDIA's driver library, where there is none."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def with_driver(
    folder: Path, source: Path, variables: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of a process that finds a driver's library: the system's, or a stub.

    folder: for the stub. source: of the stub, in C. variables: those of the process without it.

    Raises: ImportError when there is no library and no compiler.
    """
    found = dict(variables)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise ImportError("no driver library and no C compiler to build a stub of it") from None
        options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-w", "-O2"]
        exact = ["-march=native", "-frounding-math", "-fwrapv"]  # as kernels are executed
        library = str(folder / "libcuda.so.1")
        subprocess.run([compiler, *options, *exact, "-o", library, str(source), "-lm"], check=True)
        paths = [str(folder), found.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    return found
