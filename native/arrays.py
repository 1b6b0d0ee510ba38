"""NumPy arrays as memory: where their elements are, and arrays made of memory that is there.

This is the only place where an array becomes a number. The numbers keep nothing alive, so others
use `native.memory.address`, which does.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from soapstone.dtypes import BITS, name_of
from soapstone.system import drop_pages

Array = np.ndarray[Any, np.dtype[Any]]
_LEAST = 1 << 18  # bytes of a file whose pages are worth asking the system to take


def start(array: Array) -> int:
    """Return the address of an array's first element as a number that keeps nothing alive.

    Raises:
        TypeError: the argument is no array. A NumPy scalar, which arithmetic makes of arrays of
            rank 0, has memory that is freed at once.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"address of {type(array).__name__} {array!r}: an array needed")
    return _word_at(id(array) + _HEAD).value if _LIES_THERE else int(array.ctypes.data)


# In NumPy's binary interface the address comes first; `array.ctypes.data` takes ten times as long.
_HEAD, _word_at = object.__basicsize__, ctypes.c_size_t.from_address
_PROBE = np.zeros(3, np.uint8)[1:]
_LIES_THERE = _word_at(id(_PROBE) + _HEAD).value == _PROBE.ctypes.data


def array_at(number: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the C-ordered array at an address whose memory is kept alive elsewhere."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes == 0:
        return np.empty(shape, kind)
    raw = (ctypes.c_uint8 * nbytes).from_address(number)
    return np.frombuffer(raw, kind).reshape(shape)


def bytes_at(number: int, nbytes: int) -> bytes:
    """Return a copy of the bytes at an address."""
    return ctypes.string_at(number, nbytes)


def kept_by_views(array: Array) -> Array:
    """Return an array in C order, or one like it on its memory, that all views of it keep.

    NumPy's views keep what has the memory, so a weak reference to what is a view itself ends while
    others look at it.
    """
    if not isinstance(array.base, np.ndarray):
        return array
    raw: Any = (ctypes.c_uint8 * array.nbytes).from_address(start(array))
    raw.keep = array
    found: Array = np.ndarray(array.shape, array.dtype, raw)
    found.flags.writeable = array.flags.writeable
    return found


def strided(array: Array, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """Return a view of an array's memory with other extents, and strides in bytes."""
    if name_of(array.dtype) not in BITS:
        return np.lib.stride_tricks.as_strided(array, shape, strides)
    bits = array.view(f"u{array.itemsize}")  # as_strided does not know every type
    return np.lib.stride_tricks.as_strided(bits, shape, strides).view(array.dtype)


@lru_cache(maxsize=1024)
def reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the bytes by which an array extends before its first element, and behind it.

    The first is 0 or less; an empty array has none.
    """
    if 0 in shape:
        return 0, 0
    ends = [(extent - 1) * step for extent, step in zip(shape, strides)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + itemsize


def mapping(array: Array) -> mmap.mmap | None:
    """Return the mapped file in which an array's elements are, or None."""
    base: object = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None


def let_go(array: Array) -> None:
    """Release the pages of a large array in a mapped file, which will not be read again soon."""
    base = mapping(array) if array.nbytes >= _LEAST else None
    if base is not None and array.flags.c_contiguous:
        offset = start(array) - start(np.frombuffer(base, np.uint8))
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            drop_pages(base, first, last - first)
