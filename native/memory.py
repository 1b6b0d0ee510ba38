"""Addresses, memory on cache lines, and the argument blocks of compiled code.

Compiled code gets its arguments as a *block* of 64-bit words, some of which are addresses. An
address does not keep its memory alive. So an `Address` holds its array, `pack` makes blocks that
hold everything their words point to, and an `Entry` is made of such a block: an entry whose arrays
could have been collected cannot be built.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from array import array as integers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from soapstone.native import pages
from soapstone.native.arrays import Array as Array, reach, start
from soapstone.native.promises import contents

Statuses = Mapping[int, str | Callable[[], str]]  # what a code means, or what finds it out
NO_STATUSES: Statuses = MappingProxyType({})
CHECKED = os.environ.get("SOAPSTONE_CHECKED", "0") not in ("", "0")  # see checked.py
LINE = pages.LINE
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)  # of every entry


class Address(int):
    """An address, with the object that keeps its memory alive."""

    owner: object

    @staticmethod
    def of(number: int, owner: object) -> Address:
        """Return an address in memory that lives as long as `owner` does."""
        made = Address(number)
        made.owner = owner
        return made


def address(array: Array, offset: int = 0) -> Address:
    """Return the address of an array's first element, plus `offset` bytes.

    Raises:
        TypeError: as `start`.
    """
    array = contents(array)
    return Address.of(start(array) + offset, array)


def extent(array: Array) -> tuple[int, int]:
    """Return the addresses of an array's lowest byte and of the one after its highest."""
    first = start(contents(array))
    low, high = reach(array.shape, array.strides, array.itemsize)
    return first + low, first + high


def aligned(nbytes: int, *, zero: bool = False) -> Array:
    """Return memory on a cache-line boundary: uint8 (nbytes,), zeroed or uninitialised.

    In checked mode guard zones surround it, and uninitialised memory is filled with NaNs.

    Raises:
        MemoryError: the system has no room.
    """
    if CHECKED:
        from soapstone.native.checked import guarded

        return guarded(nbytes, zero)
    if nbytes >= pages.LEAST:
        return pages.piece(nbytes, zero)
    raw: Array = (np.zeros if zero else np.empty)(nbytes + LINE, np.uint8)
    first = -start(raw) % LINE
    return raw[first : first + nbytes]


class Scratch(np.ndarray[Any, np.dtype[Any]]):
    """Memory that an entry works in; its contents before a run do not matter.

    room: what it is part of, for as long as somebody has this, or a view of it.
    """

    room: Array | None

    def __array_finalize__(self, other: object) -> None:
        """Be part of what the array is part of that this is made from."""
        self.room = getattr(other, "room", None)


class Workspace:
    """Scratch memory of entries that run one at a time: each works where others did before.

    What no entry keeps is let go of.
    """

    def __init__(self) -> None:
        self._rooms: list[weakref.ref[Array]] = []
        self._taken: list[Array] = []  # by the entry that is being bound

    def next_entry(self) -> None:
        """Give out all rooms anew: the entries that had them are bound."""
        self._taken.clear()

    def take(self, nbytes: int) -> Array:
        """Return bytes of the smallest room that has them and is not this entry's, or a new one."""
        rooms = [room for ref in self._rooms if (room := ref()) is not None]
        free = [r for r in rooms if r.nbytes >= nbytes and not any(r is t for t in self._taken)]
        if free:
            room = min(free, key=lambda r: r.nbytes)
        else:
            room = aligned(nbytes)
            rooms.append(room)
        self._rooms = [weakref.ref(r) for r in rooms]
        self._taken.append(room)
        found: Scratch = room[:nbytes].view(Scratch)
        found.room = room
        return found


class _Binding(threading.local):
    """The workspace of entries that this thread binds; None: each has scratch of its own."""

    workspace: Workspace | None = None


_BINDING = _Binding()


@contextmanager
def one_at_a_time() -> Iterator[Workspace]:
    """Let the entries that this thread binds share their scratch, save in checked mode.

    Until `Workspace.next_entry` is called what they take is apart.
    """
    before, made = _BINDING.workspace, Workspace()
    _BINDING.workspace = None if CHECKED else made
    try:
        yield made
    finally:
        made.next_entry()
        _BINDING.workspace = before


def scratch(nbytes: int) -> Array:
    """Return at least one byte, and `nbytes`, as `Scratch` on a cache-line boundary."""
    workspace = _BINDING.workspace
    if workspace is not None and nbytes >= pages.LEAST:
        return workspace.take(nbytes)
    return aligned(max(nbytes, 1)).view(Scratch)


def scratch_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return `scratch` as a C-contiguous array."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    made: Array = scratch(nbytes)[:nbytes].view(kind)
    return made.reshape(shape)


