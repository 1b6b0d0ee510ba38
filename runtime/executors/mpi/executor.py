"""The MPI executor: one process a rank, each running the same program on its own points.

Every rank runs the whole program and the whole analysis (control replication), and carries out the
operations of its own processors; copies between ranks are messages (`runtime.analysis.message`). An
error on one rank stops all of them with that error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.agreement import Agreement, safe_mode
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.message import ENDS, MESSAGES, STARTS
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import (
    MachineError,
    MemoryExhausted,
    PeerError,
    ReplicationError,
    StoppedError,
)
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.executors.mpi.intra_node import IntraNode
from soapstone.runtime.executors.mpi.messenger import Messenger, timeout_s
from soapstone.runtime.executors.mpi.persistent import Persistent
from soapstone.runtime.machines.machine import Link, Machine, Memory, Processor
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.task import EntryLike
from soapstone.runtime.observe.profile import Profile, estimate_offset
from soapstone.system import usable_cores

LATENCY_S, BYTES_PER_S = 3e-6, 5e9  # nominal, of links nobody has measured
_LOOK_S = 0.001
_SWAP_S = 20e-6
_ROUND_TRIPS = 50  # to learn how far two clocks are apart
_HEARING_S = 0.3  # in which an error of one rank has come to all others
_LEFT_TAG = 32767  # of the last message of a rank; the largest tag that every MPI has
_MEETINGS: list[str] = []  # those that this rank came to
_SENT: list[Any] = []  # requests, whose bytes are to last
_GONE: dict[int, int] = {}  # how many those that have left had come to, by rank


def connect() -> Any:
    """The communicator of all ranks; from now on an exception that nobody catches ends all.

    A program that ends is told to the others, who may wait for it.

    Raises: MachineError when mpi4py or an MPI library is not there.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MachineError(
            f"executor 'mpi' needs mpi4py and MPI (pip install soapstone[mpi]): {error}"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MachineError("executor 'mpi': an MPI library with MPI_THREAD_MULTIPLE needed")
    others = MPI.COMM_WORLD.Get_size() > 1
    if others and getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)
        atexit.register(_say_left)  # before MPI's own end, which waits for the other ranks
    return MPI.COMM_WORLD


def meet(what: str) -> None:
    """Wait until every rank has come here.

    Raises: PeerError when one has left its program, or that takes longer than a message may.
    """
    comm = connect()
    request = comm.Ibarrier()
    _MEETINGS.append(what)
    limit = timeout_s()
    until = time.monotonic() + limit
    while not request.Test():
        gone = _next_missing(comm)
        if gone is not None:
            raise PeerError(f"{what}: process {gone} has left its program before it")
        if time.monotonic() > until:
            raise PeerError(f"{what}: other processes have not come to it within {limit:g} s")
        time.sleep(_LOOK_S)


def _say_left() -> None:
    """Tell the other ranks that this one's program is at its end, and hear it of them.

    They may wait for it. MPICH does not end where a message was not received, and a launcher takes
    a rank that exits without that for a failed one.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    comm = MPI.COMM_WORLD
    others = [other for other in range(comm.Get_size()) if other != comm.Get_rank()]
    _SENT.extend(comm.isend(len(_MEETINGS), other, _LEFT_TAG) for other in others)
    until = time.monotonic() + timeout_s()
    while len(_GONE) < len(others) and time.monotonic() < until:
        _next_missing(comm)
        time.sleep(_LOOK_S)


def _next_missing(comm: Any) -> int | None:
    """A rank that has left its program and not come to the last of this one's meetings."""
    for other in range(comm.Get_size()):
        message = comm.improbe(other, _LEFT_TAG)
        if message is not None:
            _GONE[other] = message.recv()
    return min((other for other, came in _GONE.items() if came < len(_MEETINGS)), default=None)


def rank() -> int:
    """This process' rank."""
    return int(connect().Get_rank())


def _alone() -> bool:
    """Whether there are no other ranks; without MPI there are none."""
    try:
        return int(connect().Get_size()) == 1
    except MachineError:
        return True


def speaks(error: BaseException) -> bool:
    """Whether this rank is the one that reports an error that ends the run: it is told once.

    Where it happened it is reported, by the lowest rank if by several; whoever only heard of it is
    silent, unless the other rank cannot speak any more.
    """
    if isinstance(error, PeerError):
        return not error.announced
    if _alone() or rank() == 0:
        return True
    if isinstance(error, ReplicationError):  # which all ranks have found, and raise alike
        return False
    messenger = MpiExecutor.messenger_of_run
    if messenger is None:  # most likely all ranks fail alike, and the first one ends this one
        time.sleep(3 * _HEARING_S)
        return True
    messenger.announce(error)
    until = time.monotonic() + _HEARING_S
    while time.monotonic() < until:
        if any(other < rank() and text == str(error) for other, text in messenger.heard):
            return False
        time.sleep(0.01)
    return True


