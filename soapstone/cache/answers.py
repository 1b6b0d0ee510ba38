"""Answers of libraries that take long to import, kept so that later processes need not ask them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from soapstone.cache.environment import digest, folder

PACKAGED = Path(__file__).resolve().parent.parent / "machine_code"  # what a package came with
_BEGAN = time.time()
_KEPT = 32  # files of a name, those of other versions too: the ones written last


def kept(path: Path) -> dict[str, Any]:
    """Return what a file of answers holds, by key; nothing of one that was cut or changed."""
    try:
        mark, _, text = path.read_bytes().partition(b"\n")
    except OSError:  # none yet
        return {}
    if mark != _mark(text):  # answers that are wrong would be believed
        return {}
    found: dict[str, Any] = json.loads(text)
    return found


class Answers:
    """Answers of a library, in a file of the user's cache, behind their hash.

    Args:
        name: of the folder that the file is in. about: what answers depend on, such as the version
            of the library. source: the file of the module that asks and says what answers look
            like; they are found while it is what it was.
        shipped: what answers depend on that the package may have come with, wherever it is; they
            are looked for first.
    """

    def __init__(
        self,
        name: str,
        about: Callable[[], str],
        source: str,
        shipped: Callable[[], str] | None = None,
    ) -> None:
        self._name, self._about, self._source, self._shipped = name, about, source, shipped
        self._new: dict[str, Any] = {}  # what no file holds yet
        self._saving = threading.Lock()

    def _within(self, place: Path, about: str) -> Path:
        here = hashlib.sha256(Path(self._source).read_bytes()).hexdigest()
        return place / self._name / f"{digest(about, here)}.json"

    @cached_property
    def _path(self) -> Path:
        return self._within(folder(), self._about())

    @cached_property
    def _came(self) -> dict[str, Any]:
        """What the package came with."""
        if self._shipped is None or not (PACKAGED / self._name).is_dir():
            return {}
        return kept(self._within(PACKAGED, self._shipped()))

    @cached_property
    def _known(self) -> dict[str, Any]:
        return kept(self._path)

    def _write(self, path: Path, answers: Mapping[str, Any]) -> None:
        text = json.dumps(answers, separators=(",", ":")).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_mark(text) + b"\n" + text)

    def answer(
        self, key: str, ask: Callable[[], Any], *, keep: Callable[[], bool] = lambda: True
    ) -> Any:
        """Return what is known under a key, or else what the library says.

        ask: returns it, as JSON has it. keep: whether `save` is to write it, asked after that.
        """
        if key in self._came:
            return self._came[key]
        if key in self._known:
            return self._known[key]
        found = self._known[key] = ask()
        if keep():
            self._new[key] = found
        return found

    def ship(self, answers: Mapping[str, Any], place: Path) -> None:
        """Write answers, by key, for a package whose `machine_code` a folder is to be."""
        assert self._shipped is not None
        self._write(self._within(place, self._shipped()), answers)

    def save(self) -> None:
        """Write what was asked in this process; where it cannot be, others ask again."""
        with self._saving:
            if not self._new:
                return
            partial = self._path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                self._write(partial, {**kept(self._path), **self._new})
                os.replace(partial, self._path)
                files = sorted(self._path.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)
                for file in files[:-_KEPT]:
                    file.unlink(missing_ok=True)
            self._new.clear()


def _mark(text: bytes) -> bytes:
    """Return the line before a file's answers: their hash."""
    return hashlib.sha256(text).hexdigest().encode()


def late(status: os.stat_result) -> bool:
    """Return whether a file was written after this process began: it may have read another."""
    return status.st_mtime > _BEGAN


def state_of(folder: Path, *, within: bool = True) -> str:
    """Return what tells a state of a package's sources from another: when each was written, and
    its size, as of Python's own compiled files. Where one is `late`, no other process has the same.

    within: of the packages in it too.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if within and name != "__pycache__")
        for name in sorted(name for name in names if name.endswith(".py")):
            status = os.stat(os.path.join(place, name))
            found.append(f"{place} {name} {status.st_mtime_ns} {status.st_size}")
            if late(status):
                found.append(os.urandom(16).hex())
    return digest(*found)
