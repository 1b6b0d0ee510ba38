"""Kernels compiled ahead of need: into this user's cache, or into a package, for any processor.

    python -m soapstone.engine.ahead FOLDER

Those are all kernels that modules declare, the instruction of each pointwise operator, and the
folds of floats. What else a program asks for, it compiles as it does where nothing is.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

from soapstone.cache.objects import LEVELS, packaged
from soapstone.ir.spec import operators
from soapstone.native.entries import MADE, Native

# Where kernels are declared, some in modules that only who needs them imports.
_PACKAGES = ("soapstone.native", "soapstone.kernels.cpu", "soapstone.runtime.tracing")
_APART = ("soapstone.native.cuda",)


def kernels() -> list[Native]:
    """Return the kernels that are compiled ahead, in order of their names."""
    for package in _PACKAGES:
        found = importlib.import_module(package)
        for each in pkgutil.walk_packages(found.__path__, f"{package}."):
            if each.name.rpartition(".")[0] not in _APART:
                importlib.import_module(each.name)
    from soapstone.kernels.cpu.elementwise.formulas import STEPS, instruction_of, names
    from soapstone.kernels.cpu.elementwise.lane_loops import instruction
    from soapstone.native.folds import fold_kernel

    named = STEPS.union(*(names(spec.name).values() for spec in operators()))
    kept = [instruction(name) for name in sorted(named) if instruction_of(name) is not None]
    kept.append(fold_kernel("<f4", "sum", 0.0))
    held = {*MADE, *kept}
    mine = [each for each in held if each.function.__module__.startswith("soapstone.")]
    return sorted(mine, key=lambda each: (each.function.__module__, each.function.__qualname__))


def fill() -> int:
    """Compile the kernels for this computer, and return how many there are."""
    for each in kernels():
        _ = each.address
    return len(kernels())


def ship(level: str) -> Path:
    """Compile the kernels for a level of instructions (`LEVELS`), into the package; its folder.

    Raises:
        ValueError: an unknown level.
        CalledProcessError: one could not be compiled; why is on standard error.
    """
    if level not in LEVELS:
        raise ValueError(f"level: {level!r} found; one of {', '.join(LEVELS)} needed")
    folder = packaged(level)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    # What LLVM thinks of old processors that clock down for vectors of 512 bits is left out.
    settings = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "-prefer-256-bit"}
    command = [sys.executable, "-m", __name__, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, **settings})
    return folder


if __name__ == "__main__":
    for kernel in kernels():
        kernel.package(Path(sys.argv[1]))
