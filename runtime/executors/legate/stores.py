"""Legate stores of regions: made on first use, cut for tasks, and shared with other libraries.

Where the host has an array of a region, launches copy between it and the store.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.native.memory import Array, address
from soapstone.runtime.errors import LaunchError
from soapstone.runtime.executors.legate.start import Legate
from soapstone.runtime.model.launch import Launch, internal
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import Read, Task, Write
from soapstone.runtime.model.tiling import Box

_BOUNDARY = 64  # bytes
_HANDLES = 512  # views of one store kept before they are forgotten


class Held:
    """Where a region's elements are: a store of Legate, and the host's array if there is one.

    The store has the region's axes in `order`, outermost first (rank 0 is one element of rank 1);
    None is C order. at_host: the host's array has the contents, and the store may be out of date.
    host_stale: the other way round. adopted: the store is somebody else's.
    """

    def __init__(
        self,
        legate: Legate,
        region: Region,
        order: tuple[int, ...] | None,
        claim: Callable[[Held, int], None],
    ) -> None:
        self.name = region.name
        self.dtype = region.dtype
        self.shape = region.shape
        self.order = None if order is None or tuple(order) == tuple(range(region.rank)) else order
        self.host: Array | None = None
        self.at_host = self.host_stale = self.adopted = False
        self._legate = legate
        self._claim = claim
        self._store: Any = None
        self._defined = False  # whether Legate has ever been told what the store holds
        self._handles: dict[Any, Any] = {}
        if len(region.shape) > legate.core.LEGATE_MAX_DIM:
            raise LaunchError(
                f"region {region.name!r}: rank {region.rank} found; Legate has stores of rank "
                f"{legate.core.LEGATE_MAX_DIM} at most"
            )

    def physical(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """A tuple over the region's axes as one over the store's."""
        if not extents:
            return (1,)
        return extents if self.order is None else tuple(extents[axis] for axis in self.order)

    def store(self) -> Any:
        """The store."""
        if self._store is None:
            kind = self._legate.type_of(self.dtype, self.name)
            if self._legate.nodes == 1:
                self._claim(self, math.prod(self.shape) * self.dtype.itemsize)
            self._store = self._legate.runtime.create_store(kind, self.physical(self.shape))
        return self._store

    def define(self, replaced: bool) -> None:
        """Make what was never written zeros, unless the next task writes all of it.

        On one node there is one instance of the whole store from then on, so that tasks see the
        same strides in every run, and no part of it is in memory twice.
        """
        if self._defined:
            return
        store = self.store()
        if self._legate.nodes == 1 and math.prod(self.shape) > 0:
            self._legate.occupy(store, not replaced)
        elif not replaced:
            store.fill(self.dtype.type(0).item())
        self._defined = True

    def box(self, box: Box) -> Any:
        """The part of the store in a box of the region."""
        store = self.store()
        low, high = box
        return self._handle((low, high), box, lambda: self._cut(store, low, high))

    def tiles(self, box: Box, tile: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Any, Any]:
        """A box cut into equal tiles, and which tile a point of a launch sees.

        tile: extents. dims: for each axis the dim of the launch that chooses the tile, or -1.
        """
        store = self.store()

        def make() -> tuple[Any, Any]:
            core = self._legate.core
            part = self._cut(store, *box)
            if all(dim < 0 for dim in dims):
                return part, None
            chosen = self.physical(dims)
            projection = tuple(
                core.constant(0) if dim < 0 else core.dimension(dim) for dim in chosen
            )
            return part.partition_by_tiling(self.physical(tile)), projection

        found: tuple[Any, Any] = self._handle((box, tile, dims), box, make)
        return found

    def _handle(self, key: Any, box: Box, make: Callable[[], Any]) -> Any:
        found = self._handles.get(key)
        if found is None:
            if not self.adopted and self._legate.nodes > 1:  # an instance for each way it is cut
                volume = math.prod(b - a for a, b in zip(*box))
                self._claim(self, volume * self.dtype.itemsize)
            if len(self._handles) >= _HANDLES:
                self._handles.clear()
            found = self._handles[key] = make()
        return found

    def _cut(self, store: Any, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
        if high == self.shape and not any(low):
            return store
        pairs = zip(self.physical(low), self.physical(high))
        return store[tuple(slice(a, b) for a, b in pairs)]

    def logical(self) -> Any:
        """The store with the region's axes in their order."""
        self.define(False)
        store = self.store()
        if self.order is None:
            return store
        return store.transpose(tuple(int(axis) for axis in np.argsort(self.order)))

    def seen(self, physical: Any, rank: int) -> Array:
        """An array of some of the store, with the region's axes in their order.

        It owns nothing and ends with the task that was given `physical`: an array that held
        Legate's object would keep the instance from being used again, and might be freed inside
        a later task or after Legate has ended, which corrupts the memory of the process.
        """
        array: Array = np.asarray(_Lent(physical.__array_interface__))
        if rank == 0:
            return array.reshape(())
        return array if self.order is None else array.transpose(np.argsort(self.order))

    def fetch(self) -> Array:
        """A copy of the contents, in C order; waits for the tasks that write them."""
        if not self._defined or not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        physical = self.box(((0,) * len(self.shape), self.shape)).get_physical_store()
        return np.array(self.seen(physical, len(self.shape)), order="C")

    def adopt(self, store: Any) -> None:
        """Use another store, in C order."""
        if self.adopted and self._store is not None and self._store.equal_storage(store):
            return
        self._store, self.order, self._defined = store, None, True
        self._handles.clear()
        self.at_host, self.host_stale, self.adopted = False, False, True


