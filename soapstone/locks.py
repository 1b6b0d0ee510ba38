"""Locks of whole processes, which a forked child finds free: who held one there does not exist.

Threads that make something by themselves are waited for before a fork, whatever locks they take.
"""

from __future__ import annotations

import _thread
import os
import weakref
from typing import Protocol


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


class Busy(Protocol):
    """Something with a thread that may hold any lock, for a while."""

    def wait(self) -> None:
        """Wait until it holds none."""


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()
_BUSY: weakref.WeakSet[Busy] = weakref.WeakSet()


def wait_for(what: Busy) -> None:
    """Have an object waited for before this process is forked."""
    _BUSY.add(what)


def wait_for_all() -> None:
    """Wait until no thread that was named to `wait_for` holds a lock."""
    for what in list(_BUSY):
        what.wait()


def _forked() -> None:
    for lock in list(_ALL):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=wait_for_all, after_in_child=_forked)
