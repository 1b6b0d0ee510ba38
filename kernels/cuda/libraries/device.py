"""What libraries are given of a GPU: addresses, streams, memory to work in, and its number."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cuda.substrate.arrays import Described, View, scratch
from soapstone.kernels.entry import Call

MOST_ALIGNED = 256  # bytes, as what an allocation begins at


def of_gpu(call: Call) -> bool:
    """Return whether a call's arrays are in a GPU's memory, and not only described."""
    return not any(isinstance(array, Described) for array in (*call.inputs, *call.outputs))


def address(view: View) -> int:
    """Return the address of a view's first element; the view has one."""
    first: int = view.span.__cuda_array_interface__["data"][0]
    return first + view.offset * np.dtype(view.dtype).itemsize


def alignment(*addresses: int) -> int:
    """Return the largest power of two, `MOST_ALIGNED` at most, that divides all addresses."""
    found = MOST_ALIGNED
    for each in addresses:
        found = min(found, each & -each or MOST_ALIGNED)
    return found


def workspace(nbytes: int, beside: View) -> tuple[int, View | None]:
    """Return the address of new memory of the GPU that is current, or 0, and what keeps it."""
    if not nbytes:
        return 0, None
    held = scratch(nbytes, "uint8", beside.span)
    return address(held), held


def current() -> int:
    """Return the number of the GPU that is current."""
    from numba import cuda

    return int(cuda.get_current_device().id)


def number(stream: Any) -> int:
    """Return a stream of Numba's as the driver's, 0 for the device's own."""
    return int(stream)


__all__ = ["MOST_ALIGNED", "address", "alignment", "current", "number", "of_gpu", "workspace"]
