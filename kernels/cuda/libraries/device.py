"""Libraries that are there, and what they are given of a GPU: addresses, streams, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np

from soapstone.kernels.cuda.substrate.arrays import Described, View, scratch
from soapstone.kernels.cuda.substrate.target import SIMULATED
from soapstone.kernels.entry import Call
from soapstone.kernels.fallback import report

MOST_ALIGNED = 256  # bytes, as what an allocation begins at


def imported(module: str, version: str, label: str, instead: str) -> Any:
    """Return a module of bindings, or None: it is not installed, or cannot be used.

    version: its function that fails where there is no library. label, instead: for the warning.
    """
    if SIMULATED:
        return None
    try:
        found = import_module(module)
    except ImportError:
        return None
    return found if attempted(getattr(found, version), label, instead) is not None else None


def attempted(call: Callable[[], Any], label: str, instead: str) -> Any:
    """Return what a library's function returns; None, with a warning, where it fails."""
    try:
        return call()
    except Exception as error:  # there is no library, no driver, or none that fits
        report(f"{label} ({error})", instead)
        return None


_EXPECTED: ContextVar[bool] = ContextVar("libraries", default=False)


@contextmanager
def expecting(libraries: bool) -> Iterator[None]:
    """Say whether libraries serve calls on arrays that are only described, in this block."""
    before = _EXPECTED.set(libraries)
    try:
        yield
    finally:
        _EXPECTED.reset(before)


def asked(call: Call, bindings: Callable[[], Any]) -> bool:
    """Return whether a library is asked to serve a call: it is there, or expected to be there.

    bindings: of the library; not looked for where arrays are only described.
    """
    if any(isinstance(array, Described) for array in (*call.inputs, *call.outputs)):
        return _EXPECTED.get()
    return bindings() is not None


def is_described(view: View) -> bool:
    """Return whether a view's elements are in no memory."""
    return isinstance(view.span, Described)


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
