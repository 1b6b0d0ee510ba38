"""What ends with the process, before the sessions do that it asks.

What waits is answered where a process ends by itself, and cancelled where an exception ends it.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_ALL: weakref.WeakKeyDictionary[Any, Callable[[Any, bool], None]] = weakref.WeakKeyDictionary()


def at_exit(of: T, end: Callable[[T, bool], None]) -> None:
    """Call `end` when the process ends, unless the object is gone by then.

    end: takes the object, and whether what waits is cancelled; it may be called after others.
    """
    _ALL[of] = end


weakref.finalize(_ALL, int)  # so that all sessions' own are called after what is registered here


@atexit.register
def _end() -> None:
    for each, end in tuple(_ALL.items()):
        end(each, hasattr(sys, "last_type"))  # of what ended the process, if it was shown


__all__ = ["at_exit"]
