"""Arrays in a device's memory, as NumPy sees them: an address, a shape and strides, no contents.

The runtime and the engine cut, reshape and transpose arrays without reading them, and so do they
with these. Under CUDA's unified addressing no device address is one of the host's, so that such an
array is an address range like any other; arithmetic and assignment on the host are refused, where
NumPy asks. Kernels and copies get what Numba launches on by `launchable`.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from soapstone.native.cuda.device import Device, any_device, numba_cuda, simulated
from soapstone.native.memory import LINE, Array, address
from soapstone.native.walks import in_places, memory_order

_LOOKS = frozenset((np.reshape, np.transpose, np.broadcast_to, np.squeeze, np.expand_dims))


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in a device's memory: views of it are made as of any array."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in _LOOKS:
            return super().__array_function__(function, types, args, kwargs)
        raise _touched(getattr(function, "__name__", "a function"))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        raise _touched(ufunc.__name__)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _touched("assignment")

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {self.shape} at {self.ctypes.data:#x})"

    __str__ = __repr__

    def _refused(self, *given: Any, **more: Any) -> Any:
        raise _touched("a look at the contents")

    astype = copy = item = tobytes = tolist = __bool__ = __float__ = __int__ = _refused


def _touched(what: str) -> TypeError:
    return TypeError(f"{what} on the host of an array in a GPU's memory; a copy of it is needed")


def on_device(array: Array) -> bool:
    """Return whether an array is in a device's memory."""
    return isinstance(array, DeviceArray)


def device_bytes(device: Device, nbytes: int, zero: bool = False) -> Array:
    """Return memory of a device: uint8 (nbytes,), zeros or whatever was there.

    It is at a boundary of 256 bytes, and given back when no view of it is left.

    Raises:
        MemoryError: the device has no room.
    """
    if not nbytes:
        return np.zeros(0, np.uint8).view(DeviceArray)
    cuda = numba_cuda()
    with device:
        try:
            held = cuda.device_array(nbytes, np.uint8)
        except Exception as error:
            raise MemoryError(" ".join(str(error).split())) from error
    found = _seen(held, nbytes)
    if zero:
        zeroed(device, found)
    return found


def _seen(held: Any, nbytes: int) -> Array:
    """Return Numba's array of bytes as NumPy sees it; it lives as long as any view of that."""
    first = held.ctypes.data if simulated() else held.__cuda_array_interface__["data"][0]
    return _bytes_at(first, nbytes, held)[0]


def _bytes_at(first: int, nbytes: int, keep: object) -> tuple[Array, object]:
    """Return a device's bytes from an address on, and what lives as long as any view of them."""
    seen, raw = _seen_at(first, nbytes, keep)
    return seen.view(DeviceArray), raw


def _seen_at(first: int, nbytes: int, keep: object) -> tuple[Array, object]:
    raw = (ctypes.c_uint8 * nbytes).from_address(first)
    raw.owner = keep  # type: ignore[attr-defined]
    seen: Array = np.ctypeslib.as_array(raw)
    return seen, raw


def part(slab: Array, offset: int, nbytes: int) -> tuple[Array, object]:
    """Return some bytes of a device's, and what lives as long as any view of these."""
    return _bytes_at(int(address(slab, offset)), nbytes, slab)


def zeroed(device: Device, array: Array) -> None:
    """Set contiguous memory of a device to zeros, and wait for that."""
    if array.nbytes:
        cuda = numba_cuda()
        with device:
            cuda.cudadrv.driver.device_memset(launchable(array), 0, array.nbytes)
            cuda.default_stream().synchronize()


def pinned_bytes(nbytes: int, zero: bool = False) -> Array:
    """Return page-locked memory of the host, which every device reads and writes at its address.

    uint8 (nbytes,) at the boundary of a cache line.

    Raises:
        MemoryError: the system has no room.
    """
    with any_device():
        raw: Array = numba_cuda().pinned_array(nbytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    found = raw[start : start + nbytes]
    if zero:
        found[...] = 0
    return found


def page_locked(array: Array) -> Array:
    """Return memory of the host page-locked where it is, for as long as any view of it is left.

    array: uint8, whole pages, at an address that is the host's own and every device's.

    Raises:
        MemoryError: the driver refuses.
    """
    if simulated():
        return array
    from cuda.bindings import driver

    first, device = int(address(array)), any_device()
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    with device:
        (status,) = driver.cuMemHostRegister(first, array.nbytes, flags)
    if int(status):
        raise MemoryError(f"CUDA driver: cuMemHostRegister: {status.name}")

    def given_back(array: Array) -> None:
        with device.current:
            driver.cuMemHostUnregister(first)

    seen, owner = _seen_at(first, array.nbytes, array)
    weakref.finalize(owner, given_back, array).atexit = False
    return seen


def pinned_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a C-contiguous array in page-locked memory of the host."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    found: Array = pinned_bytes(count * kind.itemsize).view(kind).reshape(shape)
    return found


def pinned_like(array: Array) -> Array:
    """Return pinned memory of the host for what an array holds, with its axes in the same order.

    So where the array is one range of memory, a copy between the two is one transfer.
    """
    order = memory_order(array.strides)
    return in_places(pinned_array(tuple(array.shape[d] for d in order), array.dtype), order)


def launchable(array: Array) -> Any:
    """Return an array of a device, or of pinned memory, as Numba launches kernels on it.

    The device must be current. It has the same address, shape and strides.
    """
    cuda = numba_cuda()
    if simulated():
        return type(cuda.device_array(1, np.uint8))(array.view(np.ndarray))
    if not array.size:
        return cuda.device_array(array.shape, array.dtype)
    described = {
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
        "data": (int(address(array)), False),
        "version": 3,
    }
    found = cuda.from_cuda_array_interface(described, owner=array)
    found.dtype = array.dtype  # of those that NumPy lacks, the description has only the size
    return found


def uploaded(array: Array) -> Array:
    """Return a copy of the host's array on the device that is current, C-contiguous."""
    if not array.nbytes:
        return array.view(DeviceArray)
    given = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = _seen(numba_cuda().to_device(given), array.nbytes)
    return found.view(array.dtype).reshape(array.shape)
