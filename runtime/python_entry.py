"""The native entry of a Python body: waits for the interpreter lock awake, then calls Python.

A thread that asks for the interpreter lock while another holds it sleeps until it is woken, which
takes longer than most of what holds the lock. So an entry first polls who holds it, for as long as
a sleep would take. CPython up to 3.11 tells; later ones answer "nobody", and nothing is polled.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import carray, cfunc, types

from .native import call_entry, call_pointer, pause

Array = np.ndarray[Any, np.dtype[Any]]
_POLLS = 500  # about 20 us


@cfunc("int32(voidptr)", cache=True)  # type: ignore[untyped-decorator]
def _call(block: Any) -> int:
    w = carray(block, (3,), types.int64)
    polls = 0
    while w[0] != 0 and polls < _POLLS and call_pointer(w[0]) != 0:
        pause()
        polls += 1
    status: int = call_entry(w[1], w[2])
    return status


def address() -> int:
    """The address of the entry."""
    return int(_call.address)


def blocks(trampoline: int, count: int) -> Array:
    """The blocks of `count` entries, which call `int32 trampoline(number)` with numbers from 0.

    Returns int64 (count, 3): the address that tells who holds the lock, the trampoline, the number.
    """
    holder = getattr(ctypes.pythonapi, "_PyThreadState_UncheckedGet", None)
    found = np.zeros((count, 3), dtype=np.int64)
    if holder is not None:
        found[:, 0] = ctypes.cast(holder, ctypes.c_void_p).value or 0
    found[:, 1] = trampoline
    found[:, 2] = np.arange(count)
    return found
