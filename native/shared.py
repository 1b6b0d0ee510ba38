"""Memory that never changes, kept once for equal contents.

The sessions of one model, and the input shapes of one session, pack the same weights in the same
layouts. Packed contents are compared with those that exist, so nothing is hashed, and equal
contents are one array as long as anybody holds it. What is made of a constant whose contents are
only promised (`promises.Promise`) is found by that constant, which is then neither read nor packed
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from soapstone.locks import Lock
from soapstone.native.arrays import kept_by_views
from soapstone.native.memory import Array, extent
from soapstone.native.promises import Notes, Packed, noting, promise_of

LEAST = 4096  # bytes, of which keeping account pays
_SAMPLES = 256  # bytes that are looked at first, evenly spaced
_known: dict[tuple[int, bytes], list[weakref.ref[Array]]] = {}
_lock = Lock()  # collecting garbage, as anything may, calls `forget`


def shared(array: Array) -> Array:
    """Return an array of the same bytes that was passed here before and is still held, or this one.

    array: C-contiguous; nobody writes to it from now on. The result has its shape and type.
    """
    if array.nbytes < LEAST or not array.flags.c_contiguous:
        return array
    data = _bytes(array)
    key = array.nbytes, data[:: array.nbytes // _SAMPLES].tobytes()
    with _lock:
        for known in _known.get(key, ()):
            other = known()
            if other is not None and np.array_equal(_words(_bytes(other)), _words(data)):
                if (other.shape, other.dtype) == (array.shape, array.dtype):
                    return other
                return other.reshape(-1).view(array.dtype).reshape(array.shape)

        array = kept_by_views(array)

        def forget(gone: weakref.ref[Array]) -> None:
            with _lock:
                rest = [each for each in _known.get(key, ()) if each is not gone]
                if rest:
                    _known[key] = rest
                else:
                    _known.pop(key, None)

        _known.setdefault(key, []).append(weakref.ref(array, forget))
        return array


def packed(
    array: Array, layout: Hashable, make: Callable[[Array], Array], others: Sequence[Array] = ()
) -> Array:
    """Return what a kernel makes of a constant; made now unless it exists.

    array: the constant, or a view of it. layout: identifies what is made; for equal constants and
    views, equal layouts give equal results. make: is given the constant, or another of its form,
    reads it by `promises.held` or `memory.address`, and keeps nothing of it. others: further
    constants that it reads.
    """
    promise, notes = promise_of(array), noting()
    with Notes().taken():  # what is read here is in what is made
        if promise is None:
            found = shared(make(array))
        else:
            key = layout, promise.place(array), *map(_mark, others)
            with promise.lock:  # of several processors that bind the constant at once, one makes it
                known = promise.known.get(key)
                if known is None:
                    with promise.lending():
                        known = promise.known[key] = shared(make(array))
            found = known
    if notes is not None:
        notes.read = notes.read or bool(others)
        notes.packed.append(Packed(found, array, layout, make))
    return found


def places() -> list[tuple[int, int]]:
    """Return the addresses of all arrays passed here and still held, and of their ends."""
    with _lock:
        arrays = [known() for several in _known.values() for known in several]
    return [extent(array) for array in arrays if array is not None]


def _mark(array: Array) -> Hashable:
    """Return an identity for constants that are read beside another.

    A promise's lock is that of its constant alone, and as a part of a key it is never another's.
    """
    promise = promise_of(array)
    return array.tobytes() if promise is None else (promise.lock, promise.place(array))


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _words(data: Array) -> Array:
    """Return bytes as words if their number allows, so that fewer are compared."""
    return data.view(np.uint64) if data.size % 8 == 0 else data
