"""What is chosen by extents, such as a kernel for few rows, or by contents that go along them, such
as a mask that is causal: noted where it is asked for.

A graph for other extents that is arithmetic on some (`ir/extents.py`) is written as these, so it is
one that passes would make only where they would choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

Rule = Callable[..., Hashable]  # of extents


class Choice(NamedTuple):
    """What a rule said of extents of a graph."""

    rule: Rule
    extents: tuple[int, ...]
    chosen: Hashable


class Said(NamedTuple):
    """What a rule said of contents that constants determine.

    Attributes:
        rule: of contents. made: the graph whose one output they are.
    """

    rule: Callable[[Array], Hashable]
    made: Graph
    chosen: Hashable


_NOTED: ContextVar[list[Choice | Said] | None] = ContextVar("choices by extents", default=None)


def by_extents(rule: Callable[..., bool], *extents: int) -> bool:
    """Return what a rule says of extents in the graph at hand, and take note of it.

    rule: a function of a module, of nothing else that differs between graphs of a model.
    """
    chosen = rule(*extents)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Choice(rule, extents, chosen))
    return chosen


def by_contents(rule: Callable[[Array], Hashable], made: Graph, contents: Array) -> Hashable:
    """Return what a rule says of the contents that a graph makes, and take note of it."""
    chosen = rule(contents)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Said(rule, made, chosen))
    return chosen


@contextmanager
def noted() -> Iterator[list[Choice | Said]]:
    """Yield the choices that passes make inside, in their order, in this thread."""
    found: list[Choice | Said] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


__all__ = ["Choice", "Said", "by_contents", "by_extents", "noted"]
