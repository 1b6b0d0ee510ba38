"""Memory that processes share: anonymous files, mapped by whoever is given their descriptor.

A segment has no name anywhere, so nothing is left behind, however a process ends.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from soapstone import system
from soapstone.native.memory import Array, address
from soapstone.records import dataclass

_SMALL, _SLAB = 1 << 16, 1 << 20  # bytes
_HUGE = 1 << 22  # bytes of a segment from which on large pages are asked for, as NumPy does


@dataclass(frozen=True)
class Place:
    """Where an array lies: a segment, an offset in it, and the array's form."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    writeable: bool


@dataclass(frozen=True)
class Handle:
    """How another process of this computer finds a segment while its owner keeps it.

    identity: device and file number, by which it is known to be the one meant.
    """

    process: int
    segment: int
    descriptor: int
    nbytes: int
    identity: tuple[int, int]

    def map(self) -> mmap.mmap:
        """The segment, mapped here.

        Raises: OSError when it is not there, or not to be had.
        """
        descriptor = system.open_of_process(self.process, self.descriptor)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self.identity:
                raise OSError(f"descriptor {self.descriptor} of process {self.process} is another")
            memory = mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        _advise(memory, self.nbytes)
        return memory


class Segments:
    """The shared memory of one runtime: segments that live as long as arrays in them.

    small: bytes up to which arrays share segments of `slab` bytes, since every segment takes a
    descriptor.

    Finalizers run in any thread at any moment, so they take no lock: what they change is one step.
    """

    def __init__(self, small: int = _SMALL, slab: int = _SLAB) -> None:
        self._small, self._slab_bytes = small, slab
        self._numbers = itertools.count()
        self._held: dict[int, _Segment] = {}
        self._lock = threading.Lock()
        self._slab: Array = np.zeros(0, np.uint8)  # what is left of the segment of small arrays

    def allocate(self, nbytes: int) -> Array:
        """Zeros that other processes can map: uint8 (nbytes,), at a 64-byte boundary.

        Raises: MemoryError when the system has no room.
        """
        if nbytes > self._small:
            return self._segment(nbytes)
        with self._lock:
            if self._slab.size < nbytes:
                self._slab = self._segment(self._slab_bytes)
            found, self._slab = self._slab[:nbytes], self._slab[-(-nbytes // 64) * 64 :]
            return found

    def _segment(self, size: int) -> Array:
        try:
            descriptor = system.anonymous_file(size)
        except OSError as error:
            raise MemoryError(str(error)) from error
        try:
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(str(error)) from error
        _advise(memory, size)
        whole: Array = np.frombuffer(memory, dtype=np.uint8)
        number = next(self._numbers)
        self._held[number] = _Segment(int(address(whole)), size, descriptor, weakref.ref(memory))
        weakref.finalize(memory, _release, self._held, number)
        return whole

    def changes(self, known: set[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """What has changed since someone knew some segments.

        Returns the numbers of those that ended, and number, descriptor and bytes of those that are
        new; the descriptors are duplicates, to be closed.
        """
        held = dict(self._held)
        fresh = []
        for number, segment in held.items():
            memory = segment.memory()  # as long as this is held, the descriptor stays open
            if memory is not None and number not in known:
                fresh.append((number, os.dup(segment.descriptor), segment.nbytes))
        return sorted(known - held.keys()), fresh

    def place(self, array: Array) -> Place | None:
        """The segment and offset of an array, and its form; None if it is in no segment."""
        start = address(array)
        for number, segment in list(self._held.items()):
            offset = start - segment.start
            if 0 <= offset < segment.nbytes:
                form = (array.shape, array.strides, array.dtype, array.flags.writeable)
                return Place(number, offset, *form)
        return None

    def handle(self, segment: int) -> Handle:
        """What another process needs to map a segment, given its number: its file and its size."""
        held = self._held[segment]
        status = os.fstat(held.descriptor)
        identity = status.st_dev, status.st_ino
        return Handle(os.getpid(), segment, held.descriptor, held.nbytes, identity)


class _Segment(NamedTuple):
    start: int  # its address
    nbytes: int
    descriptor: int
    memory: Callable[[], mmap.mmap | None]


def _release(held: dict[int, _Segment], number: int) -> None:
    os.close(held.pop(number).descriptor)


def view(memory: Any, place: Place) -> Array:
    """The array at a place. memory: the mapping of its segment in this process."""
    found: Array = np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)
    found.flags.writeable = place.writeable
    return found


def _advise(memory: mmap.mmap, nbytes: int) -> None:
    """Ask for large pages where they pay."""
    if nbytes >= _HUGE:
        system.use_large_pages(memory)
