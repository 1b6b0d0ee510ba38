"""Scalars of launches: taken by value when they are launched, and compared to the last bit.

A task may run long after its launch, and a trace runs it again and again: what the program does to
its variables meanwhile must not be seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from copy import copy
from typing import Any

import numpy as np

from soapstone.dtypes import code_of

# Classes of scalars that never change, and so need not be looked at.
FIXED = frozenset({int, float, complex, bool, str, bytes, type(None), type, range, slice})
_PLAIN = (int, bool, str, bytes, type(None), type)


def captured(value: Any) -> Any:
    """The value that an object has now: itself if it is a number, or anything else that stays.

    Arrays, and lists, tuples, sets and dictionaries with what they hold, are copied; an array
    without axes becomes a NumPy scalar. An object of any other class is passed as it is.
    """
    kind = type(value)
    if kind in FIXED:
        return value
    if kind is tuple:
        items = tuple([captured(item) for item in value])
        return value if all(a is b for a, b in zip(items, value)) else items
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim else value.copy()[()]
    if isinstance(value, np.void):
        return value.copy()
    if kind in (list, set):
        return kind([captured(item) for item in value])
    if kind is dict:
        return {key: captured(item) for key, item in value.items()}
    if isinstance(value, list | set | dict | deque | bytearray):
        return copy(value)
    return value


def loose(value: Any) -> bool:
    """Whether a captured value can still be changed, by whoever gets it."""
    return type(value) not in FIXED and captured(value) is not value


def exact(scalar: object) -> Hashable:
    """A key equal for scalars that are the same to the last bit, unlike `==` (0.0, -0.0, 1, True).

    Raises: TypeError for what may change without notice: anything but numbers, text, None, types,
    arrays of numbers, and tuples and lists of them.
    """
    kind = type(scalar)
    if kind in _PLAIN:
        return (kind, scalar)
    if isinstance(scalar, np.generic):
        return (code_of(scalar.dtype), scalar.tobytes())
    if isinstance(scalar, float) and kind is float:
        return (kind, scalar.hex())
    if isinstance(scalar, complex) and kind is complex:
        return (kind, scalar.real.hex(), scalar.imag.hex())
    if isinstance(scalar, tuple | list) and kind in (tuple, list):
        return (kind, *[exact(item) for item in scalar])
    if isinstance(scalar, np.dtype):
        return (np.dtype, scalar)
    if isinstance(scalar, np.ndarray) and not scalar.dtype.hasobject:
        return (np.ndarray, code_of(scalar.dtype), scalar.shape, scalar.tobytes())
    raise TypeError(f"{kind.__name__} is no number, text or tuple of them")
