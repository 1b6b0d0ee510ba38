"""GPUs of several processes: each rank of MPI drives its own.

A rank owns as many GPUs of its computer as all others, the first ranks of a computer the first
ones. Messages are the host's operations, between what lanes are given. Where MPI takes addresses of
GPUs they are from one GPU's memory to another's; else what they carry is copied to page-locked
memory, sent, and copied on from there (`analysis.coherence`).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from soapstone.native.cuda.device import Device, NoDevice, simulated
from soapstone.records import replace
from soapstone.runtime.devices.executor import DeviceExecutor
from soapstone.runtime.devices.machine import (
    HOST_LINK_BYTES_PER_S,
    LATENCY_S,
    PEER_LINK_BYTES_PER_S,
)
from soapstone.runtime.errors import MachineError
from soapstone.runtime.executors.mpi import executor as mpi
from soapstone.runtime.machines.machine import COPIER, CUDA, Link, Machine, Memory, Processor
from soapstone.runtime.machines.world import World
from soapstone.system import physical_bytes

VARIABLE = "SOAPSTONE_MPI_GPU"  # "on" and "off" say what MPI is asked otherwise


class MpiDeviceExecutor(mpi.MpiExecutor, DeviceExecutor):
    """The threads and lanes of one rank, and the messages between it and the others."""

    def _world(self) -> World:
        return replace(super()._world(), direct=takes_addresses())

    def current(self) -> AbstractContextManager[object]:
        """What threads are in that call MPI: one of its GPUs is current where messages are of GPUs.

        Any of them will do, since addresses say of which they are.
        """
        if not self.world.direct:
            return super().current()
        found: AbstractContextManager[object] = next(iter(self.lanes.values())).device.current
        return found

    def run_all(
        self, jobs: Mapping[int, Callable[[], None]], interrupt: Callable[[], None]
    ) -> None:
        """Run one function on each of some processors' threads; see `LocalExecutor.run_all`."""

        def within(job: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with self.current():
                    job()

            return run

        super().run_all({number: within(job) for number, job in jobs.items()}, interrupt)


def takes_addresses() -> bool:
    """Whether MPI takes addresses of GPUs, on all ranks. Every rank must ask.

    Open MPI, and MPICH from 4.0 on, have a function that says so.

    Raises: MachineError, on all ranks, where the variable is neither "on" nor "off" on one.
    """
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    here = "on" if query is not None and query() else "off"
    said = mpi.connect().allgather(os.environ.get(VARIABLE, here))
    for number, value in enumerate(said):
        if value not in ("on", "off"):
            raise MachineError(
                f"executor 'mpi': variable {VARIABLE} of process {number} is {value!r};"
                " 'on' or 'off' needed"
            )
    return set(said) == {"on"}


def gpu_machine_of_ranks(cpus: int | None, gpus: int) -> Machine:
    """The machine of all ranks, of `gpus` GPUs each. Every rank must call it.

    Raises: MachineError on all ranks where one has not as many, or cpus are given beside them.
    """
    if cpus is not None:
        raise MachineError(f"executor 'mpi': {gpus} gpus found beside {cpus} cpus; either needed")
    comm = mpi.connect()
    mpi.meet("the machine of all processes")
    host = socket.gethostname()
    hosts = comm.allgather(host)
    rank, share = comm.Get_rank(), hosts.count(host)
    first = hosts[:rank].count(host) * gpus
    sizes, said = [], ""
    try:
        sizes = [Device(first + number).free_bytes for number in range(gpus)]
    except NoDevice as error:
        said = f"process {rank} on {host}: {gpus} gpus asked for from number {first} on: {error}"
    found = comm.allgather((gpus, sizes, physical_bytes() // share, said))
    for number, (count, _, _, said) in enumerate(found):
        if said:
            raise MachineError(f"executor 'mpi': {said}")
        if count != gpus:
            raise MachineError(
                f"executor 'mpi': process {number} has {count} gpus, process {rank} {gpus};"
                " as many of each needed"
            )
    kind = "simulated" if simulated() else "gpu"
    nodes = {name: f"node{number}" for number, name in enumerate(sorted(set(hosts)))}
    names = [f"rank{number}" for number in range(len(hosts))]
    own = [[f"{name}.{kind}{number}" for number in range(gpus)] for name in names]
    memories = [[f"{gpu}.framebuffer" for gpu in mine] for mine in own]
    links = [Link(a, b, mpi.LATENCY_S, mpi.BYTES_PER_S) for a in names for b in names if a != b]
    for name, mine in zip(names, memories):
        ways = [(a, b) for a in (name, *mine) for b in (name, *mine) if a != b]
        rates = [HOST_LINK_BYTES_PER_S if name in way else PEER_LINK_BYTES_PER_S for way in ways]
        links += [Link(*way, LATENCY_S, rate) for way, rate in zip(ways, rates)]
    if takes_addresses():
        ways = [(a, b) for a in itertools.chain(*memories) for b in itertools.chain(*memories)]
        apart = [(a, b) for a, b in ways if a.split(".")[0] != b.split(".")[0]]
        links += [Link(*way, mpi.LATENCY_S, mpi.BYTES_PER_S) for way in apart]
    return Machine(
        "mpi",
        (
            *(
                Processor(gpu, CUDA, memory=memory, node=nodes[place])
                for place, mine, theirs in zip(hosts, own, memories)
                for gpu, memory in zip(mine, theirs)
            ),
            *(
                Processor(f"{gpu}.{way}", COPIER, memory=memory, node=nodes[place])
                for place, mine, theirs in zip(hosts, own, memories)
                for gpu, memory in zip(mine, theirs)
                for way in ("in", "out")
            ),
        ),
        (
            *(Memory(name, capacity) for name, (_, _, capacity, _) in zip(names, found)),
            *(  # the first GPU of every rank, then the second
                Memory(memories[number][gpu], found[number][1][gpu])
                for gpu in range(gpus)
                for number in range(len(names))
            ),
        ),
        tuple(links),
    )
