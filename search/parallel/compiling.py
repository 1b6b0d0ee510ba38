"""How functions are compiled, and how they get their many arrays: packed, by one pointer.

A `NamedTuple` of arrays is what Python code works with. Passed to compiled code as it is, every
array in it would be an argument of every function, which takes minutes to compile; `call` packs it
into a structure on the heap, of which the compiled code gets the address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numba.experimental import structref

from soapstone.kernels.cpu.native import stamped

F = TypeVar("F", bound=Callable[..., Any])
_FOLDER = Path(__file__).parent


# Integers written in the code would be types of their own, for which functions are compiled again.
def integer(value: int) -> int:
    """Return an integer that functions get as one of 64 bits."""
    made: int = np.int64(value)  # type: ignore[assignment]
    return made


ZERO, ONE, NONE = integer(0), integer(1), integer(-1)


def compiled(function: F) -> F:
    """Return the function for use by compiled functions: no wrapper for Python is made."""
    made = njit(
        cache=True,
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)
    found: F = stamped(made, _FOLDER)
    return found


def entry(function: F) -> F:
    """Return the function for `call`, and for use by compiled functions."""
    made = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    found: F = stamped(made, _FOLDER)
    return found


@compiled
def put(target: Any, source: Any, count: int) -> None:
    """Copy the first numbers of an array; quicker to compile than a slice."""
    for i in range(count):
        target[i] = source[i]


_packers: dict[type, Callable[..., Any]] = {}


def packed(kind: type) -> type:
    """Return a `NamedTuple` of arrays as a class whose tuples `call` packs; a decorator."""

    class Type(types.StructRef):  # type: ignore[misc, unused-ignore]
        def preprocess_fields(self, fields: Any) -> Any:
            return tuple((name, types.unliteral(field)) for name, field in fields)

    # Compiled code is kept on disk under its types, which must be found again by name.
    Type.__name__ = Type.__qualname__ = f"{kind.__name__}Type"
    Type.__module__ = kind.__module__
    setattr(sys.modules[kind.__module__], Type.__name__, Type)
    structref.register(Type)

    class Proxy(structref.StructRefProxy):  # type: ignore[misc, unused-ignore]
        def __new__(cls, *args: Any) -> Any:
            return structref.StructRefProxy.__new__(cls, *args)

    Proxy.__name__ = Proxy.__qualname__ = f"{kind.__name__}Proxy"
    structref.define_proxy(Proxy, Type, list(kind._fields))  # type: ignore[attr-defined]
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind,), own)  # without slots: a tuple keeps what it is packed to
    _packers[made] = Proxy
    return made


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function with its tuples of arrays packed."""
    return function(*(_pack(arg) if type(arg) in _packers else arg for arg in args))


def _pack(arg: Any) -> Any:
    if "packed" not in arg.__dict__:
        arg.packed = _packers[type(arg)](*arg)
    return arg.packed


__all__ = ["NONE", "ONE", "ZERO", "call", "compiled", "entry", "integer", "packed", "put"]
