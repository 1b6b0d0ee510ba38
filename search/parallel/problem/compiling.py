"""How functions are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from soapstone.cache.compiled import linked, njit

F = TypeVar("F", bound=Callable[..., Any])
_options = {"nogil": True, "error_model": "numpy"}


# Integers written in the code would be types of their own, for which functions are compiled again.
def integer(value: int) -> int:
    """Return an integer that functions get as one of 64 bits."""
    made: int = np.int64(value)  # type: ignore[assignment]
    return made


ZERO, ONE, NONE = integer(0), integer(1), integer(-1)


def compiled(function: F) -> F:
    """Return the function for use by compiled functions, as a part of them."""
    made: F = linked(**_options)(function)
    return made


def entry(function: F) -> F:
    """Return the function for `call`, and for use by compiled functions."""
    made: F = njit(**_options)(function)
    return made


@compiled
def put(target: Any, source: Any, count: int) -> None:
    """Copy the first numbers of an array; quicker to compile than a slice."""
    for i in range(count):
        target[i] = source[i]


@compiled
def span(of: Any) -> range:
    """Return the numbers of a `RANGE` of the tables."""
    return range(of.begin, of.end)
