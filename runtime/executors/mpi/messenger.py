"""The messenger of a rank: one thread that sends, receives, and watches over the other ranks.

Untraced messages are posted as they become ready, and polled. A second channel carries errors: a
rank that fails tells the others, a rank that is gone is noticed by its process number on the same
computer, and one that keeps silent by a timeout of whoever waits for it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from soapstone import system
from soapstone.native.memory import Array
from soapstone.runtime.analysis.message import Message, message_of
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.errors import PeerError

TIMEOUT_VARIABLE = "SOAPSTONE_TIMEOUT_S"
TIMEOUT_S = 120.0
_POLL_S = 20e-6
_LOOK_S = 0.02  # between two looks at the other ranks
_ERROR_TAG = 1


def timeout_s() -> float:
    """Seconds that a message may take before its peer counts as hung.

    Raises: PeerError when the variable is no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise PeerError(f"variable {TIMEOUT_VARIABLE} is {text!r}, a number of seconds needed")
    return found


class _Pending(NamedTuple):
    operation: Operation
    request: Any
    array: Array
    packed: Array
    since_ns: int


class Messenger:
    """The messages of one rank.

    finished: called with an operation whose message has ended, and when it was started (ns).
    failed: called with a PeerError. current: the context in which the thread calls MPI.
    """

    def __init__(
        self,
        comm: Any,
        finished: Callable[[Operation, int], None],
        failed: Callable[[PeerError], None],
        current: AbstractContextManager[object],
    ) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.timeout_s = timeout_s()
        self.traced = comm.Dup()  # the messages of traces, started by native code
        self.plans = comm.Dup()  # what ranks tell each other when a trace is compiled
        self.fault = np.zeros(8, dtype=np.int64)  # [0]: native code stops waiting
        self._finished = finished
        self._failed = failed
        self._current = current
        self._comm = comm.Dup()
        self._errors = comm.Dup()
        self._rank = int(comm.Get_rank())
        self._largest_tag = int(comm.Get_attr(MPI.TAG_UB))
        self._pids: dict[int, int] = {}
        here = socket.gethostname()
        for rank, (host, pid) in enumerate(comm.allgather((here, os.getpid()))):
            if host == here and rank != self._rank:
                self._pids[rank] = pid
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._pending: list[_Pending] = []
        self._statuses: list[Any] = []  # of the messages that ended last
        self._announced = False
        self.heard: list[tuple[int, str]] = []  # errors of other ranks
        self._sent: list[Any] = []
        self._wait_at_end = True
        self._thread = threading.Thread(target=self._serve, daemon=True, name="soapstone-messenger")
        self._thread.start()

    @property
    def rank(self) -> int:
        """This process' rank."""
        return self._rank

    def tag(self, message: Message) -> int:
        """The MPI tag of a message, within the largest tag that MPI allows."""
        return message.number % self._largest_tag

    def post(self, operation: Operation) -> None:
        """Hand a send or receive whose dependences are met to the thread, which starts it."""
        self._inbox.put(operation)

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks of an error of this one, once."""
        self.fault[0] = 1
        if self._announced or isinstance(error, PeerError):
            return
        self._announced = True
        told = not isinstance(error, SystemExit)  # which Python ends a program by without a word
        said = str(error) if told else f"it left its program, by SystemExit({error})"
        text = json.dumps({"rank": self.rank, "error": said, "told": told})
        data = np.frombuffer(text.encode(), dtype=np.uint8).copy()
        for other in range(self._errors.Get_size()):
            if other != self.rank:
                request = self._errors.Isend([data, self.mpi.BYTE], other, _ERROR_TAG)
                self._sent.append((request, data))

    def close(self, wait: bool) -> None:
        """Stop the thread. wait: until the messages under way have ended."""
        self._wait_at_end = wait
        self._inbox.put(None)
        self._thread.join()
        if wait:  # all ranks are here, and MPI has few communicators (2,048 in MPICH)
            for comm in (self.traced, self.plans, self._comm, self._errors):
                comm.Free()

    # -- the thread

    def _serve(self) -> None:
        with self._current:
            self._pass()

    def _pass(self) -> None:
        looked = 0.0
        closing = False
        while True:
            try:
                item = self._inbox.get(timeout=0 if self._pending else _LOOK_S)
                if item is None:
                    closing = True
                else:
                    self._start(item)
                    continue
            except queue.Empty:
                pass
            if closing and not (self._pending and self._wait_at_end and not self.fault[0]):
                return
            if self._pending and not self._poll():
                time.sleep(_POLL_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._look()

    def _start(self, operation: Operation) -> None:
        since_ns = time.perf_counter_ns()
        message = message_of(operation)
        array = operation.arrays()[0]
        packed = array if array.flags.c_contiguous else _room(array, operation.kind == "send")
        buffer = [packed.reshape(-1).view(np.uint8), self.mpi.BYTE]
        if operation.kind == "send":
            request = self._comm.Isend(buffer, message.target, self.tag(message))
        else:
            request = self._comm.Irecv(buffer, message.source, self.tag(message))
        self._pending.append(_Pending(operation, request, array, packed, since_ns))

    def _poll(self) -> bool:
        """Take what has ended. Returns whether anything has."""
        try:
            missing = len(self._pending) - len(self._statuses)
            self._statuses += [self.mpi.Status() for _ in range(missing)]
            done = self.mpi.Request.Testsome(
                [item.request for item in self._pending], self._statuses
            )
        except self.mpi.Exception as error:
            first = message_of(self._pending[0].operation)
            self._give_up(f"process {self.rank}: {first}, or one after it, failed: {error}")
            return True
        if not done:
            return False
        ended = [self._pending[place] for place in done]
        for item, status in zip(ended, self._statuses):
            found = status.Get_count(self.mpi.BYTE)
            if item.operation.kind == "recv" and found != item.packed.nbytes:
                self._give_up(
                    f"process {self.rank}: {message_of(item.operation)} has {found} bytes, "
                    f"{item.packed.nbytes} needed"
                )
                return True
        self._pending = [item for place, item in enumerate(self._pending) if place not in set(done)]
        for item in ended:
            if item.operation.kind == "recv" and item.packed is not item.array:
                item.array[...] = item.packed
            self._finished(item.operation, item.since_ns)
        return True

    def _look(self) -> None:
        """See whether the other ranks are well."""
        if self._errors.Iprobe(tag=_ERROR_TAG):
            status = self.mpi.Status()
            self._errors.Probe(tag=_ERROR_TAG, status=status)
            data = np.zeros(status.Get_count(self.mpi.BYTE), dtype=np.uint8)
            self._errors.Recv([data, self.mpi.BYTE], status.Get_source(), _ERROR_TAG)
            found = json.loads(data.tobytes())
            self.heard.append((int(found["rank"]), str(found["error"])))
            self._give_up(f"process {found['rank']}: {found['error']}", announced=found["told"])
            return
        for other, pid in self._pids.items():
            if not system.is_alive(pid):
                self._give_up(f"process {other} has died")
                return
        now_ns = time.perf_counter_ns()
        late = [item for item in self._pending if now_ns - item.since_ns > self.timeout_s * 1e9]
        if late:
            self._give_up(
                f"process {self.rank}: {message_of(late[0].operation)} has not ended after "
                f"{self.timeout_s:g} s"
            )

    def _give_up(self, text: str, announced: bool = False) -> None:
        if self.fault[0]:
            return
        self.fault[0] = 1
        self._pending = []
        self._failed(PeerError(text, announced))


def _room(array: Array, filled: bool) -> Array:
    """The bytes of an array in one piece. filled: with its contents."""
    return array.copy() if filled else np.empty(array.shape, array.dtype)
