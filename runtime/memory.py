"""Finite memories: what is allocated in each, and the error when it does not fit."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from .errors import MemoryExhausted
from .instance import Storage, aligned_bytes
from .machine import Machine
from .statistics import Statistics

Array = np.ndarray[Any, np.dtype[Any]]


class MemoryPool:
    """The bytes in use in each memory of a machine; released when their owners are collected."""

    def __init__(self, machine: Machine, statistics: Statistics) -> None:
        self._memories = machine.memories
        self._statistics = statistics
        self._used = [0] * len(machine.memories)
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()

    def used(self, memory: int) -> int:
        """The bytes in use in a memory."""
        with self._lock:
            self._settle()
            return self._used[memory]

    def free(self, memory: int) -> int:
        """The bytes not in use in a memory."""
        return self._memories[memory].capacity_bytes - self.used(memory)

    def claim(self, owner: Any, memory: int, nbytes: int, what: str) -> None:
        """Count bytes as used until `owner` is collected.

        Raises: MemoryExhausted naming what was needed, what there was, and the largest regions.
        """
        with self._lock:
            self._settle()
            place = self._memories[memory]
            if self._used[memory] + nbytes > place.capacity_bytes:
                held = sorted(
                    (s for s in self._storages if s.memory == memory), key=lambda s: -s.nbytes
                )
                largest = ", ".join(f"{s.name or '?'} ({s.nbytes} bytes)" for s in held[:5])
                raise MemoryExhausted(
                    f"memory {place.name!r}: {what} needs {nbytes} bytes, "
                    f"{place.capacity_bytes - self._used[memory]} of {place.capacity_bytes} are "
                    f"free; largest regions: {largest or 'none'}"
                )
            self._used[memory] += nbytes
            self._statistics.allocations += 1
            self._statistics.bytes_allocated += nbytes
        weakref.finalize(owner, self._released.append, (memory, nbytes)).atexit = False

    def allocate(self, storage: Storage) -> None:
        """Give a storage its bytes: zeros, or whatever was there for a transient region.

        Raises: MemoryExhausted.
        """
        self.claim(storage, storage.memory, storage.nbytes, f"region {storage.name!r}")
        self._storages.add(storage)
        storage.attach(aligned_bytes(storage.nbytes, zero=not storage.transient))

    def _settle(self) -> None:
        """Count what was released since the last look; the lock is held.

        Finalizers only append: they may run in any thread, even in one that holds the lock.
        """
        while self._released:
            memory, nbytes = self._released.popleft()
            self._used[memory] -= nbytes
