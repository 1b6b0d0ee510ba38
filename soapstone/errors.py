"""The error of data that come from users."""

from __future__ import annotations

import traceback


def fault(error: BaseException) -> str:
    """Return an exception that nobody expected as one line: its type, its text and its place."""
    said = traceback.extract_tb(error.__traceback__)
    place = f" ({said[-1].filename}, line {said[-1].lineno})" if said else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


class DataError(ValueError):
    """Data that cannot be used; names the file or field, what was found and what was needed."""
