"""Python's collector of cycles, kept from looking where much is made and nothing dropped.

While modules are imported and graphs bound, every few hundred new objects have all younger ones
looked through, a tenth of the time of a first answer, and none of them is garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Do without collections inside; of several threads, the first to leave ends it for all."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = ["paused"]
