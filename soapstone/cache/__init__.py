"""What is kept on disk between runs, and the one key under which all of it is kept.

Measured times and choices are in one SQLite file (`store`), compiled functions in folders of
Numba's (`compiled`). Both are valid for one environment (`environment`: processor, libraries) and
one state of the sources that made them (`sources`). Every other package may import this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.cache.report import Cache, caches

__all__ = ["Cache", "caches"]


def __getattr__(name: str) -> Any:
    """Import the report when it is asked for: most who import this package keep things in it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from soapstone.cache import report

    return getattr(report, name)
