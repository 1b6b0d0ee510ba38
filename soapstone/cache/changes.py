"""Whether anything has been measured since, without a look into the store of what was measured."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from soapstone.cache.environment import folder

FORMAT = 1
SESSIONS = "sessions"  # the folder of what sessions have bound
OPENED = "opened"  # the folder of notes: which of these a file has
ROWS = "rows"  # the folder of notes: of which of these rows are apart


def default_path() -> Path:
    """Return the store's file in the folder of all caches."""
    return folder() / f"measured-{FORMAT}.sqlite"


def tell_changed(store: Path) -> None:
    """Say that a store's records are others from now on."""
    with contextlib.suppress(OSError):
        _mark(store).parent.mkdir(parents=True, exist_ok=True)
        _mark(store).write_bytes(os.urandom(16))


def changed(store: Path) -> bytes:
    """Return what tells a state of a store's records from another."""
    with contextlib.suppress(OSError):
        return _mark(store).read_bytes()
    return b""


def _mark(store: Path) -> Path:
    return store.with_suffix(".changed")
