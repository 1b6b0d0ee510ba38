"""The ranks of one computer read each other's memory: a message between them is one copy.

Instances lie in segments without a name (`runtime.machines.shared`), which other ranks map, so
nothing is left behind however a rank ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone import system
from soapstone.native.memory import Array
from soapstone.runtime.errors import PeerError
from soapstone.runtime.machines.shared import Handle, Place, Segments

_SMALL, _SLAB = 1 << 20, 1 << 24  # bytes; a model has hundreds of short parameters
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Sight:
    """What a rank shows, so that others can tell whether they see its memory."""

    host: str
    handle: Handle
    place: Place
    token: bytes


class IntraNode:
    """The segments of this rank, and those of the ranks that share memory with it.

    ranks: those others. All ranks must make it together.
    """

    def __init__(self, comm: Any) -> None:
        self.segments = Segments(_SMALL, _SLAB)
        self._mapped: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = (
            weakref.WeakValueDictionary()
        )
        self.ranks: frozenset[int] = frozenset()
        self._shown = self.segments.allocate(_TOKEN_BYTES)
        token = os.urandom(_TOKEN_BYTES)
        self._shown[:] = np.frombuffer(token, np.uint8)
        host, place = socket.gethostname(), self._place(self._shown)
        mine = _Sight(host, self.segments.handle(place.segment), place, token)
        sights = comm.allgather(mine)
        rank = comm.Get_rank()
        seen = {n for n, sight in enumerate(sights) if n != rank and self.sees(mine, sight)}
        views = comm.allgather(seen)  # afterwards nobody needs what was shown
        self.ranks = frozenset(other for other in seen if rank in views[other])
        _forget_names()

    @staticmethod
    def sees(mine: _Sight, other: _Sight) -> bool:
        """Whether this process reads in another's memory what that one has written there."""
        if mine.host != other.host:
            return False
        try:
            memory = other.handle.map()
        except OSError:  # of another user, or no such system
            return False
        offset = other.place.offset
        return memory[offset : offset + _TOKEN_BYTES] == other.token

    def _place(self, array: Array) -> Place:
        found = self.segments.place(array)
        assert found is not None
        return found

    def places(self, arrays: Sequence[Array]) -> tuple[Place, ...] | None:
        """Where arrays lie, or None where one is in no segment."""
        found = tuple(place for array in arrays if (place := self.segments.place(array)))
        return found if len(found) == len(arrays) else None

    def handles(self, places: Iterable[Place]) -> tuple[Handle, ...]:
        """How another rank finds the segments of some places."""
        return tuple(map(self.segments.handle, sorted({place.segment for place in places})))

    def arrays(
        self, places: Sequence[Place], handles: Sequence[Handle], like: Sequence[np.dtype[Any]]
    ) -> list[Array]:
        """The arrays at places of another rank, whose segments are among `handles`.

        They keep what they need. like: the dtype of each.

        Raises: PeerError when a segment cannot be mapped.
        """
        known = {handle.segment: handle for handle in handles}
        return [
            np.ndarray(
                place.shape, dtype, self._map(known[place.segment]), place.offset, place.strides
            )
            for place, dtype in zip(places, like)
        ]

    def _map(self, handle: Handle) -> mmap.mmap:
        key = handle.process, handle.segment
        found = self._mapped.get(key)
        if found is None:
            try:
                found = handle.map()
            except OSError as error:
                raise PeerError(
                    f"memory of process {handle.process} ({handle.nbytes} bytes) cannot be "
                    f"mapped: {error}"
                ) from error
            self._mapped[key] = found
        return found


def _forget_names() -> None:
    """Remove the names of MPI's own shared memory, which all ranks have mapped by now.

    MPICH removes them at the end, so that a rank that is killed would leave them behind for ever.
    """
    for name in system.shared_memory_files("mpich_shm_"):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(name)
