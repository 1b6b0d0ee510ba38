"""The bytes of a GPU's memory: large ones are the driver's, small ones lie in slabs of it.

An allocation of the driver takes long, and giving one back may wait for the device. Bytes are given
back when no view of them is left; operations that a lane has keep those that they use.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from soapstone.native.cuda.arrays import device_bytes, part, zeroed
from soapstone.native.cuda.device import Device
from soapstone.native.memory import Array
from soapstone.runtime.machines.space import Space

SLAB_BYTES = 16 << 20
_LARGE_BYTES = SLAB_BYTES // 16  # and more are allocated alone


class DevicePool:
    """What a runtime has of a GPU's memory. device: the GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: list[tuple[Space, Array]] = []
        self._given_back: deque[tuple[Space, int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, zero: bool) -> Array:
        """Bytes: uint8 (nbytes,) at a boundary of 64, zeros or whatever was there.

        Raises: MemoryError when the device has no room.
        """
        if nbytes >= _LARGE_BYTES or not nbytes:
            return device_bytes(self._device, nbytes, zero)
        with self._lock:
            while self._given_back:  # finalizers only append: they run in any thread, at any time
                space, offset, size = self._given_back.popleft()
                space.give(offset, size)
            space, offset, slab = self._place(nbytes)
        found, owner = part(slab, offset, nbytes)
        weakref.finalize(owner, self._given_back.append, (space, offset, nbytes)).atexit = False
        if zero:
            zeroed(self._device, found)
        return found

    def _place(self, nbytes: int) -> tuple[Space, int, Array]:
        """A slab with room, and where; the lock is held."""
        for space, slab in self._slabs:
            taken = space.take(nbytes)
            if taken is not None:
                return space, taken[0], slab
        self._slabs.append((Space(SLAB_BYTES), device_bytes(self._device, SLAB_BYTES)))
        space, slab = self._slabs[-1]
        taken = space.take(nbytes)
        assert taken is not None  # it is empty, and larger
        return space, taken[0], slab
