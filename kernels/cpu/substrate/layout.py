"""What a kernel asks of its arrays' layouts, and views that they allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.kernels.entry import Array, Call
from soapstone.native.arrays import strided
from soapstone.native.memory import aligned_array


def is_float32(*arrays: Array) -> bool:
    """Whether all arrays hold aligned float32."""
    return all(a.dtype == np.float32 and a.flags.aligned for a in arrays)


def overlaps(array: Array) -> bool:
    """Whether elements of the array may share memory."""
    return overlapping(array.shape, array.strides, array.itemsize)


def overlapping(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Whether elements may share memory; strides and the size of one are in one unit."""
    if 0 in shape:
        return False
    reach = size
    for stride, extent in sorted((s, e) for s, e in zip(strides, shape) if e > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def dense(array: Array) -> bool:
    """Whether the array is C-contiguous float32."""
    return is_float32(array) and array.flags.c_contiguous


def rows_contiguous(*arrays: Array) -> bool:
    """Whether the last axis of each array is contiguous."""
    return all(a.size == 0 or a.shape[-1] == 1 or a.strides[-1] == a.itemsize for a in arrays)


def float_rows(*arrays: Array) -> bool:
    """Whether all arrays hold aligned float32, in contiguous rows of the last axis."""
    return is_float32(*arrays) and rows_contiguous(*arrays)


def lifted(array: Array) -> Array:
    """Return an image or filters of any rank with three spatial axes: those before are of 1."""
    return array[(slice(None), slice(None), *(None,) * (5 - array.ndim))]


def private(*shape: int) -> Array:
    """Return an uninitialised private float32 array on a cache line's bound."""
    return aligned_array(shape, np.float32)


def rows(array: Array) -> Array | None:
    """Return the array as one matrix of its last axis' rows, or None where strides forbid it."""
    return flattened(array, 0, 2)


def flattened(array: Array, axis: int, rank: int) -> Array | None:
    """Return a view of a rank, some axes from one on made one, or None where strides forbid it."""
    view: Array | None = array
    while view is not None and view.ndim > rank:
        view = merged(view, axis)
    return view


def merged(array: Array, axis: int) -> Array | None:
    """Return a view with axes `axis` and `axis + 1` made one, or None where strides forbid it."""
    (outer, inner), (far, near) = (v[axis : axis + 2] for v in (array.shape, array.strides))
    if outer == 1:
        stride = near
    elif inner == 1:
        stride = far
    elif far == inner * near:
        stride = near
    else:
        return None
    shape = (*array.shape[:axis], outer * inner, *array.shape[axis + 2 :])
    strides = (*array.strides[:axis], stride, *array.strides[axis + 2 :])
    return strided(array, shape, strides)


def along(image: Array) -> int | None:
    """Return the bytes from a position of an image (n, c, d, h, w) to the next, or None.

    None: its channels are not side by side, or its positions not evenly apart.
    """
    view = flattened(image, 2, 3)
    if view is None or (view.shape[1] > 1 and view.strides[1] != image.itemsize):
        return None
    return view.strides[2]


def channels_last(image: Array) -> Array:
    """Return memory for an image whose channels lie side by side."""
    n, c, *size = image.shape
    return np.moveaxis(aligned_array((n, *size, c), image.dtype), -1, 1)


def float32(call: Call) -> bool:
    """Return whether all operands are float32, and no output shares memory with itself."""
    served = is_float32(*call.inputs, *call.outputs)
    return served and not any(overlaps(array) for array in call.outputs)
