"""Starting Legate: its configuration, the one task all point tasks are, and what it may run on.

Importing `legate.core` starts Legate, once a process; so it is imported only when asked for. Under
the `legate` launcher the launcher has configured it; alone, it gets all cores of this computer.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone.locks import Lock
from soapstone.runtime.errors import LaunchError, MachineError
from soapstone.runtime.machines.machine import Link, Machine, Memory, Processor
from soapstone.system import physical_bytes, usable_cores

CONFIGURATION = "LEGATE_CONFIG"
_AUTOMATIC = "LEGATE_AUTO_CONFIG"
_MOST_CPUS = 62  # Legion has 64 processors a process at most, two of them for itself
_SHARE = 0.75  # of physical memory, when Legate is started alone
_USABLE = 0.9  # of Legate's memory: the rest is lost between instances
# Environment variables in which a launcher of MPI programs tells how many ranks it started.
LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS",
)
_TYPES = {
    "b1": "bool_",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
_COLLECT_EVERY = 256  # launches
_OCCUPY = 0  # a call's number: others are positive
Call = Callable[[Any], Callable[[], None] | None]
_lock = Lock()
_started: Legate | None = None


@dataclass(eq=False)
class Legate:
    """Legate, started: its module, its runtime, the library and number of our task, its cpus.

    machine: all its cpus; cpus: each of them alone.

    calls: what the task runs, by the number that is its first scalar argument. A call takes from
    Legate's context what it needs, and may return a function to run once the context is let go.

    returned: stores that nobody uses any more, which the thread that launches frees.

    Objects of Legate may be freed by the thread that launches only, never inside a task. So while
    tasks run, Python looks for cyclic garbage in that thread alone.
    """

    core: Any
    runtime: Any
    library: Any
    task: Any
    machine: Any
    cpus: tuple[Any, ...]
    gpus: int
    nodes: int
    sysmem_bytes: int
    calls: dict[int, Call]
    returned: deque[Any] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_OCCUPY + 1))
    _paused: bool = False
    _begun: int = 0

    def add(self, call: Call) -> int:
        """Keep a call. Returns its number: the same on every node, since all run one program."""
        number = next(self._numbers)
        self.calls[number] = call
        return number

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of calls that no task will run any more."""
        for number in numbers:
            self.calls.pop(number, None)

    def task_of(self, number: int, shape: tuple[int, ...]) -> Any:
        """A manual task that runs a call at each point of a shape, not yet executed."""
        task = self.runtime.create_manual_task(self.library, self.task, shape)
        task.add_scalar_arg(number, self.core.int64)
        return task

    def begin(self) -> None:
        """Prepare for a task to be launched."""
        self.returned.clear()
        if gc.isenabled():
            gc.disable()
            self._paused = True
        self._begun += 1
        if self._paused and self._begun % _COLLECT_EVERY == 0:
            gc.collect(1)

    def type_of(self, dtype: np.dtype[Any], name: str) -> Any:
        """Legate's type for a dtype.

        Raises: LaunchError.
        """
        found = _TYPES.get(dtype.str[1:]) if dtype.isnative else None
        if found is None:
            raise LaunchError(
                f"region {name!r}: dtype {dtype} found; Legate has bool, integers, float16 to "
                "float64 and complex in this computer's byte order"
            )
        return getattr(self.core, found)

    def occupy(self, store: Any, zero: bool) -> None:
        """Have one task write a whole store: zeros, or nothing.

        Legate then has an instance of all of it, in which it finds every part that tasks use. Left
        to itself it makes instances of the parts, of which it joins some.
        """
        self.begin()
        task = self.task_of(_OCCUPY, (1,))
        task.add_scalar_arg(int(zero), self.core.int64)
        task.add_output(store)
        task.execute()

    def fence(self) -> None:
        """Wait for all tasks that were launched."""
        self.returned.clear()
        self.runtime.issue_execution_fence(block=True)
        if self._paused:
            self._paused = False
            gc.enable()


def refuse_copies(environment: Mapping[str, str], nodes: int) -> None:
    """Refuse to run as one of several processes that know nothing of each other.

    `mpiexec -n 2 python program.py` starts two processes; each would start a Legate of its own and
    do all the work.

    Raises: MachineError.
    """
    if nodes > 1:
        return
    for name in LAUNCHERS:
        size = environment.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise MachineError(
                f"executor 'legate': {name}={size} found: {size} processes were started, and each "
                "has a Legate of its own that does all the work; start one program on several "
                f"nodes by `legate --nodes {size} --launcher mpirun program.py`, which needs a "
                "Legate built with a network (the wheel has none)"
            )


