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
from numba import carray, types

from soapstone import system
from soapstone.cache.compiled import cfunc
from soapstone.native.intrinsics import call_pointer, compare_exchange, load_acquire, pause, pointer
from soapstone.native.memory import address

Array = np.ndarray[Any, np.dtype[Any]]
_POLLS = 500  # about 30 us
_FREE = 2  # polls: the lock's holder is forgotten a moment before the lock is free
_PATIENCE = 25  # polls that find the lock free before another's turn is taken
_HOLDER, _TURN, _NAME, _CALL, _DONE, _WORDS = range(6)

_ensure = types.ExternalFunction("PyGILState_Ensure", types.int32())
_release = types.ExternalFunction("PyGILState_Release", types.void(types.int32))
_invoke = types.ExternalFunction("PyObject_CallNoArgs", types.intp(types.intp))
_clear = types.ExternalFunction("PyErr_Clear", types.void())
_forget = types.ExternalFunction("Py_DecRef", types.void(types.intp))


@cfunc("int32(voidptr)")
def _call(block: Any) -> int:
    w = carray(block, (_WORDS,), types.int64)
    turn = carray(pointer(w[_TURN]), (1,), types.int64)
    mine = False
    free = polls = 0
    while polls < _POLLS and not (mine and free >= _FREE):
        taken = w[_HOLDER] != 0 and call_pointer(w[_HOLDER]) != 0
        free = 0 if taken else free + 1
        if not mine:
            owner = load_acquire(turn, 0)
            if owner == 0 or free >= _PATIENCE:
                mine = compare_exchange(turn, 0, owner, w[_NAME])
                free = free if mine else 0
        pause()
        polls += 1
    state = _ensure()
    result = _invoke(w[_CALL])
    if result == 0:
        _clear()
    else:
        _forget(result)
    _release(state)
    if mine:
        compare_exchange(turn, 0, w[_NAME], 0)
    return 0 if result == w[_DONE] else -1


def entry_address() -> int:
    """The address of the entry."""
    return int(_call.address)


class Calls:
    """The blocks of entries that call Python functions without arguments.

    An entry succeeds when its function returns True; otherwise its status is -1.
    """

    def __init__(self, count: int) -> None:
        holder = getattr(ctypes.pythonapi, "_PyThreadState_UncheckedGet", None)
        self._turn = np.zeros(16, dtype=np.int64)  # whose turn it is; on a cache line of its own
        self._functions: list[Callable[[], bool] | None] = [None] * count
        self._blocks = np.zeros((count, _WORDS), dtype=np.int64)
        if holder is not None:
            self._blocks[:, _HOLDER] = system.address(holder)
        self._blocks[:, _TURN] = address(self._turn, 64)
        self._blocks[:, _NAME] = np.arange(1, count + 1)
        self._blocks[:, _DONE] = id(True)

    def block(self, number: int, function: Callable[[], bool]) -> int:
        """The address of a block that calls a function, which is kept alive."""
        self._functions[number] = function
        self._blocks[number, _CALL] = id(function)
        return int(address(self._blocks[number]))
