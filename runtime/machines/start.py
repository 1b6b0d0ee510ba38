"""Starting a runtime by the name of its executor; what an executor needs is imported only then."""

from __future__ import annotations

import os

from soapstone.errors import hint, warn
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.core import Runtime
from soapstone.runtime.errors import MachineError
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.mapper import Mapper
from soapstone.system import usable_cores

EXECUTORS = ("local", "mpi", "legate")


def launched() -> int:
    """How many processes an MPI launcher has started of this program; 1 where none has."""
    sizes = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
    found = [os.environ[name] for name in sizes if os.environ.get(name, "").isdigit()]
    return max([1, *map(int, found)])


def default_executor() -> str:
    """The executor of a program that asks for none: mpi among several processes, else local."""
    return "mpi" if launched() > 1 else "local"


def check_executor(executor: str) -> None:
    """Refuse a name that is no executor's.

    Raises: MachineError.
    """
    if executor not in EXECUTORS:
        raise MachineError(
            f"executor {executor!r} found; one of {', '.join(EXECUTORS)} needed"
            f"{hint(executor, EXECUTORS)}"
        )


def machine_of(executor: str, cpus: int | None = None, threads: int = 1, gpus: int = 0) -> Machine:
    """The machine an executor finds, with `cpus` processors of `threads` threads in each process.

    cpus: by default all cores of this computer, shared by its processes. gpus: as many GPUs for
    each process instead.

    Raises: MachineError.
    """
    check_executor(executor)
    if executor == "mpi":
        from soapstone.runtime.executors.mpi import executor as mpi

        return mpi.machine_of(cpus, threads, gpus)
    if gpus and executor == "legate":
        from soapstone.runtime.devices.legate import legate_gpu_machine

        return legate_gpu_machine(cpus, gpus)
    if gpus:
        return Machine.local(cpus, threads, gpus=gpus)
    if executor == "legate":
        from soapstone.runtime.executors.legate.start import legate_machine

        return legate_machine(cpus, threads)
    return Machine.local(cpus=cpus, threads=threads)


def warn_of_turns(cpus: int, threads: int) -> None:
    """Warn where there are more threads than cores."""
    if cpus * threads > usable_cores():
        warn(
            f"cpus: {cpus} processors of {threads} threads found; the {usable_cores()} cores of"
            " this computer take turns",
        )


def rank_of(executor: str) -> int:
    """The number of this process among those that run the program; the first one, 0, reports."""
    if executor == "mpi":
        from soapstone.runtime.executors.mpi import executor as mpi

        return mpi.rank()
    return 0


def start(executor: str, machine: Machine, mapper: Mapper, automatic: bool = False) -> Runtime:
    """A runtime on a machine, with an executor. automatic: trace launches that repeat.

    Raises: MachineError for an unknown executor, or one that cannot be started here.
    """
    check_executor(executor)
    if executor == "mpi":
        if machine.devices:
            from soapstone.runtime.devices.ranks import MpiDeviceExecutor

            return Runtime(machine, mapper, MpiDeviceExecutor, automatic=automatic)
        from soapstone.runtime.executors.mpi.executor import MpiExecutor

        return Runtime(machine, mapper, MpiExecutor, automatic=automatic)
    if executor == "legate":
        from soapstone.runtime.executors.legate.runtime import LegateRuntime
        from soapstone.runtime.executors.legate.workers import LegateWorkers

        attach(mapper, machine)
        if machine.devices:
            from soapstone.runtime.devices.legate import LegateDeviceExecutor

            return Runtime(machine, mapper, LegateDeviceExecutor, automatic=automatic)
        if any(mapper.backing(processor.memory) for processor in machine.processors):
            return Runtime(machine, mapper, LegateWorkers, automatic=automatic)
        return LegateRuntime(machine, mapper, automatic=automatic)
    return Runtime(machine, mapper, automatic=automatic)