def start_legate(cpus: int | None = None) -> Legate:
    """Legate, started by this call or before it.

    cpus: how many processors are needed; Legate gets as many if this call starts it.

    Raises: MachineError when Legate is not installed or cannot start, has fewer processors, or
    this process is one of several unrelated ones.
    """
    global _started
    with _lock:
        if _started is None:
            _started = _start(cpus)
    found = _started
    if cpus is not None and cpus > len(found.cpus):
        raise MachineError(
            f"executor 'legate': {cpus} cpus needed, Legate was started with {len(found.cpus)}; "
            f"start the program by `legate --cpus {cpus} program.py`"
        )
    return found


def _occupied(context: Any) -> None:
    if context.scalars[1].value():
        np.asarray(context.outputs[0])[...] = 0


def _configure(cpus: int | None) -> None:
    """Say what Legate starts with, unless its launcher or the user has.

    Raises: MachineError for more processors than Legate can have; it would end the process.
    """
    if CONFIGURATION in os.environ or "legate.core" in sys.modules:
        return
    if cpus is not None and cpus > _MOST_CPUS:
        raise MachineError(
            f"executor 'legate': {cpus} cpus found, Legate has {_MOST_CPUS} in a process at most"
        )
    count = cpus if cpus is not None else min(usable_cores(), _MOST_CPUS)
    megabytes = int(physical_bytes() * _SHARE) >> 20
    os.environ[CONFIGURATION] = (
        f"--cpus {count} --omps 0 --gpus 0 --sysmem {megabytes} --logging gpu=6,threads=5"
    )
    os.environ.setdefault(_AUTOMATIC, "0")


def _start(cpus: int | None) -> Legate:
    _configure(cpus)
    try:
        import legate.core as core
    except ModuleNotFoundError as error:
        raise MachineError(
            "executor 'legate': Legate is not installed; pip install 'soapstone[legate]'"
        ) from error
    except ImportError as error:
        hint = (
            "; its wheel needs the library of NVIDIA's driver, also where there is no GPU: "
            "docs/legate.md says what to do"
            if "libcuda" in str(error)
            else ""
        )
        raise MachineError(f"executor 'legate': Legate cannot be loaded: {error}{hint}") from error
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "#0 " in line] or [str(error)]
        reason = lines[0].replace("LEGATE ERROR: ", "").strip()
        given = os.environ.get(CONFIGURATION, "").split()
        hint = "" if "--gpus" in given else "; without a GPU, Legate needs to be told `--gpus 0`"
        raise MachineError(f"executor 'legate': Legate did not start: {reason}{hint}") from error
    runtime = core.get_legate_runtime()
    refuse_copies(os.environ, int(runtime.node_count))
    calls: dict[int, Call] = {_OCCUPY: _occupied}

    def body(context: Any) -> None:
        run = calls[context.scalars[0].value()](context)
        del context  # an error that is kept holds all frames it came through
        if run is not None:
            run()

    library, _ = runtime.find_or_create_library(
        "soapstone", config=core.ResourceConfig(max_tasks=1, max_dyn_tasks=1)
    )
    task = library.get_new_task_id()
    library.register_task(
        core.TaskInfo.from_variants(task, "soapstone", [(core.VariantCode.CPU, body)])
    )
    machine = runtime.get_machine().only(core.TaskTarget.CPU)
    count = machine.count(core.TaskTarget.CPU)
    return Legate(
        core=core,
        runtime=runtime,
        library=library,
        task=task,
        machine=machine,
        cpus=tuple(machine[number] for number in range(count)),
        gpus=int(runtime.get_machine().count(core.TaskTarget.GPU)),
        nodes=int(runtime.node_count),
        sysmem_bytes=int(runtime.realm_config().sysmem or physical_bytes() * _SHARE),
        calls=calls,
    )


def legate_machine(cpus: int | None = None, threads: int = 1) -> Machine:
    """The machine Legate runs on: its cpus, and the system memory of each node.

    Raises: MachineError.
    """
    found = start_legate(cpus)
    count = len(found.cpus) if cpus is None else cpus
    nodes = min(found.nodes, count)
    each = -(-len(found.cpus) // found.nodes)
    names: Sequence[str] = ["system"] if nodes == 1 else [f"node{n}" for n in range(nodes)]
    home = [names[min(cpu // each, nodes - 1)] for cpu in range(count)]
    return Machine(
        name="legate",
        processors=tuple(
            Processor(f"cpu{cpu}", threads=threads, memory=home[cpu]) for cpu in range(count)
        ),
        memories=tuple(Memory(name, int(found.sysmem_bytes * _USABLE)) for name in names),
        links=tuple(
            Link(a, b, latency_s=1e-5, bytes_per_s=1e9) for a in names for b in names if a != b
        ),
    )
