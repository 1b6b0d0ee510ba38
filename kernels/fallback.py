"""What stands in for a library that is missing is said once, as a warning that can be filtered."""

from __future__ import annotations

from functools import cache

from soapstone.errors import warn


class FallbackWarning(UserWarning):
    """Something works without a library that would make it faster; `soapstone doctor` has more."""


@cache
def report(missing: str, instead: str) -> None:
    """Warn, once in a process, what is missing (and where it was looked for) and what is used."""
    warn(f"{missing}: {instead}", FallbackWarning)
