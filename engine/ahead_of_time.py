"""Compilation of kernels ahead of need, into this user's cache or into a package.

These are all kernels that modules declare, the instruction of each pointwise operator, the folds of
floats, reductions, and the steps of recurrent layers. Whatever else a program needs is compiled
when it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from soapstone.cache import sources
from soapstone.cache.answers import PACKAGED
from soapstone.cache.objects import LEVELS, packaged
from soapstone.engine.parallel_compilation import command
from soapstone.ir import ops
from soapstone.ir.spec import operators
from soapstone.kernels import cpu
from soapstone.native.entries import MADE, Native
from soapstone.native.threads import openmp, teams
from soapstone.system import usable_cores

Progress = Callable[[str, int, int | None], None]  # a stage, how much of it is done, of how much

_SHARE = 12  # kernels of a module that one process compiles, before another may take more of them

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
    from soapstone.kernels.cpu.reduction.reduce import MONOIDS, reducing
    from soapstone.native.folds import fold_kernel

    named = STEPS.union(*(names(spec.name).values() for spec in operators()))
    kept = [instruction(name) for name in sorted(named) if instruction_of(name) is not None]
    kept.append(fold_kernel("<f4", "sum", 0.0))
    kept += [native for each in DECLARED for native in each.natives]
    kept += map(reducing, MONOIDS)
    places = {each: each.function.__module__ for each in (*MADE, *kept)}
    apart = () if teams.supported() else (openmp.__name__, teams.__name__)
    mine = [at for at, of in places.items() if of.startswith(_PACKAGES) and of not in apart]
    return sorted(mine, key=lambda each: (each.function.__module__, each.function.__qualname__))


def fill(progress: Progress | None = None) -> int:
    """Compile the kernels for this computer, and return their number.

    As many processes as there are cores compile those that no earlier one has. progress: is called
    with a stage, how many kernels are compiled, and of how many.

    Raises:
        CalledProcessError: a kernel could not be compiled; the reason is on standard error.
    """
    every = kernels()
    _compile([n for n, each in enumerate(every) if not each.kept], progress)
    return len(every)


def ship(level: str, within: Path = PACKAGED, progress: Progress | None = None) -> Path:
    """Compile the kernels for a level of instructions (`LEVELS`) into a package; return where.

    within: the package's folder `machine_code`, by default of the package that runs. progress: as
    of `fill`.

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
    _compile(None, progress, str(folder), settings_of(level))
    return folder


def settings_of(level: str) -> dict[str, str]:
    """Return Numba's settings for machine code of a level."""
    name, *more = level.split("+")
    # What LLVM thinks of old processors that clock down for vectors of 512 bits is left out.
    told = ",".join(["-prefer-256-bit", *(f"+{each}" for each in more)])
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": told}


def _compile(
    wanted: Sequence[int] | None,
    progress: Progress | None,
    folder: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Have processes compile kernels, as many at once as there are cores.

    What is shared out is the kernels of a module, which have helpers in common. The processes are
    no part of what an interrupt is for, and end with this one.

    wanted: their numbers, None for all that there are with the settings. folder: of a package that
    they are for. settings: of the environment.
    """
    if wanted is not None and not wanted:
        return
    shares: list[list[int]] = []  # the largest one last, which is taken first
    told = queue.SimpleQueue[subprocess.Popen[str] | None]()
    running: list[subprocess.Popen[str]] = []

    def modules_of(process: subprocess.Popen[str]) -> list[str]:
        """Return the module of each kernel, as a process tells when it begins."""
        assert process.stdout is not None
        found = process.stdout.readline().split()
        if not found:
            raise subprocess.CalledProcessError(process.wait(), process.args)
        return found

    def serve(process: subprocess.Popen[str]) -> None:
        """Give shares to a process, and tell each kernel, or that it has ended too early."""
        assert process.stdin is not None and process.stdout is not None
        try:
            if process is not running[0]:
                modules_of(process)
            while shares:
                share = shares.pop()
                print(*share, file=process.stdin, flush=True)
                for _ in share:
                    told.put(None if process.stdout.readline() else process)
        except IndexError:  # another one has taken the last share
            pass
        except (OSError, subprocess.CalledProcessError):
            told.put(process)

    try:
        for _ in range(usable_cores() if wanted is None else min(usable_cores(), len(wanted))):
            process = subprocess.Popen(
                command("all", folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **settings},
                start_new_session=True,
            )
            running.append(process)
        modules = modules_of(running[0])
        numbers = range(len(modules)) if wanted is None else wanted
        for _, of in groupby(numbers, key=modules.__getitem__):
            found = list(of)
            shares += [found[at : at + _SHARE] for at in range(0, len(found), _SHARE)]
        shares.sort(key=len)
        for process in running:
            threading.Thread(target=serve, args=(process,), daemon=True).start()
        total = len(numbers)
        for done in range(total):
            if progress is not None:
                progress("compiling kernels", done, total)
            ended = told.get()
            if ended is not None:
                raise subprocess.CalledProcessError(ended.wait(), ended.args)
        if progress is not None:
            progress("compiling kernels", total, total)
    finally:
        for process in running:
            process.kill()
            process.wait()


def tell(within: Path = PACKAGED) -> None:
    """Write what processes ask of the sources into a package: stamps of these kernels, and which
    modules have which operators and variants. It is found where the sources are the same.

    within: as of `ship`.
    """
    sources.ship((sources.modules_of(each.function) for each in kernels()), within)
    ops.ship(within)
    cpu.ship(within)


def _serve(what: str, folder: str = "") -> None:
    """Be a process that compiles the kernels in each line, and writes a line for each.

    They have names (`Native.name`); or numbers among `kernels`, where `what` is "all": of these it
    tells the modules first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    every = kernels() if what == "all" else []
    if every:
        print(*(each.function.__module__ for each in every), flush=True)
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            for told in line.split():
                module = told.rpartition(":")[0]
                if module:
                    importlib.import_module(module)
                    mine = [each for each in MADE if each.function.__module__ == module]
                    found = [each for each in mine if each.name == told]
                else:
                    found = [every[int(told)]]
                for each in found:
                    if folder:
                        each.package(Path(folder))
                    else:
                        _ = each.address
                print(flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