def aligned_array(shape: tuple[int, ...], dtype: Any, *, zero: bool = False) -> Array:
    """Return a C-contiguous array at the boundary of a cache line."""
    kind = np.dtype(dtype)
    found: Array = aligned(math.prod(shape) * kind.itemsize, zero=zero).view(kind)
    return found.reshape(shape)


def spoil(array: Array | None) -> None:
    """Fill memory whose contents do not matter with NaNs; integers become -1."""
    if array is not None:
        array.reshape(-1).view(np.uint8)[:] = 0xFF


class Block:
    """The argument block of an entry: int64 words, and everything they point to.

    keep: other objects that must outlive the words.
    """

    __slots__ = ("address", "keep", "words")

    def __init__(self, words: list[int] | integers[int], keep: tuple[Any, ...]) -> None:
        self.words = integers("q", words or [0])
        self.keep = keep
        self.address, _ = self.words.buffer_info()

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays among what is kept that are passed to compiled code."""
        return tuple(array for each in self.keep for array in _arrays(each))

    @property
    def objects(self) -> Iterator[Any]:
        """Everything that is kept, also in tuples and lists, one by one."""
        return _flat(self.keep)


def _flat(kept: Iterable[Any]) -> Iterator[Any]:
    for each in kept:
        if isinstance(each, (tuple, list)):
            yield from _flat(each)
        else:
            yield each


def pack(*values: Any, keep: tuple[Any, ...] = ()) -> Block:
    """Return a block of the values, one word each.

    Arrays and blocks become addresses, entries two of them (function and block); integers and
    booleans become themselves, floats the bits of a float64; tuples and lists are flattened.
    Everything pointed to is kept, and so is what `keep` names, including the `keep` of objects that
    hold arrays for compiled code.

    Raises:
        TypeError: a value is a floating NumPy scalar, where an array may have been meant.
    """
    words: list[int] = []
    kept: list[Any] = []
    _add(values, words, kept)
    kept += keep
    return Block(words, tuple(kept))


def _add(values: Iterable[Any], words: list[int], kept: list[Any]) -> None:
    """Append the words of values, and what must be kept alive for them."""
    for value in values:
        kind = type(value)
        if kind is int:  # most are
            words.append(value if value < 1 << 63 else value - (1 << 64))
        elif kind is tuple or kind is list:
            _add(value, words, kept)
        elif kind is Block:
            kept.append(value)
            words.append(value.address)
        elif kind is bool:
            words.append(int(value))
        elif isinstance(value, np.ndarray):
            array = contents(value)
            kept.append(array)
            words.append(start(array))
        elif isinstance(value, Address):
            kept.append(value.owner)
            words.append(int(value))
        elif isinstance(value, Entry):  # a tuple too
            kept.append(value.arguments)
            words += (value.address, value.block)
        elif isinstance(value, (tuple, list)):
            _add(value, words, kept)
        elif isinstance(value, float):
            words.append(int(np.float64(value).view(np.int64)))
        elif isinstance(value, np.inexact):
            raise TypeError(f"block: {type(value).__name__} {value!r}, a number or array needed")
        else:
            number = int(value)
            words.append(number if number < 1 << 63 else number - (1 << 64))


def _arrays(kept: Any) -> tuple[Array, ...]:
    """Return the arrays passed to compiled code, given what a block keeps."""
    if isinstance(kept, Block):
        return kept.arrays
    held = kept if isinstance(kept, np.ndarray) else getattr(kept, "keep", None)
    return (held,) if isinstance(held, np.ndarray) else ()


def block_at(place: Address) -> Block:
    """Return the memory at an address, which a library keeps, as a block."""
    made = Block([], ((place.owner,),))  # no array of which is compiled code's
    made.address = int(place)
    return made


NO_ARGUMENTS = pack()


class Entry(NamedTuple):
    """Compiled code bound to concrete arrays: `int32 fn(void *block)`, where 0 means success.

    `arguments` keeps everything that its words point to; `statuses` explains the non-zero codes.
    """

    address: int
    arguments: Block
    statuses: Statuses = NO_STATUSES

    @property
    def block(self) -> int:
        """The address of the words."""
        return self.arguments.address

    @property
    def keep(self) -> object:
        """The objects that must live as long as the entry."""
        return self.arguments


def call(function: int, block: int) -> int:
    """Call a native function without the interpreter lock, and return its status."""
    return int(FUNCTION(function)(block))


def run(entry: Entry) -> int:
    """Run an entry from Python, without the interpreter lock, and return its status."""
    if CHECKED:
        from soapstone.native.checked import watched

        entry = watched(entry)
    return call(entry.address, entry.block)
