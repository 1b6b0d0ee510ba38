"""Private memory in large pages: pieces that share them, and larger ones that have their own.

A page of four kilobytes holds so little of a weight that a product finds the next one's place as
often as it finds something to do, and the first touch of each costs as much as its contents. Pieces
of less than `MOST` bytes lie side by side, larger ones are mappings of their own. A piece that
nobody has any more is given out again: of the larger ones the last few are kept for that, since a
system may take long to find pages that nobody has touched (a virtual machine asks its host).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import numpy as np

from soapstone import system
from soapstone.locks import Lock

LINE = 64  # bytes of a cache line
LEAST, MOST = 1 << 15, 1 << 22  # bytes of a piece that shares pages
_PAGE, _CHUNK = 1 << 21, 1 << 24
_KEPT = 1 << 26  # bytes of larger pieces that are kept for others
_SPARE = 4  # of a kept piece one in so many bytes may go unused


class _Chunk:
    """Pages that belong together: where they are, and what of them nobody has, by place."""

    def __init__(self) -> None:
        self.memory = system.private_pages(_CHUNK + _PAGE)
        system.use_large_pages(self.memory)
        place = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.first = -(-place // _PAGE) * _PAGE
        self.free = {0: _CHUNK}

    def take(self, nbytes: int) -> int | None:
        """Return where a piece is, the first that is large enough, or None."""
        for offset, size in self.free.items():
            if size >= nbytes:
                del self.free[offset]
                if size > nbytes:
                    self.free[offset + nbytes] = size - nbytes
                    self.free = dict(sorted(self.free.items()))
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take a piece back; what lies side by side becomes one."""
        joined: dict[int, int] = {}
        last = -1
        for place, size in sorted([*self.free.items(), (offset, nbytes)]):
            if last >= 0 and last + joined[last] == place:
                joined[last] += size
            else:
                joined[place], last = size, place
        self.free = joined


class _Large:
    """A mapping of one piece, which begins with a large page and ends in small ones."""

    def __init__(self, nbytes: int) -> None:
        self.memory = system.private_pages(nbytes + _PAGE)
        place = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.nbytes, self.first = nbytes, -place % _PAGE
        system.use_large_pages(self.memory, self.first, nbytes // _PAGE * _PAGE)


_CHUNKS: list[_Chunk] = []
_LARGE: list[_Large] = []  # that nobody has, the oldest first
# What was returned by whoever collects garbage, at any time.
_RETURNED: deque[tuple[_Chunk, int, int] | _Large] = deque()
_LOCK = Lock()


def piece(nbytes: int, zero: bool = False) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a piece of LEAST bytes or more at the boundary of a cache line.

    zero: it holds zeros; otherwise any contents.

    Raises:
        MemoryError: the system has no room.
    """
    try:
        with _LOCK:
            _take_back()
            raw, fresh = _shared(nbytes) if nbytes < MOST else _whole(nbytes)
    except OSError as error:
        raise MemoryError(f"pages: {nbytes} bytes needed: {error}") from None
    made: np.ndarray[Any, np.dtype[Any]] = np.frombuffer(raw, np.uint8)
    if zero and not fresh:
        made[:] = 0
    return made


def _take_back() -> None:
    """Take back what was returned, and let go of what nobody is likely to need; it is locked."""
    while _RETURNED:
        returned = _RETURNED.popleft()
        if isinstance(returned, _Large):
            _LARGE.append(returned)
        else:
            chunk, offset, size = returned
            chunk.give(offset, size)
    _CHUNKS[1:] = [chunk for chunk in _CHUNKS[1:] if chunk.free != {0: _CHUNK}]
    while sum(large.nbytes for large in _LARGE) > _KEPT:
        del _LARGE[0]


def _shared(nbytes: int) -> tuple[Any, bool]:
    """Return bytes of a chunk, and whether they are known to be zeros."""
    size = -(-nbytes // LINE) * LINE
    for chunk in _CHUNKS:
        offset = chunk.take(size)
        if offset is not None:
            break
    else:
        chunk = _Chunk()
        _CHUNKS.append(chunk)
        offset = chunk.take(size)
        assert offset is not None
    raw = (ctypes.c_uint8 * nbytes).from_address(chunk.first + offset)
    weakref.finalize(raw, _RETURNED.append, (chunk, offset, size)).atexit = False
    return raw, False


def _whole(nbytes: int) -> tuple[Any, bool]:
    """Return the bytes of a mapping, one that was kept if it is hardly larger."""
    fitting = [large for large in _LARGE if 0 <= large.nbytes - nbytes <= nbytes // _SPARE]
    fresh = not fitting
    large = _Large(nbytes) if fresh else min(fitting, key=lambda large: large.nbytes)
    if not fresh:
        _LARGE.remove(large)
    raw = (ctypes.c_uint8 * nbytes).from_buffer(large.memory, large.first)
    weakref.finalize(raw, _RETURNED.append, large).atexit = False
    return raw, fresh
