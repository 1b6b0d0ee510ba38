"""What variants take for a call on the GPU that is current: by its events, taken in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.entry import Call
from soapstone.kernels.measure import RUNS, numbers
from soapstone.native.cuda.arrays import launchable, uploaded
from soapstone.native.cuda.device import Device, Lane, numba_cuda, simulated
from soapstone.native.cuda.timing import Repeated, identity

_ROOM = 4  # times the operands' bytes: copies of them, and what is between primitives


def current() -> Device:
    """Return the GPU that is current."""
    return Device(0 if simulated() else int(numba_cuda().get_current_device().id))


def where() -> str:
    """Return what times are of: the GPU that is current, and its driver."""
    return identity(current())


def scratch(call: Call) -> Call:
    """Return the same call on scratch arrays of equal shapes and strides.

    Raises:
        MemoryError: the GPU has no room for them, and for what variants make besides.
    """
    nbytes = sum(array.nbytes for array in (*call.inputs, *call.outputs))
    if _ROOM * nbytes > current().free_bytes:
        raise MemoryError(f"{call.operator}: {_ROOM * nbytes} bytes needed to measure its variants")

    def clone(array: Any) -> Any:
        if array.size == 0:
            return array
        flat = uploaded(numbers(array.shape, array.strides, array.dtype))
        shaped = np.lib.stride_tricks.as_strided(flat, array.shape, array.strides, subok=True)
        return launchable(shaped)

    inputs, outputs = (tuple(map(clone, side)) for side in (call.inputs, call.outputs))
    return replace(call, inputs=inputs, outputs=outputs)


def best_us(entries: Mapping[str, DeviceEntry]) -> dict[str, float]:
    """Return the best time of each entry over runs taken in turns, in microseconds."""
    lane = Lane(current())
    ready = {name: Repeated(lane, [entry]) for name, entry in entries.items()}
    best = dict.fromkeys(entries, float("inf"))
    for _ in range(1 if simulated() else RUNS):
        for name, work in ready.items():
            best[name] = min(best[name], work.us())
    return best
