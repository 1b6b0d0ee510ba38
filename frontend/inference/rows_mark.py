"""A note on a snapshot: that rows of what it answers are apart (`in_rows.py`).

Whether they are shows once a second graph of the model was made, after the snapshot is written. A
later process then answers another number of rows by steps of the snapshot, and opens no model for
it first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from soapstone.cache.changes import ROWS
from soapstone.cache.environment import digest, folder

_HASH = 32  # bytes of a snapshot that tell which one it is

Shapes = tuple[tuple[int, ...], ...]  # of the inputs, in their order


class RowsMark:
    """The mark of a snapshot.

    snapshot: returns its file. kept: whether that is of the model that was opened.
    """

    def __init__(self, snapshot: Callable[[], Path], kept: bool) -> None:
        self._snapshot, self._kept = snapshot, kept
        self._shapes: Shapes | None = None  # whose rows were found to be apart

    def says(self, shapes: Shapes) -> bool:
        """Return whether rows of inputs of these shapes are apart, as an earlier process found."""
        try:
            return self._file.read_text() == self._text(shapes)
        except (OSError, ValueError):
            return False

    def found(self, shapes: Shapes) -> None:
        """Write the mark, or let `keep` do so: rows of inputs of these shapes are apart."""
        self._shapes = shapes
        if self._kept:
            self._write(shapes)

    def keep(self) -> None:
        """Write the mark if there is to be one: the snapshot is there now."""
        self._kept = True
        if self._shapes is not None:
            self._write(self._shapes)

    def _write(self, shapes: Shapes) -> None:
        with suppress(OSError):  # there is no snapshot, or it is another user's
            text = self._text(shapes)
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            os.replace(partial, self._file)
            there = set(os.listdir(self._snapshot().parent))
            for old in self._file.parent.iterdir():
                if old.name not in there:
                    old.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return folder() / ROWS / self._snapshot().name

    def _text(self, shapes: Shapes) -> str:
        with open(self._snapshot(), "rb") as file:
            return digest(file.read(_HASH).hex(), str(shapes))


__all__ = ["RowsMark"]
