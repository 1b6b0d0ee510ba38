"""Copies to, from, between and within devices, as work that is enqueued.

One contiguous range is moved by the copy engines, beside kernels. Any other pair of strides is
moved by a kernel, which reads and writes pinned host memory and other devices at their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.dtypes import BITS, name_of
from soapstone.native.cuda.arrays import launchable, on_device, uploaded
from soapstone.native.cuda.device import Enqueued, simulated
from soapstone.native.memory import Array
from soapstone.native.walks import memory_order, moved, walk

AXES = 4  # of the arrays that kernels here take; what has more is launched row by row
_THREADS, _MOST_BLOCKS = 256, 4096


def grid_of(count: int) -> tuple[int, int]:
    """Return blocks and threads of a kernel whose threads go over `count` elements in strides.

    The simulator's threads are Python's, and it gets few.
    """
    if simulated():
        return 2, 4
    return max(1, min(-(-count // _THREADS), _MOST_BLOCKS)), _THREADS


@dataclass(frozen=True)
class Several:
    """Work that is done in order."""

    parts: tuple[Enqueued, ...]

    def enqueue(self, stream: Any) -> None:
        """Enqueue each part."""
        for part in self.parts:
            part.enqueue(stream)


@dataclass(frozen=True)
class Moved:
    """Bytes of one contiguous range that a copy engine moves.

    way: the method of Numba's array that has it done. given: its arguments but the stream. keep:
    what has to live as long.
    """

    way: Callable[..., Any]
    given: Any
    keep: tuple[Any, ...]

    def enqueue(self, stream: Any) -> None:
        """Enqueue the copy."""
        self.way(self.given, stream=stream)


@dataclass(frozen=True)
class Launched:
    """One launch of a kernel over `count` elements. keep: what has to live as long."""

    kernel: Any
    given: tuple[Any, ...]
    count: int
    keep: tuple[Any, ...] = ()

    def enqueue(self, stream: Any) -> None:
        """Enqueue the launch."""
        self.kernel[(*grid_of(self.count), stream)](*self.given)


def copied(target: Array, source: Array) -> Enqueued:
    """Return the copy between arrays of one dtype, of which one at least is a device's.

    source: of the target's shape, or broadcast to it. A host's array has to be pinned. The device
    that is current when it is enqueued has to be that of one of them.
    """
    if not target.size:
        return Several(())
    source = np.broadcast_to(source, target.shape, subok=True)
    if name_of(target.dtype) in BITS:  # which kernels do not know
        target, source = (array.view(f"u{array.itemsize}") for array in (target, source))
    if not contiguous(target, source):
        from soapstone.native.cuda.kernels import copy

        return strided(copy, moved(target, source))
    to, x = _bytes(target), _bytes(source)
    if on_device(target):
        return Moved(launchable(to).copy_to_device, launchable(x) if on_device(x) else x, (to, x))
    return Moved(launchable(x).copy_to_host, to, (to, x))


def filled(target: Array, value: Any) -> Enqueued:
    """Return the work that sets all elements of an array of the current device to a value."""
    return copied(target, uploaded(np.full((1,) * target.ndim, value, target.dtype)))


def contiguous(*arrays: Array) -> bool:
    """Return whether arrays of one shape are each one range of memory, all in the same order."""
    extents, strides = walk(arrays[0].shape, arrays)
    return len(extents) == 1 and all(
        steps[0] == array.itemsize or extents[0] == 1 for steps, array in zip(strides, arrays)
    )


def _bytes(array: Array) -> Array:
    """Return the range of an array, whose elements lie in some order without gaps, as bytes."""
    physical = array.transpose(memory_order(array.strides))
    flat: Array = np.reshape(physical, -1, copy=False).view(np.uint8)
    return flat


def strided(kernel: Any, arrays: Sequence[Array]) -> Enqueued:
    """Return the launches of a kernel over arrays of one shape and any strides.

    kernel: takes as many arrays of `AXES` axes, and does with each element what it has to.
    """
    extents, strides = walk(arrays[0].shape, arrays)
    if len(extents) > AXES:
        rows = range(arrays[0].shape[0])
        return Several(tuple(strided(kernel, [array[i] for array in arrays]) for i in rows))
    none = (1,) * (AXES - len(extents)), (0,) * (AXES - len(extents))
    given = tuple(
        np.lib.stride_tricks.as_strided(array, (*none[0], *extents), (*none[1], *steps), subok=True)
        for array, steps in zip(arrays, strides)
    )
    return Launched(kernel, tuple(map(launchable, given)), given[0].size, given)
