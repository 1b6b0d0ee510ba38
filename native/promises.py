"""Constants whose contents are promised, and made only when something asks for them.

A kernel that is bound to a constant packs it in a layout of its own. If a kernel was bound to the
same constant before, what was packed then is found, and the contents are never made
(`native/shared.py`). `Notes` tell what a kernel did with its constants, so that equal calls may
share an entry.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from soapstone.native.arrays import Array, kept_by_views, mapping, start
from soapstone.native.files import MappedFile

CONTENTS = "contents"  # by which `Promise.known` has them


class Promise(mmap.mmap):
    """A constant whose contents are made when they are first asked for.

    Its arrays have shapes and strides but no contents, which `held` and `address` provide. They
    occupy address space alone, of which no page is ever touched.

    make: returns the contents, which `known` then keeps for all promises of the same constant.
    lend: yields contents that are read at once and not kept. Both are C-contiguous and aligned.
    known: what was made of the constant, by a key (`shared.packed`), held weakly. lock: held while
    adding to `known`; one for all promises of the constant. there: the contents in a mapped file,
    perhaps unaligned, or None.
    """

    make: Callable[[], Array]
    lend: Callable[[], AbstractContextManager[Array]]
    known: MutableMapping[Hashable, Array]
    lock: AbstractContextManager[object]
    there: Array | None
    _lent: tuple[int, Array] | None = None  # to which thread

    @staticmethod
    def of(
        shape: tuple[int, ...],
        dtype: Any,
        make: Callable[[], Array],
        lend: Callable[[], AbstractContextManager[Array]],
        known: MutableMapping[Hashable, Array],
        lock: AbstractContextManager[object],
        there: Array | None = None,
    ) -> Array:
        """Return a C-contiguous, non-empty array whose contents are promised."""
        kind, size = np.dtype(dtype), math.prod(shape)
        promise = Promise(-1, size * kind.itemsize, access=mmap.ACCESS_COPY)  # shares no pages
        promise.make, promise.lend, promise.known, promise.lock = make, lend, known, lock
        promise.there = there
        made: Array = np.frombuffer(promise, kind, size).reshape(shape)
        made.flags.writeable = False
        return made

    def place(self, array: Array) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return which part of the contents an array is: its offset in bytes, shape, strides."""
        first = start(np.frombuffer(self, np.uint8))
        return start(array) - first, array.shape, array.strides

    @property
    def is_made(self) -> bool:
        """Whether the contents are held already."""
        return CONTENTS in self.known

    def contents(self) -> Array:
        """Return the contents, made now unless they are held already."""
        found = self.known.get(CONTENTS)
        if found is None and (lent := self._lent) is not None and lent[0] == threading.get_ident():
            found = lent[1]
        if found is None:
            forget_made()  # before there are others
            found = self.known[CONTENTS] = kept_by_views(self.make())
            _MADE.append(found)
        return found

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Yield contents for reading inside the block, without keeping them."""
        if self.is_made:
            yield
            return
        with self.lend() as lent:
            self._lent = threading.get_ident(), lent
            try:
                yield
            finally:
                self._lent = None


def promise_of(array: Array) -> Promise | None:
    """Return the promise of an array, or of what it is a view of; None if there is none."""
    base: object = getattr(array, "base", None)  # a GPU's array has none
    while base is not None and not isinstance(base, Promise):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def held(array: Array) -> Array:
    """Return an array with its contents for reading: itself unless they are promised."""
    if _NOTING.notes is not None:
        _NOTING.notes.read = True
    return contents(array)


def contents(array: Array) -> Array:
    """Return an array with its contents, which only compiled code reads."""
    promise = promise_of(array)
    return array if promise is None else _part(promise, promise.contents(), array)


def lying(array: Array) -> Array:
    """Return the contents of an array in place, perhaps in a file, to read little of them.

    In a file they may be unaligned, so elements have the type of bytes (`numpy.void`).
    """
    promise = promise_of(array)
    if promise is None or promise.there is None or promise.is_made:
        return held(array)
    file = mapping(promise.there)
    if isinstance(file, MappedFile):
        file.read_in_runs = True
    raw: np.dtype[Any] = np.dtype((np.void, array.itemsize))
    return _part(promise, promise.there, array, raw)


def _part(promise: Promise, contents: Array, array: Array, dtype: Any = None) -> Array:
    """Return the part of promised contents that an array is."""
    offset, shape, strides = promise.place(array)
    flat = contents.reshape(-1).view(np.uint8)
    return np.ndarray(shape, dtype or array.dtype, flat, offset, strides)


_MADE: list[Array] = []  # the contents that were made last: several variants may ask for them


def forget_made() -> None:
    """Let go of the contents that were promised and made last, unless somebody has them."""
    _MADE.clear()


class Packed(NamedTuple):
    """What a kernel made of a constant or view; see `shared.packed`."""

    made: Array
    array: Array
    layout: Hashable
    make: Callable[[Array], Array]


class Notes:
    """What a kernel did with constants when it was bound.

    Attributes:
        read: whether it read any, except through `packed` and one at a time.
        packed: what it made of constants.
    """

    def __init__(self) -> None:
        self.read = False
        self.packed: list[Packed] = []

    @contextmanager
    def taken(self) -> Iterator[Notes]:
        """Record into these notes inside the block, in this thread."""
        before, _NOTING.notes = _NOTING.notes, self
        try:
            yield self
        finally:
            _NOTING.notes = before


class _Noting(threading.local):
    notes: Notes | None = None


_NOTING = _Noting()


def noting() -> Notes | None:
    """Return the notes of the present thread, if any."""
    return _NOTING.notes
