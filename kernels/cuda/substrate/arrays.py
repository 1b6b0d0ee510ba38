"""Device arrays as kernels see them: a span of elements, where the first lies, and strides.

A kernel is compiled for types, not for ranks or layouts: each operand is a one-dimensional array
from its first to its last element, and strides are arguments, in elements. In the simulator every
index into a span is checked, since Python would take a negative one from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import types

from soapstone.dtypes import BITS, learn
from soapstone.kernels.cuda.entry import DeviceArray
from soapstone.kernels.cuda.substrate.target import SIMULATED, TYPES
from soapstone.kernels.entry import Call, Declined, is_device_array
from soapstone.native.memory import address


@dataclass(frozen=True)
class Described:
    """An array of a GPU that is not there: kernels are bound to it to be compiled, not run."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    __cuda_ndarray__ = True

    @staticmethod
    def like(array: np.ndarray[Any, Any]) -> Described:
        """Return the description of an array."""
        return Described(array.shape, array.strides, array.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class View:
    """Elements of a device array: `span[offset + index . strides]`; strides in elements."""

    span: DeviceArray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last, and of those that lie between."""
        return 1 + sum((extent - 1) * step for extent, step in zip(self.shape, self.strides))

    def aligned(self, nbytes: int) -> bool:
        """Return whether the span begins at a multiple of so many bytes; one that is only described
        does, as what an allocation begins at."""
        if isinstance(self.span, Described) or SIMULATED:
            return True
        return int(self.span.__cuda_array_interface__["data"][0]) % nbytes == 0

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        step = 1
        for extent, stride in zip(self.shape[::-1], self.strides[::-1]):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    def broadcast(self, shape: Sequence[int]) -> View:
        """Return the view repeated to a shape, as NumPy broadcasts."""
        lead = len(shape) - len(self.shape)
        own = (1,) * lead + self.shape
        strides = (0,) * lead + self.strides
        strides = tuple(0 if e == 1 else s for e, s in zip(own, strides))
        return View(self.span, tuple(shape), strides, self.dtype, self.offset)

    def row(self, number: int) -> View:
        """Return an index of the first axis, which is left out."""
        return self.through(lambda x: x[number, ...])

    def box(self, slices: Sequence[slice]) -> View:
        """Return slices of the axes."""
        place: tuple[Any, ...] = (..., *slices)  # `...`: a view at rank 0 too
        return self.through(lambda x: x[place])

    def cut(self, axis: int, begin: int, count: int) -> View:
        """Return `count` indices of an axis from `begin` on."""
        whole = [slice(None)] * len(self.shape)
        whole[axis] = slice(begin, begin + count)
        return self.box(whole)

    def through(self, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> View:
        """Return what a function that only makes views of NumPy arrays would make of the view."""
        once = np.empty(1, np.uint8)
        made = change(np.lib.stride_tricks.as_strided(once, self.shape, self.strides))
        away = int(address(made)) - int(address(once))
        return View(self.span, made.shape, made.strides, self.dtype, self.offset + away)

    def reshaped(self, shape: Sequence[int]) -> View:
        """Return a view in another shape, whose axes split or join those there are.

        Raises:
            Declined: axes would be joined whose elements do not lie as one axis would.
        """
        if self.size == 0:
            return View(self.span, tuple(shape), (0,) * len(shape), self.dtype, self.offset)

        def change(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            made = array.view()
            try:
                made.shape = tuple(shape)
            except AttributeError:
                raise Declined from None
            return made

        return self.through(change)


class _Bounded(np.ndarray[Any, Any]):
    """A span in the simulator: an index outside of it is an error."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._within(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._within(index), value)

    def _within(self, index: Any) -> int:
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"element {index} of a span of {self.shape[0]} elements")
        return int(index)


