"""The native entry of a Python body: waits for the interpreter lock awake, then calls Python.

A thread that asks for the interpreter lock while another holds it sleeps until it is woken, which
takes longer than most bodies, and so does one whose body let the lock go for a moment and wants it
back. So entries go in turns: one keeps its turn until its body has ended, or has left the lock
alone for so long that it must be at work without it; the others poll, for as long as a sleep would
take. CPython up to 3.11 tells who holds the lock; later ones answer "nobody".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone import system
from soapstone.native.blocks import Fields
from soapstone.native.entries import native
from soapstone.native.intrinsics import (
    INT,
    VOID,
    WORD,
    call_pointer,
    compare_exchange,
    external,
    load_acquire,
    pause,
)
from soapstone.native.memory import address

_POLLS = 500  # about 30 us
_FREE = 2  # polls: the lock's holder is forgotten a moment before the lock is free
_PATIENCE = 25  # polls that find the lock free before another's turn is taken

# holder: the function that tells who holds the lock, or 0; turn: the address of the name of who has
# the turn; call: the object to call; done: the object that it returns when it succeeds.
_ENTRY = Fields("holder turn name call done")
_entry_of = _ENTRY.at

_ensure = external("PyGILState_Ensure", INT)
_release = external("PyGILState_Release", VOID, INT)
_invoke = external("PyObject_CallNoArgs", WORD, WORD)
_clear = external("PyErr_Clear", VOID)
_forget = external("Py_DecRef", VOID, WORD)


@native()
def _call(block: Any) -> int:
    w = _entry_of(block)
    mine = False
    free = polls = 0
    while polls < _POLLS and not (mine and free >= _FREE):
        taken = w.holder != 0 and call_pointer(w.holder) != 0
        free = 0 if taken else free + 1
        if not mine:
            owner = load_acquire(w.turn, 0)
            if owner == 0 or free >= _PATIENCE:
                mine = compare_exchange(w.turn, 0, owner, w.name)
                free = free if mine else 0
        pause()
        polls += 1
    state = _ensure()
    result = _invoke(w.call)
    if result == 0:
        _clear()
    else:
        _forget(result)
    _release(state)
    if mine:
        compare_exchange(w.turn, 0, w.name, 0)
    return 0 if result == w.done else -1


def entry_address() -> int:
    """The address of the entry."""
    return _call.address


class Calls:
    """The blocks of entries that call Python functions without arguments.

    An entry succeeds when its function returns True; otherwise its status is -1.
    """

    def __init__(self, count: int) -> None:
        holder = getattr(ctypes.pythonapi, "_PyThreadState_UncheckedGet", None)
        self._turn = np.zeros(16, dtype=np.int64)  # whose turn it is; on a cache line of its own
        self._functions: list[Callable[[], bool] | None] = [None] * count
        self._blocks = np.zeros(count, _ENTRY.dtype)
        self._blocks["holder"] = 0 if holder is None else system.address(holder)
        self._blocks["turn"] = address(self._turn, 64)
        self._blocks["name"] = np.arange(1, count + 1)
        self._blocks["done"] = id(True)

    def block(self, number: int, function: Callable[[], bool]) -> int:
        """The address of a block that calls a function, which is kept alive."""
        self._functions[number] = function
        self._blocks["call"][number] = id(function)
        return int(address(self._blocks, number * _ENTRY.dtype.itemsize))
