"""Where snapshots of models' files are kept (`snapshots.py`), and what is noted of files and them.

A snapshot is named by the hash of the model's bytes, which takes longer to find than the answer of
a small model. So a note says which snapshot a file has had, by its path and state; and where no
snapshot could be of the model, a thread finds the hash once there is an answer.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from soapstone.cache.changes import OPENED, ROWS, SESSIONS as FOLDER
from soapstone.cache.environment import digest, folder, identity, key
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.native.files import MappedFile, file_state
from soapstone.system import usable_cores

_FORMAT = 1
MOST_BYTES = 256 << 20  # of a model's file, and of what is kept of it
_SETTINGS = ("SOAPSTONE_", "OMP_", "GOMP_", "NUMBA_", "ONEDNN_", "DNNL_")
# A file that was last written so long ago has another state once it is written again, however
# coarse its times are, and whoever writes to it as to memory (whose pages the system writes back
# after 35 s at most, and notes the time when they change again).
_SETTLED_NS = 60_000_000_000
_NOTES = 1000  # of files that are kept, those written last
_HASH = 32  # bytes of a snapshot that tell which one it is

Shapes = tuple[tuple[int, ...], ...]  # of the inputs, in their order


class Options(NamedTuple):
    """The options of a session that affect what is bound."""

    threads: int
    tune: bool
    precision: str


class Place:
    """Where the snapshot of a model's file is kept.

    base: tells the options and the environment. file: the model's bytes. changed_ns: when the file
    was written last, or its times were. threads: that hash it.

    Attributes:
        base, file: as given. state: of the file.
        settled: whether the file has another state as soon as it has other bytes.
    """

    def __init__(self, base: str, file: MappedFile, changed_ns: int, threads: int) -> None:
        self.base, self.file, self._threads = base, file, threads
        self.state = (*file.state, changed_ns)
        self.settled = time.time_ns() - max(file.state[-1], changed_ns) >= _SETTLED_NS
        self._hashing: threading.Thread | None = None
        self._hashed: list[str] = []  # by that thread

    def begin_to_hash(self) -> None:
        """Let threads hash the model's bytes, unless they are: they hardly need the interpreter's
        lock for that.
        """
        if "path" in self.__dict__:
            return

        def work() -> None:
            self._hashed.append(self.file.digest(self._threads))

        hashing = threading.Thread(target=work)
        with contextlib.suppress(RuntimeError):  # no more threads
            hashing.start()
            self._hashing = hashing

    @cached_property
    def path(self) -> Path:
        """The file that is named by the model's bytes too, which are hashed for that."""
        if self._hashing is not None:
            self._hashing.join()
        digest = self._hashed[0] if self._hashed else self.file.digest(self._threads)
        return folder() / FOLDER / f"{self.base}-{digest[:32]}"

    @property
    def occupied(self) -> bool:
        """Whether there is a snapshot that is of the model, unless its bytes are others."""
        try:
            return any(name.startswith(self.base) for name in os.listdir(folder() / FOLDER))
        except OSError:
            return False

    @property
    def unchanged(self) -> bool:
        """Whether the file that is at the model's path is in this state."""
        try:
            status = os.stat(self.file.path)
            return (*file_state(status), status.st_ctime_ns) == self.state
        except OSError:
            return False

    def noted(self) -> Path | None:
        """Return where the snapshot of a file in this state was, if that has been noted."""
        with contextlib.suppress(OSError, ValueError):
            mark, name = self._note.read_text().split()
            if mark == self._mark(name):
                return folder() / FOLDER / name
        return None

    def note(self) -> None:
        """Note which snapshot it is that a file in this state has."""
        path = self.path
        if not self.settled or not self.unchanged:  # what was hashed may be other bytes
            return
        with contextlib.suppress(OSError):
            place = _write(self._note, f"{self._mark(path.name)} {path.name}")
            notes = sorted(place.iterdir(), key=lambda f: -f.stat().st_mtime)
            for old in notes[_NOTES:]:
                old.unlink(missing_ok=True)

    @property
    def _note(self) -> Path:
        return folder() / OPENED / digest(self.file.path, self.base)

    def _mark(self, name: str) -> str:
        return digest(name, *map(str, self.state))


def _write(note: Path, text: str) -> Path:
    """Write a note whole or not at all, and return its folder."""
    partial = note.with_suffix(f".{os.getpid()}")
    note.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text)
    os.replace(partial, note)
    return note.parent


def place_of(model: str | Path, options: Options) -> Place | None:
    """Return where the snapshot of a model's file is kept; None for models without one.

    Another file, or this one after a write, has another path or state.
    """
    try:
        status = os.stat(model)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MOST_BYTES:
            return None
        data = MappedFile.of(model)
    except (OSError, ValueError):
        return None
    told = sorted(f"{n}={v}" for n, v in os.environ.items() if n.startswith(_SETTINGS))
    named = (Path(model).stem, str(options), str(usable_cores()), str(_FORMAT))
    code = __file__, onednn.path()  # another tree, or another library, has others in its place
    base = digest(*named, *code, key(identity()), *told)
    return Place(base, data, status.st_ctime_ns, options.threads)


class RowsMark:
    """A note on a snapshot: that rows of what it answers are apart (`in_rows.py`).

    Whether they are shows once a second graph of the model was made, after the snapshot is written.
    A later process then answers another number of rows by steps of the snapshot, and opens no model
    for it first. snapshot: returns its file. kept: whether that is of the model that was opened.
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
        with contextlib.suppress(OSError):  # there is no snapshot, or it is another user's
            place = _write(self._file, self._text(shapes))
            there = set(os.listdir(self._snapshot().parent))
            for old in place.iterdir():
                if old.name not in there:
                    old.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return folder() / ROWS / self._snapshot().name

    def _text(self, shapes: Shapes) -> str:
        with open(self._snapshot(), "rb") as file:
            return digest(file.read(_HASH).hex(), str(shapes))


__all__ = ["MOST_BYTES", "Options", "Place", "RowsMark", "Shapes", "place_of"]
