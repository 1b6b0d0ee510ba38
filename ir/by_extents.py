"""What is chosen by extents, such as a kernel for few rows: noted where it is asked for.

A graph for other extents that is arithmetic on some (`ir/extents.py`) is written as these, so it is
one that passes would make only where they would choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

Rule = Callable[..., Hashable]  # of extents


class Choice(NamedTuple):
    """What a rule said of extents of a graph."""

    rule: Rule
    extents: tuple[int, ...]
    chosen: Hashable


_NOTED: ContextVar[list[Choice] | None] = ContextVar("choices by extents", default=None)


def by_extents(rule: Callable[..., bool], *extents: int) -> bool:
    """Return what a rule says of extents in the graph at hand, and take note of it.

    rule: a function of a module, of nothing else that differs between graphs of a model.
    """
    chosen = rule(*extents)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Choice(rule, extents, chosen))
    return chosen


@contextmanager
def noted() -> Iterator[list[Choice]]:
    """Yield the choices that passes make inside, in their order, in this thread."""
    found: list[Choice] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


__all__ = ["Choice", "by_extents", "noted"]