class _Lent:
    """Memory that somebody else owns, for NumPy."""

    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


def store_bytes(legate: Legate, nbytes: int, zero: bool, boundary: int = _BOUNDARY) -> Array:
    """The bytes of a new store that no task is given, uint8 at a boundary of so many bytes.

    Legate makes one instance of it, and has no reason to make another or to move it. Whichever
    thread drops the last view of them, the store is freed by the one that launches.
    """
    store = legate.runtime.create_store(legate.core.uint8, (nbytes + boundary - 1,))
    legate.occupy(store, zero)
    lent = _Lent(store.get_physical_store().__array_interface__)
    weakref.finalize(lent, legate.returned.append, store).atexit = False
    found = np.asarray(lent)
    legate.fence()
    start = -int(address(found)) % boundary
    return found[start : start + nbytes]


class LegateView:
    """A region's elements for other libraries of Legate; NumPy gets a copy."""

    def __init__(self, store: Any, region: Region, legate: Legate) -> None:
        self.shape = region.shape
        self.dtype = region.dtype
        self._store = store
        self._legate = legate

    @property
    def __legate_data_interface__(self) -> Any:
        return self._store.__legate_data_interface__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a view of a Legate store is copied for NumPy")
        found = np.array(self._store.get_physical_store(), dtype=dtype)
        return found.reshape(self.shape)

    def __repr__(self) -> str:
        return f"LegateView({self.dtype} {self.shape})"


def is_legate_data(data: Any) -> bool:
    """Whether an object gives its elements to other libraries of Legate."""
    return hasattr(data, "__legate_data_interface__")


def interface_store(data: Any, region: Region) -> Any:
    """The store of Legate data, checked against the region that it will be.

    Raises: LaunchError.
    """
    from legate.core import as_logical_array

    if not is_legate_data(data):
        raise LaunchError(
            f"region {region.name!r}: {type(data).__name__} found; data of Legate needed, such as "
            "a cuPyNumeric array"
        )
    try:
        array = as_logical_array(data)
    except (TypeError, NotImplementedError) as error:
        raise LaunchError(f"region {region.name!r}: {error}") from error
    store = array.data
    shape, dtype = tuple(store.extents), store.type.to_numpy_dtype()
    if shape != region.shape or np.dtype(dtype) != region.dtype:
        raise LaunchError(
            f"region {region.name!r}: Legate data {np.dtype(dtype)} {shape} found, "
            f"{region.dtype} {region.shape} needed"
        )
    return store


def _copy(source: Any, target: Any) -> None:
    np.copyto(target, source)


FEED = Task("feed", (Write,), body=_copy, parameters=(None, Write), kind="feed")
_PUBLISH = Task("publish", (Read,), body=_copy, parameters=(Read, None), kind="publish")


def feed(region: Region, array: Array) -> Launch:
    """The launch that copies an array of the host to a region."""
    return internal(FEED, (array, Partition.whole(region)), f"feed {region.name}")


def publish(region: Region, array: Array) -> Launch:
    """The launch that copies a region to an array of the host."""
    return internal(_PUBLISH, (Partition.whole(region), array), f"publish {region.name}")
