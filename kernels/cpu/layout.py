"""How a kernel walks its arrays: dims put in memory order, merged where contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapstone.kernels.entry import Array


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
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    dims.sort(key=lambda d: -abs(views[lead].strides[d]))
    extents: list[int] = []
    strides: list[list[int]] = []
    for d in dims:
        steps = [v.strides[d] for v in views]
        if extents and all(old == new * shape[d] for old, new in zip(strides[-1], steps)):
            extents[-1] *= shape[d]
            strides[-1] = steps
        else:
            extents.append(shape[d])
            strides.append(steps)
    if not extents:
        extents, strides = [1], [[0] * len(views)]
    return Walk(tuple(extents), tuple(zip(*strides)) if views else ())


def is_float32(*arrays: Array) -> bool:
    """Whether all arrays hold aligned float32."""
    return all(a.dtype == np.float32 and a.flags.aligned for a in arrays)


def dense(array: Array) -> bool:
    """Whether the array is C-contiguous float32."""
    return is_float32(array) and array.flags.c_contiguous


def row_stride(array: Array) -> int | None:
    """The stride, in floats, of an array seen as rows of its last dim; None if it is not so."""
    if not is_float32(array) or array.ndim == 0:
        return None
    made = walk(array.shape[:-1], [array[..., 0]]) if array.shape[-1] else None
    if array.shape[-1] > 1 and array.strides[-1] != 4:
        return None
    if made is None or len(made.extents) != 1:
        return None
    return made.strides[0][0] // 4
