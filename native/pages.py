"""Private memory in large pages, shared out in pieces that are smaller than one.

A page of four kilobytes holds so little of a weight that a product finds the next one's place as
often as it finds something to do. NumPy asks for large pages from four megabytes on; what is
smaller lies here, side by side. A piece that nobody has any more is given out again.
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
LEAST, MOST = 1 << 15, 1 << 22  # bytes of a piece
_PAGE, _CHUNK = 1 << 21, 1 << 24


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


_CHUNKS: list[_Chunk] = []
_RETURNED: deque[tuple[_Chunk, int, int]] = deque()  # by whoever collects garbage, at any time
_LOCK = Lock()


def piece(nbytes: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a piece of LEAST to MOST bytes at the boundary of a cache line, with any contents.

    Raises:
        MemoryError: the system has no room.
    """
    size = -(-nbytes // LINE) * LINE
    with _LOCK:
        while _RETURNED:
            chunk, offset, given = _RETURNED.popleft()
            chunk.give(offset, given)
        _CHUNKS[1:] = [chunk for chunk in _CHUNKS[1:] if chunk.free != {0: _CHUNK}]
        for chunk in _CHUNKS:
            found = chunk.take(size)
            if found is not None:
                break
        else:
            try:
                chunk = _Chunk()
            except OSError as error:
                raise MemoryError(f"pages: {_CHUNK} bytes needed: {error}") from None
            _CHUNKS.append(chunk)
            found = chunk.take(size)
            assert found is not None
    raw: Any = (ctypes.c_uint8 * nbytes).from_address(chunk.first + found)
    weakref.finalize(raw, _RETURNED.append, (chunk, found, size)).atexit = False
    made: np.ndarray[Any, np.dtype[Any]] = np.frombuffer(raw, np.uint8)
    return made
