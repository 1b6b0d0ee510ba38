"""The messages of a trace: persistent requests, started and awaited by native code.

A start is MPI's own function on the address of a request. An end polls it, and gives up when a
worker has failed, when another rank has, or when the peer has kept silent for too long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..message import ENDS, STARTS, message_of
from ..operation import Operation
from ..task import EntryLike
from .messenger import Messenger

Array = np.ndarray[Any, np.dtype[Any]]
STOPPED, SILENT = -2, -3  # statuses of an end, as `message_kernels` returns them
_WORDS = 16


@dataclass(frozen=True)
class MessageEntry:
    """A native entry of a message; see `task.EntryLike`."""

    address: int
    block: int
    keep: object
    statuses: Mapping[int, str] = field(default_factory=dict)


class Persistent:
    """The requests of one trace. control: the trace's control words ([0]: abort)."""

    def __init__(self, messenger: Messenger, control: Array) -> None:
        self._messenger = messenger
        self._control = control
        library = ctypes.CDLL(messenger.mpi.__file__)
        self._start = _address(library.MPI_Start)
        self._test = _address(library.MPI_Test)
        self._requests: dict[int, tuple[Any, object]] = {}

    def entries(self, operations: Sequence[Operation]) -> dict[int, EntryLike]:
        """The entry of each operation, which all start or end messages, by its id."""
        for operation in operations:
            if operation.kind in STARTS:
                self._requests[message_of(operation).number] = self._request(operation)
        return {
            operation.id: self._end(operation) if operation.kind in ENDS else self._begin(operation)
            for operation in operations
        }

    def _request(self, operation: Operation) -> tuple[Any, object]:
        message = message_of(operation)
        messenger = self._messenger
        mpi = messenger.mpi
        arrays = operation.arrays()
        place, kind = _place(mpi, arrays)
        make = messenger.traced.Send_init, messenger.traced.Recv_init
        sends = operation.kind == "send"
        other = message.target if sends else message.source
        request = make[not sends]([place, 1, kind], other, messenger.tag(message))
        return request, (arrays, kind, place)

    def _begin(self, operation: Operation) -> MessageEntry:
        request, keep = self._requests[message_of(operation).number]
        address = int(self._messenger.mpi._addressof(request))
        return MessageEntry(self._start, address, (request, keep))

    def _end(self, operation: Operation) -> MessageEntry:
        from . import message_kernels

        message = message_of(operation)
        messenger = self._messenger
        request, keep = self._requests[message.number]
        block = np.zeros(_WORDS, dtype=np.int64)
        block[:5] = (
            self._test,
            messenger.mpi._addressof(request),
            self._control.ctypes.data,
            messenger.fault.ctypes.data,
            int(messenger.timeout_s * 1e9),
        )
        statuses = {
            STOPPED: "stopped by an error elsewhere",
            SILENT: f"{message} has not ended after {messenger.timeout_s:g} s",
        }
        address = int(message_kernels.await_request.address)
        return MessageEntry(address, block.ctypes.data, (block, request, keep, self), statuses)


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def _place(mpi: Any, arrays: Sequence[Array]) -> tuple[Any, Any]:
    """Where arrays begin, and the MPI datatype of all their elements seen from there."""
    kinds = [_datatype(mpi, array) for array in arrays]
    addresses = [array.ctypes.data for array in arrays]
    base = min(addresses)
    place = mpi.memory.fromaddress(base, max(_end(array) for array in arrays) - base)
    if len(arrays) == 1:
        return place, kinds[0]
    distances = [address - base for address in addresses]
    return place, mpi.Datatype.Create_struct([1] * len(kinds), distances, kinds).Commit()


def _end(array: Array) -> int:
    """The address behind an array's last byte."""
    reach = sum((extent - 1) * step for extent, step in zip(array.shape, array.strides))
    return int(array.ctypes.data + reach + array.itemsize)


def _datatype(mpi: Any, array: Array) -> Any:
    """The MPI datatype of an array's elements where they lie, whatever its strides."""
    kind = mpi.BYTE.Create_contiguous(array.itemsize)
    if array.flags.c_contiguous:
        kind = mpi.BYTE.Create_contiguous(array.nbytes)
    else:
        for extent, stride in zip(reversed(array.shape), reversed(array.strides)):
            kind = kind.Create_hvector(extent, 1, stride)
    return kind.Commit()
