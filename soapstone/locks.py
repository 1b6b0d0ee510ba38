"""Locks of whole processes, which a forked child finds free: who held one there does not exist."""

from __future__ import annotations

import _thread
import os
import weakref


class Lock(_thread.RLock):  # type: ignore[misc]  # its stub alone says that it is final
    """A reentrant lock.

    It is taken and released by compiled code alone: an interrupt of the main thread is raised
    before or after that, and never where the lock is held but nobody is there to release it.
    """

    def __init__(self) -> None:
        _ALL.add(self)

    def renew(self) -> None:
        """Be free, whoever held it."""
        self._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    for lock in list(_ALL):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
