"""The messages of a trace, started and awaited by native code.

Where ranks share memory the start of a send says that its bytes are ready, and the receiver's end
copies them. Elsewhere messages are persistent requests: a start is MPI's own function on the
address of a request, and an end polls it. Ends give up when a worker has failed, when another rank
has, or when the peer has kept silent for too long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone import system
from soapstone.native.memory import Address, Array, Entry, address, block_at, extent, pack
from soapstone.runtime.analysis.message import ENDS, STARTS, Message, message_of
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.analysis.transfer import copy_entry
from soapstone.runtime.errors import PeerError
from soapstone.runtime.executors.mpi.intra_node import IntraNode
from soapstone.runtime.executors.mpi.messenger import Messenger
from soapstone.runtime.machines.shared import Handle, Place
from soapstone.runtime.model.task import EntryLike

_LINE = 64  # bytes that two words of different writers are apart
_READY, _TAKEN = 0, 1  # the words of a message, a line each


@dataclass(frozen=True)
class Offer:
    """What a rank tells the receiver of a message: its size, and where it lies if they share that.

    places: of the two words, then of the arrays; None: the message goes through MPI.
    """

    number: int
    nbytes: int
    places: tuple[Place, ...] | None
    handles: tuple[Handle, ...]


Swap = Callable[[Mapping[int, Any]], Mapping[int, Any]]


class Persistent:
    """The messages of one trace.

    control: the trace's control words ([0]: abort). swap: gives other ranks a value each, and
    returns what they have given this one.
    """

    def __init__(
        self, messenger: Messenger, intra_node: IntraNode, control: Array, swap: Swap
    ) -> None:
        self._messenger = messenger
        self._intra_node = intra_node
        self._control = control
        self._swap = swap
        self._requests: dict[int, tuple[Any, object]] = {}
        self._words: dict[int, Array] = {}  # of messages in shared memory, by number

    def entries(self, operations: Sequence[Operation]) -> dict[int, EntryLike]:
        """The entry of each operation, which all start or end messages, by its id.

        Raises: PeerError when another rank sends something else than is expected here.
        """
        rank = self._messenger.rank
        offers: dict[int, list[Offer]] = {}
        for operation in operations:
            if operation.kind in STARTS:
                message = message_of(operation)
                other = message.source if message.target == rank else message.target
                mine = offers.setdefault(other, [])
                if operation.kind == "send":
                    mine.append(self._offer(operation))
        if not offers:
            return {}
        found: dict[tuple[int, int], Offer] = {
            (other, offer.number): offer
            for other, theirs in self._swap(offers).items()
            for offer in theirs
        }
        sources: dict[int, list[Array]] = {}
        for operation in operations:
            if operation.kind == "recv":
                message = message_of(operation)
                offer = found.get((message.source, message.number))
                if offer is None or offer.nbytes != message.nbytes:
                    there = "is not sent" if offer is None else f"has {offer.nbytes} bytes"
                    raise PeerError(
                        f"process {rank}: {message} {there}: other processes run another program"
                    )
                if offer.places is not None:
                    sources[message.number] = self._sources(operation, offer.places, offer.handles)
        self._swap(dict.fromkeys(offers, True))  # all have mapped what they need
        for operation in operations:
            number = message_of(operation).number
            if operation.kind in STARTS and number not in self._words:
                self._requests[number] = self._request(operation)
        return {
            operation.id: self._shared(operation, sources)
            if message_of(operation).number in self._words
            else self._end(operation)
            if operation.kind in ENDS
            else self._begin(operation)
            for operation in operations
        }

    # -- shared memory

    def _offer(self, operation: Operation) -> Offer:
        message = message_of(operation)
        places: tuple[Place, ...] | None = None
        handles: tuple[Handle, ...] = ()
        if message.target in self._intra_node.ranks:
            words = self._intra_node.segments.allocate(2 * _LINE).view(np.int64)
            places = self._intra_node.places([words, *operation.arrays()])
            if places is not None:
                self._words[message.number] = words
                handles = self._intra_node.handles(places)
        return Offer(message.number, message.nbytes, places, handles)

    def _sources(
        self, operation: Operation, places: Sequence[Place], handles: Sequence[Handle]
    ) -> list[Array]:
        """What a receive copies, in the sender's memory."""
        kinds = [np.dtype(np.int64), *(array.dtype for array in operation.arrays())]
        words, *arrays = self._intra_node.arrays(places, handles, kinds)
        self._words[message_of(operation).number] = words
        return arrays

    def _shared(self, operation: Operation, sources: Mapping[int, list[Array]]) -> EntryLike:
        """The entry of an operation whose message both ranks can reach."""
        from soapstone.native.entries import noop
        from soapstone.runtime.executors.mpi import message_kernels

        kind, message = operation.kind, message_of(operation)
        if kind == "post":
            return noop()
        words = self._words[message.number]
        ready, taken = (address(words, _LINE * word) for word in (_READY, _TAKEN))
        if kind == "send":
            block = message_kernels.READY.pack(rounds=0, ready=ready)
            return Entry(message_kernels.make_ready.address, block)
        copies = []
        if kind == "recv":
            given = zip(operation.arrays(), sources[message.number], strict=True)
            copies = [copy_entry(target, source) for target, source in given]
        block = message_kernels.SHARED.pack(
            rounds=0,
            ready=ready,
            taken=taken,
            copies=pack(copies),
            count=len(copies),
            keep=(self,),
            **self._limits(),
        )
        function = message_kernels.take if kind == "recv" else message_kernels.await_taken
        return Entry(function.address, block, self._statuses(message))

    def _limits(self) -> dict[str, Any]:
        """What an end looks at while it waits: two words of errors, and its nanoseconds."""
        limit_ns = int(self._messenger.timeout_s * 1e9)
        return {
            "control": self._control,
            "fault": self._messenger.fault,
            "limit_ns": limit_ns,
        }

    def _statuses(self, message: Message) -> Mapping[int, str]:
        from soapstone.runtime.executors.mpi.message_kernels import SILENT, STOPPED

        return {
            STOPPED: "stopped by an error elsewhere",
            SILENT: f"{message} has not ended after {self._messenger.timeout_s:g} s",
        }

    # -- requests

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

    def _function(self, name: str) -> int:
        """The address of a function of MPI."""
        return system.address(getattr(ctypes.CDLL(self._messenger.mpi.__file__), name))

    def _address(self, message: Message) -> Address:
        """The address of a message's request, which keeps all that it uses."""
        made = self._requests[message.number]
        return Address.of(int(self._messenger.mpi._addressof(made[0])), made)

    def _begin(self, operation: Operation) -> Entry:
        return Entry(self._function("MPI_Start"), block_at(self._address(message_of(operation))))

    def _end(self, operation: Operation) -> Entry:
        from soapstone.runtime.executors.mpi import message_kernels

        message = message_of(operation)
        room = np.zeros(16, np.int64)  # for MPI_Test's flag, and its MPI_Status
        block = message_kernels.REQUEST.pack(
            test=self._function("MPI_Test"),
            request=self._address(message),
            flag=room,
            status=address(room, 64),
            keep=(self,),
            **self._limits(),
        )
        return Entry(message_kernels.await_request.address, block, self._statuses(message))


def _place(mpi: Any, arrays: Sequence[Array]) -> tuple[Any, Any]:
    """Where arrays begin, and the MPI datatype of all their elements seen from there."""
    kinds = [_datatype(mpi, array) for array in arrays]
    addresses = [address(array) for array in arrays]
    base = min(addresses)
    place = mpi.memory.fromaddress(base, max(extent(array)[1] for array in arrays) - base)
    if len(arrays) == 1:
        return place, kinds[0]
    distances = [each - base for each in addresses]
    return place, mpi.Datatype.Create_struct([1] * len(kinds), distances, kinds).Commit()


def _datatype(mpi: Any, array: Array) -> Any:
    """The MPI datatype of an array's elements where they lie, whatever its strides."""
    kind = mpi.BYTE.Create_contiguous(array.itemsize)
    if array.flags.c_contiguous:
        kind = mpi.BYTE.Create_contiguous(array.nbytes)
    else:
        for extent, stride in zip(reversed(array.shape), reversed(array.strides)):
            kind = kind.Create_hvector(extent, 1, stride)
    return kind.Commit()
