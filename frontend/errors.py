"""The error of data that come from users."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; names the file or field, what was found and what was needed."""
