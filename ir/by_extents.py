"""Records of decisions that passes take by extents, or by contents whose size follows extents.

A pass may choose a kernel for few rows, or find that a mask is causal. A graph that is derived for
other extents (`ir/extents.py`) is valid only if passes would decide alike there, so each such
decision is recorded where it is taken.
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
    """The result of a rule for extents of a graph."""

    rule: Rule
    extents: tuple[int, ...]
    chosen: Hashable


class Said(NamedTuple):
    """The result of a rule for contents that constants determine.

    Attributes:
        rule: of contents. made: the graph whose only output they are.
    """

    rule: Callable[[Array], Hashable]
    made: Graph
    chosen: Hashable


_NOTED: ContextVar[list[Choice | Said] | None] = ContextVar("choices by extents", default=None)


def by_extents(rule: Callable[..., bool], *extents: int) -> bool:
    """Return the result of a rule for extents in the present graph, and record it.

    rule: a function at the top level of a module, which depends on nothing else that differs
    between graphs of a model.
    """
    chosen = rule(*extents)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Choice(rule, extents, chosen))
    return chosen


def by_contents(rule: Callable[[Array], Hashable], made: Graph, contents: Array) -> Hashable:
    """Return the result of a rule for the contents that a graph makes, and record it."""
    chosen = rule(contents)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Said(rule, made, chosen))
    return chosen


@contextmanager
def noted() -> Iterator[list[Choice | Said]]:
    """Yield the list of decisions that passes take inside the block, in this thread."""
    found: list[Choice | Said] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


__all__ = ["Choice", "Said", "by_contents", "by_extents", "noted"]
