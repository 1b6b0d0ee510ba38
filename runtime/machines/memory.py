"""Finite memories: what is allocated in each, and the error when it does not fit."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from soapstone.native.memory import CHECKED, Array, aligned
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.machines.machine import PROCESS, Machine
from soapstone.runtime.machines.shared import Segments
from soapstone.runtime.observe.statistics import Statistics
from soapstone.system import available_bytes, resident_bytes

if TYPE_CHECKING:
    from soapstone.runtime.devices.pool import DevicePool

_LOOK_BYTES = 64 << 20  # claims between two looks at what this computer has available
_RESERVE_BYTES = 256 << 20  # left for what is not a region: the interpreter, kernels, the system


class Arena:
    """Bytes in one memory that several may use in turn.

    buffer: uint8, at a 64-byte boundary.
    """

    __slots__ = ("__weakref__", "buffer")
    buffer: Array


class MemoryPool:
    """The bytes in use in each memory of a machine; released when their owners are collected.

    A claim must fit the memory's capacity, and all memories together must fit what this computer
    has available, of which pages that were claimed and not touched yet are still part.
    """

    def __init__(self, machine: Machine, statistics: Statistics) -> None:
        self._memories = machine.memories
        self._devices = machine.devices
        self._statistics = statistics
        self._used = [0] * len(machine.memories)
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._spaces: dict[int, Array] = {}
        self._shared: weakref.WeakValueDictionary[tuple[int, Hashable], Arena]
        self._shared = weakref.WeakValueDictionary()
        self._pools: dict[int, DevicePool] = {}  # of GPUs
        self.sources: dict[int, Callable[[int, bool], Array]] = {}  # as `buffer`, of some memories
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        shared = any(processor.kind == PROCESS for processor in machine.processors)
        self.segments = Segments() if shared else None
        self._resident_before = resident_bytes()
        self._relief: list[Callable[[], None]] = []
        self._unseen = 0  # claimed since the last look

    def forked(self) -> None:
        """In a child process nobody holds the lock."""
        self._lock = threading.Lock()

    def share(self, segments: Segments) -> None:
        """Keep all memories in segments that other processes can map."""
        self.segments = segments

    def used(self, memory: int) -> int:
        """The bytes in use in a memory."""
        with self._lock:
            self._settle()
            return self._used[memory]

    def free(self, memory: int) -> int:
        """The bytes not in use in a memory."""
        return self._memories[memory].capacity_bytes - self.used(memory)

    def on_pressure(self, give_up: Callable[[], None]) -> None:
        """Have a function called, before a claim is refused, that gives up what can be remade."""
        self._relief.append(give_up)

    def relieve(self) -> None:
        """Have everything given up that can be remade."""
        for give_up in self._relief:
            give_up()

    def claim(self, owner: Any, memory: int, nbytes: int, what: str) -> None:
        """Count bytes as used until `owner` is collected.

        Raises: MemoryExhausted naming what was needed, what there was, and the largest regions.
        """
        with self._lock:
            self._settle()
            place = self._memories[memory]
            if self._used[memory] + nbytes > place.capacity_bytes:
                free = place.capacity_bytes - self._used[memory]
                there = f"{free} of {place.capacity_bytes} are free"
                raise self._exhausted(memory, nbytes, what, there)
            self._unseen += 0 if memory in self._devices else nbytes
            if self._unseen >= _LOOK_BYTES:
                self._look(memory, nbytes, what)
            self._used[memory] += nbytes
            self._statistics.allocations += 1
            self._statistics.bytes_allocated += nbytes
        weakref.finalize(owner, self._released.append, (memory, nbytes)).atexit = False

    def _look(self, memory: int, nbytes: int, what: str) -> None:
        """Compare what is claimed and not touched yet with what is available; the lock is held."""
        available = available_bytes()
        if available is None:
            return
        touched = max(0, resident_bytes() - self._resident_before)
        mine = sum(used for memory, used in enumerate(self._used) if memory not in self._devices)
        promised = max(0, mine - touched)
        if promised + nbytes + _RESERVE_BYTES > available:
            self._unseen -= nbytes
            free = max(0, available - promised - _RESERVE_BYTES)
            raise self._exhausted(memory, nbytes, what, f"this computer has {free} available")
        self._unseen = 0

    def _exhausted(self, memory: int, nbytes: int, what: str, there: str) -> MemoryExhausted:
        held = sorted((s for s in self._storages if s.memory == memory), key=lambda s: -s.nbytes)
        largest = ", ".join(f"{s.name or '?'} ({s.nbytes} bytes)" for s in held[:5])
        return MemoryExhausted(
            f"memory {self._memories[memory].name!r}: {what} needs {nbytes} bytes, {there}; "
            f"largest regions: {largest or 'none'}"
        )

    def buffer(self, memory: int, nbytes: int, zero: bool, what: str) -> Array:
        """Bytes that were claimed before: uint8 at a 64-byte boundary.

        Those of a GPU are in its own memory (`native.cuda.arrays`), and the host's are page-locked
        where there is one. Where processors are processes all memories are shared with them, since
        mappers may place what they use in any; those of ranks are shared with the other ranks of
        their computer. `sources` are asked first.

        Raises: MemoryExhausted when the operating system refuses them.
        """
        try:
            if memory in self.sources:
                return self.sources[memory](nbytes, zero)
            if self.segments is not None:
                return self.segments.allocate(nbytes)
            if self._devices:
                if memory in self._devices:
                    return self._pool(memory).take(nbytes, zero)
                from soapstone.native.cuda.arrays import pinned_bytes

                return pinned_bytes(nbytes, zero)
            return aligned(nbytes, zero=zero)
        except MemoryError as error:
            who = "driver" if memory in self._devices else "operating system"
            refused = f"the {who} refuses them ({error})"
            raise self._exhausted(memory, nbytes, what, refused) from None

    def arena(self, memory: int, nbytes: int, what: str, of: Hashable = None) -> Arena:
        """The bytes, or more, that traces of one runtime share: each may overwrite all of them.

        Of a trace's transient instances, or under another key `of`. They replay one after another.
        On a GPU the end of one may still be running when the next begins, and in checked mode each
        has guard zones of its own: there nothing is shared.

        Raises: MemoryExhausted.
        """
        alone = memory in self._devices or CHECKED
        found = None if alone else self._shared.get((memory, of))
        if found is None or found.buffer.nbytes < nbytes:
            if found is not None:  # whoever has it keeps it, so there are to be few of them
                more = found.buffer.nbytes * 3 // 2
                nbytes = max(nbytes, min(more, self.free(memory)))
            found = Arena()
            self.claim(found, memory, nbytes, what)
            found.buffer = self.buffer(memory, nbytes, False, what)
            if not alone:
                self._shared[memory, of] = found
        return found

    def _pool(self, memory: int) -> DevicePool:
        found = self._pools.get(memory)
        if found is None:
            from soapstone.native.cuda.device import Device
            from soapstone.runtime.devices.pool import DevicePool

            found = self._pools[memory] = DevicePool(Device(self._devices[memory]))
        return found

    def _space(self, memory: int) -> Array:
        found = self._spaces.get(memory)
        if found is None:
            place = self._memories[memory]
            what = "the arena that instances leave and come to"
            self.claim(self, memory, place.capacity_bytes, what)
            found = self.buffer(memory, place.capacity_bytes, False, what)
            self._spaces[memory] = found
        return found

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes: zeros, or whatever was there for a transient region.

        One that has its offset already gets it in the arena of its memory, which takes all of it.

        Raises: MemoryExhausted.
        """
        if storage.offset is not None:
            arena = self._space(storage.memory)
            storage.attach(arena[storage.offset : storage.offset + storage.nbytes])
            return
        memory, nbytes, what = storage.memory, storage.nbytes, f"region {storage.name!r}"
        self.claim(storage, memory, nbytes, what)
        storage.attach(self.buffer(memory, nbytes, not storage.transient, what))
        self._storages.add(storage)

    def _settle(self) -> None:
        """Count what was released since the last look; the lock is held.

        Finalizers only append: they may run in any thread, even in one that holds the lock.
        """
        while self._released:
            memory, nbytes = self._released.popleft()
            self._used[memory] -= nbytes
