"""Turns of the interpreter, which a thread that works ahead leaves to those that are waited for.

Threads of Python take turns, and one that calls a library waits for its next turn after each call.
So a thread whose work nobody waits for yet stops where it holds nothing: between two operators that
it translates, that a pass rewrites, or whose launches it binds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WAIT: ContextVar[Callable[[], None] | None] = ContextVar("waits for others", default=None)


def give_way() -> None:
    """Wait while others are at work that is waited for, in a thread that works ahead."""
    wait = _WAIT.get()
    if wait is not None:
        wait()


@contextmanager
def ahead(wait: Callable[[], None]) -> Iterator[None]:
    """Work ahead inside the block, in this thread.

    wait: returns when nobody is at work that is waited for; called often.
    """
    token = _WAIT.set(wait)
    try:
        yield
    finally:
        _WAIT.reset(token)


__all__ = ["ahead", "give_way"]
