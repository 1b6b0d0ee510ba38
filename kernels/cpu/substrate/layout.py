"""How a kernel walks its arrays: dims put in memory order, merged where contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapstone.kernels.entry import Array, Call
from soapstone.native.memory import aligned_array


class Walk(NamedTuple):
    """Extents, outermost first, and for each array its strides in bytes along them."""

    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def walk(shape: Sequence[int], arrays: Sequence[Array], *, lead: int = 0) -> Walk:
    """Return the walk over `shape` that the arrays, broadcast to it, share.

    Dims are ordered by the strides of array number `lead`, largest first; dims of extent 1 are
    dropped and neighbours that are contiguous in every array are merged. At least one dim is left.
    """
    views = [np.broadcast_to(a, shape) for a in arrays]
    dims = sorted(range(len(shape)), key=lambda d: -abs(views[lead].strides[d]))
    extents, strides = merge(
        [shape[d] for d in dims], [[v.strides[d] for d in dims] for v in views]
    )
    return Walk(extents, strides)


def is_float32(*arrays: Array) -> bool:
    """Whether all arrays hold aligned float32."""
    return all(a.dtype == np.float32 and a.flags.aligned for a in arrays)


def overlaps(array: Array) -> bool:
    """Whether elements of the array may share memory."""
    if array.size == 0:
        return False
    reach = array.itemsize
    for stride, extent in sorted((s, e) for s, e in zip(array.strides, array.shape) if e > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def dense(array: Array) -> bool:
    """Whether the array is C-contiguous float32."""
    return is_float32(array) and array.flags.c_contiguous


def merge(
    extents: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the dims without those of extent 1, neighbours merged where every array allows.

    strides[a][d] is the stride of array a along dim d; at least one dim is left.
    """
    out: list[int] = []
    kept: list[list[int]] = []
    for d, extent in enumerate(extents):
        if extent == 1:
            continue
        steps = [s[d] for s in strides]
        if out and all(old == new * extent for old, new in zip(kept[-1], steps)):
            out[-1] *= extent
            kept[-1] = steps
        else:
            out.append(extent)
            kept.append(steps)
    if not out:
        out, kept = [1], [[0] * len(strides)]
    return tuple(out), tuple(zip(*kept))


def private(*shape: int) -> Array:
    """Return an uninitialised private float32 array on a cache line's bound."""
    return aligned_array(shape, np.float32)


def rows(array: Array) -> Array | None:
    """Return the array as one matrix of its last axis' rows, or None where strides forbid it."""
    view: Array | None = array
    while view is not None and view.ndim > 2:
        view = merged(view, 0)
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
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def float32(call: Call) -> bool:
    """Return whether all operands are float32, and no output shares memory with itself."""
    served = is_float32(*call.inputs, *call.outputs)
    return served and not any(overlaps(array) for array in call.outputs)
