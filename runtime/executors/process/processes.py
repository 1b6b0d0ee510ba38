"""Worker processes: where the Python bodies of a processor of kind "process" run.

A body that holds the interpreter lock keeps other threads' bodies waiting; in a process of its own
it does not. Arrays are never sent: instances are in shared memory, and a call says where its tiles
lie. Bodies and scalars are pickled, bodies by module and name. A process is started by the first
body of its processor, and ends with the runtime, or once nobody has it, whatever it is doing then.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.cache.deferred import Late
from soapstone.runtime.errors import BodyError
from soapstone.runtime.executors.process import worker
from soapstone.runtime.machines.shared import Segments
from soapstone.runtime.model.forms import Adapted
from soapstone.runtime.model.task import Task

if TYPE_CHECKING:
    import subprocess
else:
    subprocess = Late("subprocess")  # no body may ask for a process

_LOOK_MS = 500  # how often a silent process is looked at
_END_S = 2.0  # how long one may take to end by itself


class WorkerProcess:
    """A worker process that runs tasks' bodies, started on first use; for one thread at a time."""

    def __init__(self, name: str, threads: int, segments: Segments) -> None:
        self.name = name
        self._threads = threads
        self._segments = segments
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None  # what the process waits for
        self._mapped: set[int] = set()
        self._lock = threading.Lock()  # held as long as the socket is in use
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process' number, or None before its first body."""
        return None if self._process is None else self._process.pid

    def prepared(
        self, task: str, body: Callable[..., Any], given: Sequence[Any]
    ) -> Callable[[], None]:
        """The call of a body with these arguments in the process; it may be called many times.

        Raises: BodyError for a body another process cannot find, or an argument it cannot get.
        """
        if isinstance(body, Adapted) and body.task.nested:
            raise BodyError(
                f"task {task!r} launches tasks, which a worker process cannot; place it on a "
                "processor of kind 'cpu'"
            )
        message = io.BytesIO()
        try:
            for item in given:
                region = isinstance(item, np.ndarray) and item.size and item.ndim
                if region and self._segments.place(item) is None:
                    raise pickle.PicklingError(f"an array of shape {item.shape} is not of a region")
            _Pickler(message, self._segments).dump((body, tuple(given)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BodyError(
                f"task {task!r} cannot be sent to a worker process: {error}; needed a function "
                "at the top level of a module, and arguments that can be pickled"
            ) from error
        held = (message.getvalue(), list(given))  # the arrays keep their segments alive

        def call() -> None:
            self._call(held[0])

        return call

    def _call(self, message: bytes) -> None:
        with self._lock:
            connection = self._socket
            if connection is None:
                if self._closed:
                    raise BodyError("the runtime is closed")
                connection = self._start()
            try:
                self._map(connection)
                worker.send(connection, worker.CALL, message)
                answer = self._answer(connection)
            except OSError:  # it ended while it was spoken to
                answer = None
            if answer is None:
                raise BodyError(self._ended())
            if answer:
                reason, trace = pickle.loads(answer)
                raise BodyError(reason, trace)

    def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        self._end = weakref.finalize(self, os.close, held)
        program = (
            f"import sys; sys.path[:] = sys.argv[3:]; from {worker.__name__} import main; main()"
        )
        passed = (theirs.fileno(), lifeline)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, passed), *sys.path],
                pass_fds=passed,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._socket = mine
        self._mapped = set()
        worker.send(mine, worker.START, pickle.dumps(worker.main_module()))
        return mine

    def _map(self, connection: socket.socket) -> None:
        """Give the process the segments made since its last call; take back those that ended."""
        ended, fresh = self._segments.changes(self._mapped)
        for number in ended:
            worker.send(connection, worker.UNMAP, struct.pack("q", number))
            self._mapped.discard(number)
        for number, descriptor, nbytes in fresh:
            try:
                worker.send(connection, worker.MAP, struct.pack("qq", number, nbytes), descriptor)
                self._mapped.add(number)
            finally:
                os.close(descriptor)

    def _answer(self, connection: socket.socket) -> bytes | None:
        """What the process answers, or None when it has ended."""
        process, ready = self._process, select.poll()
        ready.register(connection, select.POLLIN)
        while not ready.poll(_LOOK_MS):
            if process is None or process.poll() is not None:
                return None
        found = worker.receive(connection)
        return None if found is None else found[1]

    def _ended(self) -> str:
        """Say how the process ended, and forget it: the next body starts another."""
        number = self.pid
        code = self._stop()
        self._forget()
        if code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with status {code}"
        return f"worker process {number} of processor {self.name!r} {how}"

    def _stop(self) -> int:
        """Make the process end, and wait until it has; returns its status."""
        process = self._process
        self._end()
        if process is None:
            return 0
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _forget(self) -> None:
        connection, self._socket, self._process = self._socket, None, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the process, also within a body, and wait until it has ended."""
        self._closed = True
        self._stop()
        with self._lock:
            self._forget()


class _Pickler(pickle.Pickler):
    """Arrays of regions by where they lie, functions by module and name, tasks without what stays
    here; scalars, and arrays that they hold, by value.
    """

    def __init__(self, file: io.BytesIO, segments: Segments) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._segments = segments

    def reducer_override(self, item: Any) -> Any:
        """How one object is sent."""
        if isinstance(item, np.ndarray):
            place = self._segments.place(item) if item.size else None
            if place is not None:
                return worker.view_of, (place,)
            if item.size == 0:
                return worker.nothing, (item.shape, item.dtype, item.flags.writeable)
        if isinstance(item, Task):
            kept = (item.name, item.privileges, item.body, None, item.context)
            return Task, (*kept, None, None, item.kind, item.returns)
        if isinstance(item, FunctionType) and item.__module__ != worker.__name__:
            return worker.function_of, worker.reference(item)
        return NotImplemented
