"""Compilation of kernels ahead of need, into this user's cache or into a package.

    python -m soapstone.engine.ahead FOLDER [PART PARTS]

These are all kernels that modules declare, the instruction of each pointwise operator, the folds of
floats, and the steps of recurrent layers. Whatever else a program needs is compiled when it is
used.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

from soapstone.cache import sources
from soapstone.cache.answers import PACKAGED
from soapstone.cache.objects import LEVELS, packaged
from soapstone.ir import ops
from soapstone.ir.spec import operators
from soapstone.kernels import cpu
from soapstone.native import openmp, teams
from soapstone.native.entries import MADE, Native
from soapstone.system import usable_cores

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
    from soapstone.kernels.cpu.recurrent.gates import DECLARED
    from soapstone.native.folds import fold_kernel

    named = STEPS.union(*(names(spec.name).values() for spec in operators()))
    kept = [instruction(name) for name in sorted(named) if instruction_of(name) is not None]
    kept.append(fold_kernel("<f4", "sum", 0.0))
    kept += [native for each in DECLARED for native in each.natives]
    places = {each: each.function.__module__ for each in (*MADE, *kept)}
    apart = () if teams.supported() else (openmp.__name__, teams.__name__)
    mine = [at for at, of in places.items() if of.startswith("soapstone.") and of not in apart]
    return sorted(mine, key=lambda each: (each.function.__module__, each.function.__qualname__))


def fill() -> int:
    """Compile the kernels for this computer, and return their number."""
    for each in kernels():
        _ = each.address
    return len(kernels())


def ship(level: str, within: Path = PACKAGED) -> Path:
    """Compile the kernels for a level of instructions (`LEVELS`) into a package; return where.

    As many processes as there are cores compile in parallel.

    within: the package's folder `machine_code`, by default of the package that runs.

    Raises:
        ValueError: an unknown level.
        CalledProcessError: a kernel could not be compiled; the reason is on standard error.
    """
    if level not in LEVELS:
        raise ValueError(f"level: {level!r} found; one of {', '.join(LEVELS)} needed")
    folder = packaged(level, within)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    # What LLVM thinks of old processors that clock down for vectors of 512 bits is left out.
    settings = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "-prefer-256-bit"}
    parts = usable_cores()
    running = []
    for part in range(parts):
        command = [sys.executable, "-m", __name__, str(folder), str(part), str(parts)]
        running.append(subprocess.Popen(command, env={**os.environ, **settings}))
    for process in running:
        if process.wait():
            for other in running:
                other.kill()
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return folder


def tell(within: Path = PACKAGED) -> None:
    """Write what processes ask of the sources into a package: stamps of these kernels, and which
    modules have which operators and variants. It is found where the sources are the same.

    within: as of `ship`.
    """
    sources.ship((sources.modules_of(each.function) for each in kernels()), within)
    ops.ship(within)
    cpu.ship(within)


if __name__ == "__main__":
    first, step = map(int, sys.argv[2:4] or (0, 1))
    for kernel in kernels()[first::step]:
        kernel.package(Path(sys.argv[1]))
