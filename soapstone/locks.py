"""Locks of whole processes, which a forked child finds free: who held one there does not exist."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


class Lock:
    """A reentrant lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _ALL.add(self)

    def acquire(self, timeout: float = -1) -> bool:
        """Return whether it is held now, after so many seconds at most."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: Any) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, whoever held it."""
        self._lock = threading.RLock()


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    for lock in list(_ALL):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
