"""Compilation of the search's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from soapstone.cache.compiled import linked, njit

F = TypeVar("F", bound=Callable[..., Any])
_options = {"nogil": True, "error_model": "numpy"}


# Integers written in the code would be types of their own, for which functions are compiled again.
def integer(value: int) -> int:
    """Return an integer that functions take as one of 64 bits."""
    made: int = np.int64(value)  # type: ignore[assignment]
    return made


ZERO, ONE, NONE = integer(0), integer(1), integer(-1)


def compiled(function: F) -> F:
    """Compile a function as part of the compiled functions that call it."""
    made: F = linked(**_options)(function)
    return made


def entry(function: F) -> F:
    """Compile a function for `call`, and as part of other compiled functions."""
    made: F = njit(**_options)(function)
    return made


@compiled
def put(target: Any, source: Any, count: int) -> None:
    """Copy the first numbers of an array; faster to compile than a slice."""
    for i in range(count):
        target[i] = source[i]


@compiled
def span(of: Any) -> range:
    """Return the numbers in a `RANGE` of the tables."""
    return range(of.begin, of.end)
