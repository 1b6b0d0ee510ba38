"""What a fork does to objects that have threads or locks: a child has neither the threads, nor
whoever held a lock. They are told, so that using them in the child is an error and never a wait.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = (
    "this process was forked from the one that this runtime belongs to, and has none of its "
    "threads; make another runtime here, or start processes by 'spawn'"
)


class Forkable(Protocol):
    """Something with threads or locks."""

    def forked(self) -> None:
        """Become free and unusable, or as good as new, in a child that has just been forked."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def tell(what: Forkable) -> None:
    """Have an object told when this process is forked, in the child."""
    _known.add(what)


def _after() -> None:
    for what in list(_known):
        what.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after)