def leave(code: int) -> None:
    """End this process after an error, without waiting for messages that will never come."""
    if not _alone():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        time.sleep(2 * _HEARING_S)  # others report theirs; a launcher ends them when this one goes
        os._exit(code)


def _report_uncaught(
    report: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """The hook of exceptions that nobody catches: told by one rank, and the end of all.

    report: the hook that was there before.
    """
    if speaks(error):
        report(kind, error, traceback)
    leave(1)


def machine_of(cpus: int | None = None, threads: int = 1, gpus: int = 0) -> Machine:
    """The machine of all ranks: each has its processors and one memory. Every rank must call it.

    cpus: processors of each rank; by default its share of the cores of its computer. gpus: as many
    GPUs of each rank instead (`runtime.devices.ranks`).

    Raises: MachineError when the ranks do not agree on cpus or threads.
    """
    if gpus:
        from soapstone.runtime.devices.ranks import gpu_machine_of_ranks

        return gpu_machine_of_ranks(cpus, gpus)
    comm = connect()
    meet("the machine of all processes")
    host = socket.gethostname()
    hosts = comm.allgather(host)
    share = hosts.count(host)
    if cpus is None:
        cpus = max(1, usable_cores() // share // threads)
    mine = Machine.local(cpus, threads)
    found = comm.allgather((cpus, threads, mine.host.capacity_bytes // share))
    nodes = sorted(set(hosts))
    names = [f"rank{number}" for number in range(len(found))]
    return Machine(
        "mpi",
        tuple(
            Processor(f"{name}.cpu{p}", "cpu", each, name, node=f"node{nodes.index(place)}")
            for name, place, (count, each, _) in zip(names, hosts, found)
            for p in range(count)
        ),
        tuple(Memory(name, capacity) for name, (_, _, capacity) in zip(names, found)),
        tuple(Link(a, b, LATENCY_S, BYTES_PER_S) for a in names for b in names if a != b),
    )


class MpiExecutor(LocalExecutor):
    """The worker threads of one rank, and the messages between it and the others."""

    messenger_of_run: ClassVar[Messenger | None] = None

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        comm = connect()
        meet("the start of the runtime")
        self.mine = [owner == self.world.rank for owner in self.world.runs]
        self.processors = [number for number, here in enumerate(self.mine) if here]
        self.messenger = Messenger(comm, self._finish, self._peer_failed, self.current())
        self.intra_node = IntraNode(comm)
        if self.intra_node.ranks and not machine.devices:  # whose copies need page-locked memory
            memory.share(self.intra_node.segments)
        MpiExecutor.messenger_of_run = self.messenger
        if safe_mode():
            self.agreement = Agreement(self.exchanged, super()._fail)

    def _world(self) -> World:
        comm = connect()
        size, count = comm.Get_size(), len(self.machine.memories)
        if count % size:
            raise MachineError(
                f"executor 'mpi': machine {self.machine.name!r} has {count} memories, "
                f"as many for each of {size} ranks needed"
            )
        # The first memory of every rank, then the second of every rank (`Machine.bounded`).
        return World.of(self.machine, comm.Get_rank(), [m % size for m in range(count)])

    def current(self) -> AbstractContextManager[object]:
        """What threads are in that call MPI."""
        return contextlib.nullcontext()

    # -- operations

    def allocate(self, storage: Storage) -> None:
        """Give a storage of this rank its bytes; those of other ranks have none here."""
        if self.world.owners[storage.memory] != self.world.rank:
            return
        try:
            super().allocate(storage)
        except MemoryExhausted as error:
            self.stop(error)
            raise

    def emit(self, operations: Sequence[Operation], sources: Array, targets: Array) -> None:
        """Take this rank's operations; what other ranks do is known only by their messages."""
        runs, rank = self.world.runs, self.world.rank
        mine = [operation for operation in operations if runs[operation.processor] == rank]
        if not mine:
            return
        place = {operation.id: number for number, operation in enumerate(mine)}
        first = mine[0].id
        kept = [
            (source, first + place[target])
            for source, target in zip(sources.tolist(), targets.tolist())
            if target in place
        ]
        pairs = np.array(kept, dtype=np.int64).reshape(-1, 2)
        super().emit(mine, pairs[:, 0], pairs[:, 1])

    def _push(self, operation: Operation) -> None:
        if operation.kind in MESSAGES:
            self.messenger.post(operation)
        else:
            super()._push(operation)

    def _finish(self, operation: Operation, since_ns: int) -> None:
        if self.profile is not None:
            self.profile.add(operation, since_ns, since_ns, time.perf_counter_ns())
        with self._lock:
            self._end(operation)

    # -- traces

    def messages(self, operations: Sequence[Operation], control: Array) -> dict[int, EntryLike]:
        """The native entries of a trace's messages, by operation id."""
        some = [operation for operation in operations if operation.kind in (*STARTS, *ENDS)]
        return Persistent(self.messenger, self.intra_node, control, self._swap).entries(some)

    def _swap(self, values: Mapping[int, Any]) -> Mapping[int, Any]:
        """Give other ranks a value each, and return what those have given this one.

        Raises: PeerError when one has failed, or keeps silent.
        """
        comm = self.messenger.plans
        sent = [comm.isend(value, other) for other, value in values.items()]
        found: dict[int, Any] = {}
        until = time.monotonic() + self.messenger.timeout_s
        while len(found) < len(values) or not all(request.Test() for request in sent):
            for other in values.keys() - found.keys():
                message = comm.improbe(other)
                if message is not None:
                    found[other] = message.recv()
            self.check()
            if time.monotonic() > until:
                late = min(values.keys() - found.keys(), default=min(values))
                error = PeerError(
                    f"process {self.world.rank}: process {late} has not come to the same place of "
                    f"the program within {self.messenger.timeout_s:g} s"
                )
                self._fail(error)
                raise error
            time.sleep(_SWAP_S)
        return found

    def exchanged(self, value: Any) -> list[Any]:
        """What each rank has given here, by rank; every rank must come here.

        Raises: PeerError when one has failed, or keeps silent.
        """
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        found = {self.world.rank: value, **self._swap(dict.fromkeys(others, value))}
        return [found[rank] for rank in range(self.world.size)]

    # -- profiles

    def gathered(self, profile: Profile) -> Profile | None:
        """The profile of all ranks on the clock of rank 0, which gets it; every rank must ask."""
        comm = connect()
        meet("the timeline of all processes")
        profile.offset_ns = -estimate_offset(self._round_trips(comm)) if self.world.rank else 0
        if self.world.rank == 0:
            for other in range(1, self.world.size):
                self._answer(comm, other)
        found = comm.gather(profile.to_json())
        return None if found is None else Profile.merge([Profile.from_json(one) for one in found])

    def _round_trips(self, comm: Any) -> list[tuple[int, int, int]]:
        """When this rank asked rank 0 for its time, what it said, and when that was here (ns)."""
        samples = []
        answer = np.zeros(1, dtype=np.int64)
        for _ in range(_ROUND_TRIPS):
            sent = time.perf_counter_ns()
            comm.Send(answer, 0)
            comm.Recv(answer, 0)
            samples.append((sent, int(answer[0]), time.perf_counter_ns()))
        return samples

    def _answer(self, comm: Any, other: int) -> None:
        """Tell another rank this one's time as often as it asks."""
        answer = np.zeros(1, dtype=np.int64)
        for _ in range(_ROUND_TRIPS):
            comm.Recv(answer, other)
            answer[0] = time.perf_counter_ns()
            comm.Send(answer, other)

    # -- errors

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self.messenger.announce(error)

    def _peer_failed(self, error: PeerError) -> None:
        super()._fail(error)

    def stop(self, error: BaseException) -> None:
        """Stop all ranks with an error of this one."""
        self._fail(error)
        self.told = True

    def check(self) -> None:
        """Raise what stopped the run, once as itself, or that the runtime is closed."""
        if isinstance(self.fault, PeerError) and not self.told:
            self.told = True
            raise self.fault
        super().check()

    def reset(self) -> None:
        """Refused after an error: other ranks have stopped too.

        Raises: StoppedError.
        """
        if self.fault is not None:
            raise StoppedError(
                f"a run over several processes cannot go on after an error: {self.fault}"
            ) from self.fault
        super().reset()

    def close(self) -> None:
        """Stop the threads; messages under way are waited for unless an error ends the run."""
        if not self.closed:
            ending = sys.exception()
            healthy = self.fault is None and ending is None
            if isinstance(ending, SystemExit):  # which no hook is told of
                self.messenger.announce(ending)
            if self.agreement is not None and healthy:
                self.agreement.event("end of the runtime")
            super().close()
            self.messenger.close(wait=healthy)
