"""Parameters named by layer or pattern: `fc1`, `fc1.bias`, `conv*`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from soapstone.ir.errors import GraphError


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern is a parameter's name, or that of its layer."""
    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matching(what: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern fits.

    Raises:
        GraphError: there is none; `what` asks.
    """
    names = list(names)
    found = [name for name in names if matches(pattern, name)]
    if not found:
        layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
        near = get_close_matches(pattern, [*names, *layers], 1)
        hint = f"; {near[0]!r} is there" if near else f"; there are {', '.join(layers[:8])}"
        raise GraphError(f"{what}: no parameter {pattern!r}{hint}")
    return found