def _span(array: DeviceArray, count: int) -> DeviceArray:
    itemsize = array.dtype.itemsize
    if isinstance(array, Described):
        return Described((count,), (itemsize,), array.dtype)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        flat = np.lib.stride_tricks.as_strided(array._ary, (count,), (itemsize,))
        return FakeCUDAArray(flat.view(_Bounded))
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    found = DeviceNDArray((count,), (itemsize,), array.dtype, gpu_data=array.gpu_data)
    if array.dtype.name in BITS:  # for which Numba has no type
        found._numba_type_ = types.Array(TYPES[array.dtype.name], 1, "C")
    return found


def view(array: DeviceArray) -> View:
    """Return a device array as kernels see it.

    Raises:
        Declined: a stride is negative, or no multiple of an element's bytes; it is no device array,
            or of elements that kernels do not know.
    """
    if not is_device_array(array) or array.dtype.name not in TYPES:
        raise Declined
    itemsize = array.dtype.itemsize
    shape = tuple(int(extent) for extent in array.shape)
    size = math.prod(shape)
    strides = tuple(0 if extent == 1 else step for extent, step in zip(shape, array.strides))
    if any(step < 0 or step % itemsize for step in strides) and size:
        raise Declined
    steps = tuple(step // itemsize for step in strides)
    made = View(None, shape, steps, array.dtype.name)
    return replace(made, span=_span(array, made.reach)) if size else made


def array_of(view: View, beside: DeviceArray) -> DeviceArray:
    """Return a view as a device array; beside: where one without elements is."""
    if view.span is None:
        return allocate(view.shape, view.dtype, beside)
    itemsize, kind = view.span.dtype.itemsize, view.span.dtype
    strides = tuple(step * itemsize for step in view.strides)
    if isinstance(view.span, Described):
        return Described(view.shape, strides, kind)
    if SIMULATED:
        flat = view.span._ary.view(np.ndarray)[view.offset :]
        return type(view.span)(np.lib.stride_tricks.as_strided(flat, view.shape, strides))
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    begin = view.offset * itemsize
    memory = view.span.gpu_data.view(begin, begin + view.reach * itemsize)
    return DeviceNDArray(view.shape, strides, kind, gpu_data=memory)


def views(call: Call) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """Return a call's inputs and outputs as kernels see them."""
    return tuple(map(view, call.inputs)), tuple(map(view, call.outputs))


def allocate(shape: Sequence[int], dtype: str, beside: DeviceArray) -> DeviceArray:
    """Return a new device array, where `beside` is: what is in it is not known.

    Raises:
        DeviceError: of Numba's driver, where the GPU has no room.
    """
    kind = np.dtype(learn(dtype))
    if isinstance(beside, Described):
        return Described.like(np.empty(shape, kind))
    from numba import cuda

    return cuda.device_array(tuple(shape), kind)


def scratch(count: int, dtype: str, beside: DeviceArray) -> View:
    """Return new memory of `count` elements, as a view."""
    return view(allocate((max(count, 1),), dtype, beside))


def room(shape: Sequence[int], dtype: str, beside: DeviceArray) -> View:
    """Return new memory of a shape, as a view."""
    return view(allocate(shape, dtype, beside))


def constant(array: np.ndarray[Any, Any], beside: DeviceArray) -> View:
    """Return an array of the host's as a view of a copy, which is made now."""
    if isinstance(beside, Described):
        return view(allocate(array.shape, array.dtype.name, beside))
    from numba import cuda

    return view(cuda.to_device(np.ascontiguousarray(array)))


def reinterpreted(view: View, dtype: str) -> View:
    """Return elements of a view as those of another type of their size, such as a number's bits."""
    span, kind = view.span, np.dtype(dtype)
    if isinstance(span, Described):
        return replace(view, span=replace(span, dtype=kind), dtype=dtype)
    return replace(view, span=span.view(kind) if span is not None else None, dtype=dtype)


def zeros(count: int, dtype: str, beside: DeviceArray) -> DeviceArray:
    """Return a new device array of zeros; copied there now, not when an entry is enqueued."""
    if isinstance(beside, Described):
        return allocate((count,), dtype, beside)
    from numba import cuda

    return cuda.to_device(np.zeros(count, dtype))
